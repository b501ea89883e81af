"""A scheduler that sends calls at random, some before the one before is answered."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from tests.verifier.target import Client, random_tree
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult

# What may go on before its token is known.
simple = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 14),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (2, 3, 4, 5, 6, 7, 8, 9)]),
)


class Scheduler:
    """Sends calls at random, some before the one before is answered: plain steps, and other micro-batches.

    Of requests in calls that wait for nothing some ask for `proposals`, as of `VerifyItem`.
    """

    def __init__(
        self, clients: list[Client], rng: random.Random, leaving: float, proposals: tuple[int, int] = (0, 0)
    ) -> None:
        self._proposals = proposals
        self._clients = {client.spec.request_id: client for client in clients}
        self._rng, self._leaving = rng, leaving
        self._sent: deque[VerifyCall] = deque()
        self._gone: dict[int, set[str]] = {}
        self._to_release: list[str] = []
        self._last_id = 0

    def next(self) -> VerifyCall | None:
        """The call that is computed next; None once everybody has all tokens."""
        if not self._sent and not self._send(list(self._clients.values())):
            return None
        return self._sent[0]

    def waiting(self) -> VerifyCall | None:
        """The call after the one that is computed, if it has been sent by now."""
        if len(self._sent) > 1:
            return self._sent[1]
        at_work = self._sent[0]
        busy = self._named(at_work)
        others = [client for name, client in self._clients.items() if name not in busy]
        if self._rng.random() < 0.2 and self._send(others):
            return self._sent[1]
        # Who has a whole prompt in it is believed to be ready after it.
        whole = {item.request_id for item in at_work.prefill if item.num_tokens == 100}
        ready = [self._clients[name] for name in sorted(busy)]
        ready = [
            c for c in ready if c.stage == "ready" or (c.stage == "prefill" and c.spec.request_id in whole)
        ]
        # Who has a part of a prompt in it may have the next one, which may turn out to be none.
        parts = {item.request_id for item in at_work.prefill} - whole
        reading = [self._clients[name] for name in sorted(parts) if self._clients[name].stage == "prefill"]
        if self._rng.random() < 0.6 and (ready or reading):
            # Who surely ends with the answer is left out by a scheduler; the verifier takes it nevertheless.
            going_on = self._rng.sample(ready, self._rng.randint(min(1, len(ready)), len(ready)))
            items = [VerifyItem(request_id=client.spec.request_id) for client in going_on]
            unread = [client for client in others if client.stage != "ready" and not client.done]
            prefill = [self._chunk(client) for client in unread if self._rng.random() < 0.3]
            prefill += [self._chunk(client) for client in reading if self._rng.random() < 0.7]
            leaving = [c for c in ready if c not in going_on and self._rng.random() < self._leaving]
            for client in leaving:
                self._leave(client)
            self._sent.append(self._call(verify=items, prefill=prefill))
            return self._sent[1]
        return None

    def take(self, result: VerifyResult) -> None:
        """The answer to the call that `next` returned."""
        call = self._sent.popleft()
        assert result.call_id == call.call_id
        gone = self._gone.pop(call.call_id, set())
        # Nobody waits for a verdict of who was believed to be ready, and was not.
        verdicts = [v for v in result.verdicts if self._clients[v.request_id].stage == "ready"]
        verdicts += [p.verdict for p in result.prefills if p.verdict is not None]
        for verdict in verdicts:
            client = self._clients[verdict.request_id]
            if verdict.request_id not in gone and not client.done:
                client.take(verdict)
                client.stage = "ready"
        assert not set(result.unknown) - gone
        held = [c for c in self._clients.values() if c.stage != "closed"]
        for client in held:
            name = client.spec.request_id
            is_stuck = name in result.deferred and name not in gone
            in_flight = any(name in self._named(sent) for sent in self._sent)
            if (client.done and not in_flight) or is_stuck:
                self._leave(client)

    def _send(self, clients: list[Client]) -> bool:
        rng = self._rng
        going_on = [client for client in clients if not client.done]
        if not going_on:
            return False
        for client in going_on:
            if client.stage != "closed" and rng.random() < self._leaving:
                self._leave(client)
        verify, prefill = [], []
        for client in rng.sample(going_on, rng.randint(1, len(going_on))):
            name = client.spec.request_id
            if client.stage == "ready":
                root = [*client.spec.tokens, *client.output][-1]
                style = rng.choice(["perfect", "random", *["none"] * 6])
                future = client.expected[len(client.output) :]
                tree = None if style == "none" else random_tree(rng, root, future, style)
                width, depth = self._proposals if rng.random() < 0.3 else (0, None)
                verify.append(VerifyItem(request_id=name, tree=tree, num_candidates=width, num_heads=depth))
            else:
                prefill.append(self._chunk(client))
        self._sent.append(self._call(verify=verify, prefill=prefill))
        return True

    def _chunk(self, client: Client) -> PrefillItem:
        spec = client.reopening() if client.stage == "closed" else None
        client.stage = "prefill"
        num_tokens = self._rng.choice([3, 100])
        return PrefillItem(request_id=client.spec.request_id, num_tokens=num_tokens, spec=spec)

    def _call(self, verify: list[VerifyItem], prefill: list[PrefillItem] | None = None) -> VerifyCall:
        self._last_id += 1
        release, self._to_release = self._to_release, []
        return VerifyCall(call_id=self._last_id, verify=verify, prefill=prefill or [], release=release)

    def _leave(self, client: Client) -> None:
        """What calls on their way decide of it is for nobody."""
        client.stage = "closed"
        self._to_release.append(client.spec.request_id)
        for call in self._sent:
            self._gone.setdefault(call.call_id, set()).add(client.spec.request_id)

    def _named(self, call: VerifyCall) -> set[str]:
        return {item.request_id for item in call.verify} | {item.request_id for item in call.prefill}
