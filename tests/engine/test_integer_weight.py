"""Weights of integers: what they are, parts of them, and products by Triton's interpreter and for GPUs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import tiled_product
from engine.integer_product import IntegerProduct
from engine.integer_weight import IntegerWeight, concatenated, quantized
from engine.linear import Linear
from engine.quantized_linear import make_linear
from engine.tiled_product import tile_of
from engine.weight_parts import columns, joined
from tests.engine.compiling import Kernel, compiled
from tests.engine.products import check_product
from tests.examples import examples

Matrix = tuple[IntegerWeight, np.ndarray[Any, np.dtype[np.float64]]]


def random_weight(
    outputs: int, inputs: int, group: int, bits: int, seed: int, *, is_ordered: bool = False
) -> Matrix:
    """One, and the matrix that its numbers, zero points and scales mean; its columns perhaps in any order."""
    rng = np.random.default_rng(seed)
    groups = -(-inputs // group)
    numbers = rng.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8)
    zeros = rng.integers(0, 1 << bits, (outputs, groups), dtype=np.uint8)
    scales = (2.0 ** rng.uniform(-12, 2, (outputs, groups))).astype(np.float32)
    of = np.arange(inputs) // group
    meant = (numbers.astype(np.float64) - zeros[:, of]) * scales[:, of]
    parts = (torch.from_numpy(part) for part in (numbers, scales, zeros))
    if not is_ordered:
        return IntegerWeight.of(*parts, group=group, bits=bits), meant
    order = rng.permutation(inputs)
    weight = IntegerWeight.of(*parts, group=group, bits=bits, order=torch.from_numpy(order))
    return weight, meant[:, np.argsort(order)]


sizes = st.tuples(st.sampled_from([1, 7, 64, 130]), st.sampled_from([32, 40, 128, 200, 384]))
bits = st.sampled_from([4, 8])


@given(size=sizes, group=st.sampled_from([8, 32, 96, 128, 256, 1000]), bits=bits, seed=st.integers(0, 99))
def test_numbers_mean_what_they_say(size: tuple[int, int], group: int, bits: int, seed: int) -> None:
    weight, meant = random_weight(*size, group, bits, seed, is_ordered=bool(seed % 2))
    assert weight.shape == size
    assert weight.block <= 128
    assert weight.numbers.numel() == size[0] * -(-size[1] // weight.block) * weight.block * bits // 8
    np.testing.assert_allclose(weight.dequantized(torch.float32).numpy(), meant, rtol=1e-6)


@given(
    size=sizes, group=st.sampled_from([8, 32, 128, 1000]), bits=bits, seed=st.integers(0, 99), data=st.data()
)
def test_parts_are_those_of_the_matrix(
    size: tuple[int, int], group: int, bits: int, seed: int, data: st.DataObject
) -> None:
    weight, _ = random_weight(*size, group, bits, seed)
    whole = weight.dequantized(torch.float32)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, size[1] // 8)] * 2)))
    start, stop = start * 8, min(stop * 8 + 8, size[1])
    if start < stop:
        assert torch.equal(weight.columns(start, stop).dequantized(torch.float32), whole[:, start:stop])
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weight.rows(order).dequantized(torch.float32), whole[order])
    other, _ = random_weight(
        5, size[1], data.draw(st.sampled_from([32, 128])), data.draw(st.sampled_from([4, 8])), seed + 1
    )
    both = torch.cat([whole, other.dequantized(torch.float32)])
    assert torch.equal(concatenated([weight, other]).dequantized(torch.float32), both)
    assert torch.equal(joined([weight, other.dequantized(torch.float32)], torch.float32), both)


@given(
    size=sizes, group=st.sampled_from([32, 128]), seed=st.integers(0, 99), gain=st.sampled_from([1e-6, 300])
)
def test_quantized_weights_are_the_nearest(size: tuple[int, int], group: int, seed: int, gain: float) -> None:
    weight = torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * gain
    weight[0, :32] = 0.0
    weight[:, 1] = weight[:, 1].abs() * 3  # so that zero is in no group's middle
    found = quantized(weight, group)
    wide = found.dequantized(torch.float32)
    assert not wide[0, : min(32, group)].any()
    for first in range(0, size[1], group):
        part, got = (one[:, first : first + group].double() for one in (weight, wide))
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        step = ((high - low) / 15)[:, None]
        # A zero point is rounded, too: it may move the ends of the range by half a step.
        assert bool(((part - got).abs() <= step * 1.0001 + 1e-30).all())
        inside = (part >= low[:, None] + step / 2) & (part <= high[:, None] - step / 2)
        assert bool(((part - got).abs() <= step * 0.5001 + 1e-30)[inside].all())


def test_columns_in_another_order() -> None:
    weight, meant = random_weight(24, 96, 32, 4, 0, is_ordered=True)
    whole = torch.from_numpy(meant).float()
    outputs = torch.tensor([5, 3, 20])
    torch.testing.assert_close(weight.rows(outputs).dequantized(torch.float32), whole[outputs])
    halves = [weight.rows(slice(0, 12)), weight.rows(slice(12, 24))]
    both = joined(halves, torch.float32)
    assert isinstance(both, IntegerWeight)
    torch.testing.assert_close(both.divided(16).dequantized(torch.float32), whole)
    torch.testing.assert_close(weight.columns(0, 96).dequantized(torch.float32), whole)
    with pytest.raises(ValueError, match="do not follow each other cannot be shared out"):
        weight.columns(0, 48)
    share = columns(weight, 48, 96, torch.float32)
    assert isinstance(share, torch.Tensor)
    torch.testing.assert_close(share, whole[:, 48:])
    for seed, is_ordered in ((1, True), (0, False)):  # in an order of its own, or in none
        other, _ = random_weight(24, 96, 32, 4, seed, is_ordered=is_ordered)
        mixed = joined([weight, other], torch.float32)
        assert isinstance(mixed, torch.Tensor)
        torch.testing.assert_close(mixed[:24], whole)


def test_what_does_not_belong_together_is_refused() -> None:
    numbers = torch.zeros(4, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales \[4, 2\] fit no weight \[4, 48\] in groups of 16"):
        IntegerWeight.of(numbers, torch.ones(4, 2), torch.zeros(4, 3), group=16, bits=4)
    with pytest.raises(ValueError, match=r"zero points \[4, 2\] fit no weight"):
        IntegerWeight.of(numbers, torch.ones(4, 3), torch.zeros(4, 2), group=16, bits=4)
    with pytest.raises(ValueError, match="groups of 3 inputs cannot be halved"):
        IntegerWeight.of(numbers, torch.ones(4, 16), torch.zeros(4, 16), group=3, bits=4)


def test_weights_are_widened_where_no_kernel_takes_them() -> None:
    weight, meant = random_weight(64, 200, 40, 4, 0)
    x, scale = torch.randn(3, 200), torch.rand(200)
    linear = make_linear(weight, None, scale, dtype=torch.float32)
    assert isinstance(linear, Linear)
    torch.testing.assert_close(linear(x), x * scale @ torch.from_numpy(meant).float().T, rtol=1e-4, atol=1e-2)


# -- the kernel ---------------------------------------------------------------------------------------------

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")


@interpreted
@pytest.mark.parametrize("bits", [4, 8])
def test_every_number_is_widened_exactly(bits: int) -> None:
    numbers = (torch.arange(256, dtype=torch.uint8) & ((1 << bits) - 1)).view(8, 32)
    zeros = torch.arange(8, dtype=torch.uint8)[:, None] * 2
    weight = IntegerWeight.of(numbers, torch.ones(8, 1), zeros, group=32, bits=bits)
    assert torch.equal(IntegerProduct(weight)(torch.eye(32)).T, numbers.float() - zeros.float())


@interpreted
@examples(20)
@given(
    size=sizes,
    group=st.sampled_from([32, 64, 128, 1000]),
    bits=bits,
    rows=st.sampled_from([1, 3, 17, 33]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    is_ordered=st.booleans(),
    programs=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_widened_matrix(
    size: tuple[int, int],
    group: int,
    bits: int,
    rows: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    is_ordered: bool,
    programs: int,
    seed: int,
) -> None:
    outputs, inputs = size
    weight, meant = random_weight(outputs, inputs, group, bits, seed, is_ordered=is_ordered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_product, "ENOUGH_PROGRAMS", programs)
        check_product(
            IntegerProduct(weight),
            torch.from_numpy(meant),
            rows=rows,
            dtype=dtype,
            has_bias=has_bias,
            has_residual=has_residual,
            seed=seed,
        )


def test_blocks_the_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights of 4 bits with a scale per 16 of 64 inputs: .* from 32"):
        IntegerProduct(random_weight(16, 64, 16, 4, 0)[0])
    assert IntegerProduct(random_weight(16, 64, 16, 8, 0)[0]).blocks == 4
    with pytest.raises(ValueError, match=r"weights of 8 bits with a scale per 8 of 96 inputs: .* from 16"):
        IntegerProduct(random_weight(16, 96, 24, 8, 0)[0])


# -- the assembly, which only GPUs run ----------------------------------------------------------------------


def run_assembly(code: str, registers: dict[str, np.ndarray[Any, np.dtype[np.uint32]]]) -> None:
    """What the instructions do to `registers` ("$0" ...) by the manual of PTX (ISA 8.5, 9.7), elementwise."""
    kinds = {"bf16x2": (16, np.float32), "f16x2": (0, np.float16)}

    def value(name: str) -> Any:
        return (
            np.uint32(int(name, 16 if name.startswith("0x") else 10))
            if name[0].isdigit()
            else registers[name]
        )

    def halves(word: Any, kind: str) -> tuple[Any, Any]:
        shift, number = kinds[kind]
        parts = (word & np.uint32(0xFFFF), word >> np.uint32(16))
        if number is np.float16:
            return tuple(
                np.asarray(part).astype(np.uint16).view(np.float16).astype(np.float64) for part in parts
            )
        return tuple((part << np.uint32(shift)).view(np.float32).astype(np.float64) for part in parts)

    def joined_halves(low: Any, high: Any, kind: str) -> Any:
        if kinds[kind][1] is np.float16:
            words = [part.astype(np.float16).view(np.uint16).astype(np.uint32) for part in (low, high)]
        else:
            words = [part.astype(np.float32).view(np.uint32) >> np.uint32(16) for part in (low, high)]
        return words[0] | words[1] << np.uint32(16)

    for line in re.findall(r"^\s*([a-z][^;{]*);", code, re.M):
        name, *given = re.split(r"[\s,]+", line.strip())
        if name == "mov.b32":
            registers[given[0]] = value(given[1])
        elif name == "and.b32":
            registers[given[0]] = value(given[1]) & value(given[2])
        elif name == "shr.u32":
            registers[given[0]] = value(given[1]) >> value(given[2])
        elif name == "prmt.b32":
            low, high, choice = (value(one) for one in given[1:])
            found = np.zeros_like(low)
            for place in range(4):
                byte = int(choice) >> 4 * place & 7
                source = (low if byte < 4 else high) >> np.uint32(8 * (byte % 4)) & np.uint32(0xFF)
                found = found | source << np.uint32(8 * place)
            registers[given[0]] = found
        elif name.startswith("fma.rn."):
            kind = name.removeprefix("fma.rn.")
            a, b, c = (halves(value(one), kind) for one in given[1:])
            registers[given[0]] = joined_halves(a[0] * b[0] + c[0], a[1] * b[1] + c[1], kind)
        else:
            raise AssertionError(f"{name} is not known here")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_assembly_gives_what_numbers_are_beyond_their_zeros(dtype: torch.dtype) -> None:
    from engine import integer_kernels

    is_half = dtype == torch.float16
    code = integer_kernels.TO_FLOAT16 if is_half else integer_kernels.TO_BFLOAT16
    rng = np.random.default_rng(0)
    columns = [rng.permuted(np.tile(np.arange(256, dtype=np.uint32), 17)) for _ in range(4)]  # bytes
    zeros = np.repeat(np.arange(17), 256)
    offset = torch.from_numpy(-(1024.0 if is_half else 128.0) - zeros).to(dtype)
    assert torch.equal(offset.double(), -(1024.0 if is_half else 128.0) - torch.from_numpy(zeros).double())
    bits = offset.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    pair = bits | bits << np.uint32(16)
    word = columns[0] | columns[1] << 8 | columns[2] << 16 | columns[3] << 24
    registers = {"$4": word.astype(np.uint32), "$5": pair, "$6": pair}
    run_assembly(code.value, registers)
    for register, (first, shift) in enumerate([(0, 0), (2, 0), (0, 4), (2, 4)]):
        halves = [registers[f"${register}"] & 0xFFFF, registers[f"${register}"] >> 16]
        for half, column in zip(halves, columns[first : first + 2], strict=True):
            got = torch.from_numpy(half.astype(np.uint16).view(np.int16)).view(dtype)
            expected = (column >> shift & 15).astype(np.float64) - zeros
            np.testing.assert_array_equal(got.double().numpy(), expected)


@pytest.mark.thorough
@interpreted
def test_kernels_compile_for_gpus() -> None:
    """Without registers spilled to memory but for float32, by Triton's compiler; nothing is run."""
    types = dict.fromkeys(("x", "numbers", "scales", "zeros", "bias", "residual", "out"), "*bf16")
    types |= {"numbers": "*u8", "scales": "*fp32", "zeros": "*u8"}
    types |= dict.fromkeys(("num_rows", "outputs", "inputs", "x_stride", "split_blocks"), "i32")

    def product(rows: int, arch: int, *, bits: int = 4, dtype: str = "bf16", inputs: int = 128) -> Kernel:
        tile = tile_of(rows, torch.float32 if dtype == "fp32" else torch.bfloat16)
        split = rows <= tiled_product.SPLIT_ROWS
        pointers = {name: f"*{dtype}" if kind == "*bf16" else kind for name, kind in types.items()}
        constants: dict[str, Any] = {
            "OUTPUTS": tile.outputs,
            "ROWS": tile.rows,
            "INPUTS": inputs,
            "BITS": bits,
        }
        constants |= {"IS_PACKED": dtype != "fp32"}
        constants |= {"IS_SPLIT": split, "HAS_BIAS": False, "HAS_RESIDUAL": not split}
        return (
            "engine.integer_kernels.multiply",
            pointers | ({"out": "*fp32"} if split else {}),
            constants,
            {"arch": arch, "num_warps": tile.warps, "num_stages": tile.stages},
        )

    found = compiled(
        [
            *(product(rows, 90) for rows in (1, 32, 64, 512)),
            product(1, 90, inputs=32),
            product(1, 90, dtype="fp16"),
            *(product(rows, 90, bits=8) for rows in (1, 512)),
            product(32, 90, dtype="fp32"),
            *(product(rows, 80) for rows in (1, 512)),
        ]
    )
    for number, one in enumerate(found):
        assert one.spilled == 0 or number == 8
        # What a block may have: on Hopper, and on the smallest of the others (A10, L4, RTX).
        assert one.shared <= (227 if number < 9 else 99) * 1024
    for number in (0, 1, 2, 3, 4, 9, 10):
        assert "fma.rn.bf16x2" in found[number].ptx
        assert "cp.async" in found[number].ptx
    assert "fma.rn.f16x2" in found[5].ptx
    assert "wgmma" in found[3].ptx
    assert "mma.sync" in found[0].ptx
