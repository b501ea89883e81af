"""Philox against its published vectors; the noise against what sampling needs of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from engine import host_noise
from engine.noise import gumbel_noise, philox4x32, uniform_noise
from tests.examples import examples

# Random123 1.14, tests/kat_vectors, lines "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_known_answers() -> None:
    counters = torch.tensor([c for c, _, _ in KNOWN_ANSWERS]).T.contiguous()
    keys = torch.tensor([k for _, k, _ in KNOWN_ANSWERS]).T.contiguous()
    expected = torch.tensor([e for _, _, e in KNOWN_ANSWERS]).T
    assert torch.equal(philox4x32(counters, keys), expected)


@examples(60)
@given(
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=5
    ),
    vocab=st.one_of(st.integers(1, 70), st.just(4097)),
    most=st.sampled_from([1, 5, 32_768]),
)
def test_words_by_numpy_are_philoxs(rows: list[tuple[int, int]], vocab: int, most: int) -> None:
    """Token v has word v % 4 of counter v // 4, however many counters are computed at a time."""
    seeds, positions = zip(*rows, strict=True)
    with mock.patch.object(host_noise, "_MOST_COUNTERS", most):
        found = host_noise.words(seeds, positions, vocab)
    blocks = -(-vocab // 4)
    counter = torch.zeros(4, len(rows), blocks, dtype=torch.int64)
    counter[0], counter[1] = torch.arange(blocks), torch.tensor(positions)[:, None]
    low, high = ([(seed >> shift) & 0xFFFFFFFF for seed in seeds] for shift in (0, 32))
    words = philox4x32(counter, torch.tensor([low, high])[..., None])
    expected = words.permute(1, 2, 0).reshape(len(rows), -1)[:, :vocab]
    assert np.array_equal(found, expected.numpy())


def test_uniform_within_rows_and_across_seeds_and_positions() -> None:
    grid = uniform_noise([5] * 64 + list(range(64)), list(range(64)) + [3] * 64, 4096).numpy()
    assert grid.min() > 0.0
    assert grid.max() < 1.0
    for sample in (grid[0], grid[:64].ravel(), grid[64:].ravel(), grid[:64, 17], grid[64:, 17]):
        observed, _ = np.histogram(sample, bins=16, range=(0, 1))
        assert stats.chisquare(observed).pvalue > 1e-4


@pytest.mark.parametrize("axis", ["position", "seed", "token"])
def test_neighbours_are_independent(axis: str) -> None:
    if axis == "position":
        pair = uniform_noise([9, 9], [100, 101], 40_000)
    elif axis == "seed":
        pair = uniform_noise([9, 10], [100, 100], 40_000)
    else:
        row = uniform_noise([9], [100], 40_001)[0]
        pair = torch.stack((row[:-1], row[1:]))
    x, y = pair.numpy()
    table, _, _ = np.histogram2d(x, y, bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > 1e-4
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.02


def test_gumbel_distribution() -> None:
    sample = gumbel_noise([1, 2, 3, 4], [0, 1, 2, 3], 20_000).numpy().ravel()
    assert np.isfinite(sample).all()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-4


def test_same_bits_in_any_batch() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 12345678901234567, 7]
    positions = [0, 1, 2, 3, 2**31, 5, 2**32 - 1]
    for vocab in (1, 3, 257, 4096):
        together = gumbel_noise(seeds, positions, vocab)
        assert together.shape == (7, vocab)
        assert together.dtype == torch.float32
        for i in range(7):
            assert torch.equal(together[i : i + 1], gumbel_noise([seeds[i]], [positions[i]], vocab))
        assert torch.equal(together.flip(0), gumbel_noise(seeds[::-1], positions[::-1], vocab))
        wider = gumbel_noise(seeds, positions, vocab + 5)
        assert torch.equal(wider[:, :vocab], together)
    assert torch.equal(gumbel_noise([-1], [0], 64), gumbel_noise([2**64 - 1], [0], 64))


class _Counted(TorchDispatchMode):
    """How many operations torch is asked for."""

    num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_many_rows_take_as_few_operations_as_one() -> None:
    def operations(rows: int) -> int:
        with _Counted() as counted:
            gumbel_noise(list(range(rows)), list(range(rows)), 4096, device="meta")
        return counted.num

    # Where torch computes them: ten rounds of a dozen operations and what is around them.
    assert 100 < operations(1) < 200
    assert operations(64) == operations(1)
