"""Finds members of the system that have stopped reporting: a pure judgement, time comes in looks."""

from __future__ import annotations

from cluster.members import Member

# One that still starts, or drains, may be held up for longer.
_PATIENCE = 8
# Who was heard of within so many looks shows that reports arrive.
_LATE = 4


class Supervisor:
    """Counts looks in which nothing was heard of a member.

    Looks are counted, time is not: who looks may have been stopped itself, and would find everybody silent
    when it goes on.

    Args:
        silent_s: a member that serves and was not heard of for so long is overdue.
        look_s: time between looks.
    """

    def __init__(self, silent_s: float, look_s: float) -> None:
        self._looks = max(1, round(silent_s / look_s))
        self._missed: dict[str, int] = {}
        self._members: dict[str, Member] = {}

    def heard(self, member: Member) -> None:
        """The member has reported."""
        self._members[member.id] = member
        self._missed[member.id] = 0

    def forget(self, member_id: str) -> None:
        """The member has left."""
        self._members.pop(member_id, None)
        self._missed.pop(member_id, None)

    def look(self) -> list[Member]:
        """Members that are overdue, each told once; nobody while all are silent.

        For then it is who listens that is cut off: another member's report must show that reports arrive.
        """
        for member_id in self._missed:
            self._missed[member_id] += 1
        overdue = [
            member
            for member in self._members.values()
            if self._missed[member.id] > 1 + self._looks * (1 if member.state == "ready" else _PATIENCE)
        ]
        hears_others = any(missed <= _LATE for missed in self._missed.values())
        if not hears_others:
            # Nor does it count: when reports arrive again, those of all need not come before the next look.
            self._missed = {member_id: missed - 1 for member_id, missed in self._missed.items()}
            return []
        for member in overdue:
            self.forget(member.id)
        return overdue
