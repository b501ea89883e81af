"""What a cell exposes is what its requests' receipts say, counted here a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import forced_tokens
from cluster.adapter_config import AdapterConfig
from cluster.cell_metrics import CellMetrics
from cluster.cell_stats import CellStats
from cluster.config import FlotillaConfig, TargetConfig
from cluster.drafter_config import ModelDrafterConfig
from cluster.events import Action, Cancelled, DraftDone, Emit, Reject, Verify, VerifyDone
from cluster.linear_cost import LinearCost
from cluster.placement import instance_names
from cluster.request_accounts import RequestAccounts
from cluster.stream_messages import Objective, Receipt, Resumed, TokenEvent
from cluster.tier_config import TierConfig
from cluster.violations import DecodeTimes
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import Verdict


class MeasuredWorld(World):
    """Counts as `cluster.cell` does, and keeps the receipts."""

    def __init__(self, seed: int, policy: str, num_slots: int = 400) -> None:
        self.wanted: set[str] = set()
        self.metrics = CellMetrics(lambda: self.wanted)
        self.accounts = RequestAccounts(self.metrics)
        self.receipts: list[tuple[str, Receipt]] = []
        super().__init__(seed, policy, num_slots=num_slots)
        self.metrics.configured(self.config, "model")

    def answer_one(self) -> bool:
        before = list(self.answers)
        more = super().answer_one()
        for answer in before:
            if not any(answer is other for other in self.answers):
                if isinstance(answer, DraftDone):
                    result = answer.result
                    num_drafted = sum(len(draft.tree) - 1 for draft in result.drafts)
                    self.metrics.drafted(answer.drafter, result.seconds, num_drafted)
                elif isinstance(answer, VerifyDone):
                    self.metrics.verified(answer.result, 0.003)
        return more

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Verify(call):
                    self.metrics.verify_sent(call, self.core)
                case Emit(_, events):
                    self.accounts.told(events, self.core)
                    for event in events:
                        if event.receipt is not None and event.finish_reason is not None:
                            self.receipts.append((event.finish_reason, event.receipt))
                case Reject(_, rejection):
                    self.accounts.rejected(rejection)

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        self.core.reflect()
        text = self.metrics.render(self.core)
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def objectives(number: int) -> Objective:
    return Objective(ttft_ms=(None, 20.0, 200.0)[number % 3], tpot_ms=(2.0, 100.0)[number % 2])


def test_objectives_goodput_and_violations_are_those_of_the_receipts() -> None:
    world = MeasuredWorld(5, "adaserve")
    for number in range(24):
        request = submit(
            number, world.rng, objective=objectives(number), tier=("gold", "default")[number % 2]
        )
        world.accounts.arrived(request)
        world.send(request)
    for _ in range(60):
        world.answer_one()
    world.lose("verifier")
    world.start_target()
    world.drain()
    world.check_ends()
    attained: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    good_tokens = 0
    for reason, receipt in world.receipts:
        assert reason != "cancelled"
        assert receipt.terms is not None
        asked = receipt.terms.objective
        outcomes = {
            name: took <= bound
            for name, took, bound in (
                ("ttft", receipt.ttft_ms, asked.ttft_ms),
                ("tpot", receipt.tpot_ms, asked.tpot_ms),
            )
            if took is not None and bound is not None
        }
        for name, met in outcomes.items():
            (attained if met else missed)[name] += 1
        if outcomes and all(outcomes.values()):
            attained["all"] += 1
            good_tokens += receipt.num_output_tokens
    assert min(attained["ttft"], missed["ttft"], attained["tpot"], missed["tpot"]) > 0
    for name in ("ttft", "tpot"):
        got = world.value("flotilla_slo_requests_total", objective=name, attained="true")
        assert got == attained[name]
        assert world.value("flotilla_slo_violations_total", objective=name) == missed[name]
    assert world.value("flotilla_goodput_requests_total") == attained["all"]
    assert world.value("flotilla_goodput_tokens_total") == good_tokens
    preempted = [receipt for _, receipt in world.receipts if receipt.num_preemptions]
    assert preempted, "who ran when the target was lost"
    lost_ms = [sum(receipt.preempted_ms) for receipt in preempted]
    # Who had been admitted and not begun goes on waiting in the queue.
    assert max(lost_ms) > 0
    assert all(0 <= ms <= r.e2e_ms - r.queue_ms for ms, r in zip(lost_ms, preempted, strict=True))
    assert all(sum(r.preempted_ms) == 0 for _, r in world.receipts if not r.num_preemptions)
    assert world.value("flotilla_preemptions_total") == sum(r.num_preemptions for r in preempted)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_idle_cell_uses_no_kv_slots(is_cancelled: bool) -> None:
    """What its last requests had is freed by its next call, which may not come for hours."""
    world = MeasuredWorld(4, "fixed")
    for number in range(6):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=20)))
    for _ in range(8):
        world.answer_one()
    assert world.value("flotilla_kv_cache_usage_ratio") > 0
    if is_cancelled:
        for name in list(world.core.requests):
            world.handle(Cancelled(name))
    world.drain()
    assert world.target.held
    assert world.value("flotilla_kv_cache_usage_ratio") == 0
    assert CellStats().measure(world.core, world.now)["kv_use"] == 0


def test_tokens_of_a_grammar_are_drafted_ones_by_drafter_too() -> None:
    """Without drafters, structured outputs had three tokens drafted in all, by nobody."""
    world = MeasuredWorld(7, "fixed")
    verdict = Verdict(request_id="r", tokens=[1, 2, 3], num_forced=3, num_forced_accepted=2)
    for number in (1, 2):
        forced_tokens.count(world.core.totals, verdict)
        for outcome, tokens in (("drafted", 3), ("verified", 3), ("accepted", 2)):
            assert world.value(f"flotilla_{outcome}_tokens_total") == number * tokens
            name, labels = "flotilla_drafter_tokens_total", {"drafter": "grammar", "outcome": outcome}
            assert world.value(name, **labels) == number * tokens


def test_tokens_depths_and_predictions_add_up() -> None:
    world = MeasuredWorld(7, "fixed", num_slots=4000)
    for number in range(16):
        request = submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=40))
        world.accounts.arrived(request)
        world.send(request)
        world.answer_one()
    world.drain()
    receipts = [receipt for _, receipt in world.receipts]
    by_depth: Counter[int] = Counter()
    for receipt in receipts:
        by_depth.update(dict(enumerate(receipt.acceptance_by_depth, 1)))
    assert len(by_depth) > 2
    for depth, number in by_depth.items():
        got = world.value("flotilla_drafter_depth_accepted_total", depth=str(depth))
        assert got == number
        assert world.value("flotilla_drafter_depth_trees_total", depth=str(depth)) >= number
    accepted = sum(receipt.num_accepted for receipt in receipts)
    verified = sum(receipt.num_verified for receipt in receipts)
    assert world.value("flotilla_drafter_tokens_total", outcome="accepted") == accepted
    assert world.value("flotilla_drafter_tokens_total", outcome="verified") == verified
    assert world.value("flotilla_drafter_tokens_total", outcome="drafted") >= verified
    assert world.value("flotilla_calibration_accepted_tokens_total") == accepted
    judged = world.value("flotilla_calibration_tokens_total")
    assert accepted < judged <= verified
    assert 0 < world.value("flotilla_calibration_predicted_tokens_total") < judged
    assert 0 < world.value("flotilla_calibration_squared_error_total") < judged
    decoded = world.value("flotilla_batch_requests_sum", phase="decode")
    assert world.value("flotilla_step_tokens_total", phase="decode") == verified + decoded
    assert decoded == sum(receipt.num_steps - 1 for receipt in receipts), "the first token is prefill's"
    assert world.value("flotilla_request_output_tokens_sum") == sum(r.num_output_tokens for r in receipts)
    assert world.value("flotilla_requests_running") == 0


def test_who_has_all_it_wants_did_not_give_up() -> None:
    world = MeasuredWorld(9, "fixed")
    for number, is_complete in enumerate((True, False)):
        request = submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60))
        world.accounts.arrived(request)
        world.send(request)
        for _ in range(40):
            if not world.output.get(request.request_id):
                world.answer_one()
        if is_complete:
            world.accounts.completed(request.request_id)
        world.handle(Cancelled(request.request_id))
    world.drain()
    assert world.value("flotilla_requests_total", finish_reason="stop") == 1
    assert world.value("flotilla_requests_total", finish_reason="cancelled") == 1
    assert world.value("flotilla_e2e_latency_seconds_count") == 1


def test_who_goes_on_at_another_cell_has_not_given_up() -> None:
    """When a cell is added, others give it half of their queues: clients seemed to leave in droves."""
    world = MeasuredWorld(9, "fixed")
    for number in range(2):
        request = submit(number, world.rng)
        world.accounts.arrived(request)
        world.send(request)
    world.accounts.moved("r0")
    world.handle(Cancelled("r0"))
    world.drain()
    assert world.value("flotilla_requests_total") == 1
    assert world.value("flotilla_requests_total", finish_reason="cancelled") == 0


def test_who_failed_attained_nothing() -> None:
    """Its client got a 500 and no answer, however soon the first tokens came."""
    world = MeasuredWorld(9, "fixed")
    asked = submit(0, world.rng, objective=Objective(ttft_ms=1e6, tpot_ms=1e6, e2e_ms=1e6))
    world.accounts.arrived(asked)
    world.send(asked)
    world.drain()
    ((_, receipt),) = world.receipts
    assert world.value("flotilla_goodput_requests_total") == 1
    world.metrics.finished("error", asked, receipt, DecodeTimes(), world.core)
    assert world.value("flotilla_goodput_requests_total") == 1
    assert world.value("flotilla_goodput_tokens_total") == receipt.num_output_tokens
    for objective in ("ttft", "tpot", "e2e", "all"):
        for attained in ("true", "false"):
            labels = {"objective": objective, "attained": attained}
            assert world.value("flotilla_slo_requests_total", **labels) == 1
    for objective in ("ttft", "tpot", "e2e"):
        assert world.value("flotilla_slo_violations_total", objective=objective) == 1


@pytest.mark.parametrize("outage_s", [0.0, 9.0])
@pytest.mark.parametrize("first_token_s", [0.5, 1.5])
def test_who_came_from_a_lost_cell_is_judged_by_what_its_client_saw(
    first_token_s: float, outage_s: float
) -> None:
    """An outage would show in no objective, if what came before it, and how long it took, were forgotten."""
    world = MeasuredWorld(9, "fixed")
    last_s = first_token_s + 0.1
    asked = submit(
        0,
        world.rng,
        prompt=[1] * 30,
        sampling=SamplingParams(temperature=0.0, max_tokens=20),
        output=[3, 4],
        resumed=Resumed(first_token_s=first_token_s, last_token_s=last_s, sent_s=last_s + outage_s),
        objective=Objective(ttft_ms=1e3, tpot_ms=100.0, e2e_ms=5e3),
    )
    world.output["r0"] = list(asked.output)
    world.accounts.arrived(asked)
    world.send(asked)
    world.drain()
    expected = {"ttft": first_token_s > 1.0, "tpot": outage_s > 0.0, "e2e": outage_s > 0.0}
    for objective, is_missed in expected.items():
        labels = {"objective": objective, "attained": "false"}
        assert world.value("flotilla_slo_requests_total", **labels) == is_missed
        cause = "other" if objective == "ttft" else "preempt"
        assert world.value("flotilla_slo_violations_total", objective=objective, cause=cause) == is_missed
        assert world.value("flotilla_slo_violations_total", objective=objective) == is_missed
    assert world.value("flotilla_goodput_requests_total") == (not any(expected.values()))


def test_an_answer_that_cannot_be_as_asked_is_nobodys_miss() -> None:
    """Its client gets a 400: it is no failure of the cell's, which somebody would be woken for."""
    world = MeasuredWorld(3, "fixed")
    asked = submit(0, world.rng, objective=Objective(ttft_ms=1e6))
    world.send(asked)
    world.drain()
    ((_, receipt),) = world.receipts
    before = world.value("flotilla_slo_requests_total")
    world.accounts.arrived(msgspec.structs.replace(asked, request_id="other"))
    end = TokenEvent(
        request_id="other", position=0, tokens=[], finish_reason="error", receipt=receipt, error="no way on"
    )
    world.accounts.told([end], world.core)
    assert world.value("flotilla_requests_total", finish_reason="invalid") == 1
    assert world.value("flotilla_requests_total", finish_reason="error") == 0
    assert world.value("flotilla_slo_requests_total") == before


