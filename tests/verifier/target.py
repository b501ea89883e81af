"""A tiny target model, plain decoding with it, and a caller that drives a verifier at random."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaForCausalLM

from engine.cuda_graphs import GraphedRunner
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.runner import ModelRunner
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from tests.random_llama import random_llama
from verifier.messages import PrefillItem, TokenLogprobs, Verdict, VerifyCall, VerifyItem, VerifyResult
from verifier.verifier import Verifier

VOCAB = 61
MAX_TOKENS = 96
NEAR_TIE = 1e-4


def make_model() -> LlamaForCausalLM:
    """Random weights, large enough that the next token really depends on the context."""
    return random_llama(
        1,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
    )


class Target:
    """The model twice: plainly (whole sequence in, no cache) as oracle, and behind a runner."""

    def __init__(self) -> None:
        self.plain = make_model()
        self._model = copy.deepcopy(self.plain)
        self._weights = load_llama_weights(self.plain)
        self._cache: dict[tuple[int, ...], torch.Tensor] = {}

    def runner(
        self,
        num_slots: int = 400,
        *,
        lean: bool = True,
        captured: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> ModelRunner:
        if captured:
            whole = LlamaRunner(self._weights, num_slots + 1)
            whole.keep_features(feature_layers)
            return GraphedRunner(whole, capture_at=1)
        made = LlamaRunner(self._weights, num_slots) if lean else HFRunner(self._model, num_slots)
        made.keep_features(feature_layers)
        return made

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [1, vocab] after `tokens`."""
        key = tuple(tokens)
        if key not in self._cache:
            self._cache[key] = self.plain(torch.tensor([tokens])).logits[0, -1:].float()
        return self._cache[key]

    def decode(self, spec: RequestSpec) -> tuple[list[int], list[float]]:
        """One token per step; (output tokens including those in `spec`, top-2 gap of the new ones)."""
        params = spec.sampling
        tokens, gaps = list(spec.tokens), []
        while len(tokens) - spec.prompt_len < params.max_tokens:
            history = TokenHistory(tokens[: spec.prompt_len], tokens[spec.prompt_len :])
            decision = decide(self.logits(tokens), [Row(params, len(tokens) - spec.prompt_len, history)])
            tokens.append(int(decision.tokens[0]))
            gaps.append(float(decision.gap[0]))
            if tokens[-1] in params.stop_token_ids:
                break
        return tokens[spec.prompt_len :], gaps


def spec_of(
    name: str, prompt: list[int], params: SamplingParams | None = None, output: list[int] | None = None
) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        tokens=[*prompt, *(output or [])],
        prompt_len=len(prompt),
        sampling=params or SamplingParams(temperature=0.0, max_tokens=12),
    )


def random_tree(rng: random.Random, root: int, future: list[int], style: str) -> TokenTree:
    """A draft tree. `future` is the true continuation, which the drafter may know, miss or twist.

    Styles: perfect (a chain that is right), chain (right up to a point), random (unrelated tokens),
    adversarial (right and wrong tokens, repeated siblings, right tokens under wrong parents).
    """
    size = rng.randint(0, 9)
    if style == "perfect":
        return TokenTree.chain(root, future[:size], [-0.1] * len(future[:size]))
    if style == "chain":
        known = future[: rng.randint(0, len(future))][:size]
        tokens = known + [rng.randrange(VOCAB) for _ in range(size - len(known))]
        return TokenTree.chain(root, tokens, [-0.1] * len(tokens))
    token, parent, depth = [root], [-1], [0]
    for _ in range(size):
        # Prefer recent nodes, so that trees are deep as well as wide.
        above = rng.choice([rng.randrange(len(token)), len(token) - 1])
        right = future[depth[above]] if depth[above] < len(future) else rng.randrange(VOCAB)
        wrong = rng.randrange(VOCAB)
        token.append(right if style == "adversarial" and rng.random() < 0.7 else wrong)
        parent.append(above)
        depth.append(depth[above] + 1)
    return TokenTree(
        token=np.array(token, np.int32),
        parent=np.array(parent, np.int32),
        logp=-np.array(depth, np.float32),
        depth=np.array(depth, np.int32),
    )


@dataclass
class Client:
    """What the scheduler knows of one request."""

    spec: RequestSpec
    expected: list[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    min_gap: float = float("inf")
    stage: str = "closed"  # closed, prefill, ready

    @property
    def done(self) -> bool:
        params = self.spec.sampling
        return len(self.output) >= params.max_tokens or (
            bool(self.output) and self.output[-1] in params.stop_token_ids
        )

    def reopening(self) -> RequestSpec:
        prompt = self.spec.tokens[: self.spec.prompt_len]
        return spec_of(self.spec.request_id, prompt, self.spec.sampling, self.output)

    def take(self, verdict: Verdict) -> None:
        self.output += verdict.tokens
        self.logprobs += verdict.logprobs
        self.min_gap = min(self.min_gap, verdict.min_gap)
        assert len(verdict.nodes) == verdict.num_accepted


def drive(verifier: Verifier, clients: list[Client], rng: random.Random, preempt: float = 0.1) -> None:
    """Serve all clients to the end: random batches, chunks, trees, releases."""
    by_id = {c.spec.request_id: c for c in clients}
    for call_id in range(1000):
        waiting = [c for c in clients if not c.done]
        if not waiting:
            break
        release = [c for c in waiting if c.stage != "closed" and rng.random() < preempt]
        for client in release:
            client.stage = "closed"
        call = VerifyCall(call_id=call_id, release=[c.spec.request_id for c in release])
        for client in rng.sample(waiting, rng.randint(1, len(waiting))):
            _add_item(call, client, rng)
        result = verifier.step(call)
        _take(result, by_id)
        _make_room(verifier, result, by_id, rng)
    else:
        raise AssertionError("no end in sight")


def _add_item(call: VerifyCall, client: Client, rng: random.Random) -> None:
    name = client.spec.request_id
    if client.stage == "ready":
        root = [*client.spec.tokens, *client.output][-1]
        future = client.expected[len(client.output) :]
        style = rng.choice(["perfect", "chain", "random", "adversarial", "none"])
        tree = None if style == "none" else random_tree(rng, root, future, style)
        call.verify.append(VerifyItem(request_id=name, tree=tree))
        return
    spec = client.reopening() if client.stage == "closed" else None
    num_tokens = rng.choice([1, 3, 8, 100])
    call.prefill.append(PrefillItem(request_id=name, num_tokens=num_tokens, spec=spec))
    client.stage = "prefill"


def _take(result: VerifyResult, by_id: dict[str, Client]) -> None:
    assert not result.unknown
    for verdict in result.verdicts:
        by_id[verdict.request_id].take(verdict)
    for progress in result.prefills:
        if progress.verdict is not None:
            by_id[progress.request_id].take(progress.verdict)
            by_id[progress.request_id].stage = "ready"


def _make_room(
    verifier: Verifier, result: VerifyResult, by_id: dict[str, Client], rng: random.Random
) -> None:
    """Deferred requests ask again later; somebody else is released for them."""
    for name in result.deferred:
        if name not in verifier:
            by_id[name].stage = "closed"
    finished = [c for c in by_id.values() if c.done and c.stage != "closed"]
    others = [c for c in by_id.values() if c.stage != "closed" and c.spec.request_id not in result.deferred]
    victims = finished or ([rng.choice(others)] if result.deferred and others else [])
    for victim in victims:
        victim.stage = "closed"
    if victims:
        verifier.step(VerifyCall(call_id=-1, release=[v.spec.request_id for v in victims]))
