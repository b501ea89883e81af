"""`flotilla bench deepen`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import failed


def deepen(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the written target.")] = 32,
) -> None:
    """Write the demo target with more layers that change no text: as costly as a larger model.

    The directory gets the model and cell.yaml, the demo family with it as target, for the others' --config.
    """
    import yaml

    from benchmarks import tables
    from deployments.demo import demo_config
    from zoo.deepen import deepen as write
    from zoo.registry import TARGET, weights_dir

    try:
        num_parameters = write(weights_dir(TARGET), out, layers)
    except (ValueError, OSError) as error:
        raise failed("deepen", error) from None
    demo = demo_config()
    config = {
        "target": demo.target.model_dump(exclude_defaults=True) | {"path": str(out.resolve())},
        "drafters": [{"kind": one.kind} | one.model_dump(exclude_defaults=True) for one in demo.drafters],
    }
    (out / "cell.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    tables.console.print(f"{num_parameters / 1e6:.0f} million parameters in {out}")
    tables.console.print(f"flotilla bench engine --config {out / 'cell.yaml'}", highlight=False)
