"""`flotilla bench pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Plot, Seed, end_with_differences, failed, write_plot


def pipeline(
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="`zoo` (held-out prompts) or a prompt file.")] = "zoo",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once: 8, 16, 32 if unset. May repeat.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=8, help="Most micro-batches.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 2,
    waves: Annotated[int, typer.Option(min=1, help="Requests of a run, as a multiple of the batch.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Bound on every answer's tokens.")] = 64,
    policy: Annotated[str, typer.Option(help="Speculation policy.")] = "flotilla",
    plot: Plot = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Goodput against the number of micro-batches, with the heuristic's choice (SPIN, figure 13).

    Exits 1 if outputs differ by more than a near tie.
    """
    from benchmarks import pipeline as measuring
    from benchmarks import tables

    try:
        record = measuring.run(
            measuring.PipelineOptions(
                config=config,
                source=prompts,
                batches=tuple(batch or (8, 16, 32)),
                most=most,
                rounds=rounds,
                waves=waves,
                max_tokens=max_tokens,
                policy=policy,
                seed=seed,
            )
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("pipeline", error) from None
    tables.write_json(json_file, record)
    if plot is not None:
        from benchmarks.pipeline_plot import draw

        write_plot(draw, record, plot)
    end_with_differences(record)
