"""Constrained answers are the target's own under the grammar, whatever is drafted, batched or lost."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st

from engine.constraint import Constraint
from engine.grammar import Grammars
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.examples import examples
from tests.masked_reference import answer_in
from tests.verifier.grammars import END, PIECES, Oracle, constraints, make_grammars, text_of, tokenizer
from tests.verifier.target import NEAR_TIE, VOCAB, Client, Target, drive, spec_of
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult
from verifier.verifier import Verifier

TARGET = Target()
ORACLE = Oracle(TARGET)
GRAMMARS = make_grammars()

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {7: 3.0, 9: -100.0}]),
    constraint=constraints,
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(1, 24),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(END,), (END,), (END, 20)]),
)
prompts = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=30)


class Forcing:
    """A verifier whose every draft tree may be grown by the grammar, by some number of tokens."""

    def __init__(self, verifier: Verifier, rng: random.Random) -> None:
        self._verifier, self._rng = verifier, rng
        self.num_forced = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._verifier

    def step(self, call: VerifyCall) -> VerifyResult:
        verify = [
            VerifyItem(request_id=item.request_id, tree=item.tree, max_forced=self._rng.choice([0, 1, 6]))
            for item in call.verify
        ]
        result = self._verifier.step(
            VerifyCall(call_id=call.call_id, verify=verify, prefill=call.prefill, release=call.release)
        )
        for verdict in result.verdicts:
            assert 0 <= verdict.num_forced_accepted <= verdict.num_forced
            self.num_forced += verdict.num_forced
        return result


@examples(60, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=4),
    num_slots=st.sampled_from([90, 600]),
    lean=st.booleans(),
    preempt=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_equals_masked_decoding(
    requests: list[tuple[list[int], SamplingParams]], num_slots: int, lean: bool, preempt: float, seed: int
) -> None:
    rng = random.Random(seed)
    verifier = Forcing(Verifier(TARGET.runner(num_slots, lean=lean), grammars=GRAMMARS), rng)
    clients, ties = [], 0
    for i, (prompt, sampling) in enumerate(requests):
        spec = spec_of(f"r{i}", prompt, sampling)
        expected, gaps = ORACLE.decode(spec)
        ties += min(gaps) < NEAR_TIE
        clients.append(Client(spec, expected))
    assume(ties == 0)

    drive(verifier, clients, rng, preempt)  # type: ignore[arg-type]

    event(f"forced: {verifier.num_forced > 0}")
    for client in clients:
        assert client.output == client.expected
        constraint = client.spec.sampling.constraint
        assert constraint is not None
        said = answer_in(constraint, client.output)
        event(f"thought: {said is None} {said != client.output}")
        if client.output[-1] == END and (said is not None or not constraint.thought.ends):
            assert said is not None, "it ended within its thought"
            check_text(constraint, text_of(said))


def check_text(constraint: Constraint | None, text: str) -> None:
    """By other libraries than the one that made the masks."""
    assert constraint is not None
    match constraint.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(constraint.text))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(constraint.text, text)
        case "choice":
            assert text in json.loads(constraint.text)
        case "grammar":
            depth = len(text) - len(text.lstrip("a"))
            assert re.fullmatch(f"a{{{depth}}}x[0-9]{{2}}b{{{depth}}}", text)


def open_request(verifier: Verifier, sampling: SamplingParams) -> list[int]:
    spec = spec_of("r", [5, 6, 7], sampling)
    result = verifier.step(
        VerifyCall(call_id=0, prefill=[PrefillItem(request_id="r", num_tokens=99, spec=spec)])
    )
    verdict = result.prefills[0].verdict
    assert verdict is not None
    assert not verdict.error
    return verdict.tokens


def test_tokens_without_a_choice_are_added_and_accepted() -> None:
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=20,
        stop_token_ids=(END,),
        constraint=Constraint(kind="regex", text="[xy][01][ab]z{9}"),
    )
    verifier = Verifier(TARGET.runner(), grammars=GRAMMARS)
    output = open_request(verifier, sampling)
    steps = 1
    while output[-1] != END:
        item = VerifyItem(request_id="r", tree=TokenTree.root_only(output[-1]), max_forced=16)
        verdict = verifier.step(VerifyCall(call_id=steps, verify=[item])).verdicts[0]
        assert verdict.num_accepted == len(verdict.nodes) == 0
        output += verdict.tokens
        steps += 1
    assert re.fullmatch("[xy][01][ab]z{9}", text_of(output))
    assert verdict.num_forced == verdict.num_forced_accepted == 8 + (len(verdict.tokens) == 10)
    assert steps < 6


def test_what_the_grammar_forbids_is_not_computed() -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=20, constraint=Constraint(kind="regex", text="[xyz]{20}")
    )
    verifier = Verifier(TARGET.runner(), grammars=GRAMMARS)
    output = open_request(verifier, sampling)
    tree = TokenTree.chain(output[-1], [2, 3, 4, 5], [-0.1] * 4)  # brackets
    result = verifier.step(VerifyCall(call_id=1, verify=[VerifyItem(request_id="r", tree=tree)]))
    assert result.num_tokens == 1
    assert len(result.verdicts[0].tokens) == 1


def test_a_grammar_that_cannot_be_followed_ends_its_request_and_no_other() -> None:
    broken = SamplingParams(temperature=0.0, constraint=Constraint(kind="regex", text="a("))
    unspeakable = SamplingParams(temperature=0.0, constraint=Constraint(kind="regex", text="x日"))
    fine = SamplingParams(temperature=0.0, constraint=Constraint(kind="choice", text='["abc"]'))
    verifier = Verifier(TARGET.runner(), grammars=GRAMMARS)
    prefill = [
        PrefillItem(request_id=name, num_tokens=9, spec=spec_of(name, [5, 6], sampling))
        for name, sampling in (("broken", broken), ("odd", unspeakable), ("fine", fine))
    ]
    result = verifier.step(VerifyCall(call_id=0, prefill=prefill))
    verdicts = {one.request_id: one.verdict for one in result.prefills}
    assert "unclosed group" in verdicts["broken"].error  # type: ignore[union-attr]
    assert not verdicts["broken"].tokens  # type: ignore[union-attr]
    assert len(verdicts["fine"].tokens) == 1  # type: ignore[union-attr]
    item = VerifyItem(request_id="odd", tree=TokenTree.root_only(verdicts["odd"].tokens[-1]))  # type: ignore[union-attr]
    verdict = verifier.step(VerifyCall(call_id=1, verify=[item])).verdicts[0]
    assert "no token" in verdict.error


@pytest.mark.parametrize("max_forced", [0, 6])
def test_a_draft_that_the_grammar_cannot_be_followed_after_harms_nobody(max_forced: int) -> None:
    # Whether `a` or `b` comes is the target's choice; what is after the other cannot be said.
    for spoken, odd in ("ab", "ba"):
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=9,
            stop_token_ids=(END,),
            logit_bias={PIECES.index(spoken) + 2: 50.0},
            constraint=Constraint(kind="regex", text=f"x({spoken}y{{4}}|z?{odd}日|z{spoken}1)"),
        )
        verifier = Verifier(TARGET.runner(), grammars=GRAMMARS)
        output = open_request(verifier, sampling)
        x, y, z, one, two, three = (PIECES.index(piece) + 2 for piece in ("x", "y", "z", "1", spoken, odd))
        assert output == [x]
        # Dead ends come before and after, and below a node that goes on.
        token, parent = [x, three, z, three, two, one, two, y], [-1, 0, 0, 2, 2, 4, 0, 6]
        depth = [0, 1, 1, 2, 2, 3, 1, 2]
        tree = TokenTree.of(token, parent, [-0.1 * node for node in range(8)], depth)
        item = VerifyItem(request_id="r", tree=tree, max_forced=max_forced)
        verdict = verifier.step(VerifyCall(call_id=1, verify=[item])).verdicts[0]
        assert not verdict.error
        assert verdict.tokens[:3] == [two, y, y]
        assert verdict.nodes == [6, 7]
        output += verdict.tokens
        while output[-1] != END:
            item = VerifyItem(request_id="r", tree=TokenTree.root_only(output[-1]))
            output += verifier.step(VerifyCall(call_id=2, verify=[item])).verdicts[0].tokens
        assert text_of(output) == f"x{spoken}yyyy"


def test_without_a_tokenizer_a_constraint_is_an_error() -> None:
    verifier = Verifier(TARGET.runner())
    sampling = SamplingParams(constraint=Constraint(kind="json_object"))
    spec = spec_of("r", [5], sampling)
    result = verifier.step(
        VerifyCall(call_id=0, prefill=[PrefillItem(request_id="r", num_tokens=9, spec=spec)])
    )
    assert "tokenizer" in result.prefills[0].verdict.error  # type: ignore[union-attr]


@pytest.mark.parametrize("stop", [(), (END,)])
def test_after_its_end_an_answer_that_goes_on_has_end_tokens_only(stop: tuple[int, ...]) -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=6, stop_token_ids=stop, constraint=Constraint(kind="choice", text='["z"]')
    )
    verifier = Verifier(TARGET.runner(), grammars=GRAMMARS)
    output = open_request(verifier, sampling)
    while len(output) < 6 and output[-1] not in stop:
        tree = TokenTree.chain(output[-1], [END, END, 5], [-0.1] * 3)
        output += (
            verifier.step(VerifyCall(call_id=1, verify=[VerifyItem(request_id="r", tree=tree)]))
            .verdicts[0]
            .tokens
        )
    assert text_of(output) == "z"
    assert output[1:] == [END] * (1 if stop else 5)


def test_after_its_end_an_answer_goes_on_to_its_minimum_length_whatever_is_drafted() -> None:
    # Of the two tokens that end answers, one ends this request.
    other = 0
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=9,
        min_tokens=6,
        stop_token_ids=(END,),
        logit_bias={END: 100.0},
        constraint=Constraint(kind="choice", text='["z"]'),
    )
    verifier = Verifier(TARGET.runner(), grammars=Grammars(lambda: tokenizer([other, END])))
    output = open_request(verifier, sampling)
    while output[-1] != END:
        tree = TokenTree.chain(output[-1], [other] * 3, [-0.1] * 3)
        item = VerifyItem(request_id="r", tree=tree)
        output += verifier.step(VerifyCall(call_id=1, verify=[item])).verdicts[0].tokens
    assert output[1:] == [other] * 5 + [END]
