"""What forwards of target and drafters take: by a profile, corrected by what they took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.call_cost import CallCost
from cluster.call_parts import CallParts, Rows
from cluster.cost_account import CostAccount
from cluster.drift import DRIFT_FACTOR, Drift, DriftWatch
from cluster.linear_cost import LinearCost
from cluster.newest_weight import NewestWeight
from cluster.size_correction import NUM_SIZES, SizeCorrection

# Names under which verify forwards are corrected: plain decoding, with drafts in between, and what prompts
# add to either. No drafter may be called `verifier`, so the first cannot be one's name.
VERIFY_PLAIN, VERIFY_DRAFTED = "verifier", "verifier after drafting"
VERIFY_PROMPTS = "verifier reading prompts"
VERIFY = (VERIFY_PLAIN, VERIFY_DRAFTED, VERIFY_PROMPTS)

# Name, after a drafter's, of what its calls take besides their layers, as a multiple of its smallest forward.
PER_CALL = " per call"

# Plain forwards are slow until so many times a drafted one's time is over: drafters still compute ahead, and
# read what they missed.
SETTLED_AFTER = 3.0

Float64 = NDArray[np.float64]


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted costs of one cell's models on one machine.

    Attributes:
        target: cost of a verify forward.
        drafters: cost of one draft forward (one layer of the beam), by drafter name.
        overhead_s: seconds of a whole step spent outside forwards (messages, selection).
    """

    target: LinearCost
    drafters: dict[str, LinearCost] = {}
    overhead_s: float = 0.0


DEFAULT_PROFILE = CostProfile(
    target=LinearCost(alpha=1e-6, gamma=5e-4, rho=3e-4, delta=8e-3), overhead_s=1e-3
)


