"""Sampling's kernels, run by Triton's interpreter, against what torch does operation by operation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import sampling, triton_sampling
from engine.noise import gumbel_noise
from engine.sampling import Row, TokenHistory, decide, processed_logits
from engine.sampling_params import SamplingParams
from engine.triton_sampling import gumbel_by_triton, shape_by_triton
from tests.engine.compiling import compiled
from tests.examples import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")
CPU = torch.device("cpu")

sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 10_000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@examples(15)
@given(
    keys=st.lists(
        st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=3
    ),
    vocab=st.sampled_from([1, 3, 64, 65, 200]),
)
def test_noise_is_that_of_torch(keys: list[tuple[int, int]], vocab: int) -> None:
    """Its words are integers; rounded to float32, so are the logarithms of them, but for the odd last bit."""
    seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_sampling, "_TOKENS", 64)
        found = gumbel_by_triton(seeds, positions, vocab, CPU)
    torch.testing.assert_close(found, gumbel_noise(seeds, positions, vocab), atol=0, rtol=2e-7)


def masses(scores: torch.Tensor) -> torch.Tensor:
    """float64 [2, n, vocab]: per token, the mass of those at least as probable, and of those more so."""
    weight = scores.double().softmax(-1)
    at_least = scores.unsqueeze(2) <= scores.unsqueeze(1)
    more = scores.unsqueeze(2) < scores.unsqueeze(1)
    return torch.stack([(weight.unsqueeze(1) * which).sum(2) for which in (at_least, more)])


@examples(18)
@given(
    params=st.lists(sampled, min_size=1, max_size=4),
    vocab=st.integers(1, 80),
    levels=st.sampled_from([2, 6, 10_000]),
    barred=st.sampled_from([0.0, 0.5, 0.95]),
    perturbed=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scores_are_those_of_torch(
    params: list[SamplingParams],
    vocab: int,
    levels: int,
    barred: float,
    perturbed: bool,
    in_place: bool,
    seed: int,
) -> None:
    """With ties, with barred tokens, over several blocks; a nucleus may end elsewhere if rounding decides."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (len(params), vocab)) * (12 / levels) - 6
    scores[rng.random(scores.shape) < barred] = -np.inf
    scores[:, rng.integers(vocab)] = 2.0  # some token is allowed
    logits = torch.from_numpy(scores.astype(np.float32))
    positions = rng.integers(0, 2**31, len(params)).tolist()
    rows = [Row(one, position) for one, position in zip(params, positions, strict=True)]
    expected = processed_logits(logits, rows, perturbed=perturbed)
    given_scores = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_sampling, "_TOKENS", 32)
        patch.setattr(triton_sampling, "_CUT_TOKENS", 32)
        found = shape_by_triton(given_scores, params, positions, perturbed=perturbed, in_place=in_place)
    assert (found.data_ptr() == given_scores.data_ptr()) == in_place
    assert in_place or torch.equal(given_scores, logits)
    kept, wanted = found > -math.inf, expected > -math.inf
    torch.testing.assert_close(found[kept & wanted], expected[kept & wanted], atol=0, rtol=1e-6)
    for i, one in enumerate(params):
        if torch.equal(kept[i], wanted[i]):
            continue
        assert not one.is_greedy
        assert 0.0 < one.top_p < 1.0
        cut = processed_logits(
            logits[i : i + 1],
            [Row(SamplingParams(temperature=one.temperature, top_k=one.top_k, min_p=one.min_p), 0)],
        )
        at_least, more = masses(cut)
        between = kept[i] ^ wanted[i]
        near = torch.minimum((at_least[0] - one.top_p).abs(), (more[0] - one.top_p).abs())
        assert float(near[between].max()) < 1e-6


@examples(20)
@given(params=st.lists(sampled, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_decisions_are_those_of_torch(params: list[SamplingParams], seed: int) -> None:
    """Penalties and biased tokens before; raw logits are left as they were."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=3, size=(len(params), 300)).astype(np.float32))
    rows = [
        Row(
            SamplingParams(
                temperature=one.temperature,
                top_k=one.top_k,
                min_p=one.min_p,
                seed=one.seed,
                repetition_penalty=1.3 if i % 2 else 1.0,
                logit_bias={5: 2.0} if i % 3 == 1 else {},
            ),
            i,
            TokenHistory([1, 2, 3], [4]),
            allowed=np.full(10, 0x55555555, dtype=np.int32) if i % 4 == 2 else None,
        )
        for i, one in enumerate(params)
    ]
    expected_tokens, expected_gaps = decide(logits, rows).fetch()
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "runs_triton", lambda device: True)
        patch.setattr(triton_sampling, "_CUT_TOKENS", 128)  # interpreted, what lies behind the row takes time
        patch.setattr(triton_sampling, "_TOKENS", 128)
        tokens, gaps = decide(logits, rows).fetch()
    assert torch.equal(logits, before)
    assert tokens == expected_tokens
    np.testing.assert_allclose(gaps, expected_gaps, atol=1e-5)


@pytest.mark.thorough
def test_kernels_compile_for_gpus() -> None:
    """Without registers spilled to memory, by Triton's compiler; nothing is run."""
    scores = {"scores": "*fp32", "out": "*fp32", "table": "*i32"}
    rest = {"keys": "*i32", "vocab": "i32"}
    usual = ({"TOKENS": triton_sampling._TOKENS}, {"num_warps": triton_sampling._WARPS})
    cut = ({"TOKENS": triton_sampling._CUT_TOKENS}, {"num_warps": triton_sampling._CUT_WARPS})
    seeds = {"seeds": "*i64"}
    found = compiled(
        [
            (f"engine.sampling_kernels.{name}", types, constants | sizes, options | {"arch": arch})
            for name, types, constants, (sizes, options), arch in [
                (
                    "gumbel",
                    {"out": "*fp32", "positions": "*i64", "seeds": "*i64", "vocab": "i32"},
                    {},
                    usual,
                    90,
                ),
                ("cut_and_perturb", scores | seeds | rest, {"IS_PERTURBED": True}, usual, 90),
                ("cut_and_perturb", scores | seeds | rest, {"IS_PERTURBED": False}, usual, 80),
                ("scale_and_find_cuts", scores | rest, {}, cut, 90),
                ("scale_and_find_cuts", scores | rest, {}, cut, 80),
                ("scale_and_find_cuts", scores | rest, {}, cut, 120),
            ]
        ]
    )
    for one in found:
        assert one.spilled == 0
        assert one.fitting(99 << 10) >= 1
        assert "st.global.v4" in one.ptx or "st.global.v2" in one.ptx  # whole lines of memory
    assert "fma.rn.f64" in found[1].ptx  # logarithms of the noise
    for one in found[3:]:
        assert "div.rn.f32" in one.ptx  # an approximate quotient would be another distribution
