"""Answers whose masks take ever longer, for which all requests of a target wait.

With a grammar by which a text can be read in many ways, llguidance's work per token grows with the answer,
and none of its limits counts that.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

#: Processor seconds that the masks of a tree may take: above, drafts cost others more than they can bring.
MOST_WITH_DRAFTS_S = 0.02
#: Processor seconds that the mask of one token may take, with reading the token before.
MOST_S = 0.2
#: So many successive steps: a single one may have begun anew, with a lexer that was used up.
NUM_STEPS = 3


class SlowMasks:
    """How long the masks of one request take.

    They are timed, so ranks may differ in what they find; what the first one finds is what counts.

    Attributes:
        is_slow: whether it should be drafted for no more.
    """

    __slots__ = ("_clock", "_num_dear", "_num_slow", "_seconds", "is_slow")

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        """No step yet; `clock` tells seconds of the calling thread's work."""
        self._clock = clock
        self._num_slow = self._num_dear = 0
        self._seconds = 0.0
        self.is_slow = False

    def begin(self) -> float:
        """The time, for `end`."""
        return self._clock()

    def end(self, began: float, num_nodes: int) -> None:
        """A step's masks were made, of a tree of `num_nodes`."""
        self._seconds = self._clock() - began
        self._num_slow = self._num_slow + 1 if self._seconds > MOST_WITH_DRAFTS_S else 0
        self.is_slow = self.is_slow or self._num_slow >= NUM_STEPS
        if num_nodes == 1:
            self._num_dear = self._num_dear + 1 if self._seconds > MOST_S else 0

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty if it can."""
        if self._num_dear < NUM_STEPS:
            return ""
        return (
            f"a token takes {self._seconds:.1f} s of work by now, for which other requests wait (at most "
            f"{MOST_S} s is taken); where a text can be read in many ways, as by `list: list list | item`, "
            "write the grammar so that there is one way, as by `list: item+`"
        )
