"""Drafts grown on the device: the same as on the host whatever is asked, and with one wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.model_paths import model_directory
from drafters.device_beam import DeviceBeams, Layer
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.model_drafter import ModelDrafter
from drafters.next_tokens import OnDevice
from drafters.stop_rules import StopRule
from engine import truncation
from engine.cuda_graphs import GraphedRunner
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.loading import load_runner
from engine.sampling_params import SamplingParams
from tests.drafters.no_waiting import Waits, no_waiting
from tests.drafters.test_model_drafter_state import random_commit
from tests.drafters.tiny import (
    GREEDY,
    VOCAB,
    assert_same_tree,
    call,
    following,
    llama,
    opening,
    prompt,
    trees,
)

WEIGHTS = load_llama_weights(llama())
SLOTS = 900
LONG = {"max_tokens": 9999}
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11, **LONG),
    SamplingParams(temperature=0.7, seed=-5, top_p=0.9, top_k=20, min_p=0.01, **LONG),
    SamplingParams(temperature=0.9, seed=3, top_p=0.5, logit_bias={3: 4.0, 5: -9.0}, **LONG),
    SamplingParams(temperature=0.0, allowed_token_ids=(2, 3, 5, 7, 11, 13), **LONG),
    SamplingParams(temperature=0.8, seed=2**63, min_tokens=8, stop_token_ids=tuple(range(0, 50, 3)), **LONG),
]
WITH_PENALTIES = [
    SamplingParams(temperature=1.3, seed=2, repetition_penalty=1.3, presence_penalty=0.5, **LONG),
    SamplingParams(temperature=0.0, bad_words=((3, 5), (7,)), **LONG),
]


def plain() -> LlamaRunner:
    return LlamaRunner(WEIGHTS, SLOTS)


def graphed() -> GraphedRunner:
    return GraphedRunner(LlamaRunner(WEIGHTS, SLOTS + 1), capture_at=1)


def near_ties(patch: pytest.MonkeyPatch) -> list[float]:
    """Grows by each truncation whose last token kept, or first dropped, another one is within rounding of.

    There the two ways may keep another one, since they forward other numbers of rows.
    """
    found = []
    cut = truncation._cut

    def noted(logits: torch.Tensor, threshold: torch.Tensor) -> None:
        gap = (logits - threshold).abs()
        nearest = float(gap[gap > 0].min()) if (gap > 0).any() else 1.0
        if nearest < 1e-4:
            found.append(nearest)
        cut(logits, threshold)

    patch.setattr(truncation, "_cut", noted)
    return found


def assert_same(on_device: DraftResult, on_host: DraftResult) -> None:
    assert on_device.unknown == on_host.unknown
    for device, host in zip(on_device.drafts, on_host.drafts, strict=True):
        assert device.request_id == host.request_id
        assert_same_tree(device.tree, host.tree)
        assert (device.num_scored, device.num_agreed) == (host.num_scored, host.num_agreed)


plans = st.builds(
    DraftPlan,
    depth=st.integers(0, 6),
    width=st.integers(1, 5),
    stop_logp=st.sampled_from([-np.inf, -np.inf, -3.0, -1.0]),
    stop_token_logp=st.sampled_from([-np.inf, -np.inf, -2.0, -0.7]),
    least_forward_logp=st.sampled_from([-np.inf, -np.inf, -4.0, -1.0]),
)
rules = st.one_of(
    st.none(),
    st.builds(
        StopRule,
        num_requests=st.integers(3, 6),
        base_s=st.sampled_from([0.5, 4.0]),
        first_layer_s=st.just(0.05),
        layer_s=st.sampled_from([0.0, 0.03, 0.11]),
        token_s=st.sampled_from([0.0, 0.013]),
        mean_confidence=st.sampled_from([0.3, 0.9]),
    ),
)


@pytest.mark.parametrize("runner", [plain, graphed])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_drafts_are_those_of_the_host(
    runner: Callable[[], LlamaRunner | GraphedRunner], data: st.DataObject, seed: int
) -> None:
    """Call after call, with what earlier calls left: paths followed, trees reused, drafts made ahead."""
    with pytest.MonkeyPatch.context() as patch:
        ties = near_ties(patch)
        try:
            draft_with_both(runner, data, np.random.default_rng(seed))
        except AssertionError:
            assume(not ties)
            raise


def draft_with_both(
    runner: Callable[[], LlamaRunner | GraphedRunner], data: st.DataObject, rng: np.random.Generator
) -> None:
    catch_up_rows = data.draw(st.sampled_from([15, 512]))
    device = ModelDrafter(runner(), on_device=True, catch_up_rows=catch_up_rows)
    host = ModelDrafter(plain(), on_device=False, catch_up_rows=catch_up_rows)
    names = "abcd"
    sampling = {
        name: data.draw(st.sampled_from([GREEDY, *SAMPLINGS, *WITH_PENALTIES]), label=name) for name in names
    }
    tokens = {name: prompt(int(rng.integers(1000)), int(rng.integers(1, 30))) for name in names}
    prompt_len = {name: len(known) for name, known in tokens.items()}
    heard: dict[str, int] = {}
    for _ in range(4):
        items: list[DraftItem] = []
        for name in rng.permutation(list(names))[: rng.integers(1, 5)].tolist():
            plan, full = data.draw(plans), tokens[name]
            if name in heard:
                items.append(following(name, heard[name], full[heard[name] :], plan))
            else:
                first = opening(name, full, plan, prompt_len=prompt_len[name], sampling=sampling[name])
                items.append(first)
            heard[name] = len(full)
        ahead = int(rng.integers(0, 4)) if rng.random() < 0.5 else 0
        asked = DraftCall(call_id=1, items=items, stop_rule=data.draw(rules), ahead=ahead > 0)
        found = device.draft(asked)
        assert_same(found, host.draft(asked))
        for _ in range(ahead):
            assert device.draft_ahead() == host.draft_ahead()
        device._kv.check_invariants()
        for draft in found.drafts:
            tokens[draft.request_id] += random_commit(rng, draft.tree)
    device.draft(call(release=list(names)))
    assert device.free_slots == SLOTS


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_without_slots_for_all_rows_drafts_are_those_of_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(70, 130))
    device, host = (
        ModelDrafter(LlamaRunner(WEIGHTS, num_slots), on_device=where, prefix_sharing=False)
        for where in (True, False)
    )
    items = [
        opening(name, prompt(i, int(rng.integers(3, 20))), DraftPlan(int(rng.integers(1, 7)), 4))
        for i, name in enumerate("abcd")
    ]
    assert_same(device.draft(call(*items)), host.draft(call(*items)))
    device._kv.check_invariants()


@pytest.mark.parametrize("name", ["drafter-general-2x192", "drafter-summary-1x128"])
def test_drafts_of_the_demo_family_are_those_of_the_host(name: str) -> None:
    directory = model_directory(f"zoo:{name}")
    device, host = (
        ModelDrafter(load_runner(directory, num_slots=2048, self_test=False), on_device=where)
        for where in (True, False)
    )
    vocab = device.capabilities.vocab_size
    rng = np.random.default_rng(0)
    opened = [
        opening(str(i), rng.integers(0, vocab, 5 + 20 * i).tolist(), DraftPlan(5, 1 + i), sampling=sampling)
        for i, sampling in enumerate(SAMPLINGS[:4])
    ]
    found = device.draft(call(*opened))
    assert_same(found, host.draft(call(*opened)))
    assert device.capabilities.vocab_size == 4096
    later = []
    for i, item in enumerate(opened):
        path = found.drafts[i].tree.token[1:3].tolist()
        assert item.spec is not None
        later.append(following(item.request_id, len(item.spec.tokens), [*path, 9], DraftPlan(4, 3)))
    assert_same(device.draft(call(*later)), host.draft(call(*later)))


# -- waiting -----------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "chains": {"width": 1, "sampling": [GREEDY]},
    "beams": {"width": 4, "sampling": [GREEDY]},
    "sampled": {"width": 3, "sampling": SAMPLINGS},
    "early stops": {"width": 2, "sampling": SAMPLINGS[:3], "stop_logp": -1.0, "stop_token_logp": -0.7},
}


@pytest.mark.parametrize("runner", [plain, graphed])
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_waits_once(kind: str, runner: Callable[[], LlamaRunner | GraphedRunner]) -> None:
    drafter = ModelDrafter(runner(), on_device=True, catch_up_rows=40)
    options = dict(CALLS[kind])
    width, sampling = options.pop("width"), options.pop("sampling")
    rule = StopRule(
        num_requests=9, base_s=1.0, first_layer_s=0.1, layer_s=0.02, token_s=0.01, mean_confidence=0.7
    )
    tokens = {str(i): prompt(i, 5 + 11 * i) for i in range(len(sampling) + 1)}
    asked = [
        opening(
            name,
            known,
            DraftPlan(depth=3 + i % 3, width=1 + (width + i) % width, **options),
            sampling=sampling[i % len(sampling)],
        )
        for i, (name, known) in enumerate(tokens.items())
    ]
    for new in (7, 8):
        with no_waiting() as memory:
            result = drafter.draft(DraftCall(call_id=1, items=asked, stop_rule=rule))
        assert memory.transfers == 1
        assert result.num_forwards >= 4
        assert max(len(tree) for tree in trees(result).values()) > 1
        asked = []
        for name, known in tokens.items():
            asked.append(following(name, len(known), [new, 9], DraftPlan(4, width, **options)))
            known += [new, 9]


@pytest.mark.parametrize("runner", [plain, graphed])
def test_a_tree_known_in_part_is_grown_on_with_one_wait(
    runner: Callable[[], LlamaRunner | GraphedRunner],
) -> None:
    """The committed token was drafted and computed: its subtree is kept, some of it was drafted ahead."""
    device, host = ModelDrafter(runner(), on_device=True), ModelDrafter(plain(), on_device=False)
    first = [opening(str(i), prompt(i, 9 + i), DraftPlan(4, 3)) for i in range(3)]
    (known, expected) = (drafter.draft(call(*first, ahead=True)) for drafter in (device, host))
    assert_same(known, expected)
    for _ in range(3):
        assert device.draft_ahead() == host.draft_ahead()
    then = [
        following(str(i), 9 + i, [int(draft.tree.token[1])], DraftPlan(5, 3))
        for i, draft in enumerate(known.drafts)
    ]
    for drafter in (device, host):
        tree = drafter._held["0"].tree
        assert tree is not None
        assert tree.is_computed(tree.child(0, int(then[0].tokens[0])))
    with no_waiting() as memory:
        found = device.draft(call(*then))
    assert memory.transfers == 1
    assert_same(found, host.draft(call(*then)))


def test_the_host_waits_for_every_layer_where_it_grows_the_trees() -> None:
    """That the test above can fail."""
    drafter = ModelDrafter(plain(), on_device=False)
    with pytest.raises(Waits), no_waiting():
        drafter.draft(call(opening("a", prompt(1, 9), DraftPlan(2, 2))))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: float(x[0]),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x[torch.from_numpy(np.array([0, 1]))],
        lambda x: x[[0, 1]],
        lambda x: np.asarray(x),
        lambda x: x.repeat_interleave(torch.arange(3, device=x.device)),
    ],
)
def test_what_would_wait_is_noticed(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.rand(3)
    with pytest.raises(Waits), no_waiting():
        read(x)


# -- what the host does after all --------------------------------------------------------------------


def test_where_the_device_chose_otherwise_the_host_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounding may make it choose: here it always takes another token in one row."""
    right = DeviceBeams.grow

    def wrong(self: DeviceBeams, layer: Layer, best: OnDevice) -> Layer:
        grown = right(self, layer, best)
        grown.token[:, -1] = (grown.token[:, -1] + 1) % VOCAB
        return grown

    items = [opening(str(i), prompt(i, 9 + i), DraftPlan(5, 1 + i)) for i in range(4)]
    expected = ModelDrafter(plain(), on_device=False).draft(call(*items))
    monkeypatch.setattr(DeviceBeams, "grow", wrong)
    device = ModelDrafter(plain(), on_device=True)
    result = device.draft(call(*items))
    assert_same(result, expected)
    assert result.num_forwards > expected.num_forwards
    device._kv.check_invariants()


