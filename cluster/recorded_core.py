"""A scheduler core that keeps a record of its decisions, taken from outside: without one nothing differs."""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec.structs import replace

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostModel
from cluster.decision_log import DecisionLog
from cluster.decisions import FORMAT_VERSION, Header
from cluster.decode_views import resting_view
from cluster.events import Action, Draft, DraftDone, Event, Verify, VerifyDone, WorkerLost
from cluster.phase_trace import tracing
from cluster.policies.base import DecodeRequest, Int32, LooksAhead, Policy, Rests, StepContext, StopsDrafting
from cluster.policies.registry import make_policy
from cluster.requests import State
from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from verifier.messages import VerifyCall

_log = logging.getLogger(__name__)


def make_core(config: FlotillaConfig, cost: CostModel, *, goes_on: bool = False) -> SchedulerCore:
    """The core of the configured policy, with a record of its decisions if one is asked for.

    Args:
        config: of the cell.
        cost: of its workers.
        goes_on: whether errors of a user's policy end nothing (`make_policy`).

    Raises:
        ValueError: for an unknown policy.
    """
    policy, debug = make_policy(config.policy, goes_on=goes_on), config.debug
    if debug.decisions == 0 and debug.decisions_file is None:
        return SchedulerCore(config, policy, cost)
    return RecordedCore(config, policy, cost)


class RecordedCore(SchedulerCore):
    """Decides as any core does; notes what its policy is asked and answers, and what comes of it.

    What must be written goes to the file in `reflect`, when the actions are on their way.
    """

    def __init__(self, config: FlotillaConfig, policy: Policy, cost: CostModel) -> None:
        path = config.debug.decisions_file
        header = Header(
            version=FORMAT_VERSION,
            scheduler=uuid.uuid4().hex[:12],
            flotilla=_version(),
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            policy=config.policy.model_dump(mode="json"),
            profile=cost.profile,
        )
        self.log = DecisionLog(header, config.debug.decisions, has_sink=path is not None)
        self._file = None if path is None else DecisionFile(path, self.log)
        self._ahead: VerifyCall | None = None
        super().__init__(config, recorded(policy, self.log), cost)

    def handle(self, event: Event, now: float) -> list[Action]:
        """As `SchedulerCore.handle`."""
        self.log.now = now
        match event:
            case DraftDone(drafter, result):
                self.log.draft_done(drafter, result)
            case VerifyDone(result):
                self.log.verify_done(result)
            case WorkerLost(name) if name == "verifier":
                self.log.target_lost()
        actions = super().handle(event, now)
        if self._ahead is not None and self.verify_calls.ahead is None:
            self._begin_ahead(self._ahead, now)
        for action in actions:
            match action:
                case Draft(name, call):
                    drafting = [item.request_id for item in call.items if item.plan.depth > 0]
                    outstanding = self.pool.drafters[name].outstanding.get(call.call_id)
                    if drafting and outstanding is not None:
                        self.log.draft_sent(name, call.call_id, drafting, outstanding.predicted_s)
                case Verify(call):
                    self._verify_sent(call, now)
        return actions

    def _verify_sent(self, call: VerifyCall, now: float, *, ahead: bool = False) -> None:
        sent = self.verify_calls.sent(call.call_id)
        if sent is not None:
            unplanned = self.log.unplanned(call)
            rested = [resting_view(self.requests[request_id], now) for request_id in unplanned]
            context = self.planner.context(len(rested))
            self.log.verify_sent(call, sent.parts, rested, context, ahead=ahead)

    def _begin_ahead(self, call: VerifyCall, now: float) -> None:
        """The call before is over, in one way or another; those who have not ended with it go on."""
        self._ahead = None
        verifying = {one.request_id for one in self.running.values() if one.state is State.VERIFYING}
        going_on = [item for item in call.verify if item.request_id in verifying]
        sent = self.verify_calls.sent(call.call_id)
        if sent is not None and sent.plans:
            trees = {item.request_id: sent.trees[item.request_id] for item in going_on}
            going_on = [replace(item, tree=trees[item.request_id]) for item in going_on]
            self.log.grown(trees, self.planner.calibration, self.planned_ahead.newest)
        if going_on or not call.verify:
            self._verify_sent(replace(call, verify=going_on), now, ahead=True)

    def reflect(self) -> list[Action]:
        """As `SchedulerCore.reflect`; also writes what is known by now.

        A step sent ahead begins, also in the record, when the one before is answered: then its requests are
        what they would be had it been sent only then.
        """
        actions = super().reflect()
        self._ahead = next((one.call for one in actions if isinstance(one, Verify)), self._ahead)
        if self._file is not None:
            self._file.write()
        return actions


