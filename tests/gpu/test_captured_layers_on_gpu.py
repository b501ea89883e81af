"""Layers of a draft that are captured whole: what they draft, what is launched, when they are not used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters import layer_graphs
from drafters.captured_layers import CapturedLayers, LayerShape
from drafters.device_layers import BeamCall
from drafters.layer_graphs import LayerGraphs
from drafters.messages import DraftItem, DraftPlan, DraftResult
from drafters.model_drafter import ModelDrafter
from engine import captured_shapes
from engine.cuda_graphs import GraphedRunner
from engine.loading import load_runner
from engine.moving_rows import BeamShape
from engine.sampling_params import SamplingParams
from tests.drafters.both_ways import assert_same
from tests.drafters.tiny import GREEDY, call, following, opening, trees
from tests.emulated_cuda import IS_NEEDED, Emulation
from tests.gpu.waiting import never_waiting

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=-3, max_tokens=999)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are captured when a shape comes for the first time, whatever else it could be padded to."""
    monkeypatch.setattr(layer_graphs, "CAPTURE_AT", 1)
    monkeypatch.setattr(captured_shapes, "CAPTURE_AT_BESIDE", captured_shapes.CAPTURE_AT)


def drafting(
    directory: Path, *, on_device: bool, graphs: bool = True, layer_graphs: bool = True
) -> ModelDrafter:
    runner = load_runner(
        directory, num_slots=2048, attention="triton", device="cuda", graphs=graphs, self_test=False
    )
    return ModelDrafter(runner, on_device=on_device, layer_graphs=layer_graphs)


def shapes(drafter: ModelDrafter) -> list[LayerShape]:
    assert drafter._graphs is not None
    return drafter._graphs.shapes


class Used:
    """Which calls' layers were captured ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[bool] = []
        plain = LayerGraphs.layers

        def layers(graphs: LayerGraphs, call: BeamCall) -> CapturedLayers | None:
            found = plain(graphs, call)
            self.calls.append(found is not None)
            return found

        monkeypatch.setattr(LayerGraphs, "layers", layers)


def prompts(drafter: ModelDrafter, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, drafter.capabilities.vocab_size, length).tolist() for length in lengths]


def path(result: DraftResult, name: str, length: int) -> list[int]:
    """The first tokens of the likeliest path of a draft."""
    tree = trees(result)[name]
    tokens, node = [], 0
    while len(tokens) < length:
        children = np.flatnonzero(tree.parent == node)
        if not len(children):
            break
        node = int(children[tree.logp[children].argmax()])
        tokens.append(int(tree.token[node]))
    return tokens


def test_drafts_are_those_of_the_host(drafter: Path, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In beams of several widths and depths: of new requests, of some whose tree goes on, and of both."""
    used = Used(monkeypatch)
    device, host = drafting(drafter, on_device=True), drafting(drafter, on_device=False, graphs=False)
    laid_out = drafting(drafter, on_device=True, layer_graphs=False)
    known = prompts(device, [7, 12, 20])
    samplings = [GREEDY, SAMPLED, GREEDY]
    opened = [
        opening(str(i), known[i], plan, sampling=samplings[i])
        for i, plan in enumerate([DraftPlan(3, 3), DraftPlan(2, 4), DraftPlan(3, 2, stop_token_logp=-4.0)])
    ]
    found = device.draft(call(*opened))
    assert_same(found, host.draft(call(*opened)))
    # Else the host has forwarded what the device had not chosen; also below.
    assert found.num_forwards == laid_out.draft(call(*opened)).num_forwards
    # The first follows what was drafted, the second does not, the third is as it was.
    new = [path(found, "0", 2), [1, 2], []]
    later = [
        following(str(i), len(known[i]), new[i], plan)
        for i, plan in enumerate([DraftPlan(3, 2), DraftPlan(2, 1), DraftPlan(4, 2)])
    ]
    found = device.draft(call(*later))
    assert_same(found, host.draft(call(*later)))
    assert found.num_forwards == laid_out.draft(call(*later)).num_forwards
    starts = [len(tokens) + len(more) for tokens, more in zip(known, new, strict=True)]
    # Of chains alone the first two, of which one goes on where its tree ended.
    last = [
        following(name, starts[int(name)], path(found, name, 1), DraftPlan(4, 1, stop_logp=-9.0))
        for name in "01"
    ]
    assert_same(device.draft(call(*last)), host.draft(call(*last)))
    assert used.calls == [True] * 3
    assert {shape.beams for shape in shapes(device)} == {BeamShape(4, 4), BeamShape(2, 1)}
    device._kv.check_invariants()
    device.draft(call(release=["0", "1", "2"]))
    assert device.free_slots == device.capabilities.num_slots


def test_tokens_that_end_a_request_get_no_children(drafter: Path, at_once: None) -> None:
    """Nor on the device, which would have given other tokens none for them, and left those to the host."""
    device, host = drafting(drafter, on_device=True), drafting(drafter, on_device=False, graphs=False)
    (tokens,) = prompts(device, [11])
    plan = DraftPlan(4, 2)
    whole = host.draft(call(opening("a", tokens, plan)))
    ending = SamplingParams(temperature=0.0, stop_token_ids=tuple(path(whole, "a", 2)[1:]), max_tokens=99)
    item = opening("b", tokens, plan, sampling=ending)
    found, expected = device.draft(call(item)), host.draft(call(item))
    assert_same(found, expected)
    assert trees(found)["b"].token.tolist() != trees(whole)["a"].token.tolist()
    assert found.num_forwards == expected.num_forwards
    assert len(shapes(device)) == 1


