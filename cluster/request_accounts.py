"""Requests a cell has been sent and not ended: what was asked, and the cell's clocks at the first token."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.cell_metrics import CellMetrics
from cluster.core import SchedulerCore
from cluster.stream_messages import Rejected, Submit, TokenEvent
from cluster.violations import DecodeTimes


@dataclass(slots=True)
class _Account:
    """One request.

    Attributes:
        submit: what was asked.
        at_first: what the cell had done when its first token came.
        is_complete: whether its front end has all it wants of it.
    """

    submit: Submit
    at_first: DecodeTimes | None = None
    is_complete: bool = False


class RequestAccounts:
    """Turns the ends of requests into metrics."""

    def __init__(self, metrics: CellMetrics) -> None:
        self._metrics = metrics
        self._accounts: dict[str, _Account] = {}
        # Those without a token yet; mostly none, so that a step's events need no look at each.
        self._unstarted: set[str] = set()

    def arrived(self, submit: Submit) -> None:
        """A request was sent; one with the id of another is refused, and counts for nothing here."""
        if submit.request_id not in self._accounts:
            self._accounts[submit.request_id] = _Account(submit)
            self._unstarted.add(submit.request_id)

    def looked_at(self, submit: Submit, core: SchedulerCore) -> None:
        """The scheduler has taken a request or refused it.

        It counts as taken now, not when it ends: refusals are a share of both. One that a cell had taken
        before was counted there.
        """
        if submit.was_taken or submit.output:
            return
        account, request = self._accounts.get(submit.request_id), core.requests.get(submit.request_id)
        if account is not None and account.submit is submit and request is not None:
            self._metrics.admitted(submit, request.submit)

    def completed(self, request_id: str) -> None:
        """Its front end has all it wants: that it is cancelled is its regular end."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.is_complete = True

    def moved(self, request_id: str) -> None:
        """Its front end takes it to another cell, where it counts: here it neither ended nor was refused."""
        self._accounts.pop(request_id, None)
        self._unstarted.discard(request_id)

    def rejected(self, rejection: Rejected) -> None:
        """A request was refused."""
        account = self._accounts.get(rejection.request_id)
        if rejection.code != "duplicate_id":  # else it is the id of a request being served
            self._accounts.pop(rejection.request_id, None)
            self._unstarted.discard(rejection.request_id)
        self._metrics.rejected(rejection.code, account.submit.tier if account is not None else "default")

    def told(self, events: list[TokenEvent], core: SchedulerCore) -> None:
        """These went to a front end."""
        for event in events:
            reason = event.finish_reason
            if reason is None and not self._unstarted:
                continue
            account = self._accounts.get(event.request_id)
            if account is None:
                continue
            if account.at_first is None:
                self._unstarted.discard(event.request_id)
                account.at_first = self._metrics.decode_times(core)
            if reason is None:
                continue
            del self._accounts[event.request_id]
            if event.receipt is not None:
                times = self._metrics.decode_times(core).since(account.at_first)
                if event.error:  # its client's: the cell could not have done better
                    reason = "invalid"
                reason = "stop" if reason == "cancelled" and account.is_complete else reason
                self._metrics.finished(reason, account.submit, event.receipt, times, core)
