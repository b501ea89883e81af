"""What the decoding heads propose with a verdict: after the right token, ranked right, when asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.heads import DecodingHeads
from engine.proposals import Proposals
from engine.sampling import Row, TokenHistory, perturbed_scores
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.verifier.target import VOCAB, Target, spec_of
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult
from verifier.proposing import HeadProposer
from verifier.verifier import Verifier

TARGET = Target()
NUM_HEADS, SCALE, CANDIDATES = 3, 1.5, 4
WEIGHT = torch.randn(NUM_HEADS, 32, 32, generator=torch.Generator().manual_seed(2)) * 0.3
PROMPT = [5, 9, 33, 21, 60, 2, 17]
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, seed=7, max_tokens=12, presence_penalty=0.5, repetition_penalty=1.2
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def verifier(num_slots: int = 200, *, lean: bool = True) -> Verifier:
    runner = TARGET.runner(num_slots, lean=lean)
    return Verifier(runner, proposer=HeadProposer(DecodingHeads(runner, WEIGHT, last_token_scale=SCALE)))


@torch.no_grad()
def expected(spec: RequestSpec, output: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Best tokens and their scores after prompt and `output`, from Transformers' hidden states."""
    model = TARGET.plain
    tokens = [*spec.tokens[: spec.prompt_len], *output]
    hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
    x = hidden + SCALE * model.get_input_embeddings()(torch.tensor(tokens[-1]))
    logits = model.lm_head(torch.stack([hidden + torch.nn.functional.silu(w @ x) for w in WEIGHT])).float()
    history = TokenHistory(tokens[: spec.prompt_len], output)
    rows = [Row(spec.sampling, len(output) + i, history) for i in range(NUM_HEADS)]
    logp, token = perturbed_scores(logits, rows).log_softmax(-1).topk(CANDIDATES)
    return token.numpy(), logp.numpy()


def check(verdict: Verdict, spec: RequestSpec, output: list[int]) -> None:
    assert verdict.proposals is not None
    token, logp = expected(spec, output)
    assert verdict.proposals.position == spec.prompt_len + len(output)
    assert verdict.proposals.token.dtype == np.int32
    assert verdict.proposals.logp.dtype == np.float32
    np.testing.assert_allclose(verdict.proposals.logp, logp, atol=1e-3)
    # Where two scores are nearly equal, rounding may order them either way.
    clear = np.abs(np.diff(logp, axis=1)).min(axis=1) > 1e-3
    np.testing.assert_array_equal(verdict.proposals.token[clear], token[clear])
    assert clear.any()


def prefill(of: Verifier, spec: RequestSpec, chunk: int = 100) -> tuple[Verdict, list[Verdict | None]]:
    """Verdict of the completed prefill, and those of the chunks before it."""
    before: list[Verdict | None] = []
    opening: RequestSpec | None = spec
    while True:
        item = PrefillItem(
            request_id=spec.request_id, num_tokens=chunk, spec=opening, num_candidates=CANDIDATES
        )
        (progress,) = of.step(VerifyCall(call_id=1, prefill=[item])).prefills
        if progress.num_computed == len(spec.tokens):
            assert progress.verdict is not None
            return progress.verdict, before
        before.append(progress.verdict)
        opening = None


def verify(of: Verifier, spec: RequestSpec, tree: TokenTree, num_candidates: int = CANDIDATES) -> Verdict:
    item = VerifyItem(request_id=spec.request_id, tree=tree, num_candidates=num_candidates)
    (verdict,) = of.step(VerifyCall(call_id=2, verify=[item])).verdicts
    return verdict


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("lean", [True, False])
def test_proposals_follow_the_last_committed_token(params: SamplingParams, lean: bool) -> None:
    spec = spec_of("a", PROMPT, params)
    future, _ = TARGET.decode(spec)
    serving = verifier(lean=lean)
    verdict, _ = prefill(serving, spec)
    output = list(verdict.tokens)
    check(verdict, spec, output)
    # Right up to its second token, with a wrong sibling before the right one.
    tree = TokenTree(
        token=np.array([output[-1], (future[1] + 1) % VOCAB, future[1], future[2], (future[3] + 1) % VOCAB]),
        parent=np.array([-1, 0, 0, 2, 3]),
        logp=np.zeros(5, np.float32),
        depth=np.array([0, 1, 1, 2, 3]),
    )
    verdict = verify(serving, spec, tree)
    assert verdict.num_accepted == 2
    output += verdict.tokens
    assert output == future[:4]
    check(verdict, spec, output)


