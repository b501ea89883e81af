"""Real schedulers, each with a real verifier, and a front end between them: one process, virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import msgspec

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import (
    Action,
    Cancelled,
    CellDraining,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    Reject,
    RequestArrived,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.policies.registry import make_policy
from cluster.stream_messages import Rejected, Submit, TokenEvent
from deployments.pending_requests import PASSING, Pending
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.cluster.simulated import SimulatedDrafter
from tests.verifier import target as tiny
from tests.verifier.grammars import make_grammars
from tests.verifier.target import VOCAB, Target, random_tree
from verifier.messages import TokenLogprobs, VerifyCall, VerifyResult
from verifier.verifier import Verifier

MAX_TOKENS = 160
with mock.patch.object(tiny, "MAX_TOKENS", MAX_TOKENS):
    TARGET = Target()
GRAMMARS = make_grammars()
_CALLS, _RESULTS = Decoder(VerifyCall), Decoder(VerifyResult)


class Texts:
    """What the target says alone after each prompt, for drafters that know it in part."""

    def __init__(self) -> None:
        self._known: list[tuple[list[int], list[int]]] = []

    def add(self, prompt: list[int], output: list[int]) -> None:
        self._known.append((prompt, output))

    def after(self, tokens: list[int]) -> list[int]:
        for prompt, output in self._known:
            num_output = len(tokens) - len(prompt)
            if num_output >= 0 and [*prompt, *output[:num_output]] == tokens:
                return output[num_output:]
        return []


class Drafter(SimulatedDrafter):
    """Chains and trees, right or wrong."""

    texts: Texts

    def _tree(self, tokens: list[int], depth: int, width: int) -> TokenTree:
        future = self.texts.after(tokens)[:depth]
        style = self.rng.choice(["perfect", "chain"] if width == 1 else ["perfect", "random", "adversarial"])
        tree = random_tree(self.rng, tokens[-1], future, style if self.rng.random() < 0.9 else "chain")
        return tree.subset((tree.depth <= depth).nonzero()[0])


class RealCell:
    """A scheduler and its target; calls and answers go over the wire's encoding."""

    def __init__(self, name: str, front_end: FrontEnd, texts: Texts, config: FlotillaConfig, num_slots: int):
        self.name, self.config, self.num_slots = name, config, num_slots
        self._front_end, self._texts, self._rng = front_end, texts, front_end.rng
        self.now = 0.0
        self.start(with_target=True)

    def start(self, *, with_target: bool) -> None:
        """A new scheduler: the former one is gone; with its target, or with one that waited for the next."""
        if with_target:
            self.verifier = Verifier(TARGET.runner(self.num_slots), grammars=GRAMMARS)
        else:
            self.verifier.forget_all(with_prefixes=False)
        self.core = SchedulerCore(self.config, make_policy(self.config.policy), CostModel(DEFAULT_PROFILE))
        self.answers: list[Event] = []
        self.sent: list[TokenEvent | Rejected] = []  # on its way to the front end, and lost with this
        self.drafters: dict[str, Drafter] = {}
        self.handle(VerifierReady(self.num_slots, MAX_TOKENS, VOCAB))
        for name in ("good", "poor"):
            self.start_drafter(name)

    def start_drafter(self, name: str) -> None:
        drafter = self.drafters[name] = Drafter(0.8, self._rng)
        drafter.texts = self._texts
        drafter.capabilities = msgspec.structs.replace(drafter.capabilities, vocab_size=VOCAB)
        self.handle(DrafterReady(name, drafter.capabilities, 6))

    def lose_drafter(self, name: str) -> None:
        self.answers = [a for a in self.answers if not (isinstance(a, DraftDone) and a.drafter == name)]
        self.handle(WorkerLost(name))
        self.start_drafter(name)

    def lose_target(self) -> None:
        self.answers = [answer for answer in self.answers if isinstance(answer, DraftDone)]
        self.handle(WorkerLost("verifier"))
        self.verifier = Verifier(TARGET.runner(self.num_slots), grammars=GRAMMARS)
        self.handle(VerifierReady(self.num_slots, MAX_TOKENS, VOCAB))

    def drain(self) -> None:
        """Give back first who waits, then who runs; another scheduler takes requests after that."""
        self.handle(CellDraining())
        for _ in range(self._rng.randrange(5)):
            self.answer_one()
        self.handle(CellDraining(with_running=True))
        while self.answer_one():
            pass
        self.deliver()
        self.start(with_target=False)

    def handle(self, event: Event) -> None:
        self.now += 0.003
        self._act(self.core.handle(event, self.now))
        self._act(self.core.reflect())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Draft(name, call):
                    self.answers.append(DraftDone(name, self.drafters[name].draft(call)))
                case Verify(call):
                    result = self.verifier.step(_CALLS.decode(encode(call)))
                    self.answers.append(VerifyDone(_RESULTS.decode(encode(result))))
                case Emit(_, events):
                    self.sent += events
                case Reject(_, rejection):
                    self.sent.append(rejection)

    def deliver(self) -> bool:
        """What was sent arrives at the front end; whether there was anything."""
        sent, self.sent = self.sent, []
        for message in sent:
            if isinstance(message, Rejected):
                self._front_end.refused(message)
            else:
                self._front_end.told(message)
        return bool(sent)

    def answer_one(self) -> bool:
        """Hand over an answer: each worker's in their order, those of different workers in any."""
        first: dict[str, int] = {}
        for place, answer in enumerate(self.answers):
            first.setdefault(answer.drafter if isinstance(answer, DraftDone) else "target", place)
        if not first:
            return False
        self.handle(self.answers.pop(self._rng.choice(sorted(first.values()))))
        return True


