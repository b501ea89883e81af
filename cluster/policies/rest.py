"""For how many steps a policy that found drafting not to pay does not look again."""

from __future__ import annotations

from cluster.policies.base import StepContext
from cluster.policies.decode_batch import DecodeBatch

# So many steps, unless there are fewer requests than this share of them by then.
REST_STEPS, REST_WITH_OBJECTIVES, REST_OF_FEW = 16, 4, 4
# Where plain steps are sent ahead, as far as it is known that they are, the target waits for a look that does
# not find that the rest goes on. Few requests without objectives that were looked at before are let twice as
# many steps then.
REST_AHEAD = 12
REST_SHARE = 0.8
# So many requests are soon another matter.
FEW_REQUESTS = 4


class Rest:
    """Steps in which nothing is drafted, whoever asks."""

    def __init__(self) -> None:
        self._until = 0
        self._num_requests = 0
        # Of few requests: who was looked at last, and did without drafts.
        self._who: tuple[str, ...] = ()

    def holds(self, num_requests: int, step: int) -> bool:
        """Whether so many requests rest in this step."""
        return step < self._until and num_requests >= self._num_requests

    def after_look(self, batch: DecodeBatch, context: StepContext) -> None:
        """Drafts do not pay for these requests, nor does any need them."""
        who, before = tuple([request.request_id for request in batch]), self._who
        self._who = who
        is_again = who == before and context.sends_ahead and not batch.has_objectives
        steps = with_objectives(context) if batch.has_objectives else REST_STEPS
        self.begin(len(batch), steps, context, 2 * REST_OF_FEW if is_again else REST_OF_FEW)

    def begin(
        self, num_requests: int, num_steps: int, context: StepContext, of_few: int = REST_OF_FEW
    ) -> None:
        """For so many steps, few requests for at most `of_few`, or until fewer are running."""
        is_few = num_requests <= FEW_REQUESTS
        self._until = context.step + (min(num_steps, of_few) if is_few else num_steps)
        self._num_requests = num_requests if is_few else max(FEW_REQUESTS + 1, int(REST_SHARE * num_requests))

    def ended(self) -> None:
        """Somebody drafts."""
        self._who = ()


def with_objectives(context: StepContext) -> int:
    """Steps of a rest beside objectives, for which drafts soon matter."""
    return REST_AHEAD if context.sends_ahead else REST_WITH_OBJECTIVES
