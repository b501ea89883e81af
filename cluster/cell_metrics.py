"""Prometheus metrics of a cell, kept by the shell so that the scheduler core stays pure."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.core import SchedulerCore
from cluster.drafter_pool import DrafterPool
from cluster.stream_messages import Objective, Receipt

# Seconds. vLLM's buckets for TTFT; finer ones for time per token, where objectives are a few milliseconds.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
TPOT_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.3, 1)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
STEP_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512)


class CellMetrics:
    """One registry per cell; raw counters only, rates are derived by queries."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "flotilla_requests", "Requests ended.", ["finish_reason", "tier"], registry=self.registry
        )
        self._rejected = Counter(
            "flotilla_requests_rejected", "Requests refused.", ["code"], registry=self.registry
        )
        self._ttft = self._histogram("flotilla_time_to_first_token_seconds", "TTFT.", ["tier"], TTFT_BUCKETS)
        self._tpot = self._histogram(
            "flotilla_time_per_output_token_seconds", "Mean TPOT of a request.", ["tier"], TPOT_BUCKETS
        )
        self._e2e = self._histogram(
            "flotilla_e2e_latency_seconds", "Arrival to last token.", ["tier"], E2E_BUCKETS
        )
        self._slo = Counter(
            "flotilla_slo_requests",
            "Requests with an objective, by outcome.",
            ["objective", "attained", "tier"],
            registry=self.registry,
        )
        self._goodput = Counter(
            "flotilla_goodput_tokens",
            "Output tokens of requests that attained their TPOT objective.",
            ["tier"],
            registry=self.registry,
        )
        self._step = self._histogram("flotilla_step_seconds", "Time by phase.", ["phase"], STEP_BUCKETS)
        self._corrections = Gauge(
            "flotilla_cost_model_correction_ratio",
            "Recent forward time over what the cost profile says.",
            ["model"],
            registry=self.registry,
        )
        self._restarts = Counter(
            "flotilla_worker_restarts", "Lost workers made again.", ["worker"], registry=self.registry
        )
        self._gauges: dict[str, Gauge] = {}
        self._totals: dict[str, Counter] = {}
        self._seen: dict[str, float] = {}
        self._drafter_tokens = Counter(
            "flotilla_drafter_tokens",
            "Tokens by kind of drafter.",
            ["drafter", "outcome"],
            registry=self.registry,
        )
        self._served = Gauge(
            "flotilla_drafter_requests",
            "Requests served now, by drafter instance.",
            ["drafter", "instance"],
            registry=self.registry,
        )
        self._prices = Gauge(
            "flotilla_drafter_capacity_price",
            "Tokens per second that one more place on drafters of the kind would have brought.",
            ["drafter"],
            registry=self.registry,
        )
        self._first_drafts = Counter(
            "flotilla_drafter_switch_first_drafts",
            "Switches after which the new drafter drafted, by whether its cache had been built ahead.",
            ["prepared"],
            registry=self.registry,
        )
        self._switch_wait = Counter(
            "flotilla_drafter_switch_wait_seconds",
            "Seconds from those switches to the first draft.",
            ["prepared"],
            registry=self.registry,
        )

    def restarted(self, worker: str) -> None:
        """A lost worker is made again."""
        self._restarts.labels(worker).inc()

    def rejected(self, code: str) -> None:
        """A request was refused."""
        self._rejected.labels(code).inc()

    def finished(self, reason: str, tier: str, objective: Objective, receipt: Receipt) -> None:
        """A request ended."""
        self._requests.labels(reason, tier).inc()
        if reason == "cancelled":
            return
        self._e2e.labels(tier).observe(receipt.e2e_ms / 1e3)
        if receipt.ttft_ms is not None:
            self._ttft.labels(tier).observe(receipt.ttft_ms / 1e3)
            if objective.ttft_ms is not None:
                self._slo.labels("ttft", str(receipt.ttft_ms <= objective.ttft_ms).lower(), tier).inc()
        if receipt.tpot_ms is not None:
            self._tpot.labels(tier).observe(receipt.tpot_ms / 1e3)
            if objective.tpot_ms is not None:
                attained = receipt.tpot_ms <= objective.tpot_ms
                self._slo.labels("tpot", str(attained).lower(), tier).inc()
                if attained:
                    self._goodput.labels(tier).inc(receipt.num_output_tokens)

    def phase(self, phase: str, seconds: float) -> None:
        """One phase of one step: "draft", "verify" or "schedule"."""
        self._step.labels(phase).observe(seconds)

    def render(self, core: SchedulerCore) -> str:
        """The exposition text, with the scheduler's counters brought up to date."""
        self._gauge("flotilla_requests_running", "Requests decoded now.", len(core.running))
        self._gauge("flotilla_requests_waiting", "Requests queued.", len(core.waiting))
        num_slots = core.verifier.num_slots if core.verifier else 0
        used = 1.0 - core.free_slots / num_slots if num_slots else 0.0
        self._gauge("flotilla_kv_cache_usage_ratio", "Share of KV slots in use.", used)
        self._gauge("flotilla_drafters_ready", "Drafters alive.", len(core.pool.drafters))
        for model, factor in core.cost.corrections.items():
            self._corrections.labels(model).set(factor)
        totals = core.totals
        self._count("flotilla_steps", "Verify steps.", totals.steps)
        self._count("flotilla_key_tokens", "Keys the target's attention read.", totals.key_tokens)
        self._count("flotilla_padded_tokens", "Keys of padding it read besides.", totals.padded_tokens)
        self._count("flotilla_generation_tokens", "Committed tokens.", totals.committed_tokens)
        self._count("flotilla_drafted_tokens", "Candidate tokens drafted.", totals.drafted_tokens)
        self._count("flotilla_verified_tokens", "Draft tokens verified.", totals.verified_tokens)
        self._count("flotilla_accepted_tokens", "Draft tokens accepted.", totals.accepted_tokens)
        self._count("flotilla_preemptions", "Requests preempted.", totals.preemptions)
        self._count("flotilla_draft_timeouts", "Drafts not waited for.", totals.draft_timeouts)
        self._render_pool(core.pool)
        self._count(
            "flotilla_cached_prompt_tokens",
            "Prompt tokens from shared prefixes.",
            totals.cached_prompt_tokens,
        )
        for outcome, by_drafter in (
            ("verified", totals.verified_by_drafter),
            ("accepted", totals.accepted_by_drafter),
        ):
            for drafter, tokens in by_drafter.items():
                grown = self._grown(f"{drafter} {outcome}", tokens)
                self._drafter_tokens.labels(drafter, outcome).inc(grown)
        return generate_latest(self.registry).decode()

    def _render_pool(self, pool: DrafterPool) -> None:
        switches = pool.switching.totals
        self._count("flotilla_drafter_switches", "Requests that left their drafter.", switches.switches)
        self._count(
            "flotilla_drafter_switches_prepared",
            "Switches to drafters that had next to nothing to read.",
            switches.prepared,
        )
        self._count(
            "flotilla_drafter_preparations_wasted", "Caches built ahead and not used.", switches.wasted
        )
        self._count(
            "flotilla_drafter_rebuild_avoided_seconds",
            "Seconds of reading done before the switch.",
            switches.avoided_s,
        )
        self._count(
            "flotilla_drafter_explorations",
            "Readings by drafters for the sake of their scores alone.",
            pool.explorer.num_explorations,
        )
        for was_prepared in (False, True):
            label = str(was_prepared).lower()
            first_drafts, wait_s = switches.first_drafts[was_prepared], switches.wait_s[was_prepared]
            self._first_drafts.labels(label).inc(self._grown(f"first drafts {label}", first_drafts))
            self._switch_wait.labels(label).inc(self._grown(f"switch wait {label}", wait_s))
        for gauge in (self._served, self._prices):
            gauge.clear()  # instances and kinds come and go
        for drafter in pool.drafters.values():
            self._served.labels(drafter.kind, drafter.name).set(len(drafter.served))
        for kind, price in pool.selector.prices().items():
            self._prices.labels(kind).set(price)

    def _histogram(self, name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, registry=self.registry)
        self._gauges[name].set(value)

    def _count(self, name: str, text: str, total: float) -> None:
        if name not in self._totals:
            self._totals[name] = Counter(name, text, registry=self.registry)
        self._totals[name].inc(self._grown(name, total))

    def _grown(self, key: str, total: float) -> float:
        grown = total - self._seen.get(key, 0.0)
        self._seen[key] = total
        return max(0.0, grown)
