"""`flotilla bench overhead`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Seed, failed

CONCURRENCIES = [1, 16]


def overhead(
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="`zoo` (held-out prompts) or a JSONL prompt file.")] = "zoo",
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once: 1 and 16 if unset. May repeat.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each way in a round.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Bound on every answer's tokens.")] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure what HTTP and gRPC add to the cell's own token stream, side by side on one served system."""
    from benchmarks import demo, tables
    from benchmarks import overhead as measuring

    try:
        record = measuring.run(
            demo.load_config(config),
            source=prompts,
            concurrencies=concurrency or CONCURRENCIES,
            per_run=num_requests,
            rounds=rounds,
            max_tokens=max_tokens,
            seed=seed,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("overhead", error) from None
    tables.write_json(json_file, record)
