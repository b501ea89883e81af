"""Constrained answers of the demo family: under every drafter they are those of a plain masked forward."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from unittest.mock import patch

import jsonschema
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import FlotillaConfig
from cluster.local import Completion, LocalEngine
from cluster.stream_messages import Speculation, Submit
from cluster.totals import Totals
from deployments.text_codec import TextCodec
from engine.constraint import Constraint, Thought
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import SamplingParams
from tests.cluster.small_family import TARGET, small_family
from tests.masked_reference import MaskedReference
from zoo.registry import weights_dir

Served = Callable[[str], tuple[list[Completion], Totals]]

EOS, COLON, LINE_BREAK = 2, 31, 204
CALL, IT, QUOTE = 371, 347, 286
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["fast", "slow"]}, "maxItems": 2},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(EOS,))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40, stop_token_ids=(EOS,), logprobs=1)
PENALISED = msgspec.structs.replace(
    SAMPLED, presence_penalty=0.4, repetition_penalty=1.1, logit_bias={9: 2.0}
)
CASES = [
    ("def area(circle):\n    ", Constraint(kind="json_schema", text=json.dumps(SCHEMA)), GREEDY),
    ("Describe the class.\n", Constraint(kind="json_schema", text=json.dumps(SCHEMA), compact=True), SAMPLED),
    ("import os\n", Constraint(kind="regex", text=r"import [a-z]{2,8}(\nimport [a-z]{2,8}){2}"), GREEDY),
    ("The answer is", Constraint(kind="choice", text='[" yes, it is", " no, it is not", " yes"]'), SAMPLED),
    (
        "x = ",
        Constraint(kind="grammar", text='start: /[a-z]{1,6}/ "(" (/[0-9]{1,3}/ ("," start)?)? ")"'),
        PENALISED,
    ),
    ("{", Constraint(kind="json_object"), SAMPLED),
    # A thought that the prompt has begun, and one that may begin: line breaks and colons as marks.
    (
        "def area(circle):\n    ",
        Constraint(
            kind="json_schema",
            text=json.dumps(SCHEMA),
            thought=Thought(open_token=3, close_token=LINE_BREAK, is_open=True),
        ),
        GREEDY,
    ),
    (
        "import os",
        Constraint(
            kind="regex", text="[a-z]{3,9}", thought=Thought(open_token=LINE_BREAK, close_token=COLON)
        ),
        SAMPLED,
    ),
    # Messages with headers: one line after another, until one begins with `Call it`, up to its first quote.
    (
        "import os\n",
        Constraint(
            kind="regex",
            text="[0-9]{3,9}",
            thought=Thought(open_token=LINE_BREAK, close_token=QUOTE, header=(CALL, IT)),
        ),
        GREEDY,
    ),
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(weights_dir(TARGET))


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(FlotillaConfig.model_validate(small_family()))


def submits(codec: TextCodec, **speculation: object) -> list[Submit]:
    return [
        Submit(
            request_id=f"r{number}",
            prompt=codec.encode(prompt),
            sampling=msgspec.structs.replace(mode, constraint=constraint, seed=number),
            speculation=Speculation(**speculation),  # type: ignore[arg-type]
        )
        for number, (prompt, constraint, mode) in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def expected(codec: TextCodec) -> list[list[int]]:
    """By Transformers, llguidance and nothing of ours but the rule that chooses a token."""
    reference = MaskedReference(
        AutoModelForCausalLM.from_pretrained(weights_dir(TARGET), dtype=torch.float32).eval(),
        weights_dir(TARGET) / "tokenizer.json",
    )
    found = []
    for submit in submits(codec):
        output: list[int] = []
        plain = msgspec.structs.replace(submit.sampling, constraint=None)
        assert submit.sampling.constraint is not None
        while len(output) < plain.max_tokens and output[-1:] != [EOS]:
            logits = reference.logits(submit.sampling.constraint, submit.prompt, output)
            row = Row(plain, len(output), TokenHistory(submit.prompt, output))
            output.append(int(decide(logits, [row]).tokens[0]))
        found.append(output)
    return found


def run(engine: LocalEngine, codec: TextCodec, policy: str, **speculation: object) -> list[Completion]:
    raw = engine.config.model_dump()
    raw["policy"] = {"name": policy}
    engine.use_policy(FlotillaConfig.model_validate(raw))
    requests = submits(codec, **speculation)
    found = engine.generate(requests)
    return [found[request.request_id] for request in requests]


@pytest.fixture(scope="module")
def served(engine: LocalEngine, codec: TextCodec) -> Served:
    """With a policy, once for all tests; to be read only."""

    @functools.cache
    def once(policy: str) -> tuple[list[Completion], Totals]:
        return run(engine, codec, policy), engine.core.totals

    return once


@pytest.mark.parametrize("policy", ["autoregressive", "flotilla", "adaserve", "fixed"])
def test_every_policy_gives_the_masked_forwards_tokens(
    served: Served, expected: list[list[int]], policy: str
) -> None:
    assert [one.tokens for one in served(policy)[0]] == expected


@pytest.mark.thorough
def test_every_drafter_alone_and_none_give_the_same(
    engine: LocalEngine, codec: TextCodec, expected: list[list[int]]
) -> None:
    off = run(engine, codec, "fixed", mode="off")
    assert [one.tokens for one in off] == expected
    assert engine.core.totals.verified_tokens == 0
    for name in engine.drafters:
        assert [one.tokens for one in run(engine, codec, "fixed", drafters=(name,))] == expected
        assert set(engine.core.totals.verified_by_drafter) <= {name}


def test_complete_answers_satisfy_their_constraint(served: Served, codec: TextCodec) -> None:
    found, _ = served("adaserve")
    texts = [codec.decode(one.tokens) for one in found]
    finished = [one.finish_reason == "stop" for one in found]
    assert sum(finished) >= 4
    for number, text in enumerate(texts):
        if finished[number] and number < 2:
            jsonschema.validate(json.loads(text), SCHEMA)
    if finished[2]:
        assert re.fullmatch(CASES[2][1].text, texts[2])
    assert texts[3] in json.loads(CASES[3][1].text)


def test_what_the_grammar_adds_is_accounted_for(served: Served) -> None:
    found, totals = served("autoregressive")
    assert totals.accepted_by_drafter["grammar"] > 0
    assert totals.accepted_by_drafter["grammar"] == totals.accepted_tokens <= totals.verified_tokens
    receipts = [one.receipt for one in found if one.receipt is not None]
    assert sum(receipt.drafters.get("grammar", 0) for receipt in receipts) == totals.accepted_tokens
    for one, receipt in zip(found, receipts, strict=True):
        assert receipt.num_steps == len(one.tokens) - receipt.num_accepted
        assert sum(receipt.acceptance_by_depth) == receipt.num_accepted <= receipt.num_verified


def test_log_probabilities_are_those_before_the_mask(served: Served) -> None:
    off, drafted = (served(policy)[0][1] for policy in ("autoregressive", "adaserve"))
    assert len(off.logprobs) == len(off.tokens)
    # Some token was not the model's own first choice: the mask alone made it so.
    assert any(one.top_ids[0] != token for one, token in zip(off.logprobs, off.tokens, strict=True))
    for one, other in zip(off.logprobs, drafted.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids == other.top_ids


def test_a_target_lost_half_way_changes_nothing(
    engine: LocalEngine, codec: TextCodec, expected: list[list[int]]
) -> None:
    """The verifier forgets everything; prompt and committed tokens are all that the requests have."""
    verifier = engine.target.verifier
    begin, calls = verifier.begin, []

    def forgetful(call):  # type: ignore[no-untyped-def]
        calls.append(call)
        if len(calls) % 4 == 0:
            for name in [f"r{number}" for number in range(len(CASES))]:
                verifier._table.forget(name)
        return begin(call)

    with patch.object(verifier, "begin", forgetful):
        found = run(engine, codec, "fixed")
    assert [one.tokens for one in found] == expected
    assert sum(one.receipt.num_preemptions for one in found if one.receipt is not None) > 0
