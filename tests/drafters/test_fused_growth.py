"""Kernels that choose and grow on a GPU, run by Triton's interpreter, against what torch and the host do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from drafters import device_state, next_tokens
from drafters.device_beam import Layer
from drafters.device_state import DeviceState
from drafters.messages import DraftPlan
from drafters.next_tokens import OnDevice
from engine import best_tokens
from engine.beam import Beam
from engine.best_tokens import highest, highest_by_triton
from tests.drafters.test_device_draft import draft_with_both, graphed, near_ties, plain
from tests.engine.compiling import compiled
from tests.examples import examples

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU"),
    # Rows of padding are whatever memory held: numpy warns of it, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@examples(20)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(1, 70),
    k=st.integers(1, 9),
    levels=st.sampled_from([2, 5, 10_000]),
    barred=st.sampled_from([0.0, 0.5, 0.95]),
    seed=st.integers(0, 1000),
)
def test_the_best_tokens_and_their_log_probabilities(
    rows: int, vocab: int, k: int, levels: int, barred: float, seed: int
) -> None:
    """Over several blocks of tokens, with ties within and between them, and with tokens that are barred."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (rows, vocab)) * (8 / levels) - 4
    scores[rng.random((rows, vocab)) < barred] = -np.inf
    scores[:, rng.integers(vocab)] = 1.5  # some token is allowed
    tensor = torch.from_numpy(scores.astype(np.float32))
    values, tokens = highest(torch.log_softmax(tensor, dim=-1), k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_tokens, "_BLOCK", 16)
        got_values, got_tokens = highest_by_triton(tensor, k)
    torch.testing.assert_close(got_values, values, atol=1e-5, rtol=1e-5)
    is_possible = values > -torch.inf
    assert torch.equal(got_tokens[is_possible], tokens[is_possible])
    assert bool((got_tokens < vocab).all())


def place_compared(numbers: Any, *, axis: int, keepdims: bool) -> Any:
    """Where a GPU finds the highest: it compares two at a time, and keeps the later one of no numbers."""
    assert axis == 0
    assert not keepdims
    place = 0
    for other in range(1, len(numbers)):
        place = place if numbers[place] >= numbers[other] else other
    return np.int32(place)