def test_what_alerts_wait_for_is_there_before_it_happens() -> None:
    """A counter that appears with its first increment has no rate for it, and its panel nothing to show."""
    metrics = CellMetrics()
    drafter = ModelDrafterConfig(name="small", path="zoo:drafter", replicas=2)
    target = TargetConfig(path="zoo:target")
    metrics.configured(
        FlotillaConfig(target=target, drafters=(drafter,), tiers={"bulk": TierConfig(priority=1)}), "model"
    )
    series = {
        (family.name, *(value for _, value in sorted(sample.labels.items())))
        for family in text_string_to_metric_families(metrics.set.render())
        for sample in family.samples
        if sample.value == 0.0
    }
    workers = {name[1] for name in series if name[0] == "flotilla_worker_restarts"}
    assert workers == {"verifier", *instance_names("small", 2)}
    for tier in ("default", "bulk"):
        for code in ("queue_full", "saturated", "slo_infeasible"):
            assert ("flotilla_requests_rejected", code, tier) in series
        for reason in ("stop", "length", "cancelled", "invalid", "error"):
            assert ("flotilla_requests", reason, tier) in series


def test_the_first_loss_of_a_drafter_that_was_added_is_an_increase() -> None:
    """As of one that was configured: a series that begins with one has none."""
    world = MeasuredWorld(4, "fixed")
    assert "good" not in {drafter.name for drafter in world.config.drafters}
    lost = {"cell": "", "worker": "good"}
    world.metrics.set.constant["cell"] = ""

    def losses() -> float | None:
        world.metrics.refresh(world.core)
        return world.metrics.set.registry.get_sample_value("flotilla_worker_restarts_total", lost)

    assert losses() == 0.0
    world.metrics.restarted("good")
    assert losses() == 1.0


