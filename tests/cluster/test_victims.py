"""Who is preempted where keys' memory runs out: between tenants no client's own word counts."""

from __future__ import annotations

from cluster.admission import victim
from cluster.requests import Request
from cluster.stream_messages import Submit, Tenant
from cluster.tier_config import TierConfig
from engine.sampling_params import SamplingParams

TIERS = {"batch": TierConfig(priority=10)}


def request(order: int, label: str, priority: int = 0, tier: str = "default") -> Request:
    submit = Submit(
        request_id=f"r{order}",
        prompt=[1],
        sampling=SamplingParams(max_tokens=10),
        priority=priority,
        tier=tier,
        tenant=Tenant(label=label),
    )
    return Request(submit, "front-end", 0.0, order)


def preempted(*running: Request) -> str:
    return victim(running, 1.0, 0.01, TIERS).request_id


def test_a_priority_named_by_one_tenant_says_nothing_of_others() -> None:
    """One that counted its own down took everybody else's memory."""
    honest = request(0, "b")
    greedy = [request(number, "a", priority=-(1 << 31)) for number in range(1, 60)]
    assert preempted(honest, *greedy) == "r59"
    assert preempted(*greedy, honest) == "r59"


def test_among_its_own_a_tenant_s_word_counts() -> None:
    assert preempted(request(0, "a", priority=5), request(1, "a"), request(2, "a")) == "r0"
    # Without keys all are of one tenant.
    assert preempted(request(0, "", priority=5), request(1, ""), request(2, "")) == "r0"


def test_between_tenants_the_priority_of_tiers_counts() -> None:
    urgent = [request(number, "a") for number in range(1, 4)]
    assert preempted(request(0, "b", priority=10, tier="batch"), *urgent) == "r0"
    assert preempted(request(0, "b", priority=-5, tier="batch"), *urgent) == "r0"
