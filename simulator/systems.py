"""The systems that are compared: a speculation policy with its bounds, and a batching rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from cluster.batching.registry import BATCHING_RULES
from cluster.config import FlotillaConfig, PolicyConfig, SchedulerConfig, SelectorConfig, TargetConfig
from cluster.policies.base import Policy
from cluster.policies.registry import POLICIES
from engine.own_classes import is_own
from simulator.scripts import Scripts
from simulator.workers import SimulatedDrafter

# What the papers call systems. vLLM before its V1 engine prefills whole prompts first; the others cut them
# into chunks that join the decodes. AdaServe runs on FlexFlow Serve; how that batches prefills, its papers
# leave open, and it is given the better rule here.
_PRESETS = {
    "vllm": ("autoregressive", "fcfs"),
    "sarathi": ("autoregressive", "sarathi"),
    "adaserve": ("adaserve", "sarathi"),
    "adaserve-v1": ("adaserve-v1", "sarathi"),
    "flotilla": ("flotilla", "flotilla"),
}
# SmartSpec with lengths that are planned ahead of the answer, as no paper has it.
_AHEAD = "smartspec-ahead"
_SPEC = re.compile(r"vllm-spec-(\d+)|fixed-(\d+)")
# As many requests as come are taken in: the papers refuse nobody.
_UNBOUNDED = 1 << 20


SimulatedPolicy = Callable[[PolicyConfig, Scripts, Mapping[str, SimulatedDrafter]], Policy]


@dataclass(frozen=True, slots=True)
class System:
    """Something that serves.

    Attributes:
        name: in tables.
        config: of its scheduler.
        policy: makes the policy, for those that only the simulator can run: it tells them the texts and the
            drafters. None makes the policy that the configuration names.
    """

    name: str
    config: FlotillaConfig
    policy: SimulatedPolicy | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all systems of a comparison have in common; the papers' settings for a large GPU.

    Attributes:
        max_running: requests decoded at once.
        prefill_chunk: prompt tokens of a verify call, where prompts are cut.
        max_depth, max_width: deepest draft and widest beam.
        draft_budget: beam tokens of a draft step (AdaServe's B2).
        verify_budget: tokens of a verify step (AdaServe's B1); None takes the profile's knee.
        micro_batches: groups whose drafting and verification overlap.
        selector: of drafters, by name or import path.
        async_scheduling: whether plain steps are sent ahead; the papers' systems do not. All that a profile
            counts beside forwards overlaps then, also what the target's process takes.
    """

    max_running: int = 256
    prefill_chunk: int = 512
    max_depth: int = 8
    max_width: int = 4
    draft_budget: int = 64
    verify_budget: int | None = None
    micro_batches: int = 1
    selector: str = "flotilla"
    async_scheduling: bool = False


def parse(text: str, bounds: Bounds | None = None) -> System:
    """A system by the name of a paper's system, or as `POLICY/BATCHING`.

    `vllm`, `sarathi`, `adaserve`, `flotilla`, `vllm-spec-4` and the like are the papers' systems; any policy
    may be named with any batching rule (`specserve/sarathi`), `fixed-4` drafts chains of four, and
    `smartspec-ahead` is `smartspec` with `smartspec_ahead`. A policy alone is run with `sarathi`. A policy of
    one's own is named by its import path.

    Raises:
        ValueError: for a name that is none of these.
    """
    bounds = bounds or Bounds()
    policy, _, rule = text.partition("/")
    depth, is_ahead = None, policy == _AHEAD
    spec = _SPEC.fullmatch(policy)
    if spec is not None:
        depth = int(spec[1] or spec[2])
        default = "fcfs" if spec[1] else "sarathi"
        policy = "fixed"
    elif is_ahead:
        policy, default = "smartspec", "sarathi"
    else:
        policy, default = _PRESETS.get(policy, (policy, "sarathi"))
    rule = rule or default
    if policy not in POLICIES and not is_own(policy):
        raise ValueError(
            f"unknown policy {policy!r}; known: {', '.join(sorted({*POLICIES, *_PRESETS, _AHEAD}))}"
        )
    if rule not in BATCHING_RULES:
        raise ValueError(f"unknown batching rule {rule!r}; known: {', '.join(sorted(BATCHING_RULES))}")
    try:
        policy_config = PolicyConfig(
            name=policy,
            max_depth=bounds.max_depth if depth is None else max(depth, bounds.max_depth),
            max_width=bounds.max_width,
            draft_budget=bounds.draft_budget,
            verify_budget=bounds.verify_budget,
            fixed_depth=4 if depth is None else depth,
            smartspec_ahead=is_ahead,
        )
        selector = SelectorConfig(name=bounds.selector)
    except ValidationError as error:
        raise ValueError(f"{text}: {error.errors()[0]['msg']}") from None
    scheduler = SchedulerConfig(
        batching=rule,
        max_running=bounds.max_running,
        max_waiting=_UNBOUNDED,
        prefill_chunk=bounds.prefill_chunk,
        micro_batches=bounds.micro_batches,
        draft_timeout_ms=60_000.0,
        async_scheduling=bounds.async_scheduling,
    )
    config = FlotillaConfig(
        target=TargetConfig(path="simulated"), policy=policy_config, selector=selector, scheduler=scheduler
    )
    return System(text, config)