@pytest.mark.parametrize("first", [np.nan, 1.0])
def test_what_is_no_number_is_no_token_behind_the_vocabulary(
    first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that embeddings do not have would end the process on a GPU, with the requests of all others."""
    monkeypatch.setattr(best_tokens, "_BLOCK", 16)
    monkeypatch.setattr(np, "nanargmax", place_compared)
    scores = torch.full((1, 5), torch.nan)
    scores[0, 0] = first
    tokens = highest_by_triton(scores, 2)[1]
    assert bool((tokens < 5).all())
    assert int(tokens[0, 0]) == 0


def states(
    plans: list[tuple[int, int, int, float]], stops: list[frozenset[int]]
) -> tuple[DeviceState, DeviceState]:
    """Of beams with so many rows, layers, and nodes above them, and a threshold: by torch, by the kernel."""
    growths: Any = [
        SimpleNamespace(
            width=width,
            num_layers=num_layers,
            above=list(range(num_above)),
            frontier=[],
            job=SimpleNamespace(
                beam=Beam(0, DraftPlan(depth=9, width=width, stop_token_logp=least), stops[i]),
                held=SimpleNamespace(tokens=[1] * (i + 3)),
            ),
        )
        for i, (width, num_layers, num_above, least) in enumerate(plans)
    ]
    by_torch = DeviceState(growths, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_state, "runs_triton", lambda device: True)
        return by_torch, DeviceState(growths, torch.device("cpu"))


@examples(30)
@given(
    plans=st.lists(
        st.tuples(
            st.integers(1, 5),
            st.integers(1, 4),
            st.integers(0, 3),
            st.sampled_from([-np.inf, -1.5, -1.0, -0.5]),
        ),
        min_size=1,
        max_size=4,
    ),
    stops=st.lists(st.frozensets(st.integers(0, 5), max_size=3), min_size=4, max_size=4),
    num_choices=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_layers_are_those_of_torch(
    plans: list[tuple[int, int, int, float]], stops: list[frozenset[int]], num_choices: int, seed: int
) -> None:
    """Few different scores, so that paths tie; fewer and fewer beams have a further layer."""
    rng = np.random.default_rng(seed)
    plans = sorted(plans, key=lambda plan: -plan[1])
    of_torch, of_kernel = states(plans, stops)
    first = of_torch.roots(range(len(plans)))
    first = Layer(
        torch.from_numpy(rng.integers(0, 6, first.token.shape)),
        first.parent,
        torch.from_numpy(-rng.integers(0, 3, first.token.shape) / 2.0),
        torch.from_numpy(rng.random(first.token.shape) < 0.7),
    )
    layers = [first, first]
    for number in range(plans[0][1]):
        active = sum(num_layers > number for _, num_layers, _, _ in plans)
        if number:
            num_rows = sum(width for width, _, _, _ in plans)
            scores = rng.choice(np.float32([-0.5, -1.0, -1.5, -np.inf]), (num_rows, 6))
            best = OnDevice(*highest(torch.from_numpy(scores), num_choices))
            layers = [
                state.grow(layer, best, active, number)
                for state, layer in zip((of_torch, of_kernel), layers, strict=True)
            ]
        rows = [state.rows(layer) for state, layer in zip((of_torch, of_kernel), layers, strict=True)]
        expected, got = layers
        is_own = torch.arange(of_torch.width) < torch.tensor([[plan[0]] for plan in plans[: len(got.token)]])
        is_node = (expected.logp > -torch.inf) & is_own
        assert torch.equal(got.is_open, expected.is_open)
        for one, other in zip(
            (got.token, got.parent, got.logp), (expected.token, expected.parent, expected.logp), strict=True
        ):
            assert torch.equal(one[is_node], other[is_node])
        assert torch.equal(rows[1].committed, rows[0].committed)
        assert torch.equal(rows[1].tokens[is_node[is_own]], rows[0].tokens[is_node[is_own]])
        assert (rows[1].seen is None) == (rows[0].seen is None) == (of_torch.width == 1)
        if rows[0].seen is not None and rows[1].seen is not None:
            assert torch.equal(rows[1].seen[is_node], rows[0].seen[is_node])


@pytest.mark.parametrize("runner", [plain, graphed])
@examples(4, suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_drafts_are_those_of_the_host(runner: Any, data: st.DataObject, seed: int) -> None:
    """Call after call, as in `test_device_draft`, where every layer is chosen and grown by the kernels."""
    launches = []

    def best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        launches.append(len(scores))
        return highest_by_triton(scores, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_state, "runs_triton", lambda device: True)
        patch.setattr(next_tokens, "highest_log_probabilities", best)
        ties = near_ties(patch)
        try:
            draft_with_both(runner, data, np.random.default_rng(seed))
        except AssertionError:
            if not ties:
                raise
    assert launches


@pytest.mark.thorough
def test_kernels_compile_for_gpus() -> None:
    rows = {"layer": "*i64", "is_given": "*i64"}
    rows |= {"num_rows": "i32", "num_choices": "i32", "num_stops": "i32", "num_columns": "i32"}
    beams = {"first_row": "*i64", "widths": "*i64", "least": "*fp64", "stops": "*i64", "own_column": "*i64"}
    old = {"old_logp": "*fp64", "old_open": "*u8", "old_seen": "*u8"}
    new = {"token": "*i64", "parent": "*i64", "logp": "*fp64", "is_open": "*u8", "seen": "*u8"}
    sizes: dict[str, Any] = {"CHOICES": 4, "CANDIDATES": 16, "STOPS": 2, "ROWS": 4, "COLUMNS": 64}
    widest = {"CHOICES": 16, "CANDIDATES": 256, "STOPS": 8, "ROWS": 16, "COLUMNS": 256, "HAS_SEEN": True}
    captured = {"is_open": "*i64", "old_open": "*i64"}  # one type in the memory that the host is sent
    move_on = {
        "segments": "*i32", "first_position": "*i64", "widths": "*i64", "layer": "*i64",
        "layer_slots": "*i64", "positions": "*i64", "write": "*i64",
    }  # fmt: skip
    best = {"values": "*fp32", "tokens": "*i64"}
    candidates = {"values": "*fp32", "tokens": "*i32", "weight": "*fp32"}
    out = {"out_values": "*fp32", "out_tokens": "*i64"}
    counts = {"num_blocks": "i32", "k": "i32"}
    found = compiled(
        [
            (
                "drafters.growth_kernels.grow",
                best | beams | old | new | {"row_tokens": "*i64"} | rows,
                sizes | {"HAS_SEEN": True},
                {"num_warps": 4},
            ),
            (
                "drafters.growth_kernels.grow",
                best | beams | old | new | captured | {"row_tokens": "*i64"} | rows,
                widest,
                {"num_warps": 4},
            ),
            (
                "engine.moving_kernels.move_on",
                move_on | {"width": "i32", "num_layers": "i32", "last_position": "i32"},
                {"WIDTH": 4},
                {"num_warps": 1},
            ),
            (
                "engine.best_kernels.best_of_block",
                {"scores": "*fp32"} | candidates | {"vocab": "i32"} | counts,
                {"BLOCK": 4096},
                {"num_warps": 8},
            ),
            (
                "engine.best_kernels.best_of_blocks",
                candidates | out | counts,
                {"BLOCKS": 32, "CANDIDATES": 128},
                {"num_warps": 4},
            ),
        ]
    )
    assert len(found) == 5
    for kernel in found:
        assert kernel.spilled == 0
        assert kernel.shared <= 48 << 10
    # What other threads may write is read before they do; of the next tokens, which nobody writes, two loads.
    for kernel, num_loads in zip(found[:3], (2, 2, 0), strict=True):
        assert kernel.ptx.split("bar.sync", 1)[1].count("ld.global") == num_loads
