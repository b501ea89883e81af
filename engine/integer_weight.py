"""Weights of four or eight bits: integers, each with the zero point and the scale of the block it lies in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

#: Most neighbouring inputs in a block; larger groups, whose scale is the same, are cut.
MOST_INPUTS = 128
_LARGEST = 15


@dataclass(frozen=True, slots=True, eq=False)
class IntegerWeight:
    """A matrix `(number - zero) * scale`.

    Attributes:
        numbers: uint8 [outputs, blocks, bytes of a block]. With four bits the lower ones of a byte are of the
            first half of the block's inputs, the others of the second. The last block may be padded.
        scales: float32 [outputs, blocks].
        zeros: uint8 [outputs, blocks].
        inputs: of the matrix.
        bits: of a number, 4 or 8.
        order: which input each column is of, int64 [inputs]; None where they follow each other.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    inputs: int
    bits: int
    order: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        *,
        group: int,
        bits: int,
        order: torch.Tensor | None = None,
    ) -> IntegerWeight:
        """Numbers uint8 [outputs, inputs], with scales and zeros [outputs, ceil(inputs / group)].

        With `order` [inputs] its columns are those inputs, one after the other.

        Raises:
            ValueError: if they do not belong together, or blocks of four bits would be of odd size.
        """
        outputs, inputs = numbers.shape
        groups = -(-inputs // group)
        for what, found in (("scales", scales), ("zero points", zeros)):
            if found.shape != (outputs, groups):
                raise ValueError(
                    f"{what} {list(found.shape)} fit no weight {[outputs, inputs]} in groups of {group}"
                )
        block = _block_of(group, inputs)
        if bits == 4 and block % 2:
            raise ValueError(f"groups of {group} inputs cannot be halved")
        blocks = -(-inputs // block)
        index = torch.arange(blocks, device=numbers.device) * block // group
        missing = blocks * block - inputs
        padded = torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers
        padded = padded.reshape(outputs, blocks, block)
        if bits == 4:
            low, high = padded.chunk(2, dim=2)
            padded = low | high << 4
        each = (scales.float()[:, index].contiguous(), zeros.to(torch.uint8)[:, index].contiguous())
        return cls(padded.contiguous(), *each, inputs, bits, order)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.numbers.shape[0], self.inputs

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.numbers.shape[2] * 8 // self.bits

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.numbers.device

    def to(self, device: torch.device) -> IntegerWeight:
        """The same on a device."""
        moved = self._with(lambda part: part.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    def rows(self, which: slice | torch.Tensor) -> IntegerWeight:
        """Some outputs, by a range or by numbers int64 [n]."""
        return self._with(lambda part: part[which])

    def columns(self, start: int, stop: int) -> IntegerWeight:
        """The inputs from `start` to `stop`, in blocks cut as small as they must be for that.

        Raises:
            ValueError: if columns do not follow each other: some of all groups would be taken.
        """
        if self.order is not None and (start, stop) != (0, self.inputs):
            raise ValueError("inputs that do not follow each other cannot be shared out")
        bounds = [edge for edge in (start, stop) if edge < self.inputs]
        finer = self.divided(math.gcd(self.block, *bounds)) if bounds else self
        blocks = slice(start // finer.block, -(-stop // finer.block))
        return finer._with(lambda part: part[:, blocks].contiguous(), inputs=stop - start)

    def divided(self, block: int) -> IntegerWeight:
        """The same with blocks of `block` inputs, a divisor of its own."""
        if block == self.block:
            return self
        times, blocks = self.block // block, -(-self.inputs // block)
        scales, zeros = (
            part.repeat_interleave(times, dim=1)[:, :blocks] for part in (self.scales, self.zeros)
        )
        return IntegerWeight.of(self.unpacked(), scales, zeros, group=block, bits=self.bits, order=self.order)

    def unpacked(self) -> torch.Tensor:
        """The numbers, uint8 [outputs, inputs], in their order."""
        return self._blocks().flatten(1)[:, : self.inputs]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[outputs, inputs] in `dtype`, rounded once in float32, and once more in a coarser one."""
        wide = self._blocks().float().sub_(self.zeros.unsqueeze(2)).mul_(self.scales.unsqueeze(2))
        found = wide.flatten(1)[:, : self.inputs].to(dtype).contiguous()
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)

    def _blocks(self) -> torch.Tensor:
        """The numbers, uint8 [outputs, blocks, inputs of a block]."""
        if self.bits == 8:
            return self.numbers
        return torch.cat([self.numbers & 15, self.numbers >> 4], dim=2)

    def has_order_of(self, other: IntegerWeight) -> bool:
        """Whether both have the same columns one after the other."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def _with(
        self, change: Callable[[torch.Tensor], torch.Tensor], *, inputs: int | None = None
    ) -> IntegerWeight:
        """The same with each of the three tensors changed."""
        return IntegerWeight(
            change(self.numbers),
            change(self.scales),
            change(self.zeros),
            self.inputs if inputs is None else inputs,
            self.bits,
            self.order,
        )


def quantized(weight: torch.Tensor, group: int = MOST_INPUTS) -> IntegerWeight:
    """The nearest numbers of four bits to a float matrix [outputs, inputs], zero among them in each group."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    padded = weight.new_zeros(outputs, groups * group, dtype=torch.float32)
    padded[:, :inputs] = weight
    parts = padded.view(outputs, groups, group)
    low, high = parts.amin(2).clamp_(max=0), parts.amax(2).clamp_(min=0)
    # By tensors: for a number PyTorch multiplies with its inverse on a GPU, and rounds otherwise than a CPU.
    scales = (high - low) / torch.full_like(low, _LARGEST)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    zeros = (-low / scales).round_()
    numbers = ((parts / scales[:, :, None]).round_() + zeros[:, :, None]).clamp_(0, _LARGEST)
    kept = numbers.to(torch.uint8).view(outputs, -1)[:, :inputs]
    return IntegerWeight.of(kept, scales, zeros, group=group, bits=4)


def _block_of(group: int, inputs: int) -> int:
    """Inputs of the blocks that matrices are kept in: all of a block have the same scale."""
    if group >= inputs:  # one group: blocks are as large as they may be, and the last one is padded
        return min(MOST_INPUTS, 1 << max(1, (inputs - 1).bit_length()))
    return math.gcd(group, MOST_INPUTS)


def concatenated(weights: Sequence[IntegerWeight]) -> IntegerWeight:
    """Matrices of the same inputs in the same order, one's outputs after the other's; of the most bits."""
    bits = max(weight.bits for weight in weights)
    block = math.gcd(*(weight.block for weight in weights))
    same = [_with_bits(weight, bits).divided(block) for weight in weights]
    numbers, scales, zeros = (
        torch.cat([getattr(weight, part) for weight in same]) for part in ("numbers", "scales", "zeros")
    )
    return IntegerWeight(numbers, scales, zeros, weights[0].inputs, bits, weights[0].order)


def _with_bits(weight: IntegerWeight, bits: int) -> IntegerWeight:
    if weight.bits == bits:
        return weight
    return IntegerWeight.of(
        weight.unpacked(), weight.scales, weight.zeros, group=weight.block, bits=bits, order=weight.order
    )