def test_a_drafter_that_was_lost_is_told_from_one_that_was_removed() -> None:
    """The one is missed by alerts, the other by nobody."""
    world = MeasuredWorld(4, "fixed")
    kind = next(iter(world.core.pool.drafters.values())).kind
    world.wanted = {kind, "lost"}
    world.core.cost.learn("lost", LinearCost(delta=1e-3))
    world.core.cost.observe_draft("lost", 1e-3, 2e-3)
    assert world.value("flotilla_drafters_ready", drafter=kind) > 0

    def told(name: str) -> set[str]:
        lines = world.metrics.set.render().splitlines()
        return {line.split('"')[1] for line in lines if line.startswith(f"{name}{{")}

    assert "lost" in told("flotilla_drafters_ready")
    assert "lost" in told("flotilla_cost_model_correction_ratio")
    assert world.value("flotilla_drafters_ready", drafter="lost") == 0
    world.wanted = {kind}
    world.metrics.refresh(world.core)
    for name in ("flotilla_drafters_ready", "flotilla_cost_model_correction_ratio"):
        assert "lost" not in told(name)
    assert kind in told("flotilla_drafters_ready")


def test_what_the_target_does_beside_its_forwards_is_a_phase_of_its_own() -> None:
    world = MeasuredWorld(7, "fixed")
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=40)))
    world.drain()
    phase_s = {
        phase: world.value("flotilla_step_phase_seconds_total", phase=phase) for phase in ("verify", "target")
    }
    assert phase_s["verify"] > 0.05
    assert phase_s["target"] == pytest.approx(0.1 * phase_s["verify"])  # 1 ms beside forwards of 10


def test_requests_of_adapters_are_counted_by_name() -> None:
    world = MeasuredWorld(10, "fixed")
    adapters = (AdapterConfig(name="terse", path="/a"), AdapterConfig(name="unused", path="/b"))
    target = world.config.target.model_copy(update={"adapters": adapters})
    world.metrics.configured(world.config.model_copy(update={"target": target}), "model")
    assert world.value("flotilla_adapter_requests_total", adapter="unused") == 0
    world.send(submit(0, world.rng))
    world.drain()
    ((_, receipt),) = world.receipts
    alone = world.value("flotilla_adapter_requests_total", adapter="")
    for number, adapter in enumerate(("terse", "", "terse")):
        asked = msgspec.structs.replace(submit(number, world.rng), adapter=adapter)
        world.metrics.finished("stop", asked, receipt, DecodeTimes(), world.core)
    assert world.value("flotilla_adapter_requests_total", adapter="terse") == 2
    assert world.value("flotilla_adapter_requests_total", adapter="") == alone + 1
    assert world.value("flotilla_adapter_requests_total") == alone + 3
