"""Latencies predicted for a newcomer, from the cost model and from how steps have gone lately."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cluster.cost_model import CostModel
from cluster.first_chunks import FirstChunks
from cluster.load_pace import LoadPace
from cluster.passing import NOBODY_PASSES, Passing
from cluster.requests import PREFILL, Request
from cluster.running_mean import RunningMean
from cluster.stream_messages import Prediction, Submit
from verifier.messages import VerifyResult

# Tokens per step that a request by itself is taken to get where there are drafters, until it is known.
SOLO_TOKENS = 2.0
# Steps after which a load counts as known.
KNOWN_STEPS = 8
# What a load seemed slower than one seen now lets expect is forgotten by this share in so many steps of that,
# and by twice the share in each with prompts: if it were for ever, whoever is refused for it would be, too.
FORGOTTEN, FORGOTTEN_STEPS = 1 / 256, 16
# Share of its `max_tokens` that a request is taken to use until some have ended.
FIRST_SHARE = 1.0
# Requests that are reckoned to pass one that waits; by then it is late for any objective.
MOST_PASSING = 256


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the requests at hand are expected to have begun and ended, in seconds from now.

    Attributes:
        start_s: when a newcomer would be admitted.
        starts_s: when each of those waiting before it would be, in their order.
        ends_s: when each of those running and waiting would end, sorted.
        places: how many run at once at most.
    """

    start_s: float
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    places: int

    def num_left(self, after_s: float) -> int:
        """How many of them are still there then."""
        return len(self.ends_s) - bisect_left(self.ends_s, after_s)


