"""What is measured of servers side by side."""

from __future__ import annotations

from benchmarks import vllm_peer
from benchmarks.engine import Deck
from benchmarks.http_engine import HttpEngine
from benchmarks.prompts import Prompt
from tests.benchmarks.fake_server import FakeServer, serving_in_a_thread


def test_latencies_are_of_no_warm_ups() -> None:
    """The first requests that a server gets are slow, and with one stream one of them is most of a p99."""
    server = FakeServer(lambda body: ["a "] * body["max_tokens"])
    prompts = [Prompt(domain, text="x", max_tokens=3) for domain in ("code", "chat") for _ in range(20)]
    deck = Deck(prompts, [[n, n + 1] for n in range(40)], bound=None, seed=0)
    options = vllm_peer.VllmOptions(modes=("base",), concurrencies=(1, 4), per_domain=2, rounds=3)
    with serving_in_a_thread(server) as url:
        engines = [HttpEngine(name, url, "fake") for name in ("vllm base", "flotilla")]
        vllm_peer.measure(engines, deck, options, (), lambda: None)
        for engine in engines:
            engine.close()
    # Two classes, three rounds, two requests each, or as many as there are streams; five warm-ups.
    assert [{at: len(of) for at, of in engine.outcomes.items()} for engine in engines] == [{1: 12, 4: 24}] * 2
    assert len(server.bodies) == 2 * (5 + 36)
    assert [(one["engine"], one["concurrency"]) for one in vllm_peer.latencies(engines)] == [
        (name, streams) for name in ("vllm base", "flotilla") for streams in (1, 4)
    ]
