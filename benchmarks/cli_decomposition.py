"""`flotilla bench decomposition`: the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Plot, Seed, failed


def decomposition(
    batch: Annotated[
        list[int] | None, typer.Option(min=2, help="Requests of a verify step: 8, 16, 32 if unset.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of each draft tree, its root included.")] = 5,
    lengths: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Context lengths: an Azure or Mooncake trace, or one number a line; lognormal if unset.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Batches drawn of each size.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each, interleaved.")] = 7,
    plot: Plot = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure verify steps over ragged contexts: one rectangle, grouped by shape, and decomposed."""
    from benchmarks import decomposition as bench
    from benchmarks import decomposition_plot, tables

    options = bench.Options(
        batches=tuple(batch or (8, 16, 32)),
        num_nodes=nodes,
        lengths=lengths,
        draws=draws,
        repeats=repeats,
        seed=seed,
    )
    try:
        record = bench.run(options)
    except (ValueError, OSError) as error:
        raise failed("decomposition", error) from None
    tables.write_json(json_file, record)
    if plot is not None:
        decomposition_plot.draw([bench.Measured(**row) for row in record["steps"]], plot)
