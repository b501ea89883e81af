"""Who waits while drafts grow on the device: the host, for one layer while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from drafters.messages import DraftCall, DraftPlan
from drafters.model_drafter import ModelDrafter
from drafters.next_tokens import NextTokens, Sent
from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.stop_rules import EstimateRule
from tests.drafters.both_ways import SAMPLINGS, assert_same, graphed, plain
from tests.drafters.no_waiting import Waits, no_waiting
from tests.drafters.tiny import (
    GREEDY,
    call,
    following,
    opening,
    prompt,
    trees,
)

CALLS: dict[str, dict[str, Any]] = {
    "chains": {"width": 1, "sampling": [GREEDY]},
    "beams": {"width": 4, "sampling": [GREEDY]},
    "sampled": {"width": 3, "sampling": SAMPLINGS},
    "early stops": {"width": 2, "sampling": SAMPLINGS[:3], "stop_logp": -1.0, "stop_token_logp": -0.7},
}


@pytest.mark.parametrize("runner", [plain, graphed])
@pytest.mark.parametrize("kind", CALLS)
def test_what_forwards_found_is_fetched_and_nothing_else_waits(
    kind: str, runner: Callable[[], LlamaRunner | GraphedRunner]
) -> None:
    drafter = ModelDrafter(runner(), on_device=True, catch_up_rows=40)
    options = dict(CALLS[kind])
    width, sampling = options.pop("width"), options.pop("sampling")
    rule = EstimateRule(
        num_requests=9, base_s=1.0, first_layer_s=0.1, layer_s=0.02, token_s=0.01, mean_confidence=0.7
    )
    is_ended = "stop_logp" in options
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
            result = drafter.draft(DraftCall(call_id=1, items=asked, stop_rule=rule if is_ended else None))
        assert 1 < memory.transfers <= result.num_forwards  # of parts of prompts nothing is wanted
        assert result.num_forwards >= (2 if is_ended else 4)
        assert max(len(tree) for tree in trees(result).values()) > 1
        asked = []
        for name, known in tokens.items():
            asked.append(following(name, len(known), [new, 9], DraftPlan(4, width, **options)))
            known += [new, 9]


def noted(patch: pytest.MonkeyPatch) -> list[str]:
    """What is done from here on: launches, and waits for what was sent."""
    done: list[str] = []
    launch, receive = NextTokens._begin, NextTokens.receive

    def launched(self: NextTokens) -> None:
        done.append("launch")
        launch(self)

    def received(self: NextTokens, sent: Sent) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        done.append("wait")
        return receive(self, sent)

    patch.setattr(NextTokens, "_begin", launched)
    patch.setattr(NextTokens, "receive", received)
    return done


def test_the_next_layer_is_launched_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catch-up and the layers in turn; nothing comes after the deepest layer's forward."""
    drafter = ModelDrafter(plain(), on_device=True)
    done = noted(monkeypatch)
    drafter.draft(
        call(opening("a", prompt(1, 9), DraftPlan(4, 2)), opening("b", prompt(2, 9), DraftPlan(3, 1)))
    )
    assert done == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


def test_a_draft_ended_by_a_rule_has_one_layer_computed_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ModelDrafter(plain(), on_device=True)
    done = noted(monkeypatch)
    drafter.draft(call(opening("a", prompt(1, 9), DraftPlan(8, 1, least_forward_logp=-1e-9))))
    assert done == ["launch", "launch", "wait"]


@pytest.mark.parametrize("runner", [plain, graphed])
def test_a_tree_known_in_part_is_grown_on_without_other_waits(
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
    assert memory.transfers == found.num_forwards
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
