"""Prometheus metrics of a cell, kept by the shell so that the scheduler core stays pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import PER_CALL
from cluster.metric_catalog import CAUSES, OBJECTIVES, REFUSALS
from cluster.metric_set import MetricSet
from cluster.placement import instance_names
from cluster.requests import GRAMMAR
from cluster.selector_regret import estimated_regret
from cluster.stream_messages import Receipt, Submit, Terms
from cluster.violations import DecodeTimes, causes, missed
from verifier.messages import VerifyCall, VerifyResult

_COUNTERS = {
    "flotilla_steps_total": "steps",
    "flotilla_iterations_total": "iterations",
    "flotilla_key_tokens_total": "key_tokens",
    "flotilla_padded_tokens_total": "padded_tokens",
    "flotilla_generation_tokens_total": "committed_tokens",
    "flotilla_drafted_tokens_total": "drafted_tokens",
    "flotilla_verified_tokens_total": "verified_tokens",
    "flotilla_accepted_tokens_total": "accepted_tokens",
    "flotilla_preemptions_total": "preemptions",
    "flotilla_draft_timeouts_total": "draft_timeouts",
}
_TIMES = (
    "flotilla_time_to_first_token_seconds",
    "flotilla_time_per_output_token_seconds",
    "flotilla_e2e_latency_seconds",
    "flotilla_queue_time_seconds",
    "flotilla_prefill_time_seconds",
    "flotilla_decode_time_seconds",
)


class CellMetrics:
    """The metrics of one cell.

    Events are counted as they come, a few increments each; what the scheduler counts itself is read in
    `refresh`, when somebody asks.

    Args:
        wanted: kinds of drafters that are to be there; those ever seen, if it is not known.

    Attributes:
        set: the metrics; `set.constant` says which cell it is.
    """

    def __init__(self, wanted: Callable[[], Collection[str]] | None = None) -> None:
        self._wanted = wanted
        self.set = MetricSet("cell")
        self._prefill_s = 0.0
        # Of calls that are not answered: share of their tokens that are prompts.
        self._prefill_share: dict[int, float] = {}
        self._step = self.set.histogram("flotilla_step_seconds")
        self._verify_call = self.set.histogram("flotilla_verify_call_seconds")
        self._decoded = self.set.histogram("flotilla_batch_requests", "decode")
        self._prefilled = self.set.histogram("flotilla_batch_requests", "prefill")
        self._decode_tokens = self.set.counter("flotilla_step_tokens_total", "decode")
        self._prefill_tokens = self.set.counter("flotilla_step_tokens_total", "prefill")
        self._budget = self.set.counter("flotilla_step_budget_tokens_total")
        self._kinds: set[str] = set()

    def configured(self, config: FlotillaConfig, model: str) -> None:
        """What is served how; whatever can be missed later is there from now on, at zero."""
        names = (config.policy.name, config.selector.name, config.scheduler.batching)
        self.set.show("flotilla_config_info", [((model, *names), 1)])
        self._kinds.update(drafter.name for drafter in config.drafters)
        for kind in self._kinds:
            for outcome in ("drafted", "verified", "accepted"):
                self.set.counter("flotilla_drafter_tokens_total", kind, outcome)
            self.set.histogram("flotilla_draft_call_seconds", kind)
        for drafter in config.drafters:
            for name in instance_names(drafter.name, drafter.replicas):
                self.set.counter("flotilla_worker_restarts_total", name)
        for objective in OBJECTIVES:
            self.set.histogram("flotilla_admission_prediction_ratio", objective)
        self.set.counter("flotilla_worker_restarts_total", "verifier")
        for adapter in ("", *(adapter.name for adapter in config.target.adapters)):
            self.set.counter("flotilla_adapter_requests_total", adapter)
        for tier in ("default", *config.tiers):
            for code in REFUSALS:
                self.set.counter("flotilla_requests_rejected_total", code, tier)
            for reason in ("stop", "length", "cancelled", "invalid", "error"):
                self.set.counter("flotilla_requests_total", reason, tier)
            for name in _TIMES:
                self.set.histogram(name, tier)
            self.set.counter("flotilla_goodput_requests_total", tier)
            self.set.counter("flotilla_goodput_tokens_total", tier)
            for decision in ("accepted", "downgraded", "rejected"):
                self.set.counter("flotilla_admission_decisions_total", decision, tier)
            for objective in OBJECTIVES:
                for cause in CAUSES:
                    self.set.counter("flotilla_slo_violations_total", objective, cause, tier)
            for objective in (*OBJECTIVES, "all"):
                for attained in ("true", "false"):
                    self.set.counter("flotilla_slo_requests_total", objective, attained, tier)

    def restarted(self, worker: str) -> None:
        """A lost worker is made again."""
        self.set.counter("flotilla_worker_restarts_total", worker).inc()
        if worker == "verifier":
            self._prefill_share.clear()

    # Steps

    def drafted(self, kind: str, seconds: float, num_drafted: int) -> None:
        """A drafter of this kind drafted so many tokens in so many seconds."""
        self.set.histogram("flotilla_draft_call_seconds", kind).observe(seconds)
        self.set.counter("flotilla_drafter_tokens_total", kind, "drafted").inc(num_drafted)

    def verify_sent(self, call: VerifyCall, core: SchedulerCore) -> None:
        """A call goes to the target."""
        num_decoded, num_prefilled = len(call.verify), len(call.prefill)
        sent = core.verify_calls.outstanding
        num_prompt = sum(item.num_tokens for item in call.prefill) if num_prefilled else 0
        num_rows = sent.num_tokens if sent is not None else num_prompt
        self._prefill_share[call.call_id] = num_prompt / num_rows if num_rows else 0.0
        if num_prefilled:
            self._prefilled.observe(num_prefilled)
            self._prefill_tokens.inc(num_prompt)
        if num_decoded:
            self._decoded.observe(num_decoded)
            self._decode_tokens.inc(num_rows - num_prompt)
            self._budget.inc(core.config.policy.verify_budget or core.cost.knee(num_decoded))

    def verified(self, result: VerifyResult, elapsed_s: float | None) -> None:
        """The target answered; `elapsed_s` since its answer before, None if it was idle between."""
        self._verify_call.observe(result.seconds)
        if elapsed_s is not None:
            self._step.observe(elapsed_s)
        self._prefill_s += self._prefill_share.pop(result.call_id, 0.0) * result.forward_seconds

    def decode_times(self, core: SchedulerCore) -> DecodeTimes:
        """Running totals, of which a request's decoding is the part between its first and last token."""
        totals = core.totals
        return DecodeTimes(totals.step_draft_s, totals.forward_s - self._prefill_s, self._prefill_s)

    # Requests

    def admitted(self, asked: Submit, served: Submit) -> None:
        """A request was taken; what it asked for, and on which terms."""
        decision = "accepted" if served.objective == asked.objective else "downgraded"
        self.set.counter("flotilla_admission_decisions_total", decision, asked.tier).inc()

    def rejected(self, code: str, tier: str) -> None:
        """A request was refused."""
        self.set.counter("flotilla_requests_rejected_total", code, tier).inc()
        if code != "draining":  # given back to its front end, which sends it to another cell
            self.set.counter("flotilla_admission_decisions_total", "rejected", tier).inc()

    def finished(
        self, reason: str, submit: Submit, receipt: Receipt, times: DecodeTimes, core: SchedulerCore
    ) -> None:
        """A request ended.

        Args:
            reason: finish reason; `cancelled` only if its client gave up on it, `invalid` for errors of the
                client's.
            submit: what was asked for.
            receipt: what came of it.
            times: what the cell did while it was decoded.
            core: who served it.
        """
        terms = receipt.terms or Terms(objective=submit.objective, tier=submit.tier, priority=submit.priority)
        tier = terms.tier
        self.set.counter("flotilla_requests_total", reason, tier).inc()
        self.set.counter("flotilla_adapter_requests_total", submit.adapter).inc()
        if receipt.ttft_ms is not None:
            self.set.counter("flotilla_prompt_tokens_total").inc(receipt.num_prompt_tokens)
            self.set.counter("flotilla_prefix_cache_query_tokens_total").inc(receipt.num_prompt_tokens)
            self.set.counter("flotilla_prefix_cache_hit_tokens_total").inc(receipt.num_cached_tokens)
        if reason in ("cancelled", "invalid"):
            return
        is_resumed = bool(submit.output)
        # Of a front end of an earlier version: when its first token came this cell does not know.
        is_known = not is_resumed or submit.resumed is not None
        self._observe_times(tier, receipt, is_resumed=is_resumed, is_known=is_known)
        misses = missed(terms.objective, receipt)
        if reason == "error":  # its client got no answer, however soon the first tokens came
            asked = (name for name in OBJECTIVES if getattr(terms.objective, f"{name}_ms") is not None)
            misses = dict.fromkeys(asked, True)
        elif not is_known:
            misses = {name: is_missed for name, is_missed in misses.items() if name == "tpot"}
        elif not is_resumed:
            has_all = reason == "length" and submit.assumed_tokens is None
            self._compare_with_prediction(receipt, has_all=has_all)
        for objective, is_missed in misses.items():
            self.set.counter("flotilla_slo_requests_total", objective, _flag(not is_missed), tier).inc()
        if misses:
            attained = not any(misses.values())
            self.set.counter("flotilla_slo_requests_total", "all", _flag(attained), tier).inc()
            if attained:
                self.set.counter("flotilla_goodput_requests_total", tier).inc()
                self.set.counter("flotilla_goodput_tokens_total", tier).inc(
                    receipt.num_output_tokens - len(submit.output)
                )
            else:
                if reason == "error":
                    found = dict.fromkeys(misses, "other")
                else:
                    found = causes(terms.objective, receipt, times, self._usual(core))
                    if is_resumed and "ttft" in found:
                        found["ttft"] = "other"  # it was had from another cell, for whatever reason
                for objective in [name for name, is_missed in misses.items() if is_missed]:
                    self.set.counter("flotilla_slo_violations_total", objective, found[objective], tier).inc()

    def _observe_times(self, tier: str, receipt: Receipt, *, is_resumed: bool, is_known: bool) -> None:
        observed = {
            "flotilla_queue_time_seconds": receipt.queue_ms,
            "flotilla_time_per_output_token_seconds": receipt.tpot_ms,
        }
        if is_known:
            observed["flotilla_e2e_latency_seconds"] = receipt.e2e_ms
            observed["flotilla_time_to_first_token_seconds"] = receipt.ttft_ms
        if receipt.ttft_ms is not None:
            if not is_resumed:  # else it was read by another cell before its first token
                observed["flotilla_prefill_time_seconds"] = max(0.0, receipt.ttft_ms - receipt.queue_ms)
            observed["flotilla_decode_time_seconds"] = max(0.0, receipt.e2e_ms - receipt.ttft_ms)
        for name, value_ms in observed.items():
            if value_ms is not None:
                self.set.histogram(name, tier).observe(value_ms / 1e3)
        self.set.histogram("flotilla_request_prompt_tokens", tier).observe(receipt.num_prompt_tokens)
        self.set.histogram("flotilla_request_output_tokens", tier).observe(receipt.num_output_tokens)

    def _compare_with_prediction(self, receipt: Receipt, *, has_all: bool) -> None:
        predicted = receipt.predicted
        if predicted is None:
            return
        pairs = {
            "ttft": (receipt.ttft_ms, predicted.ttft_ms),
            "tpot": (receipt.tpot_ms, predicted.tpot_ms),
            # Predicted for as much output as was reckoned with.
            "e2e": (receipt.e2e_ms if has_all else None, predicted.e2e_ms),
        }
        for objective, (took, expected) in pairs.items():
            if took is not None and expected > 0.0:
                ratio = took / expected
                self.set.histogram("flotilla_admission_prediction_ratio", objective).observe(ratio)

    def _usual(self, core: SchedulerCore) -> dict[str, float]:
        """Shares of the cell's decode time so far."""
        totals = core.totals
        draft_s, verify_s = totals.step_draft_s, totals.step_verify_s
        whole_s = max(totals.step_s, draft_s + verify_s)
        if whole_s <= 0.0:
            return {"verify": 1.0}
        other = 1.0 - (draft_s + verify_s) / whole_s
        return {"draft": draft_s / whole_s, "verify": verify_s / whole_s, "other": other}

    # What the scheduler knows itself

    def render(self, core: SchedulerCore, scheduler_s: float = 0.0) -> str:
        """The exposition text, up to date."""
        self.refresh(core, scheduler_s)
        return self.set.render()

    def refresh(self, core: SchedulerCore, scheduler_s: float = 0.0) -> None:
        """Bring everything up to date with the scheduler; `scheduler_s`: its processor time so far."""
        self.set.measure_process()
        totals = core.totals
        for name, counter in _COUNTERS.items():
            self.set.grow(core, name, getattr(totals, counter))
        for has_drafts, steps in totals.steps_ahead.items():
            self.set.grow(core, "flotilla_steps_ahead_total", steps, _flag(has_drafts))
        phases = {"draft": totals.step_draft_s, "verify": totals.step_verify_s}
        phases["target"] = totals.step_target_s
        self.set.grow(self, "flotilla_step_phase_seconds_total", scheduler_s, "schedule")
        for phase, seconds in phases.items():
            self.set.grow(core, "flotilla_step_phase_seconds_total", seconds, phase)
        other_s = totals.step_s - sum(phases.values()) - scheduler_s
        self.set.grow(core, "flotilla_step_phase_seconds_total", other_s, "other")
        self.set.grow(core, "flotilla_forward_seconds_total", totals.forward_s, "target")
        self.set.grow(core, "flotilla_forward_seconds_total", totals.draft_forward_s, "drafters")
        self._refresh_state(core)
        self._refresh_speculation(core)
        self._refresh_pool(core)
        for model, account in core.cost.accounts.items():
            label = model.replace(" ", "_")
            self.set.grow(core, "flotilla_cost_model_calls_total", account.calls, label)
            for field, seconds in (
                ("predicted", account.predicted_s),
                ("actual", account.actual_s),
                ("absolute_error", account.error_s),
            ):
                self.set.grow(core, f"flotilla_cost_model_{field}_seconds_total", seconds, label)

    def _refresh_state(self, core: SchedulerCore) -> None:
        num_slots = core.verifier.num_slots if core.verifier else 0
        used = 1.0 - core.free_slots / num_slots if num_slots else 0.0
        self.set.gauge("flotilla_ready").set(core.verifier is not None)
        self.set.gauge("flotilla_kv_cache_usage_ratio").set(used)
        self.set.gauge("flotilla_kv_cache_slots").set(num_slots)
        self.set.gauge("flotilla_micro_batches").set(core.micro_batches.count)
        tiers = ("default", *core.config.tiers)
        for name, requests in (("running", core.running.values()), ("waiting", core.waiting)):
            counts = Counter(dict.fromkeys(tiers, 0)) + Counter()
            counts.update(request.submit.tier for request in requests)
            self.set.show(
                f"flotilla_requests_{name}", [((tier,), counts[tier]) for tier in {*tiers, *counts}]
            )

    def _refresh_speculation(self, core: SchedulerCore) -> None:
        totals, calibration = core.totals, core.planner.calibration
        for drafter, tokens in totals.verified_by_drafter.items():
            self.set.grow(core, "flotilla_drafter_tokens_total", tokens, drafter, "verified")
            if drafter == GRAMMAR:  # has no calls of which it could be counted; what it adds is verified
                self.set.grow(core, "flotilla_drafter_tokens_total", tokens, drafter, "drafted")
        for drafter, tokens in totals.accepted_by_drafter.items():
            self.set.grow(core, "flotilla_drafter_tokens_total", tokens, drafter, "accepted")
        for drafter in calibration.depths.reached:
            for depth, reached, kept in calibration.depths.by_depth(drafter):
                labels = (drafter, str(depth))
                self.set.grow(core, "flotilla_drafter_depth_trees_total", reached, *labels)
                self.set.grow(core, "flotilla_drafter_depth_accepted_total", kept, *labels)
        for drafter, (tried, predicted, accepted, squared) in calibration.predictions().items():
            self.set.grow(core, "flotilla_calibration_tokens_total", tried, drafter)
            self.set.grow(core, "flotilla_calibration_predicted_tokens_total", predicted, drafter)
            self.set.grow(core, "flotilla_calibration_accepted_tokens_total", accepted, drafter)
            self.set.grow(core, "flotilla_calibration_squared_error_total", squared, drafter)

    def _refresh_pool(self, core: SchedulerCore) -> None:
        pool, switches = core.pool, core.pool.switching.totals
        self.set.grow(core, "flotilla_drafter_switches_total", switches.switches)
        self.set.grow(core, "flotilla_drafter_switches_prepared_total", switches.prepared)
        self.set.grow(core, "flotilla_drafter_preparations_wasted_total", switches.wasted)
        self.set.grow(core, "flotilla_drafter_rebuild_avoided_seconds_total", switches.avoided_s)
        self.set.grow(core, "flotilla_drafter_explorations_total", pool.explorer.num_explorations)
        for was_prepared in (False, True):
            label = _flag(was_prepared)
            first_drafts, wait_s = switches.first_drafts[was_prepared], switches.wait_s[was_prepared]
            self.set.grow(core, "flotilla_drafter_switch_first_drafts_total", first_drafts, label)
            self.set.grow(core, "flotilla_drafter_switch_wait_seconds_total", wait_s, label)
        ready: Counter[str] = Counter()
        capacity: Counter[str] = Counter()
        requests = []
        for drafter in pool.drafters.values():
            ready[drafter.kind] += 1
            capacity[drafter.kind] += drafter.max_requests
            requests.append(((drafter.kind, drafter.name), len(drafter.served)))
            self.set.counter("flotilla_worker_restarts_total", drafter.name)  # zero until it is lost
        self.set.show("flotilla_drafter_requests", requests)
        # Of one that was lost this is zero; of one that was removed there is nothing.
        kinds = {*(self._kinds if self._wanted is None else self._wanted()), *ready}
        self._kinds |= kinds
        self.set.show("flotilla_drafters_ready", [((kind,), ready[kind]) for kind in kinds])
        self.set.show("flotilla_drafter_capacity", [((kind,), capacity[kind]) for kind in kinds])
        prices = pool.selector.prices()
        self.set.show(
            "flotilla_drafter_capacity_price",
            [((kind,), prices.get(kind, 0.0)) for kind in prices.keys() | kinds],
        )
        removed = {model for kind in self._kinds - kinds for model in (kind, kind + PER_CALL)}
        self.set.show(
            "flotilla_cost_model_correction_ratio",
            [
                ((model.replace(" ", "_"),), factor)
                for model, factor in core.cost.corrections.items()
                if model not in removed
            ],
        )
        self.set.gauge("flotilla_selector_regret").set(estimated_regret(core))


def _flag(value: bool) -> str:
    return str(value).lower()
