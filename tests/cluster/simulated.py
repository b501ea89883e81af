"""Workers without models around the scheduler core: a target with a known text, drafters that guess at it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cluster.stream_messages import Submit
from drafters.messages import Draft, DraftCall, DraftResult
from drafters.protocol import Capabilities
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from verifier.messages import PrefillProgress, Verdict, VerifyCall, VerifyResult

VOCAB = 50
STOP = 7


def next_token(tokens: list[int]) -> int:
    """The text every request has: a function of all tokens before, so that a lost one shows."""
    value = len(tokens)
    for token in tokens[-6:]:
        value = (value * 31 + token * 17 + 5) % 1009
    return value % VOCAB


def expected_output(submit: Submit, max_tokens: int) -> list[int]:
    """What a request must return, token for token."""
    tokens, output = list(submit.prompt), []
    while len(output) < submit.sampling.max_tokens and len(tokens) < max_tokens:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in submit.sampling.stop_token_ids:
            break
    return output


@dataclass
class SimulatedTarget:
    """Serves verify calls by the contract, with a KV pool of a given size.

    As the real one, it cuts chunks to the slots there are, unless these are fewer than `smallest_chunk`.
    """

    num_slots: int = 400
    max_tokens: int = 200
    vocab_size: int = VOCAB
    smallest_chunk: int = 4
    held: dict[str, tuple[RequestSpec, list[int], int]] = field(default_factory=dict)
    calls: int = 0

    def free(self) -> int:
        return self.num_slots - sum(computed for _, _, computed in self.held.values())

    def step(self, call: VerifyCall) -> VerifyResult:
        self.calls += 1
        for request_id in call.release:
            self.held.pop(request_id, None)
        verdicts, prefills, deferred, unknown = [], [], [], []
        for item in call.verify:
            if item.request_id not in self.held:
                unknown.append(item.request_id)
                continue
            spec, tokens, computed = self.held[item.request_id]
            tree = TokenTree.root_only(tokens[-1]) if item.tree is None else item.tree
            tree.validate()
            is_prefilled = len(tokens) > len(spec.tokens)
            if item.tree is None and not is_prefilled:  # it had fewer slots than it seemed
                deferred.append(item.request_id)
                continue
            assert is_prefilled, "verified before its prefill was complete"
            assert computed == len(tokens) - 1
            assert tree.token[0] == tokens[-1], "the root is not the last committed token"
            if item.tree is None and len(tokens) - spec.prompt_len >= spec.sampling.max_tokens:
                # The call before brought the last of them after this one was sent.
                verdicts.append(Verdict(request_id=item.request_id, tokens=[], num_accepted=0, nodes=[]))
                continue
            assert len(tokens) - spec.prompt_len < spec.sampling.max_tokens, "it has all its tokens"
            assert len(tokens) < self.max_tokens, "beyond the window"
            if self.free() < len(tree):
                deferred.append(item.request_id)
                continue
            verdicts.append(self._decide(item.request_id, spec, tokens, tree))
        for chunk in call.prefill:
            if chunk.spec is not None:
                assert chunk.request_id not in self.held, "opened twice"
                self.held[chunk.request_id] = (chunk.spec, list(chunk.spec.tokens), 0)
            if chunk.request_id not in self.held:
                unknown.append(chunk.request_id)
                continue
            spec, tokens, computed = self.held[chunk.request_id]
            if chunk.spec is None and len(tokens) > len(spec.tokens):
                continue  # its prompt ended sooner than it seemed
            wanted = min(chunk.num_tokens, len(tokens) - computed)
            size = min(wanted, self.free())
            if size < min(self.smallest_chunk, wanted):
                deferred.append(chunk.request_id)
                if chunk.spec is not None:
                    del self.held[chunk.request_id]  # as the real one, which opens nothing without room
                continue
            computed += size
            self.held[chunk.request_id] = (spec, tokens, computed)
            verdict = None
            if computed == len(tokens):
                verdict = self._decide(chunk.request_id, spec, tokens, TokenTree.root_only(tokens[-1]))
            prefills.append(
                PrefillProgress(request_id=chunk.request_id, num_computed=computed, verdict=verdict)
            )
        return VerifyResult(
            call_id=call.call_id,
            verdicts=verdicts,
            prefills=prefills,
            deferred=deferred,
            unknown=unknown,
            free_slots=self.free(),
            forward_seconds=0.01,
            seconds=0.011,
        )

    def _decide(self, request_id: str, spec: RequestSpec, tokens: list[int], tree: TokenTree) -> Verdict:
        nodes: list[int] = []
        new: list[int] = []
        node, sequence = 0, list(tokens)
        while True:
            token = next_token(sequence)
            sequence.append(token)
            new.append(token)
            match = [c for c in tree.children(node).tolist() if tree.token[c] == token]
            if not match:
                break
            node = match[0]
            nodes.append(node)
        output = len(tokens) - spec.prompt_len
        for index, token in enumerate(new):
            if token in spec.sampling.stop_token_ids or output + index + 1 >= spec.sampling.max_tokens:
                new = new[: index + 1]
                break
        tokens = tokens + new
        self.held[request_id] = (spec, tokens, len(tokens) - 1)
        return Verdict(request_id=request_id, tokens=new, num_accepted=len(nodes), nodes=nodes)


@dataclass
class SimulatedDrafter:
    """Drafts the true text with a given accuracy; checks what it is told."""

    accuracy: float
    rng: random.Random
    held: dict[str, list[int]] = field(default_factory=dict)
    prompt_len: dict[str, int] = field(default_factory=dict)
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(
            kind="simulated",
            max_depth=8,
            max_width=3,
            has_probabilities=True,
            needs_prefill=True,
            vocab_size=VOCAB,
            max_tokens=200,
        )
    )

    def draft(self, call: DraftCall) -> DraftResult:
        for request_id in call.release:
            self.held.pop(request_id, None)
        drafts, unknown = [], []
        for item in call.items:
            if item.start == 0:
                assert item.spec is not None, "opened without a specification"
                self.held[item.request_id] = list(item.spec.tokens)
                self.prompt_len[item.request_id] = item.spec.prompt_len
            elif len(self.held.get(item.request_id, [])) < item.start:
                unknown.append(item.request_id)
                continue
            else:
                kept = self.held[item.request_id][: item.start]
                self.held[item.request_id] = kept + item.tokens.tolist()
            tree = self._tree(self.held[item.request_id], item.plan.depth, item.plan.width)
            first = max(item.start, self.prompt_len[item.request_id])
            scored = max(0, len(self.held[item.request_id]) - first)
            agreed = sum(self.rng.random() < self.accuracy for _ in range(scored))
            drafts.append(Draft(request_id=item.request_id, tree=tree, num_scored=scored, num_agreed=agreed))
        return DraftResult(call_id=call.call_id, drafts=drafts, unknown=unknown, seconds=0.002)

    def _tree(self, tokens: list[int], depth: int, width: int) -> TokenTree:
        token, parent, logp, depths = [tokens[-1]], [-1], [0.0], [0]
        best, sequence = 0, list(tokens)
        for layer in range(1, depth + 1):
            guess = next_token(sequence) if self.rng.random() < self.accuracy else self.rng.randrange(VOCAB)
            options = [guess, *((guess + 1 + i) % VOCAB for i in range(width - 1))]
            first = len(token)
            for rank, option in enumerate(options):
                token.append(option)
                parent.append(best)
                logp.append(logp[best] - 0.2 - rank)
                depths.append(layer)
            best = first
            sequence.append(guess)
        return TokenTree.of(token, parent, logp, depths)


def submit(number: int, rng: random.Random, **changes: object) -> Submit:
    """A request with a random prompt and output length."""
    fields: dict[str, object] = {
        "request_id": f"r{number}",
        "prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
        "sampling": SamplingParams(
            temperature=0.0, max_tokens=rng.randint(1, 40), stop_token_ids=(STOP,) if number % 2 else ()
        ),
    }
    return Submit(**(fields | changes))  # type: ignore[arg-type]