def test_masks_that_the_device_cannot_make_leave_beams_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with FlashInfer: chains are grown on the device."""
    items = [opening(str(i), prompt(i, 9 + i), DraftPlan(5, width)) for i, width in enumerate((1, 3, 1))]
    expected = ModelDrafter(plain(), on_device=False).draft(call(*items))
    runner = plain()
    monkeypatch.setattr(runner.attention, "takes_device_masks", False)
    device = ModelDrafter(runner, on_device=True)
    assert_same(device.draft(call(*items)), expected)
    with no_waiting() as memory:
        device.draft(call(following("0", 9, [5], DraftPlan(4, 1)), following("2", 11, [5], DraftPlan(3, 1))))
    assert memory.transfers == 1
    with pytest.raises(Waits), no_waiting():
        device.draft(call(following("1", 10, [5], DraftPlan(4, 2))))


def test_penalties_depend_on_the_path_and_leave_their_requests_to_the_host() -> None:
    device = ModelDrafter(plain(), on_device=True)
    item = opening("a", prompt(1, 9), DraftPlan(3, 2), sampling=WITH_PENALTIES[0])
    with pytest.raises(Waits), no_waiting():
        device.draft(call(item))


def test_a_runner_that_takes_no_rows_drafts_as_ever() -> None:
    items = [opening(str(i), prompt(i, 9 + i), DraftPlan(3, 1 + i)) for i in range(3)]
    drafter = ModelDrafter(HFRunner(llama(), 500), on_device=True)
    assert_same(
        drafter.draft(call(*items)),
        ModelDrafter(HFRunner(llama(), 500), on_device=False).draft(call(*items)),
    )


def test_layers_behind_a_stop_are_dropped() -> None:
    """They were forwarded, for nobody looked; afterwards they hold no slots and are not kept."""
    item = opening("a", prompt(6, 12), DraftPlan(depth=6, width=2))
    whole = trees(ModelDrafter(plain(), on_device=True).draft(call(item)))["a"]
    stop = float(whole.logp[whole.depth == 2].max()) + 1e-3
    short = msgspec.structs.replace(item, plan=DraftPlan(depth=6, width=2, stop_logp=stop))
    drafters = [ModelDrafter(plain(), on_device=where) for where in (True, False)]
    device, host = (drafter.draft(call(short)) for drafter in drafters)
    assert_same(device, host)
    assert (device.num_forwards, host.num_forwards) == (6, 2)
    held = [drafter._held["a"].tree for drafter in drafters]
    assert held[0] is not None
    assert held[1] is not None
    assert len(np.concatenate(held[0].slots)) == len(np.concatenate(held[1].slots))