@dataclass(slots=True)
class CostModel:
    """A profile with online correction: multiplicative factors, tracked by moving average.

    One for each model, and of plain verify forwards one for each size: after drafts they take 1.2 to 1.3
    times what the profile says whatever their size, without them 0.7 to 1.2 times.

    Attributes:
        profile: the offline fit.
        smoothing: weight of the newest observation.
        kinds: of drafter instances, where that is not their own name; profile and corrections are by kind,
            and instances may be asked about.
        accounts: how predictions compare with what was measured, by model.
    """

    profile: CostProfile
    smoothing: float = 0.05
    kinds: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, CostAccount] = field(default_factory=dict)
    _factor: dict[str, float] = field(default_factory=dict)
    _plain: SizeCorrection = field(default_factory=SizeCorrection)
    _weights: dict[str, NewestWeight] = field(default_factory=dict)
    _calls: dict[str, CallCost] = field(default_factory=dict)
    _drifts: DriftWatch = field(default_factory=DriftWatch)
    # Kinds of the last two forwards in which anything was decoded.
    _decoded: tuple[str, str] = ("", "")
    # Seconds of forwards until those without drafts have settled.
    _unsettled_s: float = 0.0

    def verify_seconds(
        self,
        num_requests: int,
        num_tokens: int,
        num_context: int,
        *,
        drafted: bool = False,
        num_attended: int | None = None,
    ) -> float:
        """Predicted seconds of one verify forward; arguments as of `LinearCost.seconds`.

        `drafted` says whether drafters ran since the last one. They share caches and memory bandwidth
        with the target, so the same forward takes longer after them; each kind is corrected by its own
        observations. Of a forward with prompts in it, `call_parts` knows more.
        """
        predicted = self.profile.target.seconds(num_requests, num_tokens, num_context, num_attended)
        return predicted * self._verify_factor(num_tokens, drafted=drafted)

    def _verify_factor(self, num_tokens: float, *, drafted: bool) -> float:
        """Of a verify forward in which so many rows decode."""
        return self._factor.get(VERIFY_DRAFTED, 1.0) if drafted else self._plain.factor(num_tokens)

    def call_parts(self, decoding: Rows, prompts: Rows, *, drafted: bool) -> CallParts:
        """Predicted seconds of one verify forward: what decoding takes, and what prompts add to it.

        Each is corrected by itself: on two cores beside drafters, decoded rows take 1.2 to 1.5 times what the
        profile says, and rows of prompts just what it says.
        """
        target = self.profile.target
        alone_s = target.seconds(*decoding) if decoding.num_requests else 0.0
        added_s = target.seconds(*decoding.with_rows(prompts)) - alone_s if prompts.num_requests else 0.0
        kind = VERIFY_DRAFTED if drafted else VERIFY_PLAIN
        return CallParts(
            kind,
            alone_s * self._verify_factor(decoding.num_tokens, drafted=drafted),
            added_s * self._factor.get(VERIFY_PROMPTS, 1.0),
            profile_s=alone_s + added_s,
            profile_decoding_s=alone_s,
            num_decoding=decoding.num_tokens,
        )

    def verify_fixed_seconds(self, num_tokens: float, *, drafted: bool = False) -> float:
        """What a verify forward of so many rows takes whatever is in it; `drafted` as of `verify_seconds`."""
        return self.profile.target.delta * self._verify_factor(num_tokens, drafted=drafted)

    def verify_token_seconds(self, context: float = 0.0, num_tokens: float = math.inf) -> float:
        """Marginal seconds of one more token in a verify forward past the knee.

        Args:
            context: context tokens of the request it belongs to.
            num_tokens: rows beside it, which share experts with it; by default all experts are read.
        """
        return self.profile.target.token_seconds(context, num_tokens) * self._factor.get(VERIFY_DRAFTED, 1.0)

    def prompt_token_seconds(self) -> float:
        """Marginal seconds of one more token of a prompt in a verify forward."""
        return self.profile.target.token_seconds() * self._factor.get(VERIFY_PROMPTS, 1.0)

    def verify_added_seconds(self, num_tokens: int, most: int, context: float = 0.0) -> Float64:
        """float64 [most], marginal seconds of each of `most` tokens on top of `num_tokens`: the knee seen."""
        added = self.profile.target.added_seconds(num_tokens, most, context)
        return added * self._factor.get(VERIFY_DRAFTED, 1.0)

    def draft_seconds(
        self, drafter: str, num_requests: int, width: int, depth: int, num_context: int = 0
    ) -> float:
        """Predicted seconds of one draft call: `depth` forwards, the first on up to two rows per request.

        Args:
            drafter: its name; one without a profile costs nothing.
            num_requests: requests in the call.
            width: beam width.
            depth: layers.
            num_context: context tokens of those requests.
        """
        kind = self.kinds.get(drafter, drafter)
        cost = self.profile.drafters.get(kind)
        if cost is None or depth == 0:
            return 0.0
        layers_s = _layers_s(cost, num_requests, width, depth, num_context)
        return layers_s * self._factor.get(kind, 1.0) + self._per_call_s(kind, cost)

    def layers_seconds(
        self, drafter: str, num_requests: int, width: int, depth: int, num_context: int = 0
    ) -> float:
        """What the profile alone says of a draft call's forwards; arguments as of `draft_seconds`."""
        cost = self.profile.drafters.get(self.kinds.get(drafter, drafter))
        if cost is None or depth == 0:
            return 0.0
        return _layers_s(cost, num_requests, width, depth, num_context)

    def _per_call_s(self, kind: str, cost: LinearCost) -> float:
        """Seconds of a draft call besides its layers."""
        multiple = self._factor.get(kind + PER_CALL)
        return 0.0 if multiple is None else multiple * cost.seconds(1, 1, 0)

    def draft_seconds_by_depth(
        self, drafter: str, num_requests: int, width: int, deepest: int, num_context: int = 0
    ) -> list[float]:
        """`draft_seconds` of every depth from 0 to `deepest`."""
        kind = self.kinds.get(drafter, drafter)
        cost = self.profile.drafters.get(kind)
        if cost is None or deepest == 0:
            return [0.0] * (deepest + 1)
        first = cost.seconds(num_requests, 2 * num_requests, num_context)
        later = cost.seconds(num_requests, width * num_requests, num_context)
        factor, per_call_s = self._factor.get(kind, 1.0), self._per_call_s(kind, cost)
        return [0.0, *((first + more * later) * factor + per_call_s for more in range(deepest))]

    def read_seconds(self, drafter: str, num_tokens: int) -> float:
        """Predicted seconds in which a drafter computes keys and values of `num_tokens` tokens of a request.

        Extrapolated from forwards of few rows; one without a profile costs nothing.
        """
        kind = self.kinds.get(drafter, drafter)
        cost = self.profile.drafters.get(kind)
        if cost is None or num_tokens <= 0:
            return 0.0
        return cost.seconds(1, num_tokens, num_tokens, num_tokens * num_tokens / 2) * self._factor.get(
            kind, 1.0
        )

    def draft_layer_seconds(self, drafter: str, num_requests: int, width: int, num_context: int = 0) -> float:
        """Seconds of one forward of a drafter, which a layer costs that was not computed ahead.

        What was makes calls shorter than their forwards; so a correction below 1 says nothing of those.
        """
        kind = self.kinds.get(drafter, drafter)
        cost = self.profile.drafters.get(kind)
        if cost is None:
            return 0.0
        return cost.seconds(num_requests, width * num_requests, num_context) * max(
            1.0, self._factor.get(kind, 1.0)
        )

    def knee(self, num_requests: int) -> int:
        """AdaServe's hardware budget for a batch of `num_requests`."""
        return self.profile.target.knee(num_requests)

    def observe_draft(self, drafter: str, layers_s: float, actual: float) -> None:
        """Learn from a draft call what its layers take, and what the call takes besides.

        Nothing from one after steps without drafts, in which drafters read what they missed meanwhile, too.

        Args:
            drafter: its name.
            layers_s: `layers_seconds` of what the call came to.
            actual: seconds it took.
        """
        kind = self.kinds.get(drafter, drafter)
        cost = self.profile.drafters.get(kind)
        if cost is None or layers_s <= 0.0 or actual <= 0.0 or self._decoded == (VERIFY_PLAIN,) * 2:
            return
        call = self._calls.get(kind) or self._calls.setdefault(kind, CallCost())
        self._count(kind, call.expected_s(layers_s), actual)
        call.observe(layers_s, actual, self.smoothing)
        self._factor[kind] = call.slope
        self._factor[kind + PER_CALL] = call.fixed_s / cost.seconds(1, 1, 0)
        self._watch(kind, call.slope)

    def learn(self, kind: str, cost: LinearCost) -> None:
        """A kind of drafter is new, or has other weights: what corrected the costs before does not hold."""
        drafters = {**self.profile.drafters, kind: cost}
        self.profile = msgspec.structs.replace(self.profile, drafters=drafters)
        self._calls.pop(kind, None)
        for name in (kind, kind + PER_CALL):
            self._factor.pop(name, None)

    def _count(self, model: str, predicted: float, actual: float) -> None:
        account = self.accounts.get(model) or self.accounts.setdefault(model, CostAccount())
        account.add(predicted, actual)

    @property
    def has_settled(self) -> bool:
        """Whether drafters have come to rest since they were asked last."""
        return self._unsettled_s <= 0.0

    def observe_call(self, parts: CallParts, actual: float) -> None:
        """Learn from a verify forward: each part is corrected by its share of what was predicted.

        Of decoding after drafts only if one of the last two was of its kind, without only once drafters have
        come to rest: those after others are slower than those that follow, and would make what is rare seem
        too dear ever to become common.

        Args:
            parts: as predicted.
            actual: seconds it took.
        """
        predicted = parts.seconds
        if predicted <= 0.0 or actual <= 0.0:
            return
        self._count(parts.kind, predicted, actual)
        if parts.decoding_s > 0.0:
            before, self._decoded = self._decoded, (self._decoded[1], parts.kind)
            other = VERIFY_PLAIN if parts.kind == VERIFY_DRAFTED else VERIFY_DRAFTED
            self._weight(other).missed()
            if parts.kind == VERIFY_PLAIN:
                for call in self._calls.values():
                    call.missed()
            counts = self.has_settled if parts.kind == VERIFY_PLAIN else parts.kind in before
            self._unsettled_s -= actual
            if parts.kind == VERIFY_DRAFTED:
                self._unsettled_s = SETTLED_AFTER * parts.decoding_s
            if counts:
                self._correct(
                    parts.kind, actual / predicted, parts.decoding_s / predicted, parts.num_decoding
                )
        self._correct(VERIFY_PROMPTS, actual / predicted, parts.prompts_s / predicted)

    def _correct(self, model: str, ratio: float, share: float, num_tokens: float = 0.0) -> None:
        """Move a factor by how far a forward was off, as far as the model had a share in it."""
        if share <= 0.0:
            return
        # A hiccup of the machine must not be believed at once: a step counts at most fourfold.
        ratio = min(max(ratio, 0.25), 4.0)
        # The first steps count for more: a profile of forwards alone knows nothing of their company.
        weight = self._weight(model).next(self.smoothing)
        if model == VERIFY_PLAIN:
            self._plain.correct(num_tokens, ratio, weight, share)
            factor = self._plain.factor(num_tokens)
        else:
            factor = self._factor.get(model, 1.0) * ratio ** (share * weight)
        self._factor[model] = factor
        self._watch(model, factor)

    def _weight(self, model: str) -> NewestWeight:
        return self._weights.get(model) or self._weights.setdefault(model, NewestWeight())

    def correction(self, model: str) -> float:
        """Current factor on the offline prediction; of plain forwards that of the size seen last."""
        return self._factor.get(model, 1.0)

    @classmethod
    def corrected(
        cls,
        profile: CostProfile,
        corrections: Mapping[str, float],
        kinds: Mapping[str, str],
        plain_by_size: Sequence[float] = (),
    ) -> CostModel:
        """A model with these corrections by name, and these kinds of instances: to predict as another did.

        Plain forwards of all sizes have the one by name, unless there are some by size.
        """
        by_size = plain_by_size or [corrections.get(VERIFY_PLAIN, 1.0)] * NUM_SIZES
        return cls(profile, kinds=dict(kinds), _factor=dict(corrections), _plain=SizeCorrection(by_size))

    def take_drifts(self) -> list[Drift]:
        """What began to drift or came back since the last time this was asked."""
        return self._drifts.take()

    @property
    def corrections(self) -> dict[str, float]:
        """Current factors of all models observed, as `correction`."""
        return dict(self._factor)

    @property
    def plain_by_size(self) -> list[float]:
        """Current factors of plain verify forwards of 1, 2, 4, ... rows."""
        return self._plain.factors

    def _watch(self, model: str, factor: float) -> None:
        # Drafters may be as fast as they like: what they computed ahead costs the call nothing.
        self._drifts.look(model, factor, 1.0 / DRIFT_FACTOR if model in VERIFY else 0.0)


def _layers_s(cost: LinearCost, num_requests: int, width: int, depth: int, num_context: int) -> float:
    """Forwards of one draft call, the first on up to two rows per request."""
    first = cost.seconds(num_requests, 2 * num_requests, num_context)
    if depth == 1:
        return first
    return first + (depth - 1) * cost.seconds(num_requests, width * num_requests, num_context)
