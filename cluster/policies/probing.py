"""When to try what is believed not to pay, so that it is noticed when that has become wrong."""

from __future__ import annotations

# Steps of a try, one after the other. In the first, drafters may have to read what they missed; of those that
# follow, the first still pays for the change.
PROBE_RUN = 6
# Of goodput no larger share is spent on tries, unless there were hardly any then.
MOST_SPENT = 0.01
# A try comes no more often than once in so many steps, for changing takes a step's time as well, and no more
# seldom.
LEAST_INTERVAL, MOST_INTERVAL = 192, 768


class Probing:
    """Tries of one kind of step: so many in a row, the fewer the more the other kind is believed to bring.

    What is known of a kind of step is learnt from steps that follow one of their own kind
    (`CostModel.observe_call`): a single one says next to nothing.
    """

    def __init__(self, first_step: int = 0) -> None:
        """The first try may come from step `first_step` on."""
        self._due = first_step
        self._until = 0

    def is_running(self, step: int) -> bool:
        """Whether the step is in the middle of a try."""
        return step < self._until

    def is_due(self, step: int) -> bool:
        """Whether `tries` would have the step be one."""
        return self.is_running(step) or step >= self._due

    def tries(self, step: int, worth: float, times: float = 1.0, num_steps: int = PROBE_RUN) -> bool:
        """Whether the step at hand is to be one of the kind that is not believed to pay.

        Args:
            step: number of the step.
            worth: goodput that such a step is believed to have, by that of the best; above 0, at most 1.
            times: as many times as long as the others such a step is believed to take, at least 1: tries are
                spent time, not steps.
            num_steps: of a try.
        """
        if self.is_running(step):
            return True
        if step < self._due:
            return False
        interval = PROBE_RUN * (1.0 / max(worth, 1e-3) - 1.0) / MOST_SPENT
        self._until = step + num_steps
        self._due = self._until - PROBE_RUN + int(min(times * max(interval, LEAST_INTERVAL), MOST_INTERVAL))
        return True
