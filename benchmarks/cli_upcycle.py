"""`flotilla bench upcycle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import failed, write_demo_cell


def upcycle(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of each layer.")] = 16,
    per_token: Annotated[int, typer.Option(min=1, help="How many of them a token is sent to.")] = 2,
) -> None:
    """Write the demo target as a mixture of experts that says the same: it costs what a mixture does.

    The directory gets the model and cell.yaml, the demo family with it as target, for the others' --config.
    """
    from zoo.registry import TARGET, weights_dir
    from zoo.upcycle import upcycle as write

    try:
        num_parameters = write(weights_dir(TARGET), out, experts, per_token)
    except (ValueError, OSError) as error:
        raise failed("upcycle", error) from None
    write_demo_cell(out, num_parameters, "flotilla profile")