def test_a_prefill_in_chunks_proposes_once_and_the_same() -> None:
    spec = spec_of("a", PROMPT * 5, GREEDY)
    whole, _ = prefill(verifier(), spec)
    last, before = prefill(verifier(), spec, chunk=4)
    assert len(before) > 3
    assert all(verdict is None for verdict in before)
    assert whole.proposals is not None
    assert last.proposals is not None
    np.testing.assert_array_equal(whole.proposals.token, last.proposals.token)
    check(last, spec, last.tokens)


def test_a_request_whose_kv_was_lost_gets_proposals_with_its_next_verdict() -> None:
    spec = spec_of("a", PROMPT, SAMPLED)
    serving = verifier()
    first, _ = prefill(serving, spec)
    serving.step(VerifyCall(call_id=3, release=["a"]))
    reopened = spec_of("a", PROMPT, SAMPLED, output=first.tokens)
    again, _ = prefill(serving, reopened)
    check(again, spec, first.tokens + again.tokens)


def test_only_those_who_ask_and_go_on_get_proposals() -> None:
    serving = verifier()
    asking, silent = spec_of("asks", PROMPT, GREEDY), spec_of("silent", PROMPT[::-1], GREEDY)
    ending = spec_of("ends", PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    call = VerifyCall(
        call_id=1,
        prefill=[
            PrefillItem(request_id="silent", num_tokens=50, spec=silent),
            PrefillItem(request_id="ends", num_tokens=50, spec=ending, num_candidates=2),
            PrefillItem(request_id="asks", num_tokens=50, spec=asking, num_candidates=2),
        ],
    )
    result = Decoder[VerifyResult](VerifyResult).decode(encode(serving.step(call)))
    verdicts = {p.request_id: p.verdict for p in result.prefills}
    assert all(verdict is not None for verdict in verdicts.values())
    proposals = {name: v.proposals for name, v in verdicts.items() if v is not None}
    assert proposals["silent"] is None
    assert proposals["ends"] is None
    assert proposals["asks"] is not None
    assert proposals["asks"].token.shape == proposals["asks"].logp.shape == (NUM_HEADS, 2)
    assert proposals["asks"].seconds > 0.0


def test_who_asks_for_fewer_heads_gets_the_first_of_them() -> None:
    def served(num_heads: int | None) -> dict[str, Proposals]:
        call = VerifyCall(
            call_id=1,
            prefill=[
                PrefillItem(
                    request_id="all", num_tokens=50, spec=spec_of("all", PROMPT, SAMPLED), num_candidates=3
                ),
                PrefillItem(
                    request_id="some",
                    num_tokens=50,
                    spec=spec_of("some", PROMPT, SAMPLED),
                    num_candidates=2,
                    num_heads=num_heads,
                ),
            ],
        )
        if num_heads == 1:
            del call.prefill[0]  # nobody needs the others: they are not evaluated
        result = verifier().step(Decoder[VerifyCall](VerifyCall).decode(encode(call)))
        found = {p.request_id: p.verdict.proposals for p in result.prefills if p.verdict is not None}
        return {name: one for name, one in found.items() if one is not None}

    whole = served(None)
    assert whole["all"].token.shape == (NUM_HEADS, 3)
    for num_heads in (1, 2):
        some = served(num_heads)["some"]
        assert some.token.shape == (num_heads, 2)
        np.testing.assert_array_equal(some.token, whole["some"].token[:num_heads])
        np.testing.assert_allclose(some.logp, whole["some"].logp[:num_heads], atol=1e-4)


def test_a_stop_token_ends_proposals_and_a_target_without_heads_makes_none() -> None:
    future, _ = TARGET.decode(spec_of("a", PROMPT, GREEDY))
    stopping = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(future[0],))
    verdict, _ = prefill(verifier(), spec_of("a", PROMPT, stopping))
    assert verdict.tokens == future[:1]
    assert verdict.proposals is None
    verdict, _ = prefill(Verifier(TARGET.runner()), spec_of("a", PROMPT, GREEDY))
    assert verdict.proposals is None


def test_proposals_change_no_token() -> None:
    for params in (GREEDY, SAMPLED):
        spec = spec_of("a", PROMPT, params)
        serving = verifier()
        output = list(prefill(serving, spec)[0].tokens)
        while len(output) < params.max_tokens:
            output += verify(serving, spec, TokenTree.root_only(output[-1])).tokens
        assert output == TARGET.decode(spec)[0]
