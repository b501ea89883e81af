"""`flotilla bench regret`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Plot, Seed, failed, write_plot


def regret(
    slots: Annotated[int, typer.Option(min=64, help="Slots of the stationary bandit.")] = 1 << 17,
    shift_slots: Annotated[
        int, typer.Option(min=1024, help="Slots of the bandit whose drafters change halfway.")
    ] = 1 << 15,
    seeds: Annotated[int, typer.Option(min=1, help="Instances, each with noise of its own.")] = 5,
    alpha: Annotated[int, typer.Option(min=1, help="LBSS: slots of exploration in an epoch.")] = 128,
    beta: Annotated[int, typer.Option(min=1, help="LBSS: slots of a chunk.")] = 8,
    epsilon: Annotated[
        float, typer.Option(min=0, max=1, help="Epsilon-greedy's share of exploration.")
    ] = 0.2,
    plot: Plot = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the regret of the drafter selectors on SPIN's bandit; no models take part."""
    from benchmarks import regret as simulated
    from benchmarks import tables

    options = simulated.RegretOptions(
        slots, shift_slots, tuple(range(seed, seed + seeds)), alpha, beta, epsilon
    )
    try:
        record = simulated.run(options)
    except ValueError as error:
        raise failed("regret", error) from None
    tables.write_json(json_file, record)
    if plot is not None:
        from benchmarks.regret_plot import draw

        write_plot(draw, record, plot)
