"""Profiles of models on hardware: how long their forwards take, what fits in memory, how good drafters are.

The profiles in `simulator/profiles` are written by `scripts/fit_hardware.py`, from kernel tables measured by
others or from a roofline, and by `scripts/fit_measured.py`, from forwards of this engine; each says which
(`source`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost
from simulator.acceptance import DraftQuality
from simulator.pace import Phase
from simulator.proposing import EAGLE, EagleProfile

PROFILES = Path(__file__).with_name("profiles")


class DrafterProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One drafter of a cell.

    Attributes:
        model: which model it is.
        cost: of one of its forwards.
        quality: of its drafts, by class of request.
        call_s: seconds that a call takes besides its forwards.
        num_parameters: of the model, by which drafters are ordered: embeddings count for all or for none of a
            profile; 0 if not told.
        stream: tells its noise from that of others; its place in the profile if None.
    """

    model: str
    cost: LinearCost
    quality: DraftQuality
    call_s: float = 0.0
    num_parameters: int = 0
    stream: int | None = None


class Trips(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an iteration that are in no forward: scheduling, sampling, messages.

    Attributes:
        verify_s, verify_request_s: of a verify call, and for each request in it.
        draft_s, draft_request_s: the same of a draft call.
        plain_request_s: for each request of a verify call without drafts; `verify_request_s` if None.
        ahead_s, ahead_request_s: of a verify call sent while another is computed, between the two forwards:
            what the target's process takes for messages and sampling. The rest is hidden.
    """

    verify_s: float
    verify_request_s: float = 0.0
    draft_s: float = 0.0
    draft_request_s: float = 0.0
    plain_request_s: float | None = None
    ahead_s: float = 0.0
    ahead_request_s: float = 0.0

    def gap_s(self, num_requests: int) -> float:
        """From the end of a forward to the next one, where that was sent ahead."""
        return self.ahead_s + self.ahead_request_s * num_requests

    def call_s(self, num_requests: int, *, drafted: bool) -> float:
        """Of a verify call."""
        each_s = self.verify_request_s
        if not drafted and self.plain_request_s is not None:
            each_s = self.plain_request_s
        return self.verify_s + each_s * num_requests


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A target and its drafters on some accelerators.

    Attributes:
        name: in `--profile`.
        target: which model, and how it is split.
        hardware: which accelerators, and how many.
        source: where the numbers come from; begins with "measured", "fitted" or "roofline".
        error: median and largest relative difference between the linear model and what it was fitted to, and
            remarks on how that compares with whole-model measurements.
        cost: of the target's forwards.
        num_slots: tokens its KV pool holds.
        max_tokens: longest sequence.
        drafters: by name.
        collocated: drafters and target share accelerators, and so take turns.
        overhead_s: seconds of a step outside forwards: scheduling, sampling, messages.
        acceptance: name of the fitted acceptance model.
        trips: `overhead_s` in parts, where they were measured; half of it for each call if None.
        after_drafting: factor on what decodes in a forward with drafts in it: drafters use the same caches.
            Rows of prompts beside it are not slowed.
        pace: phases in which all forwards take longer or shorter; none on a machine of one's own.
        eagle: a layer of EAGLE beside the target, if there is one. Its drafts take the scheduler's process no
            time but what `trips` say, and the scheduler is woken for calls that it holds back.
        quantization: to what the target's weights are rounded when they are loaded, as the configuration says
            it; None if they are as the checkpoint has them.
    """

    name: str
    target: str
    hardware: str
    source: str
    error: str
    cost: LinearCost
    num_slots: int
    max_tokens: int
    drafters: dict[str, DrafterProfile] = {}
    collocated: bool = True
    overhead_s: float = 2e-3
    acceptance: str = "chat"
    trips: Trips | None = None
    after_drafting: float = 1.0
    pace: list[Phase] = []
    eagle: EagleProfile | None = None
    quantization: Literal["fp8", "int4"] | None = None

    def cost_profile(self) -> CostProfile:
        """What the scheduler is told, if it is told the truth."""
        costs = {name: drafter.cost for name, drafter in self.drafters.items()}
        if self.eagle is not None:
            costs[EAGLE] = self.eagle.believed()
        return CostProfile(target=self.cost, drafters=costs, overhead_s=self.overhead_s)

    def check(self, kinds: Iterable[str]) -> None:
        """See that it is known how good the drafters are on classes of requests.

        Raises:
            ValueError: if it is not.
        """
        qualities = [drafter.quality for drafter in self.drafters.values()]
        for quality in qualities if self.eagle is None else [*qualities, self.eagle.quality]:
            for kind in sorted(set(kinds)):
                quality.rate_of(kind)

    def baseline_s(self, context: int = 512) -> float:
        """What relative objectives are multiples of: seconds per token without drafts, at so much context.

        Of a profile without `trips` all of `overhead_s` is counted, of which a plain step takes half: by
        itself a request is quicker by the other half.
        """
        trips = self.trips
        beside_s = self.overhead_s if trips is None else trips.call_s(1, drafted=False)
        return self.cost.seconds(1, 1, context) + beside_s


@cache
def names() -> tuple[str, ...]:
    """The profiles there are."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


def load(name: str) -> HardwareProfile:
    """A profile by its name, or by the path of a file like those in `simulator/profiles`.

    Raises:
        ValueError: for an unknown name, listing the known ones, or for a file that is no profile.
    """
    path = PROFILES / f"{name}.json" if name in names() else Path(name)
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=HardwareProfile)
    except FileNotFoundError:
        known = ", ".join(names())
        raise ValueError(
            f"unknown profile {name!r}: there is no such file, and the names are: {known}"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the profile {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a hardware profile, as those of `flotilla simulate --list` and `flotilla bench "
            f"fidelity --write-profile` are (what `flotilla profile` writes is for cells): {error}"
        ) from None
    for who, cost in {"the target": profile.cost, **{n: d.cost for n, d in profile.drafters.items()}}.items():
        # Beyond the knee rows may cost less than before it, but no forward may end before it begins.
        told = {**msgspec.structs.asdict(cost), "gamma_knee": cost.gamma + cost.gamma_knee}
        below = [name for name, value in told.items() if value < 0.0]
        if below:
            raise ValueError(f"{path}: costs below 0, of {who}: {', '.join(below)}")
    return profile
