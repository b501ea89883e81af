"""Until when workers are busy: drafters and target, each with its calls in turn, on one GPU or not."""

from __future__ import annotations


class Machine:
    """Timelines of a target and its drafters, in seconds.

    Collocated, a drafter and the target that compute at the same time share what the accelerator does: the
    drafter runs at half speed beside a forward, and the forward takes longer by the drafter's own time.
    """

    def __init__(self, *, collocated: bool) -> None:
        self._collocated = collocated
        self._drafters: dict[str, float] = {}  # until when, by name
        self._forwards: dict[int, list[float]] = {}  # began, until; by call, in order

    def draft(self, name: str, ready: float, seconds: float) -> float:
        """When a drafter has done a call of `seconds` that reaches it at `ready`."""
        begin = max(ready, self._drafters.get(name, 0.0))
        if self._collocated:
            running = [forward for forward in self._forwards.values() if forward[1] > begin]
            shared = 0.0
            if running and running[0][0] < begin + seconds:
                # Both at half speed, so for twice as long as what is left of either.
                alone = max(0.0, running[0][0] - begin)
                shared = min(seconds - alone, running[0][1] - begin - alone)
                running[0][1] += shared
                for forward in running[1:]:
                    forward[0] += shared
                    forward[1] += shared
            seconds += shared
        self._drafters[name] = begin + seconds
        return begin + seconds

    def verify(self, call_id: int, ready: float, seconds: float, gap_s: float = 0.0) -> float:
        """When the target should have done a forward of `seconds` that reaches it at `ready`.

        After another it does not begin before `gap_s` have passed.
        """
        begin = max([ready, *(until + gap_s for _, until in self._forwards.values())])
        if self._collocated:
            beside = max((until - begin for until in self._drafters.values()), default=0.0)
            seconds += min(max(beside, 0.0), seconds)
        self._forwards[call_id] = [begin, begin + seconds]
        return begin + seconds

    def due(self, call_id: int) -> float:
        """When a forward ends, as far as is known now."""
        return self._forwards[call_id][1]

    def verified(self, call_id: int) -> float:
        """A forward has ended: the seconds it took."""
        began, until = self._forwards.pop(call_id)
        return until - began
