"""Weights of eight bits: e4m3 numbers, each with the scale of the block of its matrix it lies in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Side of the square blocks that share a scale, in published fine-grained checkpoints and where we quantize.
BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A matrix `number * scale`.

    Attributes:
        numbers: uint8 [outputs, inputs], the bits of e4m3 numbers (torch's float8_e4m3fn: no infinities).
        scales: float32 [outputs, ceil(inputs / block)].
        block: neighbouring inputs that share an output's scale.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.numbers.device

    def to(self, device: torch.device) -> Fp8Weight:
        """The same on a device."""
        return Fp8Weight(self.numbers.to(device), self.scales.to(device), self.block)

    def rows(self, which: slice | torch.Tensor) -> Fp8Weight:
        """Some outputs, by a range or by numbers int64 [n]."""
        return Fp8Weight(self.numbers[which], self.scales[which], self.block)

    def columns(self, start: int, stop: int) -> Fp8Weight:
        """The inputs from `start` to `stop`, in blocks cut as small as they must be for that."""
        inputs = self.shape[1]
        bounds = [edge for edge in (start, stop) if edge < inputs]
        finer = self.divided(math.gcd(self.block, *bounds)) if bounds else self
        blocks = slice(start // finer.block, -(-stop // finer.block))
        return Fp8Weight(self.numbers[:, start:stop].contiguous(), finer.scales[:, blocks], finer.block)

    def divided(self, block: int) -> Fp8Weight:
        """The same with blocks of `block` inputs, a divisor of its own."""
        if block == self.block:
            return self
        blocks = -(-self.shape[1] // block)
        scales = self.scales.repeat_interleave(self.block // block, dim=1)[:, :blocks]
        return Fp8Weight(self.numbers, scales, block)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[outputs, inputs] in `dtype`, rounded once in float32, and once more in a coarser one."""
        numbers = self.numbers.view(torch.float8_e4m3fn).float()
        scales = self.scales.repeat_interleave(self.block, dim=1)[:, : numbers.shape[1]]
        return numbers.mul_(scales).to(dtype)


def stored(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Fp8Weight:
    """A matrix as checkpoints have it.

    Args:
        numbers: float8_e4m3fn [outputs, inputs].
        scales: what numbers are multiplied by: one; [outputs] or [outputs, 1]; or one per block,
            [ceil(outputs / rows), ceil(inputs / columns)].
        block: rows and columns of a block, if there are blocks.

    Raises:
        ValueError: if numbers or scales have another type or shape.
    """
    if numbers.dtype != torch.float8_e4m3fn or numbers.dim() != 2:
        raise ValueError(f"not a matrix of float8_e4m3fn: {numbers.dtype} {list(numbers.shape)}")
    if not scales.dtype.is_floating_point:
        raise ValueError(f"scales of type {str(scales.dtype).removeprefix('torch.')} are not understood")
    outputs, inputs = numbers.shape
    bits, found = numbers.view(torch.uint8), scales.float()
    if found.numel() == 1:
        return Fp8Weight(bits, found.reshape(1, 1).expand(outputs, 1).contiguous(), inputs)
    if found.shape in ((outputs,), (outputs, 1)):
        return Fp8Weight(bits, found.reshape(outputs, 1).contiguous(), inputs)
    rows, columns = block
    if found.shape != (-(-outputs // rows), -(-inputs // columns)):
        raise ValueError(
            f"scales {list(scales.shape)} fit no weight {[outputs, inputs]} in blocks of {rows} by {columns}"
        )
    each = found.repeat_interleave(rows, dim=0)[:outputs]
    return Fp8Weight(bits, each.contiguous(), min(columns, inputs))


def quantized(weight: torch.Tensor, block: int = BLOCK) -> Fp8Weight:
    """The nearest numbers to a float matrix [outputs, inputs]; the largest of each square block is 448."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // block), -(-inputs // block)
    padded = weight.new_zeros(rows * block, columns * block, dtype=torch.float32)
    padded[:outputs, :inputs] = weight
    tiles = padded.view(rows, block, columns, block)
    largest = tiles.abs().amax(dim=(1, 3))
    # By a tensor: for a number PyTorch multiplies with its inverse on a GPU, and rounds otherwise than a CPU.
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / torch.full_like(largest, _LARGEST))
    numbers = (tiles / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    kept = numbers.view(torch.uint8).reshape(rows * block, columns * block)[:outputs, :inputs]
    return stored(kept.contiguous().view(torch.float8_e4m3fn), scales, (block, block))


def concatenated(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """Matrices of the same inputs, one's outputs after the other's."""
    block = math.gcd(*(weight.block for weight in weights))
    same = [weight.divided(block) for weight in weights]
    return Fp8Weight(
        torch.cat([weight.numbers for weight in same]), torch.cat([weight.scales for weight in same]), block
    )
