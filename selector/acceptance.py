"""Acceptance rates of every drafter on every request, from its prompt and from what it has said so far.

The rate of drafter j on request i is modelled as `w_j . x_i + c_i + s_ij`: what requests with such prompts
taught of the drafter (`selector.prior`), how easy the request is for all drafters, and how it suits this one.
All terms are Gaussian, so the posterior after `agreed` of `scored` tokens is closed. Without c a hard request
would be blamed on the one drafter that was tried on it, and wander from drafter to drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from selector.prior import DriftingRidge, Float64
from selector.prompt_features import PromptFeatures
from selector.windowed_counts import WindowedCounts

# Before anything is known of a drafter its rate is believed to be this, give or take so much.
INITIAL_RATE = 0.7
INITIAL_SPREAD = 0.15
# Spread of a drafter's rate over kinds of prompts.
PROMPT_SPREAD = 0.15
# Variance of c and of s; over the demo family's held-out prompts of one domain nearly all is shared.
SHARED_VARIANCE = 0.015
OWN_VARIANCE = 0.005
# Variance of one token's agreement, p (1 - p) at p = 0.8, times three: easy and hard places come in runs, so
# that a token tells a third of what an independent one would (correlations over 1 to 8 tokens sum to one).
TOKEN_VARIANCE = 0.5
# Requests after which what they taught has faded to 1/e.
MEMORY_REQUESTS = 2000.0
# A running request teaches when it has been scored on this many tokens, and each time they have doubled.
TEACH_TOKENS = 8
# Requests that ended this recently still teach: their last scores may be on the way.
NUM_ENDED = 64


@dataclass(slots=True, kw_only=True)
class _Scores(WindowedCounts):
    """One drafter on one request: its prior, its counts since it last changed, and what was taught of them.

    `own` is the variance of what the drafter does not share with others: that of its prior is in it.
    """

    mean: float
    own: float
    taught_scored: float = 0.0
    taught_precision: float = 0.0
    taught_information: float = 0.0

    def count(self, scored: float, agreed: float) -> bool:
        """Add; whether the drafter has changed."""
        has_changed = self.add(scored, agreed)
        if has_changed:
            # What the prior was taught held then; what holds now is news to it.
            self.taught_scored = self.taught_precision = self.taught_information = 0.0
        return has_changed


@dataclass(slots=True)
class _Evidence:
    """What is known of one request; `shared` is None until asked for anew."""

    features: Float64
    scores: dict[str, _Scores] = field(default_factory=dict)
    shared: float | None = 0.0


@dataclass(slots=True)
class _DrafterModel:
    own_variance: float
    prior: DriftingRidge


class AcceptanceEstimates:
    """Chance that a drafter's next token is the target's, per request and drafter."""

    def __init__(self, memory: float = MEMORY_REQUESTS) -> None:
        """Nothing known; `memory` is in requests.

        `num_shifts` counts how often a drafter was found to have changed on a running request.
        """
        self.num_shifts = 0
        self._memory = memory
        self._features = PromptFeatures()
        self._drafters: dict[str, _DrafterModel] = {}
        self._live: dict[str, _Evidence] = {}
        self._ended: OrderedDict[str, _Evidence] = OrderedDict()
        self._num_begun = 0

    def expect(
        self,
        drafter: str,
        rate: float = INITIAL_RATE,
        spread: float = INITIAL_SPREAD,
        own_variance: float = OWN_VARIANCE,
    ) -> None:
        """What to believe of a drafter before anything is known of it; ignored once something is.

        Args:
            drafter: its name.
            rate: its expected acceptance rate.
            spread: standard deviation of that belief.
            own_variance: variance of its rate between requests of one kind, apart from what is shared by
                all drafters.
        """
        if drafter in self._drafters:
            return
        size = self._features.size
        mean, variance = np.zeros(size), np.full(size, PROMPT_SPREAD**2)
        mean[-1], variance[-1] = rate, spread**2
        self._drafters[drafter] = _DrafterModel(own_variance, DriftingRidge(mean, variance, self._memory))

    def is_known(self, drafter: str) -> bool:
        """Whether anything was expected of the drafter, asked or observed."""
        return drafter in self._drafters

    def begin_anew(self, drafter: str) -> None:
        """The drafter has other weights: nothing is known of it, nor of how requests suit it."""
        self._drafters.pop(drafter, None)
        for evidence in (*self._live.values(), *self._ended.values()):
            if evidence.scores.pop(drafter, None) is not None:
                evidence.shared = None

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """A request to estimate rates for (see `PromptFeatures.of`); nothing if it is known already."""
        if request_id in self._live:
            return
        self._num_begun += 1
        self._ended.pop(request_id, None)
        self._live[request_id] = _Evidence(self._features.of(prompt, labels))

    def observe(self, request_id: str, drafter: str, scored: int, agreed: int) -> None:
        """Fold in that `agreed` of `scored` tokens of a request were the drafter's first choice.

        Scores of a request that ended a short while ago teach the prior; those of others are ignored.
        """
        evidence = self._live.get(request_id)
        has_ended = evidence is None
        if evidence is None:
            evidence = self._ended.get(request_id)
        if scored <= 0 or evidence is None:
            return
        scores = evidence.scores.get(drafter) or self._scores(evidence, drafter)
        if scores.count(scored, agreed):
            self.num_shifts += 1
        evidence.shared = None
        so_far = scores.scored
        if has_ended or (so_far >= TEACH_TOKENS and so_far >= 2.0 * scores.taught_scored):
            self._teach(evidence, drafter)

    def rate(self, request_id: str, drafter: str) -> float:
        """Estimated acceptance rate: the prior for its prompt, moved by the request's own evidence."""
        evidence = self._live.get(request_id)
        mine = None if evidence is None else evidence.scores.get(drafter)
        if evidence is None or mine is None:
            return self._posterior(request_id, drafter)[0]
        # As `_posterior`, which is asked for far less often than this.
        shared = evidence.shared
        if shared is None:
            shared = evidence.shared = self._shared(evidence)
        rate, scored = mine.mean + shared, mine.scored
        if scored > 0.0:
            rate += mine.own / (mine.own + TOKEN_VARIANCE / scored) * (mine.agreed / scored - rate)
        return 0.0 if rate < 0.0 else 1.0 if rate > 1.0 else rate

    def uncertainty(self, request_id: str, drafter: str) -> float:
        """Standard deviation of what tells this drafter's rate on this request from the others'."""
        return self._posterior(request_id, drafter)[1]

    def posterior(self, request_id: str, drafter: str) -> tuple[float, float]:
        """`rate` and `uncertainty` at once."""
        return self._posterior(request_id, drafter)

    def prior(self, request_id: str, drafter: str) -> tuple[float, float]:
        """Mean and standard deviation of the drafter's rate on further prompts like this request's."""
        evidence = self._live.get(request_id)
        features = self._features.of(()) if evidence is None else evidence.features
        mean, variance = self._model(drafter).prior.predict(features, self._num_begun)
        return mean, float(max(variance, 0.0) ** 0.5)

    def evidence(self, request_id: str, drafter: str) -> float:
        """Tokens of this request the drafter has been judged on, since it last changed."""
        evidence = self._live.get(request_id)
        scores = None if evidence is None else evidence.scores.get(drafter)
        return 0.0 if scores is None else scores.scored

    def forget(self, request_id: str) -> None:
        """A request ended; the priors keep what it taught."""
        evidence = self._live.pop(request_id, None)
        if evidence is None:
            return
        for drafter in evidence.scores:
            self._teach(evidence, drafter)
        self._ended[request_id] = evidence
        if len(self._ended) > NUM_ENDED:
            self._ended.popitem(last=False)

    def _model(self, drafter: str) -> _DrafterModel:
        self.expect(drafter)
        return self._drafters[drafter]

    def _scores(self, evidence: _Evidence, drafter: str) -> _Scores:
        """The prior is kept as it was at the first question: later it has learnt from the request itself."""
        scores = evidence.scores.get(drafter)
        if scores is None:
            model = self._model(drafter)
            mean, variance = model.prior.predict(evidence.features, self._num_begun)
            scores = evidence.scores[drafter] = _Scores(
                mean=mean, own=model.own_variance + max(variance, 0.0)
            )
        return scores

    def _posterior(self, request_id: str, drafter: str) -> tuple[float, float]:
        evidence = self._live.get(request_id)
        if evidence is None:
            evidence = _Evidence(self._features.of(()))
        mine = evidence.scores.get(drafter) or self._scores(evidence, drafter)
        shared = evidence.shared
        if shared is None:
            shared = evidence.shared = self._shared(evidence)
        # What the shared term leaves over is the drafter's own.
        rate, variance, scored = mine.mean + shared, mine.own, mine.scored
        if scored > 0.0:
            gain = variance / (variance + TOKEN_VARIANCE / scored)
            rate += gain * (mine.agreed / scored - rate)
            variance *= 1.0 - gain
        return (0.0 if rate < 0.0 else 1.0 if rate > 1.0 else rate), variance**0.5

    def _shared(self, evidence: _Evidence) -> float:
        """Posterior mean of the term shared by all drafters, from every one scored."""
        precision, information = 1.0 / SHARED_VARIANCE, 0.0
        for other in evidence.scores.values():
            scored = other.scored
            if scored > 0.0:
                noise = other.own + TOKEN_VARIANCE / scored
                precision += 1.0 / noise
                information += (other.agreed / scored - other.mean) / noise
        return information / precision

    def _teach(self, evidence: _Evidence, drafter: str) -> None:
        """Bring the prior up to date with the request's counts, as if they were one observation.

        Its information is `precision * rate`; what was taught of it before is taken off.
        """
        scores, model = evidence.scores[drafter], self._drafters[drafter]
        if scores.scored <= scores.taught_scored:
            return
        precision = 1.0 / (SHARED_VARIANCE + model.own_variance + TOKEN_VARIANCE / scores.scored)
        information = precision * scores.agreed / scores.scored
        new = precision - scores.taught_precision
        model.prior.observe(
            evidence.features, (information - scores.taught_information) / new, new, self._num_begun
        )
        scores.taught_scored = scores.scored
        scores.taught_precision, scores.taught_information = precision, information


def expected_tokens(rate: float, depth: int) -> float:
    """Tokens one step yields with chains of `depth` (SmartSpec: `(1 - a^(k+1)) / (1 - a)`)."""
    if rate >= 1.0:
        return depth + 1.0
    return float((1.0 - rate ** (depth + 1)) / (1.0 - rate))
