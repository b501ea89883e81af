"""How many tokens a second steps with drafts brought, beside what was predicted of them."""

from __future__ import annotations

from cluster.policies.base import DecodeRequest
from cluster.policies.decode_batch import DecodeBatch

# Weight of the newest step.
SMOOTHING = 0.05
# No step counts as further off than by this factor: a pause is not believed.
MOST_OFF = 2.0
# Steps in which prompts have a larger share of the time say nothing of drafts.
MOST_PROMPTS = 0.2


class Realised:
    """What became of drafts, as the requests of the next plan tell: their tokens, and the time since.

    Drafts that end by their drafter's confidence, which knows more than a mean acceptance rate, are deep
    where that pays: beside an 8B target on a GPU they bring 1.1 to 1.4 times the tokens that rates and one
    depth say. Where drafting begins to pay that decides. It depends on how many requests share the time, so
    sizes are told apart by powers of two.
    """

    def __init__(self) -> None:
        self._before: dict[str, DecodeRequest] = {}
        self._step = 0
        self._predicted = 0.0
        self._ratio: dict[int, float] = {}

    def gain(self, num_requests: int) -> float:
        """Goodput of steps in which so many are drafted for, over what was predicted; not below 1.

        Less than predicted is no reason to look for less: who has an objective would miss it sooner.
        """
        return max(1.0, self.known(num_requests))

    def known(self, num_requests: int) -> float:
        """The same, also below 1."""
        return self._ratio.get(num_requests.bit_length(), 1.0)

    def look(self, batch: DecodeBatch, step: int, prompts_s: float) -> None:
        """Learn from what the requests drafted for in the step before have got.

        Args:
            batch: those of this step.
            step: its number.
            prompts_s: seconds that prompts added to the step before, whose tokens these are not.
        """
        before, self._before = self._before, {}
        if not before or step != self._step + 1:
            return
        shared = [(before[one.request_id], one) for one in batch if one.request_id in before]
        if 2 * len(shared) < len(before):
            return
        tokens = sum([now.num_decoded - then.num_decoded for then, now in shared]) / len(shared) * len(before)
        whole_s = max([now.decoding_s - then.decoding_s for then, now in shared])
        seconds = whole_s - prompts_s
        if tokens <= 0.0 or seconds <= (1.0 - MOST_PROMPTS) * whole_s:
            return
        ratio = min(max(tokens / seconds / self._predicted, 1.0 / MOST_OFF), MOST_OFF)
        known = self.known(len(before))
        self._ratio[len(before).bit_length()] = known + SMOOTHING * (ratio - known)

    def drafted(self, batch: DecodeBatch, step: int, predicted: float) -> None:
        """Drafts for these are planned; so many tokens a second are predicted of the step, but for `gain`."""
        if predicted > 0.0:
            self._before = {one.request_id: one for one in batch}
            self._step, self._predicted = step, predicted
