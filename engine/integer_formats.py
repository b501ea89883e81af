"""Reads weights of integers as checkpoints have them: GPTQ, AWQ, compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.integer_weight import IntegerWeight
from engine.stored_words import bits_of, num_words

#: Outputs of a word of AWQ's, by the place of their four bits in it, from the lowest.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_qweight(
    tensors: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    *,
    is_symmetric: bool,
    is_v2: bool,
    group: int | None = None,
) -> IntegerWeight | torch.Tensor:
    """A weight of GPTQ's or AWQ's; a matrix of floats if not all groups are of equally many inputs.

    GPTQ packs neighbouring inputs into a word, AWQ neighbouring outputs; which it is the shape tells. GPTQ's
    zero points are one too small, but for its second version (`gptq_v2`). Some tools store those of one
    under the name of the other, which shows where the weights are symmetric.

    Args:
        tensors: `qweight`, `scales` [groups, outputs] and perhaps `qzeros`, words of integers, and `g_idx`
            [inputs], the group of each.
        shape: (outputs, inputs) of the layer.
        is_symmetric: the checkpoint says that all zero points are the middle of what integers there are.
        is_v2: the checkpoint says that zero points are what they are.
        group: inputs of most layers' groups as the checkpoint says, if it does; of the last one there may be
            fewer, as AutoRound has them.

    Raises:
        ValueError: if they fit no such layer, or have another number of bits than is read.
    """
    outputs, inputs = shape
    words, scales, zeros = tensors["qweight"], tensors["scales"], tensors.get("qzeros")
    if words.dim() != 2 or words.dtype != torch.int32:
        raise ValueError(f"`qweight` is {_told(words)}, no matrix of words")
    is_awq = words.shape[0] == inputs
    if not is_awq and words.shape[1] != outputs:
        raise ValueError(f"`qweight` {list(words.shape)} where the model has {[outputs, inputs]}")
    bits = bits_of(words.shape[1], outputs) if is_awq else bits_of(words.shape[0], inputs)
    if is_awq and bits != 4:
        raise ValueError(f"AWQ's weights are read with four bits, not {bits}")
    if scales.dim() != 2 or scales.shape[1] != outputs:
        raise ValueError(f"`scales` {list(scales.shape)} where the model has {[outputs, inputs]}")
    numbers = _unpacked_awq(words) if is_awq else _unpacked(words.T, bits)[:, :inputs]
    middle = 1 << (bits - 1)
    if zeros is None:
        if not is_symmetric:
            raise ValueError("`qzeros` is missing")
        points = torch.full_like(scales.T, middle, dtype=torch.uint8)
    else:
        if zeros.dtype != torch.int32 or zeros.dim() != 2 or zeros.shape[1] != num_words(outputs, bits):
            raise ValueError(
                f"`qzeros` is {_told(zeros)} where words [groups, {num_words(outputs, bits)}] belong"
            )
        points = _unpacked_awq(zeros) if is_awq else _unpacked(zeros, bits).T[:outputs]
        if is_symmetric and bool((points == points[0, 0]).all()) and middle - int(points[0, 0]) in (0, 1):
            is_v2 = int(points[0, 0]) == middle
        if not (is_awq or is_v2):
            points = (points + 1) & ((1 << bits) - 1)
    return _weight(numbers, scales.T, points, bits, tensors.get("g_idx"), group)


def from_packed(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> IntegerWeight | torch.Tensor:
    """A weight of compressed-tensors', `pack-quantized`; see `from_qweight`.

    Args:
        tensors: `weight_packed`, words [outputs, words], `weight_scale`, one or [outputs, groups], and
            perhaps `weight_zero_point`, words [words, groups] or as old versions have it, int8 [outputs,
            groups] less the middle, without which zero is zero, and `weight_g_idx`.
        shape: (outputs, inputs) of the layer.

    Raises:
        ValueError: if they fit no such layer, or have another number of bits than is read.
    """
    outputs, inputs = shape
    words, scales, zeros = (
        tensors.get(name) for name in ("weight_packed", "weight_scale", "weight_zero_point")
    )
    assert words is not None
    assert scales is not None
    if words.dim() != 2 or words.dtype != torch.int32 or words.shape[0] != outputs:
        raise ValueError(f"`weight_packed` is {_told(words)} where the model has {[outputs, inputs]}")
    bits = bits_of(words.shape[1], inputs)
    numbers = _unpacked(words, bits)[:, :inputs]
    scales, zeros = _for_each_output(scales, zeros, outputs)
    scales = scales.reshape(outputs, -1) if scales.shape[:1] == (outputs,) else scales
    if zeros is None:
        points = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
    elif zeros.dtype == torch.int32 and zeros.dim() == 2 and zeros.shape[0] == num_words(outputs, bits):
        points = _unpacked(zeros.T, bits).T[:outputs]
    elif zeros.dtype == torch.int8 and zeros.numel() == scales.numel() and zeros.shape[0] == outputs:
        points = (zeros.reshape(scales.shape).to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    else:
        packed = [num_words(outputs, bits), scales.shape[-1]]
        raise ValueError(
            f"`weight_zero_point` is {_told(zeros)} where words {packed} or int8 {list(scales.shape)} belong"
        )
    return _weight(numbers, scales, points, bits, tensors.get("weight_g_idx"))


def from_int8(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> IntegerWeight | torch.Tensor:
    """A weight of compressed-tensors', `int-quantized`.

    Args:
        tensors: `weight`, int8 [outputs, inputs], `weight_scale`, one or [outputs, groups], and perhaps
            `weight_zero_point`, int8, as many.
        shape: (outputs, inputs) of the layer.

    Raises:
        ValueError: if they fit no such layer.
    """
    outputs, _ = shape
    weight, scales, zeros = (tensors.get(name) for name in ("weight", "weight_scale", "weight_zero_point"))
    assert weight is not None
    assert scales is not None
    if tuple(weight.shape) != shape:
        raise ValueError(f"{list(weight.shape)} where the model has {list(shape)}")
    scales, zeros = _for_each_output(scales, zeros, outputs)
    scales = scales.reshape(outputs, -1) if scales.shape[:1] == (outputs,) else scales
    points = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros.reshape(scales.shape)
    return _weight(_unsigned(weight), scales, _unsigned(points), 8)


def _weight(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    order: torch.Tensor | None = None,
    group: int | None = None,
) -> IntegerWeight | torch.Tensor:
    """Of numbers [outputs, inputs], with scales and zeros [outputs, groups] of neighbouring inputs.

    All groups are of equally many, but where that many `group`s leave the last one fewer. With `order`
    [inputs] the group of each is that; a matrix of floats if then groups are not of equally many.
    """
    inputs, groups = numbers.shape[1], scales.shape[-1]
    size = inputs // groups
    if group is not None and 0 < group < inputs and groups == -(-inputs // group):
        size = group
    if scales.dim() != 2 or (inputs % groups and size != group):
        raise ValueError(f"scales {list(scales.shape)} fit no weight {list(numbers.shape)}")
    if order is None or order.numel() <= 1 or bool((order < 0).all()):  # there is none
        return IntegerWeight.of(numbers, scales, zeros, group=size, bits=bits)
    if order.shape != (inputs,) or not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise ValueError(f"`g_idx` {list(order.shape)} names no groups of {groups} for {inputs} inputs")
    order = order.long()
    if bool((torch.bincount(order, minlength=groups) != size).any()):
        return (numbers.float() - zeros[:, order]).mul_(scales.float()[:, order])
    columns = torch.argsort(order, stable=True)
    if torch.equal(columns, torch.arange(inputs, device=order.device)):
        return IntegerWeight.of(numbers, scales, zeros, group=size, bits=bits)
    return IntegerWeight.of(numbers[:, columns], scales, zeros, group=size, bits=bits, order=columns)


def _for_each_output(
    scales: torch.Tensor, zeros: torch.Tensor | None, outputs: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, with one for each output where there is one for the whole matrix."""
    if scales.numel() != 1 or (zeros is not None and zeros.numel() != 1):
        return scales, zeros
    scales, *more = (one.reshape(1, 1).expand(outputs, 1) for one in (scales, zeros) if one is not None)
    return scales, more[0] if more else None


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, numbers] of int32 [rows, words], the lowest bits first."""
    # On machines that have the lowest byte first, as all do on which torch runs.
    found = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return found if bits == 8 else torch.stack([found & 15, found >> 4], dim=2).flatten(1)


def _unpacked_awq(words: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, inputs] of int32 [inputs, words]."""
    numbers = _unpacked(words.T, 4).view(words.shape[1], words.shape[0], len(AWQ_ORDER))
    order = [AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))]
    return numbers.permute(2, 0, 1)[order].transpose(0, 1).reshape(-1, words.shape[0])


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """uint8, of int8 numbers moved up by 128."""
    return (numbers.to(torch.int16) + 128).to(torch.uint8)


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
