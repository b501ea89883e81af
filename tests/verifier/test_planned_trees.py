"""Trees that a verifier grows from its own proposals: those that would have been sent, and begun at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters.messages import DraftPlan
from engine.sampling_params import SamplingParams
from tests.eagle_reference import EagleReference
from tests.verifier.planned import ahead, in_turn, verdicts_of
from tests.verifier.target import VOCAB, Target, spec_of
from tests.verifier.test_eagle_drafts import GREEDY, verifier
from verifier.messages import VerifyCall, VerifyItem

TARGET = Target()
PROMPTS = {"a": [5, 9, 33, 21], "b": [17, 2, 60, 21, 33, 9], "c": [40, 41, 7]}
# Tokens that may be drafted, and that the target itself never says after these.
SAID = {
    token for name, prompt in PROMPTS.items() for token in TARGET.decode(spec_of(name, prompt, GREEDY))[0]
}
UNSAID = tuple(sorted(set(range(VOCAB)) - SAID))


@pytest.mark.parametrize("kind", ["lean", "captured", "hf"])
@pytest.mark.parametrize(
    ("params", "plan"),
    [
        (GREEDY, DraftPlan(depth=3)),
        (GREEDY, DraftPlan(depth=2, width=2)),
        (GREEDY, DraftPlan(depth=3, stop_logp=-2.0)),
        (SamplingParams(temperature=0.8, seed=5, max_tokens=12), DraftPlan(depth=3)),
        (
            SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=1.0, logprobs=1),
            DraftPlan(depth=3),
        ),
        (SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=UNSAID), DraftPlan(depth=3)),
    ],
    ids=["a chain", "a beam", "ended early", "sampled", "with penalties", "with stop tokens"],
)
def test_planned_trees_are_those_that_would_have_been_sent(
    tmp_path: Path, kind: str, params: SamplingParams, plan: DraftPlan
) -> None:
    reference = EagleReference(TARGET.plain)
    specs = [spec_of(name, prompt, params) for name, prompt in PROMPTS.items()]
    steps = 4
    serving = verifier(reference, tmp_path / "turn", kind=kind)
    expected = in_turn(serving, specs, plan, steps)
    serving = verifier(reference, tmp_path / "ahead", kind=kind, overlaps=True)
    found, begun = ahead(serving, specs, plan, steps)
    assert begun == [True] * steps + [False]
    assert any(result.num_tokens > len(specs) for result in expected[1:]), "nothing was drafted"
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.digest, mine.free_slots, mine.num_tokens) == (
            theirs.digest,
            theirs.free_slots,
            theirs.num_tokens,
        )
        for one, other in zip(verdicts_of(mine), verdicts_of(theirs), strict=True):
            assert (one.tokens, one.nodes) == (other.tokens, other.nodes)
            assert (one.proposals is None) == (other.proposals is None)
            if one.proposals is not None and other.proposals is not None:
                np.testing.assert_array_equal(one.proposals.token, other.proposals.token)
    outputs: dict[str, list[int]] = {}
    for result in found:
        for verdict in verdicts_of(result):
            outputs.setdefault(verdict.request_id, []).extend(verdict.tokens)
    for spec in specs:
        plain, _ = TARGET.decode(spec)
        assert outputs[spec.request_id][: len(plain)] == plain[: len(outputs[spec.request_id])]


def test_what_was_proposed_after_another_token_is_not_drafted_from(tmp_path: Path) -> None:
    """As after a step that asked for nothing."""
    serving = verifier(EagleReference(TARGET.plain), tmp_path)
    spec, plan = spec_of("a", PROMPTS["a"], GREEDY), DraftPlan(depth=3)
    in_turn(serving, [spec], plan, 1)
    serving.step(VerifyCall(call_id=5, verify=[VerifyItem(request_id="a")]))
    result = serving.step(VerifyCall(call_id=6, verify=[VerifyItem(request_id="a", plan=plan)]))
    assert result.num_tokens == 1
    assert len(result.verdicts[0].tokens) == 1


def test_who_was_stopped_by_the_verdict_before_gets_no_rows(tmp_path: Path) -> None:
    """The scheduler, which sent the step before it knew of that, waits for nothing."""
    plain, _ = TARGET.decode(spec_of("a", PROMPTS["a"], GREEDY))
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(plain[2],))
    specs = [spec_of("a", PROMPTS["a"], params), spec_of("b", PROMPTS["b"], GREEDY)]
    serving = verifier(EagleReference(TARGET.plain), tmp_path, overlaps=True)
    found, _ = ahead(serving, specs, DraftPlan(depth=3), 6)
    of_a = [one.tokens for result in found for one in verdicts_of(result) if one.request_id == "a"]
    first = plain.index(plain[2]) + 1
    assert [token for tokens in of_a for token in tokens] == plain[:first]
    assert of_a[-1] == []
    # Its root would be a row, and what is drafted after it more.
    assert found[-1].num_tokens <= 4
