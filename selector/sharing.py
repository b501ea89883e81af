"""Which kinds of drafter draft on the same processors, and so wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sharing:
    """Groups of kinds that share processors; kinds of different groups do not delay each other.

    Attributes:
        group_of: name of a kind's group; kinds that are not there are in group "".
        at_once: by group, how many of its drafters compute at the same time; 1 where it is not there.
    """

    group_of: Mapping[str, str] = field(default_factory=dict)
    at_once: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, calls_s: Mapping[str, float], other_s: Mapping[str, float]) -> float:
        """How long draft calls made at the same time take.

        Args:
            calls_s: by kind, the seconds its call takes by itself; not empty.
            other_s: by kind, seconds of other work on its processors, during which others of the group wait.
        """
        work_s: dict[str, float] = {}
        for kind, call_s in calls_s.items():
            group = self.group_of.get(kind, "")
            work_s[group] = work_s.get(group, 0.0) + call_s + other_s.get(kind, 0.0)
        busiest_s = max(seconds / self.at_once.get(group, 1) for group, seconds in work_s.items())
        return max(busiest_s, *calls_s.values())

    def num_at_once(self, kinds: Collection[str]) -> int:
        """How many of these kinds compute at the same time; at least 1."""
        members = Counter(self.group_of.get(kind, "") for kind in kinds)
        return max(1, sum(min(count, self.at_once.get(group, 1)) for group, count in members.items()))
