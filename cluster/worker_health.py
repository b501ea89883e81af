"""Watches the workers of a cell: replaces those that stall, and tells how each of them is."""

from __future__ import annotations

import logging
from typing import Any

from cluster.config import FlotillaConfig
from cluster.lifecycle import Life, Lifecycle, Shell
from cluster.metric_set import MetricSet
from cluster.placement import rank_name
from cluster.stalls import Signs, Suspicions, call_limit_s, judge
from cluster.worker import VERIFIER
from cluster.worker_set import WorkerSet

_log = logging.getLogger(__name__)

_STATES = {"loading": "starting", "restarting": "lost", "draining": "draining"}


class WorkerHealth:
    """Looks at every worker with each tick of the cell.

    Args:
        config: the cell, as it started.
        workers: their connections.
        lifecycle: replaces who is lost.
        shell: the scheduler's.
        metrics: of the cell.
    """

    def __init__(
        self,
        config: FlotillaConfig,
        workers: WorkerSet,
        lifecycle: Lifecycle,
        shell: Shell,
        metrics: MetricSet,
    ) -> None:
        self._config = config.health
        self._num_ranks = config.target.tensor_parallel
        self._drafter_floor_s = config.pool.hang_timeouts * config.scheduler.draft_timeout_ms / 1e3
        self._workers = workers
        self._lifecycle = lifecycle
        self._shell = shell
        self._metrics = metrics
        self._suspicions = Suspicions()
        self._stalls: dict[str, int] = {}
        self._without_calls_since: float | None = None
        for kind in ("target", "drafter"):
            for reason in ("silent", "stuck"):
                metrics.counter("flotilla_worker_stalls_total", kind, reason)

    def look(self, now: float) -> None:
        """Replace workers that give no sign of life, or owe an answer for too long."""
        processes = self._processes(now)
        stalled: dict[str, str] = {}
        self._suspicions.keep({process for _, process, _ in processes})
        ages = [((process,), signs.call_s or 0.0) for _, process, signs in processes]
        self._metrics.show("flotilla_worker_call_age_seconds", ages)
        for life, process, signs in processes:
            floor_s = self._floor_s(life)
            reason = judge(signs, floor_s, self._config)
            if not self._suspicions.confirm(process, reason) or life.name in stalled:
                continue
            stalled[life.name] = process
            kind = "drafter" if life.config is not None else "target"
            assert reason is not None
            self._metrics.counter("flotilla_worker_stalls_total", kind, reason).inc()
            self._stalls[life.name] = self._stalls.get(life.name, 0) + 1
            if reason == "silent":
                _log.error("%s has given no sign of life for %.1f s; replacing it", process, signs.heard_s)
            else:
                _log.error(
                    "%s lives, and has worked on a call for %.1f s (%.3f s predicted, at most %.1f s allowed)"
                    "; replacing it",
                    process,
                    signs.call_s,
                    signs.predicted_s,
                    call_limit_s(signs, floor_s, self._config),
                )
        for name in stalled:
            self._lifecycle.lost(name)
        self._look_at_scheduler(now)

    def check(self, now: float) -> None:
        """Raise RuntimeError if the scheduler has requests, a target, and has asked nobody for long."""
        since = self._without_calls_since
        if since is not None and now - since >= self._config.scheduler_stuck_s:
            raise RuntimeError(
                f"the scheduler has {len(self._shell.core.requests)} requests and has waited for nobody's "
                f"answer for {now - since:.0f} s"
            )

    def report(self, now: float) -> list[dict[str, Any]]:
        """How every process of a worker is.

        `state` is `ready`, `busy` (works on a call), `stalled` (about to be replaced), `starting`, `lost`
        (being replaced) or `draining`. `heard_s`, `answered_s` and `call_s` are seconds since it was heard,
        since its last answer, and on the present call, which is predicted to take `predicted_s` and may take
        `limit_s`.
        """
        found = {
            life.name: {
                "worker": life.name,
                "kind": "drafter" if life.config is not None else "target",
                "state": _STATES.get(life.state, "ready"),
                "restarts": life.restarts,
                "stalls": self._stalls.get(life.name, 0),
                "recovery_s": life.recovery_s,
            }
            for life in self._lifecycle.lives.values()
        }
        reports: list[dict[str, Any]] = []
        for life, process, signs in self._processes(now):
            floor_s = self._floor_s(life)
            worker = self._workers.workers[life.name]
            rank = [one.name for one in worker.connections].index(process)
            node, pid = worker.where[rank] if rank < len(worker.where) else ("", 0)
            state = found[life.name]["state"]
            if state == "ready" and judge(signs, floor_s, self._config) is not None:
                state = "stalled"
            elif state == "ready" and signs.call_s is not None:
                state = "busy"
            has_call = signs.call_s is not None
            reports.append(
                found[life.name]
                | {
                    "process": process,
                    "node": node,
                    "pid": pid,
                    "state": state,
                    "heard_s": round(signs.heard_s, 3),
                    "answered_s": round(signs.answered_s, 3),
                    "call_s": round(signs.call_s, 3) if signs.call_s is not None else None,
                    "predicted_s": round(signs.predicted_s, 6) if has_call else None,
                    "limit_s": round(call_limit_s(signs, floor_s, self._config), 3) if has_call else None,
                }
            )
        told = {one["worker"] for one in reports}
        for name in found.keys() - told:
            reports += [found[name] | {"process": process} for process in self._names(name)]
        return reports

    def _names(self, worker: str) -> list[str]:
        """Of the processes it has when it serves."""
        return [rank_name(rank) for rank in range(self._num_ranks)] if worker == VERIFIER else [worker]

    def _processes(self, now: float) -> list[tuple[Life, str, Signs]]:
        """Of every worker that serves: its life, the name of each of its processes, and the signs of that."""
        found = []
        for life in self._lifecycle.lives.values():
            worker = self._workers.workers.get(life.name)
            if worker is None or not worker.is_loaded or life.state not in ("ready", "draining"):
                continue
            predicted_s = self._predicted_s(life.name)
            found += [(life, one.name, one.signs(now, predicted_s)) for one in worker.connections]
        return found

    def _floor_s(self, life: Life) -> float:
        return self._config.target_stuck_s if life.config is None else self._drafter_floor_s

    def _predicted_s(self, name: str) -> float:
        """What the longest call that the worker owes is expected to take."""
        core = self._shell.core
        if name == VERIFIER:
            return max((call.predicted_s for call in core.verify_calls.all_outstanding), default=0.0)
        drafter = core.pool.drafters.get(name)
        calls = drafter.outstanding.values() if drafter is not None else ()
        return max(
            (call.predicted_s + core.cost.read_seconds(name, call.num_read) for call in calls), default=0.0
        )

    def _look_at_scheduler(self, now: float) -> None:
        core = self._shell.core
        has_calls = bool(core.verify_calls.all_outstanding) or any(
            drafter.outstanding for drafter in core.pool.drafters.values()
        )
        if not core.requests or core.verifier is None or has_calls:
            self._without_calls_since = None
        elif self._without_calls_since is None:
            self._without_calls_since = now