def drafted(device: ModelDrafter, depth: int, width: int, sampling: SamplingParams) -> list[DraftItem]:
    """One call, and the items of another one of the same shape."""
    known = prompts(device, [9, 14])
    plan = DraftPlan(depth, width)
    device.draft(call(*(opening(str(i), known[i], plan, sampling=sampling) for i in range(2))))
    return [following(str(i), len(known[i]), [3], plan) for i in range(2)]


@pytest.mark.parametrize(("width", "sampling"), [(1, SAMPLED), (3, GREEDY)])
def test_a_layer_is_a_replay_and_a_transfer(
    width: int, sampling: SamplingParams, drafter: Path, at_once: None, emulated: Emulation
) -> None:
    """Whatever is asked."""
    found = []
    for depth in (2, 3):
        device = drafting(drafter, on_device=True)
        items = drafted(device, depth, width, sampling)
        before = len(emulated.launches), emulated.num_transfers
        assert device.draft(call(*items)).num_forwards == depth
        found.append((emulated.launches[before[0] :], emulated.num_transfers - before[1]))
    (short, few), (long, more) = found
    assert sorted(long) == sorted([*short, "replay"])
    assert more == few + 1


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1, 4])
def test_drafts_wait_for_events_only(
    width: int, drafter: Path, cuda: torch.device, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call after call, greedy and sampled; on a GPU many, and the drafts are those of layers laid out."""
    used = Used(monkeypatch)
    device = drafting(drafter, on_device=True)
    laid_out = drafting(drafter, on_device=True, layer_graphs=False)
    known, rng = prompts(device, [9, 14, 5]), np.random.default_rng(2)
    samplings = [GREEDY, SAMPLED, GREEDY]
    plan = DraftPlan(4 if IS_NEEDED else 8, width)
    opened = [opening(str(i), known[i], plan, sampling=samplings[i]) for i in range(3)]
    found = device.draft(call(*opened))
    assert_same(found, laid_out.draft(call(*opened)))
    for _ in range(1 if IS_NEEDED else 100):
        items = []
        for i, tokens in enumerate(known):
            follows = path(found, str(i), int(rng.integers(0, 4))) if rng.random() < 0.7 else []
            new = [*follows, int(rng.integers(device.capabilities.vocab_size))]
            items.append(following(str(i), len(tokens), new, plan))
            tokens += new
        found = never_waiting(lambda items=items: device.draft(call(*items)))
        assert_same(found, laid_out.draft(call(*items)))
    assert set(used.calls[::2]) == {True}


@pytest.mark.thorough
def test_a_shape_that_has_not_come_often_is_padded_to_a_larger_one(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_graphs, "CAPTURE_AT", 1)
    used = Used(monkeypatch)
    device, host = drafting(drafter, on_device=True), drafting(drafter, on_device=False, graphs=False)
    known = prompts(device, [7, 12, 20])
    wide = [opening(str(i), tokens, DraftPlan(3, 5), sampling=SAMPLED) for i, tokens in enumerate(known[:2])]
    narrow = [opening("c", known[2], DraftPlan(4, 1))]
    for items in (wide, narrow):
        assert_same(device.draft(call(*items)), host.draft(call(*items)))
    assert used.calls == [True, True]
    assert shapes(device) == [LayerShape(BeamShape(2, 8), 8, is_sampled=True)]


def test_what_shifts_logits_is_laid_out(
    drafter: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Used(monkeypatch)
    device = drafting(drafter, on_device=True)
    biased = SamplingParams(temperature=0.0, logit_bias={3: 2.0}, max_tokens=99)
    barred = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(3,), max_tokens=99)
    ending = SamplingParams(temperature=0.0, stop_token_ids=tuple(range(9)), max_tokens=99)
    for name, sampling in (("a", biased), ("b", barred), ("c", ending)):
        device.draft(call(opening(name, [1, 2, 3], DraftPlan(2, 1), sampling=sampling)))
    assert used.calls == [False] * 3
    assert shapes(device) == []


def test_layers_that_find_no_room_are_laid_out(
    drafter: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Used(monkeypatch)
    device = drafting(drafter, on_device=True)
    monkeypatch.setattr("engine.moving_rows.MOST_LAYERS", 1)
    device.draft(call(opening("a", [1, 2, 3], DraftPlan(2, 1))))
    item = opening("b", [1, 2, 3], DraftPlan(3, 1))
    found = device.draft(call(item))
    assert used.calls == [True, False]
    assert_same(found, drafting(drafter, on_device=False, graphs=False).draft(call(item)))


def test_without_memory_nothing_more_is_captured(
    drafter: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = drafting(drafter, on_device=True)

    def full(runner: GraphedRunner, compute: object) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(GraphedRunner, "captured", full)
        found = device.draft(call(opening("a", [1, 2, 3], DraftPlan(3, 1))))
    assert len(found.drafts[0].tree) == 4
    assert "captured layers of 0 drafts only" in caplog.text
    device.draft(call(following("a", 3, [4], DraftPlan(3, 1))))
    assert shapes(device) == []


def test_usual_layers_are_captured_before_the_first_request(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_graphs, "USUAL_REQUESTS", (1, 2))
    monkeypatch.setattr(layer_graphs, "USUAL_WIDTHS", (1,))
    used = Used(monkeypatch)
    device = drafting(drafter, on_device=True)
    device.warm_up()
    assert [(shape.beams, shape.is_sampled) for shape in shapes(device)] == [
        (BeamShape(requests, 1), is_sampled) for requests in (2, 1) for is_sampled in (False, True)
    ]
    device.draft(call(opening("a", [1, 2, 3], DraftPlan(2, 1), sampling=SAMPLED)))
    assert used.calls == [True]