@dataclass(slots=True)
class Forecast:
    """Predicts time to first token and time per output token.

    The pace of decoding is measured by load, as steps and what they bring depend on how many share them:
    drafts shrink, prompts come in between. Where a load has not been seen, the nearest one that has is
    scaled by the cost model, and without any the cost model stands alone.

    Attributes:
        cost: forward-time model of the target.
        chunk_tokens: most prompt tokens of a step.
        max_running: requests that may run at once.
        first_chunks: what passes before a newcomer's prompt is begun.
    """

    cost: CostModel
    chunk_tokens: int
    max_running: int
    first_chunks: FirstChunks = field(default_factory=FirstChunks)
    _paces: dict[int, LoadPace] = field(default_factory=dict)
    _answered_at: float | None = None
    _output_share: RunningMean = field(default_factory=lambda: RunningMean(FIRST_SHARE))
    # Seconds from one answer to the next with part of a prompt in it, over those of its forward, by load.
    _prefill_share: dict[int, RunningMean] = field(default_factory=dict)
    _cached_share: RunningMean = field(default_factory=lambda: RunningMean(0.0))
    _chunk: RunningMean = field(init=False)

    def __post_init__(self) -> None:
        self._chunk = RunningMean(float(self.chunk_tokens))

    # What happens

    def verified(self, result: VerifyResult, running: Collection[Request], now: float) -> None:
        """The target answered; requests as they were before the answer."""
        since, self._answered_at = self._answered_at, now
        is_resuming = False
        num_left = num_prefilled = num_decoding = num_context = 0
        begun = now
        computed = {progress.request_id: progress for progress in result.prefills}
        for request in running:
            first_at = request.first_token_at
            if request.state not in PREFILL:
                if since is not None and first_at is not None and first_at <= since:
                    num_decoding += 1
                    num_context += request.num_tokens
            else:
                progress = computed.get(request.request_id)
                if progress is None:
                    # Who was not begun by the answer before may have come when this call was on its way.
                    begun_at = request.first_chunk_at
                    num_left += since is not None and begun_at is not None and begun_at < since
                else:
                    num_prefilled += progress.num_computed - max(request.num_computed, progress.num_cached)
                    num_left += progress.verdict is None
                    is_resuming |= request.is_resuming
                    if request.first_chunk_at is not None:
                        begun = min(begun, request.first_chunk_at)
        # When the prompts of those that lost the target were begun again is known only by the answer before.
        if num_prefilled > 0 and not (is_resuming and since is None):
            if num_left:  # the step's room for prompts was used up
                self._chunk.follow(float(num_prefilled))
            step_s = max(0.0, now - (begun if since is None else max(begun, since)))
            expected_s = self._chunk_s(num_prefilled, num_decoding)
            share = self._prefill_share.setdefault(num_decoding.bit_length(), RunningMean(1.0))
            share.follow(min(step_s / expected_s, 4 * share.value))
            for other in self._prefill_share.values():
                other.value -= 2 * FORGOTTEN * max(0.0, other.value - share.value)
        if since is None or num_decoding == 0 or now <= since:  # the clock was put back
            return
        num_committed = sum(len(verdict.tokens) for verdict in result.verdicts)
        step_s, expected_s = now - since, self._chunk_s(max(0, num_prefilled), num_decoding)
        means = num_committed / num_decoding, num_context / num_decoding
        pace = self._paces.get(num_decoding.bit_length())
        # A hiccup of the machine counts fourfold at most, also where it is all that was seen.
        if pace is None:
            values = (float(num_decoding), min(step_s, 4 * expected_s), *means)
            pace = self._paces[num_decoding.bit_length()] = LoadPace(*map(RunningMean, values))
        pace.num_decoding.follow(num_decoding)
        pace.step_s.follow(min(step_s, 4 * pace.step_s.value))
        pace.num_committed.follow(means[0])
        pace.num_context.follow(means[1])
        for slow in self._paces.values() if pace.step_s.seen % FORGOTTEN_STEPS == 0 else ():
            here_s = self._seen_s(pace, slow.num_decoding.value, slow.num_context.value)
            slow.step_s.value -= FORGOTTEN * max(0.0, slow.step_s.value - here_s)

    def ended(self, request: Request, reason: str) -> None:
        """A request ended; only one that did so by itself says how long answers are."""
        if reason not in ("stop", "length") or not request.output:
            return
        self._output_share.follow(min(1.0, len(request.output) / request.submit.num_reckoned))
        # Who was begun before finds what it left, which newcomers will not.
        if request.num_preemptions == request.num_resubmitted == 0:
            self._cached_share.follow(request.num_cached / request.num_prompt)

    def idle(self) -> None:
        """Nobody is served any more, or the target is lost: the time until the next answer says nothing."""
        self._answered_at = None

    # What is predicted

    def tpot_s(
        self, num_decoding: int, *, drafts: bool, num_context: float = 0.0, is_calm: bool = False
    ) -> float:
        """Seconds per output token of a request while so many decode, itself included.

        Args:
            num_decoding: requests.
            drafts: whether anybody drafts for it.
            num_context: tokens of a request's sequence, where no load has been seen.
            is_calm: whether nobody comes any more, so that no prompts are computed in between.
        """
        num_decoding = max(1, num_decoding)
        # As if nothing were drafted: what that brings beyond is not known at first.
        plain_s = self._plain_s(num_decoding, num_context) + self.cost.profile.overhead_s
        known = [pace for pace in self._paces.values() if pace.step_s.seen >= KNOWN_STEPS]
        if not known:
            return plain_s
        bits = num_decoding.bit_length()
        nearest = min(known, key=lambda one: abs(round(one.num_decoding.value).bit_length() - bits))
        found_s = self._paced_s(nearest, num_decoding, drafts=drafts)
        if not is_calm:
            return found_s
        # A low load may have been seen only while a burst began: it is never slower than a higher one.
        higher = [one for one in known if one.num_decoding.value >= nearest.num_decoding.value]
        return min(plain_s, *(self._paced_s(one, num_decoding, drafts=drafts) for one in higher), found_s)

    def _paced_s(self, pace: LoadPace, num_decoding: int, *, drafts: bool) -> float:
        """Seconds per output token at a load, from what was seen at another."""
        step_s = self._seen_s(pace, num_decoding, pace.num_context.value)
        num_committed = max(1e-3, pace.num_committed.value)
        return step_s / (num_committed if drafts else min(1.0, num_committed))

    def _seen_s(self, pace: LoadPace, num_decoding: float, num_context: float) -> float:
        """Seconds of a step at a load, scaled from what was seen at another."""
        seen_s = self._plain_s(max(1.0, pace.num_decoding.value), pace.num_context.value)
        return pace.step_s.value * self._plain_s(num_decoding, num_context) / seen_s

    def _plain_s(self, num_decoding: float, num_context: float) -> float:
        cost = self.cost.profile.target
        return cost.seconds(round(num_decoding), num_decoding, round(num_decoding * num_context))

    def prefill_s(self, num_tokens: float, num_decoding: int) -> float:
        """Seconds in which so many prompt tokens are computed while so many requests decode."""
        chunk = min(max(1.0, self._chunk.value), float(self.chunk_tokens))
        seconds = self._chunks_s(num_tokens, chunk, num_decoding)
        bits = num_decoding.bit_length()
        known = min(self._prefill_share, key=lambda other: abs(other - bits), default=None)
        return seconds * (1.0 if known is None else self._prefill_share[known].value)

    def _chunks_s(self, num_tokens: float, chunk: float, num_decoding: int) -> float:
        """The same by the profile, in steps with so many prompt tokens each."""
        full, rest = divmod(max(1.0, num_tokens), chunk)
        last_s = self._chunk_s(rest, num_decoding) if rest >= 1.0 else 0.0
        return full * self._chunk_s(chunk, num_decoding) + last_s

    def _chunk_s(self, num_tokens: float, num_decoding: int) -> float:
        """Predicted seconds of a step with so many prompt tokens beside the decoding ones."""
        profile = self.cost.profile
        return profile.target.seconds(num_decoding + 1, num_decoding + num_tokens, 0) + profile.overhead_s

    def schedule(
        self,
        running: Collection[Request],
        ahead: Sequence[Request],
        *,
        is_full: bool,
        drafts: bool,
        starts_only: bool = False,
        passing: Passing = NOBODY_PASSES,
    ) -> Schedule:
        """When those running and waiting would begin and end, places being given in the queue's order.

        Args:
            running: requests running.
            ahead: waiting requests before the newcomer.
            is_full: whether no more can run than do now, as when anybody waits.
            drafts: whether there are drafters.
            starts_only: leave out when those end whose end nobody waits for, and say infinity; it is most
                of the work, and what will be true now does not depend on it.
            passing: who comes later than the newcomer and begins before it.
        """
        places = len(running) if is_full else self.max_running
        free = max(0, places - len(running))
        paces: dict[int, float] = {}
        # All who run get a token per `tpot_s`, which is shorter the fewer they are: time goes by in tokens.
        heap = [self._num_left(request) for request in running]
        heapq.heapify(heap)
        starts: list[float] = []
        ends: list[float] = []
        now_s = tokens = 0.0
        start_s = 0.0 if free > len(ahead) or places == 0 else None
        for request in ahead:
            if free > 0:
                free -= 1
            elif heap:
                now_s, tokens = self._next_end(heap, now_s, tokens, paces, drafts=drafts)
                ends.append(now_s)
            starts.append(now_s)
            heapq.heappush(heap, tokens + self._num_left(request))
        num_passed, passer = 0, 0.0 if passing.is_nobody else self._mean_length([*running, *ahead])
        due_s = due = 0.0
        while heap:
            if starts_only and start_s is not None:
                ends += [math.inf] * len(heap)
                break
            now_s, tokens = self._next_end(heap, now_s, tokens, paces, drafts=drafts)
            ends.append(now_s)
            if start_s is not None:
                continue
            # Places that became free until now, against those that passers have asked for: less than a whole
            # one is how likely somebody has come who takes this one.
            before_s, before, due_s, due = due_s, due, now_s, passing.number(now_s) - num_passed
            if due > 0.0 and num_passed < MOST_PASSING:
                num_passed += 1
                heapq.heappush(heap, tokens + passer)
            else:
                share = before / (before - due) if before > 0.0 >= due else 1.0
                start_s = before_s + share * (now_s - before_s) if num_passed else now_s
        return Schedule(start_s or 0.0, starts, ends, max(1, places))

    def _next_end(
        self, heap: list[float], now_s: float, tokens: float, paces: dict[int, float], *, drafts: bool
    ) -> tuple[float, float]:
        """When the next of those running ends, and at which of the tokens that each gets."""
        num_running = len(heap)
        if num_running not in paces:
            # Once some have ended the load falls; only the present one has prompts in between.
            paces[num_running] = self.tpot_s(num_running, drafts=drafts, is_calm=bool(paces))
        end = heapq.heappop(heap)
        return now_s + (end - tokens) * paces[num_running], end

    def predict(
        self,
        submit: Submit,
        running: Collection[Request],
        schedule: Schedule,
        *,
        drafts: bool,
        busy_s: float = 0.0,
        after_s: float = 0.0,
        more: int = 0,
        prompts_s: float = 0.0,
        num_sent: int = 0,
    ) -> Prediction:
        """Latencies of the request if it comes `after_s` from now, and `more` others have come by then.

        Args:
            submit: the request.
            running: requests running now.
            schedule: of those running and waiting before it.
            drafts: whether drafters may draft for it.
            busy_s: seconds until the target is done with the step under way.
            after_s, more: see above.
            prompts_s: seconds of prompts that would be computed before its own then.
            num_sent: tokens of prompts in the step under way, so that `busy_s` counts them.
        """
        num_others = schedule.num_left(after_s) + more
        queue_s = max(0.0, schedule.start_s - after_s)
        num_decoding = min(schedule.places, num_others + 1)
        drafts = drafts and submit.speculation.mode != "off"
        tpot_s = self.tpot_s(
            num_decoding, drafts=drafts, num_context=len(submit.prompt), is_calm=after_s > 0.0
        )
        share = 1.0 - min(1.0, self._cached_share.value)
        num_tokens = share * (len(submit.prompt) + len(submit.output))
        num_beside = min(num_others, len(running))
        if queue_s == 0.0 and after_s == 0.0:
            prefilling = [request for request in running if request.state in PREFILL]
            left = sum(request.num_tokens - request.num_computed for request in prefilling)
            num_tokens += max(0, left - num_sent)
            num_beside -= len(prefilling)
            queue_s = busy_s + self.first_chunks.wait_s(num_beside)
        ttft_s = max(queue_s, prompts_s) + self.prefill_s(num_tokens, max(0, num_beside))
        num_after = max(0, submit.num_reckoned - 1 - len(submit.output))
        return Prediction(
            ttft_ms=1e3 * ttft_s, tpot_ms=1e3 * tpot_s, e2e_ms=1e3 * (ttft_s + num_after * tpot_s)
        )

    def prompts_s(
        self,
        running: Collection[Request],
        ahead: Sequence[Request],
        starts_s: Sequence[float],
        times_s: Sequence[float],
    ) -> list[float]:
        """Seconds of prompts that are left to compute at each of the times, if nobody comes.

        Args:
            running: requests running, some of them with a prompt under way.
            ahead: waiting requests.
            starts_s: when each of them begins, ascending.
            times_s: ascending, from now.
        """
        under_way = [request for request in running if request.state in PREFILL]
        num_decoding = len(running) - len(under_way)
        num_tokens = sum(request.num_tokens - request.num_computed for request in under_way)
        left_s, at_s = self.prefill_s(num_tokens, num_decoding) if under_way else 0.0, 0.0
        share = 1.0 - min(1.0, self._cached_share.value)
        coming = list(zip(starts_s, ahead, strict=True))[::-1]
        found = []
        for time_s in times_s:
            while coming and coming[-1][0] <= time_s:
                start_s, request = coming.pop()
                left_s = max(0.0, left_s - (start_s - at_s)) + self.prefill_s(
                    share * request.num_tokens, num_decoding
                )
                at_s = start_s
            found.append(max(0.0, left_s - (time_s - at_s)))
        return found

    def alone(self, submit: Submit, *, drafts: bool) -> Prediction:
        """The best that can be hoped for: nobody else served, and drafts that are worth their while."""
        num_tokens = (1.0 - min(1.0, self._cached_share.value)) * (len(submit.prompt) + len(submit.output))
        # Not by prompts that were slow once: where all are refused for that, none shows that it is over.
        least_s = self._chunks_s(num_tokens, self.chunk_tokens, 0)
        ttft_ms = 1e3 * min(self.prefill_s(num_tokens, 0), least_s)
        drafts = drafts and submit.speculation.mode != "off"
        tpot_ms = 1e3 * self.alone_tpot_s(drafts=drafts, num_context=len(submit.prompt))
        num_after = max(0, submit.num_reckoned - 1 - len(submit.output))
        return Prediction(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=ttft_ms + num_after * tpot_ms)

    def alone_tpot_s(self, *, drafts: bool, num_context: float = 0.0) -> float:
        """Seconds per output token of a request beside nobody, with drafts that are worth their while."""
        # As when nobody comes: one that decodes by itself now may do so beside a burst of prompts.
        tpot_s = self.tpot_s(1, drafts=drafts, num_context=num_context, is_calm=True)
        pace = self._paces.get(1)
        if not drafts or (pace is not None and pace.step_s.seen >= KNOWN_STEPS):
            return tpot_s
        plain_s = self._plain_s(1, num_context) + self.cost.profile.overhead_s
        return min(tpot_s, plain_s / SOLO_TOKENS)

    def _mean_length(self, requests: Collection[Request]) -> float:
        """Output tokens that a request like these is expected to get in all."""
        most = sum(request.submit.num_reckoned for request in requests) / max(1, len(requests))
        return max(1.0, min(1.0, self._output_share.value) * most)

    def work_s(self, submit: Submit, *, drafts: bool) -> float:
        """Seconds of the cell's time that a request takes when all places are in use."""
        num_tokens = max(1.0, min(1.0, self._output_share.value) * submit.num_reckoned)
        return num_tokens * self.tpot_s(self.max_running, drafts=drafts) / self.max_running

    def _num_left(self, request: Request) -> float:
        """Output tokens the request is expected to get yet, each a token's time; its prompt not counted."""
        most = request.submit.num_reckoned
        expected = min(1.0, self._output_share.value) * most - len(request.output)
        return max(1.0, min(expected, most - len(request.output)))