class DecisionFile:
    """Appends a log's lines to a file, opened anew each time and begun anew after somebody else wrote to it.

    That is so when the file was moved away, and when cores of several policies take turns. While another
    process writes, lines wait for the next time: what it is held up by must not stop this cell as well. Nor
    must a disk that takes no more: the first failure is logged and ends the writing.
    """

    def __init__(self, path: Path, log: DecisionLog) -> None:
        self._path = path
        self._log = log
        self._size = -1

    def write(self) -> None:
        """Write the steps that ended."""
        if not self._log.has_unwritten:
            return
        try:
            with open(self._path, "ab+", opener=_private) as file:
                if not _locked(file.fileno()):
                    return
                size = file.seek(0, os.SEEK_END)
                is_begun, is_cut_off = size == self._size, False
                if size and not is_begun:
                    # An earlier writer may have been killed within a line.
                    file.seek(size - 1)
                    is_cut_off = file.read(1) != b"\n"
                lines = self._log.take_lines(with_header=not is_begun)
                file.write(b"\n" * is_cut_off + b"\n".join(lines) + b"\n")
                self._size = file.tell()
        except OSError as error:
            self._log.close_sink()
            _log.error("decisions are no longer recorded: cannot write %s: %s", self._path, error)


def _locked(file: int) -> bool:
    """Whether nobody else writes until it is closed, so that who wrote last stays as it was seen."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def recorded(policy: Policy, log: DecisionLog) -> Policy:
    """The policy with every call noted; it can stop drafting, and rests, if the policy can and does."""
    return (
        RecordedStoppingPolicy(policy, policy, log)
        if isinstance(policy, StopsDrafting)
        else RecordedPolicy(policy, log)
    )


class RecordedPolicy:
    """A policy whose answers are noted."""

    def __init__(self, policy: Policy, log: DecisionLog) -> None:
        self._policy = policy
        self._log = log
        # Only where it has it: whoever never rests is asked for every step. Nothing of it need be noted.
        if isinstance(policy, Rests):
            self.rests = policy.rests
        if isinstance(policy, LooksAhead):
            self.look_ahead, self.tries_drafts = policy.look_ahead, getattr(policy, "tries_drafts", True)
        self.plans_ahead = getattr(policy, "plans_ahead", False)

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """As the policy's."""
        plans = self._policy.plan(batch, context)
        self._log.planned(batch, context, plans)
        return plans

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """As the policy's."""
        with tracing() as trace:
            selected = self._policy.select(batch, trees, context)
        self._log.selected(batch, trees, context, selected, trace)
        return selected


class RecordedStoppingPolicy(RecordedPolicy):
    """A policy whose stop rules are noted, too."""

    def __init__(self, policy: Policy, stopping: StopsDrafting, log: DecisionLog) -> None:
        super().__init__(policy, log)
        self._stopping = stopping

    def stop_rule(
        self, drafter: str, num_drafting: int, batch: Sequence[DecodeRequest], context: StepContext
    ) -> StopRule | None:
        """As the policy's."""
        rule = self._stopping.stop_rule(drafter, num_drafting, batch, context)
        self._log.ruled(drafter, num_drafting, batch, context, rule)
        return rule


def _version() -> str:
    try:
        return version("flotilla")
    except PackageNotFoundError:
        return "0+checkout"


def newest_decisions(core: SchedulerCore, limit: int) -> bytes | None:
    """The record of the newest `limit` steps, as JSON lines; None where they are not kept."""
    if not isinstance(core, RecordedCore) or core.config.debug.decisions == 0:
        return None
    return b"".join(line + b"\n" for line in core.log.dump(limit))


def _private(path: str, flags: int) -> int:
    """What the record holds of answers is for its owner."""
    return os.open(path, flags, 0o600)
