"""Batching rules by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from cluster.batching.base import BatchingRule
from cluster.batching.fcfs import Fcfs
from cluster.batching.fcfs_slo import FcfsSlo
from cluster.batching.flotilla import Flotilla
from cluster.batching.priority import Priority
from cluster.batching.sarathi import Sarathi
from cluster.batching.sep_pipe import SepPipe
from cluster.batching.stta import Stta

BATCHING_RULES: MappingProxyType[str, Callable[[], BatchingRule]] = MappingProxyType(
    {
        "fcfs": Fcfs,
        "fcfs-slo": FcfsSlo,
        "flotilla": Flotilla,
        "priority": Priority,
        "sarathi": Sarathi,
        "sep-pipe": SepPipe,
        "stta": Stta,
    }
)


def make_rule(name: str) -> BatchingRule:
    """The batching rule of that name.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    factory = BATCHING_RULES.get(name)
    if factory is None:
        raise ValueError(f"unknown batching rule `{name}`; known: {', '.join(sorted(BATCHING_RULES))}")
    return factory()


def reads_beside(name: str) -> bool:
    """Whether steps of the rule of that name read prompts beside decoding."""
    return not isinstance(make_rule(name), Fcfs)
