"""Drafts grown on the device: the same as on the host, whatever is asked."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.model_paths import model_directory
from drafters.device_beam import DeviceBeams, Layer
from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.model_drafter import ModelDrafter
from drafters.next_tokens import OnDevice
from engine import truncation
from engine.cuda_graphs import GraphedRunner
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.loading import load_runner
from engine.stop_rules import EstimateRule, ForwardRule
from tests.drafters.both_ways import SAMPLINGS, SLOTS, WEIGHTS, WITH_PENALTIES, assert_same, graphed, plain
from tests.drafters.no_waiting import Waits, no_waiting
from tests.drafters.test_model_drafter_state import random_commit
from tests.drafters.tiny import (
    GREEDY,
    VOCAB,
    call,
    following,
    llama,
    opening,
    prompt,
    trees,
)
from tests.examples import examples


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
        EstimateRule,
        num_requests=st.integers(3, 6),
        base_s=st.sampled_from([0.5, 4.0]),
        first_layer_s=st.just(0.05),
        layer_s=st.sampled_from([0.0, 0.03, 0.11]),
        token_s=st.sampled_from([0.0, 0.013]),
        mean_confidence=st.sampled_from([0.3, 0.9]),
    ),
    st.builds(
        ForwardRule,
        rate=st.sampled_from([0.4, 0.9]),
        verify_tokens=st.sampled_from([0.0, 0.1]),
        row_tokens=st.just(0.01),
        forward_tokens=st.sampled_from([0.02, 0.2]),
    ),
)


@pytest.mark.parametrize("runner", [plain, graphed])
@examples(40)
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
    for _ in range(3):
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
        asked = DraftCall(
            call_id=1, items=items, stop_rule=data.draw(rules), ahead_s=math.inf if ahead else 0.0
        )
        found = device.draft(asked)
        assert_same(found, host.draft(asked))
        for _ in range(ahead):
            assert device.draft_ahead() == host.draft_ahead()
        device._kv.check_invariants()
        for draft in found.drafts:
            tokens[draft.request_id] += random_commit(rng, draft.tree)
    device.draft(call(release=list(names)))
    assert device.free_slots == SLOTS


@examples(15)
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
    with no_waiting():
        device.draft(call(following("0", 9, [5], DraftPlan(4, 1)), following("2", 11, [5], DraftPlan(3, 1))))
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
    """One was forwarded before anybody looked; afterwards it holds no slots and is not kept."""
    item = opening("a", prompt(6, 12), DraftPlan(depth=6, width=2))
    whole = trees(ModelDrafter(plain(), on_device=True).draft(call(item)))["a"]
    stop = float(whole.logp[whole.depth == 2].max()) + 1e-3
    short = msgspec.structs.replace(item, plan=DraftPlan(depth=6, width=2, stop_logp=stop))
    drafters = [ModelDrafter(plain(), on_device=where) for where in (True, False)]
    device, host = (drafter.draft(call(short)) for drafter in drafters)
    assert_same(device, host)
    assert (device.num_forwards, host.num_forwards) == (3, 2)
    held = [drafter._held["a"].tree for drafter in drafters]
    assert held[0] is not None
    assert held[1] is not None
    assert len(np.concatenate(held[0].slots)) == len(np.concatenate(held[1].slots))
