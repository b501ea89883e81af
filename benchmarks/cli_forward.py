"""`flotilla bench forward`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from benchmarks.cli_common import JsonFile, QuantizationOption, failed


def forward(
    shape: Annotated[str, typer.Option(help="Sizes of the model: tiny, 1b, 8b, 32b or 70b.")] = "tiny",
    runner: Annotated[
        str,
        typer.Option(help="lean, or hf: a Transformers model beside the lean runner."),
    ] = "lean",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    attention: Annotated[
        str | None, typer.Option(help="padded, decomposed, flashinfer, triton or auto; by device if unset.")
    ] = None,
    quantization: QuantizationOption = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows, per request.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Forwards per case; medians count.")] = 21,
    kernels: Annotated[
        bool, typer.Option(help="Also say which kernels (operators on a CPU) a captured forward consists of.")
    ] = False,
    prompt: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt that one more request reads in each case.")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time forwards of a model's shape, with random weights, beside what the device's memory allows."""
    from benchmarks import environment, forward_floor, tables
    from engine.attention_kinds import AttentionKind
    from engine.devices import DeviceUnavailable

    if shape not in forward_floor.SHAPES:
        raise typer.BadParameter(f"one of {', '.join(forward_floor.SHAPES)}", param_hint="--shape")
    if runner not in ("lean", "hf"):
        raise typer.BadParameter("lean or hf", param_hint="--runner")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter("float32, bfloat16 or float16", param_hint="--dtype")
    kinds: tuple[AttentionKind, ...] = get_args(AttentionKind)
    kind = next((one for one in kinds if one == attention), None)
    if attention is not None and kind is None:
        raise typer.BadParameter(f"one of {', '.join(kinds)}", param_hint="--attention")
    try:
        record = forward_floor.run(
            shape,
            runner="hf" if runner == "hf" else "lean",
            device=device,
            dtype=dtype,
            attention=kind,
            context=context,
            repeats=repeats,
            quantization=quantization,
            kernels=kernels,
            prompt=prompt,
        )
    except (ValueError, RuntimeError, DeviceUnavailable) as error:
        raise failed("forward", error) from None
    print(forward_floor.table(record))
    tables.write_json(json_file, {"environment": environment.describe(), **record})
