"""Which tensors of a checkpoint are quantized weights: their names and types decide, not the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.quantized_files import NOTHING_READ
from engine.stored_words import bits_of, leaves_gaps
from engine.tensor_headers import DescribedTensors, UnreadableCheckpoint

Layout = Literal["fp8", "int8", "qweight", "packed"]
"""Of e4m3 numbers; of signed integers of eight bits; GPTQ's or AWQ's; compressed-tensors' packed one."""

_BY_KIND: dict[str, Layout] = {"F8_E4M3": "fp8", "I8": "int8"}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BY_NAME: dict[str, Layout] = {"qweight": "qweight", "weight_packed": "packed"}
# What layouts have beside the numbers: scales by one of some names, and what they may have. FP8's are called
# the first way in fine-grained checkpoints (DeepSeek, Qwen), and the second by compressed-tensors and FBGEMM.
_BESIDE: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fp8": (("weight_scale_inv", "weight_scale"), ()),
    "int8": (("weight_scale",), ("weight_zero_point",)),
    "qweight": (("scales",), ("qzeros", "g_idx")),
    "packed": (("weight_scale",), ("weight_shape", "weight_zero_point", "weight_g_idx")),
}
# Ends of weights' names: of linear layers, of experts that are stored as one, and of quanto's numbers.
_WEIGHTS = ("weight", "_proj", "_data")
_ZERO_POINTS = ("zero_point", "qzeros")
# What other formats have beside their numbers, and no one else: by it they can be told what they are.
_UNREAD = {
    "weight_global_scale": "in NVFP4 (floats of four bits)",
    "weight_scale_2": "with scales of scales (NVFP4, floats of four bits)",
    "scale_packed": "of which zeros are left out (2:4), laid out for one kernel (`marlin-24`)",
    "_weight_qdata": "as torchao stores them",
    "_data": "as quanto stores them",
    "SCB": "as bitsandbytes stores them",
    "quant_map": "as bitsandbytes stores them",
    "biases": "as MLX stores them (Apple)",
}


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A linear layer.

    Attributes:
        module: its name.
        layout: how its weight is stored.
        numbers: name of the tensor with the numbers, less the module's.
        scales: the same of the scales.
        beside: the same of the others, which are there.
    """

    module: str
    layout: Layout
    numbers: str
    scales: str
    beside: tuple[str, ...] = ()

    @property
    def tensors(self) -> set[str]:
        """Names of all."""
        return {f"{self.module}.{part}" for part in (self.numbers, self.scales, *self.beside)}


def why_not_stored(checkpoint: DescribedTensors, described: Mapping[str, Any]) -> str | None:
    """What of quantized weights is not read, as far as headers and config.json show; None if nothing.

    Args:
        checkpoint: what there is.
        described: how config.json says that weights are quantized.
    """
    try:
        layers = stored_layers(checkpoint)
    except UnreadableCheckpoint as error:
        return str(error)
    if not layers:
        return NOTHING_READ
    version = str(described.get("version") or "gemm").lower()
    if described.get("quant_method") == "awq" and version != "gemm":
        return f"AWQ's packing {version!r} is not read, only 'gemm'"
    if described.get("checkpoint_format") == "marlin":
        return "GPTQ's packing 'marlin' is not read, only 'gptq' and 'gptq_v2'"
    return None


def stored_layers(checkpoint: DescribedTensors) -> dict[str, StoredLayer]:
    """The layers with quantized weights, by their modules' names.

    Raises:
        UnreadableCheckpoint: if one has no scales, or is in a format or of a number of bits that is not read.
    """
    found = {layer.module: layer for layer in _found(checkpoint)}
    for layer in found.values():
        try:
            _check_bits(checkpoint, layer)
        except ValueError as error:
            raise UnreadableCheckpoint(f"`{layer.module}` has {error}") from None
    return found


def are_quantized(checkpoint: DescribedTensors) -> bool:
    """Whether tensors show that there are such layers, even if config.json does not say so.

    So do weights of anything but floats: what these are to mean, only a format can tell.
    """
    return any(_is_quantized(checkpoint, name) for name in checkpoint.names)


def _is_quantized(checkpoint: DescribedTensors, name: str) -> bool:
    part, kind = name.rpartition(".")[2], checkpoint.kind(name)
    if part in _BY_NAME or kind == "F8_E4M3":
        return True
    # Buffers of integers are no weights.
    return kind not in _FLOATS and (part.endswith(_WEIGHTS) or f"{name}_scale" in checkpoint.names)


def _found(checkpoint: DescribedTensors) -> Iterator[StoredLayer]:
    names = sorted(checkpoint.names)
    for name in names:  # of others first, which have tensors in common with those that are read
        if (told := _UNREAD.get(name.rpartition(".")[2])) is not None:
            raise UnreadableCheckpoint(f"`{name}` belongs to weights {told}, which are not read")
    for name in names:
        module, _, part = name.rpartition(".")
        kind = checkpoint.kind(name)
        by_kind = _BY_KIND.get(kind)
        layout = _BY_NAME.get(part) or by_kind
        if layout == "packed" and kind == "U8":  # NVFP4's have a scale of scales, and are told above
            raise UnreadableCheckpoint(f"`{name}` is in MXFP4 (floats of four bits), which is not read")
        if layout is None and part.endswith(_WEIGHTS) and kind not in _FLOATS:
            raise UnreadableCheckpoint(f"`{name}` is of type {kind}, which is not read")
        if layout is None or part.endswith(_ZERO_POINTS):
            continue
        called, more = _BESIDE[layout]
        scales = next((one for one in called if f"{module}.{one}" in checkpoint.names), None)
        if scales is None or (layout == by_kind and part != "weight"):
            bits = "eight" if by_kind else "few"
            raise UnreadableCheckpoint(f"`{name}` is of {bits} bits and has no scales beside it")
        beside = tuple(one for one in more if f"{module}.{one}" in checkpoint.names)
        yield StoredLayer(module, layout, part, scales, beside)


def _check_bits(checkpoint: DescribedTensors, layer: StoredLayer) -> None:
    """Check how many bits the numbers of a layer have, where shapes tell; loading sees what they do not.

    Raises:
        ValueError: if these are not read.
    """
    own = {part: f"{layer.module}.{part}" for part in (layer.numbers, layer.scales, *layer.beside)}
    packed = own.get("weight_packed") or own.get("qzeros")
    if packed is None or checkpoint.kind(packed) != "I32":
        return
    words = checkpoint.shape(packed)
    if layer.layout == "packed" and "weight_shape" in own:
        numbers = tuple(checkpoint.integers(own["weight_shape"]))
    elif layer.layout == "qweight":  # zero points of outputs, packed as numbers are
        numbers = checkpoint.shape(own["scales"])
    else:
        return
    # Of shapes that do not fit each other, loading says more.
    if len(words) == len(numbers) == 2 and all((*words, *numbers)) and not leaves_gaps(words[1], numbers[1]):
        bits_of(words[1], numbers[1])
