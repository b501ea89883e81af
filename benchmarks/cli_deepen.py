"""`flotilla bench deepen`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import failed, write_demo_cell


def deepen(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the written target.")] = 32,
) -> None:
    """Write the demo target with more layers that change no text: as costly as a larger model.

    The directory gets the model and cell.yaml, the demo family with it as target, for the others' --config.
    """
    from zoo.deepen import deepen as write
    from zoo.registry import TARGET, weights_dir

    try:
        num_parameters = write(weights_dir(TARGET), out, layers)
    except (ValueError, OSError) as error:
        raise failed("deepen", error) from None
    write_demo_cell(out, num_parameters, "flotilla bench engine")
