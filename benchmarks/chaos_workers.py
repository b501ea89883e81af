"""Workers of the fault search: a target whose text is known beforehand, drafters that guess at it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drafters.messages import Draft, DraftCall, DraftResult
from drafters.protocol import Capabilities
from engine.draft_plan import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree
from verifier.messages import PrefillProgress, Verdict, VerifyCall, VerifyResult

VOCAB = 50
#: Longest sequence of the target.
MAX_TOKENS = 120
_FORWARD_S = 0.01
# As the real target, on the scale of the fault search's prompts: a chunk takes the slots there are, if these.
_SMALLEST_CHUNK = 4


class Violation(AssertionError):
    """Something that must always hold did not."""


def require(holds: bool, message: str) -> None:
    """Raise `Violation` with the message unless it holds."""
    if not holds:
        raise Violation(message)


class Texts:
    """The target's text after each prompt: a function of the prompt and the position."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], list[int]] = {}

    def output(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The first tokens after the prompt."""
        key = tuple(prompt)
        known = self._by_prompt.get(key)
        if known is None:
            known = self._by_prompt[key] = []
        while len(known) < num_tokens:
            before = known[-1] if known else sum(key) + 7 * len(key)
            known.append((before * 31 + len(known) * 17 + sum(key) + 5) % 1009 % VOCAB)
        return known[:num_tokens]


@dataclass
class Held:
    """A request as a worker holds it: `computed` of its tokens are in the KV pool; `proposals` came last.

    Of `num_slow` of its verdicts it was said that it should be drafted for no more.
    """

    spec: RequestSpec
    tokens: list[int]
    computed: int = 0
    proposals: Proposals | None = None
    num_slow: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether the masks of some grammar would take long by now."""
        return self.spec.prompt_len % 5 == 2 and len(self.tokens) > self.spec.prompt_len + 3

    @property
    def is_prefilled(self) -> bool:
        """Whether the token after those it was opened with is known."""
        return len(self.tokens) > len(self.spec.tokens)

    def planned_tree(self, plan: DraftPlan | None) -> TokenTree:
        """What is verified where that is left to the target: grown by `plan` from what it proposed."""
        last, proposals = self.tokens[-1], self.proposals
        if plan is None or proposals is None or proposals.position != len(self.tokens):
            return TokenTree.root_only(last)
        return grown(last, plan, frozenset(self.spec.sampling.stop_token_ids), proposals)


@dataclass
class ChaosTarget:
    """Serves verify calls by their contract; each of its KV slots is accounted for.

    Attributes:
        texts: what it says.
        num_slots: tokens its KV pool holds.
        has_heads: whether it proposes tokens where that is asked for.
        has_beams: whether those are the nodes of a beam, as EAGLE's, and not decoding heads'.
        shares: whether some of each prompt may be in its cache already.
        held: requests by id.
        num_withheld: slots that the next call finds taken although they were told to be free.
    """

    texts: Texts
    num_slots: int
    has_heads: bool = False
    has_beams: bool = False
    shares: bool = False
    num_withheld: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    _forgotten: dict[str, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        held = sum(one.computed for one in self.held.values())
        return self.num_slots - held - sum(self._forgotten.values())

    def forget(self, request_id: str) -> None:
        """Lose a request; its slots are free once the scheduler has been told."""
        self._forgotten[request_id] = self.held.pop(request_id).computed

    def step(self, call: VerifyCall) -> VerifyResult:
        """Release, verify and prefill; raises `Violation` for a call that no target could serve."""
        for request_id in call.release:
            self.held.pop(request_id, None)
            self._forgotten.pop(request_id, None)
        named = [item.request_id for item in call.verify] + [chunk.request_id for chunk in call.prefill]
        require(len(set(named)) == len(named), "a verify call names a request twice")
        verdicts, prefills = [], []
        deferred: list[str] = []
        unknown: list[str] = []
        for item in call.verify:
            held = self.held.get(item.request_id)
            if held is None:
                unknown.append(item.request_id)
                continue
            num_output = len(held.tokens) - held.spec.prompt_len
            if item.tree is None and num_output >= held.spec.sampling.max_tokens:
                # The call before brought the last of them after this one was sent.
                verdicts.append(Verdict(request_id=item.request_id, tokens=[], num_accepted=0, nodes=[]))
                continue
            require(num_output < held.spec.sampling.max_tokens, f"{item.request_id} has all its tokens")
            if item.tree is None and not held.is_prefilled:
                deferred.append(item.request_id)  # the chunk that was to end its prompt had no slots
                continue
            tree = held.planned_tree(item.plan) if item.tree is None else item.tree
            self._check_tree(held, tree, item.request_id)
            if self.free - self.num_withheld < len(tree):
                deferred.append(item.request_id)
                continue
            verdicts.append(self._decide(item.request_id, held, tree, item.num_candidates))
        for chunk in call.prefill:
            num_cached = 0
            if chunk.spec is not None:
                require(chunk.request_id not in self.held, f"{chunk.request_id} was opened twice")
                self._check_spec(chunk.spec)
                num_cached = self._num_cached(chunk.spec)
                self.held[chunk.request_id] = Held(chunk.spec, list(chunk.spec.tokens), num_cached)
            held = self.held.get(chunk.request_id)
            if held is None:
                unknown.append(chunk.request_id)
                continue
            require(chunk.num_tokens >= 1, "an empty chunk of a prompt")
            if chunk.spec is None and held.is_prefilled:
                continue  # its prompt ended sooner than it seemed
            wanted = min(chunk.num_tokens, len(held.tokens) - held.computed)
            size = min(wanted, self.free - self.num_withheld)
            if size < min(wanted, _SMALLEST_CHUNK):
                deferred.append(chunk.request_id)
                if chunk.spec is not None:
                    del self.held[chunk.request_id]  # as the real one, which opens nothing without room
                continue
            held.computed += size
            verdict, computed = None, held.computed
            if held.computed == len(held.tokens):
                root = TokenTree.root_only(held.tokens[-1])
                verdict = self._decide(chunk.request_id, held, root, chunk.num_candidates)
            progress = PrefillProgress(
                request_id=chunk.request_id, num_computed=computed, num_cached=num_cached, verdict=verdict
            )
            prefills.append(progress)
        self.num_withheld = 0
        for request_id in unknown:
            self._forgotten.pop(request_id, None)
        require(self.free >= 0, "the KV pool holds more than it can")
        return VerifyResult(
            call_id=call.call_id,
            verdicts=verdicts,
            prefills=prefills,
            deferred=deferred,
            unknown=unknown,
            free_slots=self.free,
            forward_seconds=_FORWARD_S,
            seconds=1.1 * _FORWARD_S,
        )

    def _num_cached(self, spec: RequestSpec) -> int:
        """Tokens of a request found in the cache: of some requests many, and of some all but the last."""
        most = min(len(spec.tokens) - 1, self.free - self.num_withheld)
        return max(0, most * (sum(spec.tokens) % 3) // 2) if self.shares else 0

    def _check_spec(self, spec: RequestSpec) -> None:
        output = spec.tokens[spec.prompt_len :]
        right = self.texts.output(spec.tokens[: spec.prompt_len], len(output))
        require(output == right, f"{spec.request_id} was opened with tokens that the target never said")
        require(len(spec.tokens) <= MAX_TOKENS, f"{spec.request_id} was opened beyond the longest sequence")
        require(all(0 <= token < VOCAB for token in spec.tokens), "a token outside the vocabulary")

    @staticmethod
    def _check_tree(held: Held, tree: TokenTree, request_id: str) -> None:
        ready = held.is_prefilled and held.computed == len(held.tokens) - 1
        require(ready, f"{request_id} is verified before it is prefilled")
        try:
            tree.validate()
        except (ValueError, IndexError) as error:
            raise Violation(f"a malformed tree reached the target: {error}") from None
        require(tree.token[0] == held.tokens[-1], f"the root of {request_id} is not its last token")
        outside = int(tree.token.min()) < 0 or int(tree.token.max()) >= VOCAB
        require(not outside, "a draft token outside the vocabulary reached the target")
        # The call sent before the answer, and the next, whose drafts were there, may still have some.
        is_drafted = len(tree) > 1 and held.num_slow > 2
        require(not is_drafted, f"{request_id} is drafted for though its masks are slow")
        deepest = len(held.tokens) + int(tree.depth.max())
        require(deepest <= MAX_TOKENS, f"a draft of {request_id} goes beyond the longest sequence")

    def _decide(self, request_id: str, held: Held, tree: TokenTree, num_candidates: int) -> Verdict:
        spec = held.spec
        start = len(held.tokens) - spec.prompt_len
        text = self.texts.output(held.tokens[: spec.prompt_len], start + len(tree) + 8)
        nodes: list[int] = []
        node, count = 0, 1
        while True:
            token = text[start + count - 1]
            match = [child for child in tree.children(node).tolist() if tree.token[child] == token]
            if not match:
                break
            node = match[0]
            nodes.append(node)
            count += 1
        new = text[start : start + count]
        for index, token in enumerate(new):
            if token in spec.sampling.stop_token_ids or start + index + 1 >= spec.sampling.max_tokens:
                new = new[: index + 1]
                break
        held.tokens = held.tokens + new
        held.computed = len(held.tokens) - 1
        proposals = None
        if num_candidates and self.has_heads:
            guesses = text[start + len(new) : start + len(new) + 4]
            rows = np.array([[(guess + i) % VOCAB for i in range(num_candidates)] for guess in guesses])
            proposals = Proposals(
                position=len(held.tokens),
                token=rows.astype(np.int32),
                logp=np.tile(-0.3 - np.arange(num_candidates), (len(guesses), 1)).astype(np.float32),
                parent=np.zeros_like(rows, dtype=np.int32) if self.has_beams else None,
            )
        held.proposals = proposals
        held.num_slow += held.is_slow
        return Verdict(
            request_id=request_id,
            tokens=new,
            num_accepted=len(nodes),
            nodes=nodes,
            proposals=proposals,
            is_slow=held.is_slow,
        )


#: What kinds of drafters there are: accuracy and capabilities.
KINDS: dict[str, tuple[float, Capabilities]] = {
    "good": (
        0.9,
        Capabilities(
            kind="model",
            max_depth=8,
            max_width=3,
            has_probabilities=True,
            needs_prefill=True,
            vocab_size=VOCAB,
            max_tokens=MAX_TOKENS,
            num_parameters=1000,
        ),
    ),
    "short": (
        0.5,
        Capabilities(
            kind="model",
            max_depth=4,
            max_width=2,
            has_probabilities=True,
            needs_prefill=True,
            vocab_size=VOCAB,
            max_tokens=70,
            num_parameters=100,
        ),
    ),
    "lookup": (
        0.3,
        Capabilities(
            kind="prompt_lookup",
            max_depth=8,
            max_width=1,
            has_probabilities=False,
            needs_prefill=False,
            vocab_size=VOCAB,
            max_tokens=MAX_TOKENS,
        ),
    ),
    "heads": (
        0.7,
        Capabilities(
            kind="heads",
            max_depth=4,
            max_width=2,
            has_probabilities=True,
            needs_prefill=False,
            vocab_size=VOCAB,
            max_tokens=MAX_TOKENS,
            num_candidates=2,
            has_independent_layers=True,
        ),
    ),
}


@dataclass
class ChaosDrafter:
    """Drafts the right text with some accuracy; checks what it is told."""

    kind: str
    texts: Texts
    rng: random.Random
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return KINDS[self.kind][1]

    def draft(self, call: DraftCall) -> DraftResult:
        """By the contract of a draft call; raises `Violation` for what no drafter could serve."""
        for request_id in call.release:
            self.held.pop(request_id, None)
        named = [item.request_id for item in call.items]
        require(len(set(named)) == len(named), "a draft call names a request twice")
        drafts, unknown = [], []
        for item in call.items:
            if item.start == 0:
                if item.spec is None:
                    raise Violation(f"{item.request_id} was opened without a specification")
                self.held[item.request_id] = Held(item.spec, list(item.spec.tokens))
            held = self.held.get(item.request_id)
            if held is None or len(held.tokens) < item.start:
                unknown.append(item.request_id)
                continue
            if item.start:
                held.tokens = held.tokens[: item.start] + item.tokens.tolist()
            output = held.tokens[held.spec.prompt_len :]
            right = self.texts.output(held.tokens[: held.spec.prompt_len], len(output) + 8)
            require(output == right[: len(output)], f"a drafter was told wrong tokens of {item.request_id}")
            num_scored = 0 if item.spec is not None else len(item.tokens)
            drafts.append(
                Draft(
                    request_id=item.request_id,
                    tree=self._tree(held.tokens[-1], right[len(output) :], item.plan.depth, item.plan.width),
                    num_scored=num_scored,
                    num_agreed=sum(self.rng.random() < self._accuracy for _ in range(num_scored)),
                )
            )
        return DraftResult(call_id=call.call_id, drafts=drafts, unknown=unknown, seconds=0.002)

    @property
    def _accuracy(self) -> float:
        return KINDS[self.kind][0]

    def _tree(self, root: int, right: Sequence[int], depth: int, width: int) -> TokenTree:
        require(depth <= self.capabilities.max_depth, "a plan is deeper than its drafter")
        require(width <= self.capabilities.max_width, "a plan is wider than its drafter")
        token, parent, logp, depths = [root], [-1], [0.0], [0]
        best = 0
        for layer in range(1, depth + 1):
            is_right = self.rng.random() < self._accuracy
            guess = right[layer - 1] if is_right else self.rng.randrange(VOCAB)
            first = len(token)
            for rank in range(width):
                token.append((guess + rank) % VOCAB)
                parent.append(best)
                logp.append(logp[best] - 0.2 - rank)
                depths.append(layer)
            best = first
        return TokenTree.of(token, parent, logp, depths)
