"""Policies by name."""

from __future__ import annotations

from types import MappingProxyType

from cluster.config import PolicyConfig
from cluster.policies.adaserve import AdaServe
from cluster.policies.autoregressive import Autoregressive
from cluster.policies.base import Policy, PolicyFactory
from cluster.policies.fixed import Fixed
from cluster.policies.flotilla import Flotilla

POLICIES: MappingProxyType[str, PolicyFactory] = MappingProxyType(
    {
        "adaserve": AdaServe,
        "autoregressive": Autoregressive,
        "fixed": Fixed,
        "flotilla": Flotilla,
    }
)


def make_policy(config: PolicyConfig) -> Policy:
    """The policy named in the configuration.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    factory = POLICIES.get(config.name)
    if factory is None:
        raise ValueError(f"unknown policy `{config.name}`; known: {', '.join(sorted(POLICIES))}")
    return factory(config)
