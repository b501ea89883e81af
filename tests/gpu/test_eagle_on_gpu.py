"""EAGLE's drafts on a GPU: those of a CPU, beside captured forwards too, with one wait a call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from engine.proposals import Proposals
from engine.runner import Segment
from engine.sampling_params import SamplingParams
from engine.stop_rules import EstimateRule, ForwardRule
from engine.tree import TokenTree
from tests.eagle_reference import EagleReference
from tests.emulated_cuda import Emulation
from tests.gpu.eagle_on_device import SAMPLINGS, assert_same_choices, drafting
from tests.gpu.waiting import never_waiting
from tests.verifier.target import spec_of
from verifier import eagle_drafts
from verifier.eagle_drafts import EagleDrafts
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState
from verifier.verifier import Verifier

DEPTH, WIDTH = 3, 2


def assert_same_paths(one: Proposals, other: Proposals) -> None:
    """Layer by layer the same paths from the first on, with what they are worth."""
    for mine, theirs in zip(paths_of(one), paths_of(other), strict=True):
        assert mine.keys() == theirs.keys()
        for path, logp in mine.items():
            assert abs(logp - theirs[path]) < 1e-3


def paths_of(proposals: Proposals) -> list[dict[tuple[int, ...], float]]:
    """Per layer, the tokens of each path and the last one's log-probability."""
    layers: list[dict[tuple[int, ...], float]] = []
    above: list[tuple[int, ...]] = [()]
    parents = proposals.parent
    assert parents is not None
    for tokens, parent, logp in zip(proposals.token, parents, proposals.logp, strict=True):
        paths = [(*above[place], int(token)) for place, token in zip(parent, tokens, strict=True)]
        layers.append(dict(zip(paths, map(float, logp), strict=True)))
        above = paths
    return layers


def serving(files: EagleFiles, target: Path, device: str) -> Verifier:
    drafts, runner = drafting(files, target, device)
    return Verifier(runner, proposer=drafts, device=torch.device(device))


def steps(verifier: Verifier) -> list[list[Verdict]]:
    """A prefill of two requests, and verify calls of one shape, which are captured on the way."""
    specs = [spec_of(f"r{i}", [3, 14, 15, 9, 2, 6][i:], params) for i, params in enumerate(SAMPLINGS)]
    asked = {"num_candidates": WIDTH, "num_heads": DEPTH, "stop_token_logp": -4.0}
    prefill = [PrefillItem(request_id=one.request_id, num_tokens=10, spec=one, **asked) for one in specs]
    done = [one.verdict for one in verifier.step(VerifyCall(call_id=0, prefill=prefill)).prefills]
    found = [[verdict for verdict in done if verdict is not None]]
    for number in range(1, 4):
        items = [
            VerifyItem(
                request_id=verdict.request_id,
                tree=TokenTree.chain(verdict.tokens[-1], [5 * number, 7], [-0.5, -1.0]),
                **asked,
            )
            for verdict in found[-1]
        ]
        found.append(verifier.step(VerifyCall(call_id=number, verify=items)).verdicts)
    return found


def test_drafts_are_those_of_a_cpu_and_wait_once(target: Path, tmp_path: Path, cuda: torch.device) -> None:
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    there, here = serving(files, target, "cuda"), serving(files, target, "cpu")
    for mine, theirs in zip(steps(there), steps(here), strict=True):
        assert len(mine) == len(theirs) == 2
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens == other.tokens
            assert one.proposals is not None
            assert other.proposals is not None
            np.testing.assert_allclose(one.proposals.logp, other.proposals.logp, atol=1e-3)
            assert_same_choices(one.proposals, other.proposals)
    drafts = there._proposer
    assert isinstance(drafts, EagleDrafts)
    states = [there._table._requests[f"r{i}"] for i in range(2)]
    asking = [Asking(state, [7], 0, WIDTH, DEPTH, place) for place, state in enumerate(states)]
    drafts.propose(asking)()
    found = never_waiting(lambda: drafts.propose(asking)())
    assert [one.token.shape for one in found] == [(DEPTH, WIDTH)] * 2
    # What ends drafts is asked a layer late, and waits for events only.
    certain = [msgspec.structs.replace(one, least_logp=0.0) for one in asking]
    found = never_waiting(lambda: drafts.propose(certain)())
    assert [one.token.shape for one in found] == [(2, WIDTH)] * 2
    dear = EstimateRule(
        num_requests=2, base_s=1.0, first_layer_s=0.1, layer_s=50.0, token_s=0.0, mean_confidence=0.5
    )
    found = never_waiting(lambda: drafts.propose(asking, dear)())
    assert [one.token.shape for one in found] == [(2, WIDTH)] * 2
    stops = found[0].token[0].tolist()  # nothing goes on
    spec = spec_of("s", [3], SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=tuple(stops)))
    states[0] = RequestState(spec, there._runner.shape)
    asking = [Asking(states[0], [7], 0, WIDTH, DEPTH, 0, least_logp=-50.0)]
    found = never_waiting(lambda: drafts.propose(asking)())
    assert [one.token.shape for one in found] == [(2, WIDTH)]


