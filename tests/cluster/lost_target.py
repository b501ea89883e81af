"""A target that dies again and again while it serves."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.events import RequestArrived, Verify, WorkerLost
from cluster.local import Completion, LocalEngine
from cluster.stream_messages import Submit
from verifier.proposing import Proposer
from verifier.verifier import Verifier


def generate(
    engine: LocalEngine, requests: Sequence[Submit], proposer: Proposer, every: int = 12
) -> dict[str, list[int]]:
    """Tokens of each request. With every so manieth verify call the target dies, and another comes up."""
    completions = {request.request_id: Completion() for request in requests}
    for request in requests:
        engine._handle(RequestArrived(request, "local"))
    num_verified = 0
    while engine._actions:
        action = engine._actions.popleft()
        if isinstance(action, Verify):
            num_verified += 1
            if num_verified % every == 0:
                engine._handle(WorkerLost("verifier"))
                running = [r for r in engine.core.requests.values() if r.output]
                assert all(request.proposals is None for request in running)
                engine.target.verifier = Verifier(engine.target.runner, proposer=proposer)
                engine._handle(engine.target.ready())
                continue
        engine._perform(action, completions)
    return {name: done.tokens for name, done in completions.items()}
