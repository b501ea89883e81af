"""`flotilla bench pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, MaxTokens, Prompts, Seed, end_with_differences, failed


def pool(
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="Cell configuration; the demo family with every kind of drafter if unset."
        ),
    ] = None,
    prompts: Prompts = "zoo",
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafters of the pool, by name; all configured if unset.")
    ] = None,
    selector: Annotated[
        list[str] | None, typer.Option(help="Selectors, by name; SPIN's, its baselines and ours if unset.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each class in a round.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    warm_ups: Annotated[
        int, typer.Option(min=0, help="Rounds before, in which selectors learn and nothing is counted.")
    ] = 1,
    max_tokens: MaxTokens = None,
    fixed_depth: Annotated[
        int | None,
        typer.Option(
            min=1, help="Drafts of so many tokens for all, as in SPIN; the policy decides if unset."
        ),
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare the whole pool under each selector with each drafter alone (SPIN, figures 10 and 11).

    Exits 1 if outputs differ by more than a near tie.
    """
    from benchmarks import pool as comparison
    from benchmarks import tables

    try:
        record = comparison.run(
            comparison.PoolOptions(
                config=config,
                source=prompts,
                drafters=tuple(drafter or ()),
                selectors=tuple(selector or comparison.SELECTORS),
                concurrency=concurrency,
                per_domain=per_domain,
                rounds=rounds,
                warm_ups=warm_ups,
                max_tokens=max_tokens,
                fixed_depth=fixed_depth,
                seed=seed,
            )
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("pool", error) from None
    tables.write_json(json_file, record)
    end_with_differences(record)
