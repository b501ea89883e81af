"""What may be chosen by name in the configuration, known without importing what the names stand for.

A test holds them against the registries, which import the configuration. Policies and selectors of one's own
are named by import path and known where they are made.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from engine.own_classes import is_own

POLICY_NAMES = (
    "adaptive-verification",
    "adaserve",
    "adaserve-v1",
    "autoregressive",
    "equal-greedy",
    "fixed",
    "flotilla",
    "global-greedy",
    "smartspec",
    "specinfer",
    "specserve",
    "threshold",
)
BATCHING_NAMES = ("fcfs", "fcfs-slo", "flotilla", "priority", "sarathi", "sep-pipe", "stta")
SELECTOR_NAMES = ("flotilla", "lbss", "epsilon-greedy", "greedy-length", "fixed")


def _one_of(name: str, kind: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise ValueError(f"unknown {kind} `{name}`; known: {', '.join(sorted(known))}")
    return name


def _one_of_or_own(name: str, kind: str, known: tuple[str, ...]) -> str:
    return name if is_own(name) else _one_of(name, kind, known)


def _schema(known: tuple[str, ...]) -> WithJsonSchema:
    path = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", "title": "import path"}
    return WithJsonSchema({"anyOf": [{"type": "string", "enum": list(known)}, path]})


PolicyName = Annotated[
    str, AfterValidator(lambda name: _one_of_or_own(name, "policy", POLICY_NAMES)), _schema(POLICY_NAMES)
]
BatchingName = Annotated[
    str,
    AfterValidator(lambda name: _one_of(name, "batching rule", BATCHING_NAMES)),
    Field(json_schema_extra={"enum": list(BATCHING_NAMES)}),
]
SelectorName = Annotated[
    str,
    AfterValidator(lambda name: _one_of_or_own(name, "selector", SELECTOR_NAMES)),
    _schema(SELECTOR_NAMES),
]