def proposing(
    files: EagleFiles, target: Path, device: str, samplings: Sequence[SamplingParams] = SAMPLINGS
) -> tuple[EagleDrafts, list[RequestState]]:
    """Drafts after three requests of different lengths, which were read."""
    drafts, runner = drafting(files, target, device)
    states, segments, reads = [], [], []
    first = 0
    for number, length in enumerate((3, 9, 6)):
        tokens = np.arange(5 + number, 5 + number + length, dtype=np.int32)
        slots = np.arange(100 * number, 100 * number + length, dtype=np.int32)
        positions = np.arange(length, dtype=np.int32)
        segments.append(Segment(tokens, positions, slots, slots[:0]))
        rows = positions + np.int32(first)
        reads.append(Read(f"r{number}", rows, np.roll(tokens, -1), positions, slots, slots[:0]))
        first += length
        params = samplings[number % len(samplings)]
        states.append(RequestState(spec_of(f"r{number}", tokens.tolist(), params), runner.shape))
    runner.forward(segments, np.arange(first, dtype=np.int32))
    drafts.read(reads, is_asked=True)
    return drafts, states


@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_captured_layers_draft_as_a_cpu_does(
    width: int, target: Path, tmp_path: Path, cuda: torch.device
) -> None:
    """Beams of other requests and depths before and after, and one request less than the shape has."""
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    # Of requests whose logits are adjusted, whose tokens are chosen outside.
    adjusted = [msgspec.structs.replace(one, presence_penalty=0.5) for one in SAMPLINGS]
    (captured, states), (ordinary, _) = (
        proposing(files, target, device, adjusted) for device in ("cuda", "cpu")
    )
    graphs = captured._graphs
    assert graphs is not None
    assert ordinary._graphs is None
    for places, depth in (((0, 1, 2), 2), ((2, 0, 1), 4), ((1, 2, 0), 3), ((0, 2, 1), 4)):
        asking = [Asking(states[i], [7], 0, width, depth, i) for i in places]
        if len(graphs.shapes) == 1:  # one that is captured in the midst of it waits
            found = never_waiting(lambda asking=asking: captured.propose(asking)())
        else:
            found = captured.propose(asking)()
        for one, other in zip(found, ordinary.propose(asking)(), strict=True):
            assert one.token.shape == (depth, width)
            assert_same_choices(one, other)
            np.testing.assert_allclose(one.logp, other.logp, atol=1e-3)
    assert graphs.shapes == [(4, width)]


@pytest.mark.parametrize(
    # Chains are grown in test_eagle_growing_on_gpu.py, too.
    "width",
    [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)],
)
def test_layers_that_grow_by_themselves_draft_as_a_cpu_does(
    width: int, target: Path, tmp_path: Path, cuda: torch.device
) -> None:
    """Of greedy requests, which choose their own tokens: some end at tokens, or where the layer is unsure."""
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    greedy = [
        SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=stops)
        for stops in ((), (2, 3), tuple(range(2, 46, 7)))
    ]
    (captured, states), (ordinary, _) = (
        proposing(files, target, device, greedy) for device in ("cuda", "cpu")
    )
    graphs = captured._graphs
    assert graphs is not None
    for places, depth, least in (
        ((0, 1, 2), 2, -np.inf),
        ((2, 0, 1), 4, -np.inf),
        ((1, 2, 0), 3, -3.0),
        ((0, 2, 1), 4, -4.0),
        ((0, 1, 2), 3, -np.inf),
    ):
        asking = [Asking(states[i], [7], 0, width, depth, i, stop_token_logp=least) for i in places]
        if graphs.shapes:
            found = never_waiting(lambda asking=asking: captured.propose(asking)())
        else:
            found = captured.propose(asking)()
        for one, other in zip(found, ordinary.propose(asking)(), strict=True):
            assert one.token.shape == (depth, width)
            if width == 1:
                np.testing.assert_array_equal(one.token, other.token)
            # Behind what has ended stands any token, in any order.
            assert_same_paths(one, other)
    assert graphs._growing.shapes == [((4, width), False)]
    assert not graphs._captured.shapes
    # Where a path ends, and the rule of a call, are heard of as ever: a layer late.
    certain = [Asking(states[i], [7], 0, width, 5, i, least_logp=0.0) for i in range(3)]
    assert [one.token.shape for one in captured.propose(certain)()] == [(2, width)] * 3
    never = ForwardRule(rate=0.0, verify_tokens=1.0, row_tokens=1.0, forward_tokens=1.0)
    asking = [Asking(states[i], [7], 0, width, 5, i) for i in range(3)]
    assert [one.token.shape for one in captured.propose(asking, never)()] == [(2, width)] * 3
    # More stop tokens than a captured layer knows are looked for around it.
    params = msgspec.structs.replace(greedy[0], stop_token_ids=tuple(range(9)))
    asking = [Asking(RequestState(spec_of("m", [3], params), captured._runner.shape), [7], 0, width, 4, 0)]
    assert_same_paths(captured.propose(asking)()[0], ordinary.propose(asking)()[0])


@pytest.mark.parametrize(("width", "most"), [(1, 1), pytest.param(4, 1, marks=pytest.mark.thorough)])
def test_a_captured_layer_is_a_replay_and_few_launches(
    width: int,
    most: int,
    target: Path,
    tmp_path: Path,
    emulated: Emulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more layer, the rest as it is, of a shape that was captured when loading.

    Requests are greedy, with a bound on what is unsure.
    """
    monkeypatch.setattr(eagle_drafts, "_CAPTURED_ROWS", (2,))
    monkeypatch.setattr(eagle_drafts, "_WARM_WIDTHS", (width,))
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    drafts, states = proposing(files, target, "cuda")
    drafts.warm_up()
    found = []
    for depth in (3, 4):
        count = len(emulated.launches)
        asking = [Asking(states[i], [7], 0, width, depth, i // 2, -50.0, -9.0) for i in (0, 2)]
        drafts.propose(asking)()
        found.append(emulated.launches[count:])
    assert [launches.count("replay") for launches in found] == [2, 3]
    assert len(found[1]) - len(found[0]) <= most
