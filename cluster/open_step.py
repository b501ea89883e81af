"""A step on its way: what is known of it before its verdicts are in."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from cluster.decisions import CalibrationTable, DraftCallRecord, StepRecord


@dataclass(slots=True, eq=False)
class OpenStep:
    """A step that is still on its way.

    Attributes:
        record: what is known of it.
        last_order: of the policy's last call in it.
        tables: the calibration tables it refers to, by drafter and version.
        index: place of each request in the record.
        unanswered: draft calls sent, by drafter and call.
        verify_call: id of its verify call; -1 before there is one.
    """

    record: StepRecord
    last_order: int
    tables: dict[tuple[str, int], CalibrationTable] = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)
    unanswered: dict[tuple[str, int], DraftCallRecord] = field(default_factory=dict)
    verify_call: int = -1

    def join(self, other: OpenStep) -> None:
        """Take over another step, which was planned apart and goes on with this one."""
        record, more, first = self.record, other.record, len(self.record.requests)

        def moved(places: list[int]) -> list[int]:
            return [first + place for place in places]

        record.requests.extend(more.requests)
        record.plans.extend(replace(one, requests=moved(one.requests)) for one in more.plans)
        record.stop_rules.extend(replace(one, requests=moved(one.requests)) for one in more.stop_rules)
        record.drafts.extend(more.drafts)
        self.last_order = max(self.last_order, other.last_order)
        self.tables |= other.tables
        self.index |= {request_id: first + place for request_id, place in other.index.items()}
        self.unanswered |= other.unanswered

    def predicted_s(self) -> float:
        """What the cost model expects of the step: drafting, verification, and the time outside both."""
        record = self.record
        values = {} if record.known is None else record.known.values
        overhead = values.get("draft_overhead_s" if record.drafts else "plain_overhead_s", 0.0)
        # Drafters work at the same time.
        draft_s = max((draft.seconds.predicted for draft in record.drafts), default=0.0)
        return float(draft_s + overhead + (record.verify.predicted if record.verify else 0.0))
