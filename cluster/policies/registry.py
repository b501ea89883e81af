"""Policies by name."""

from __future__ import annotations

from types import MappingProxyType

from cluster.config import PolicyConfig
from cluster.policies.adaptive_verification import AdaptiveVerification
from cluster.policies.adaserve import AdaServe
from cluster.policies.adaserve_v1 import AdaServeV1
from cluster.policies.autoregressive import Autoregressive
from cluster.policies.base import Policy, PolicyFactory
from cluster.policies.equal_greedy import EqualGreedy
from cluster.policies.fixed import Fixed
from cluster.policies.flotilla import Flotilla
from cluster.policies.global_greedy import GlobalGreedy
from cluster.policies.own import own_policy
from cluster.policies.smartspec import SmartSpec
from cluster.policies.specinfer import SpecInfer
from cluster.policies.specserve import SpecServe
from cluster.policies.threshold import Threshold
from engine.own_classes import is_own

POLICIES: MappingProxyType[str, PolicyFactory] = MappingProxyType(
    {
        "adaptive-verification": AdaptiveVerification,
        "adaserve": AdaServe,
        "adaserve-v1": AdaServeV1,
        "autoregressive": Autoregressive,
        "equal-greedy": EqualGreedy,
        "fixed": Fixed,
        "flotilla": Flotilla,
        "global-greedy": GlobalGreedy,
        "smartspec": SmartSpec,
        "specinfer": SpecInfer,
        "specserve": SpecServe,
        "threshold": Threshold,
    }
)


def make_policy(config: PolicyConfig, *, goes_on: bool = False) -> Policy:
    """The policy named in the configuration, one of `POLICIES` or the import path of a `PolicyFactory`.

    Args:
        config: of the policy.
        goes_on: whether errors of a user's policy are logged, and steps then go without drafts, as where
            clients are served; else they are raised.

    Raises:
        ValueError: for an unknown name, listing the known ones, or a path that cannot be imported.
    """
    if is_own(config.name):
        return own_policy(config, goes_on=goes_on)
    factory = POLICIES.get(config.name)
    if factory is None:
        raise ValueError(f"unknown policy `{config.name}`; known: {', '.join(sorted(POLICIES))}")
    return factory(config)