class Answer(NamedTuple):
    """What a client was given of its request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    ends: list[str]


class FrontEnd:
    """Sends requests to either cell, and again when it was lost or gave them back; keeps what clients got."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pending: dict[str, Pending] = {}
        self.answers: dict[str, Answer] = {}
        self.num_resubmitted = self.num_accepted = 0

    def submit(self, request: Submit, cell: RealCell) -> None:
        self.answers[request.request_id] = Answer([], [], [], [])
        pending = self.pending[request.request_id] = Pending(request, [])
        self._send(pending, cell)

    def _send(self, pending: Pending, cell: RealCell) -> None:
        pending.ask_all()
        message = pending.next_life(cell.name)
        self.num_resubmitted += pending.sent > 1
        if message is not None:
            cell.handle(
                RequestArrived(msgspec.structs.replace(message, output=[*message.output]), "front end")
            )
        self._take(pending)

    def place_all(self, cells: Sequence[RealCell]) -> bool:
        """Send those that are nowhere; whether there were any."""
        homeless = [pending for pending in self.pending.values() if not pending.cell]
        for pending in homeless:
            self._send(pending, self.rng.choice(cells))
        return bool(homeless)

    def lost(self, cell: RealCell) -> None:
        for pending in self.pending.values():
            if pending.cell == cell.name:
                pending.lost()

    def leave(self, request_id: str, cells: Sequence[RealCell]) -> None:
        """Its client is gone."""
        pending = self.pending.pop(request_id)
        for cell in cells:
            if cell.name == pending.cell:
                cell.handle(Cancelled(pending.wire_id))

    def told(self, event: TokenEvent) -> None:
        pending = self._find(event.request_id)
        if pending is not None:
            pending.accept(event)
            self._take(pending)

    def refused(self, rejection: Rejected) -> None:
        pending = self._find(rejection.request_id)
        if pending is not None:
            assert rejection.code in PASSING, rejection
            pending.refused(rejection)
            pending.is_promised = True

    def _find(self, wire_id: str) -> Pending | None:
        pending = self.pending.get(wire_id.partition("~")[0])
        return pending if pending is not None and pending.wire_id == wire_id else None

    def _take(self, pending: Pending) -> None:
        name = pending.request.request_id
        answer = self.answers[name]
        while not pending.events.empty():
            event = pending.events.get_nowait()
            assert isinstance(event, TokenEvent), event
            assert not answer.ends, "an event after the end"
            assert event.position == len(answer.tokens)
            self.num_accepted += event.num_accepted
            answer.tokens.extend(event.tokens)
            answer.logprobs.extend(event.logprobs)
            answer.prompt_logprobs.extend(event.prompt_logprobs)
            if event.finish_reason is not None:
                answer.ends.append(event.finish_reason)
                self.pending.pop(name, None)
