"""Configurations that Flotilla refuses once it starts, or that wait for ever, are refused by the chart."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import FlotillaConfig
from tests.helm.rendered_chart import files, flotilla_args, group, merged, refusal

VOLUME = {"models": {"source": "pvc", "pvc": {"claimName": "models"}}}
KEYS = {"apiKeys": {"enabled": True, "existingSecret": "keys"}}
FAULT_TOLERANCE = {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"}}
LOOKUP = {"kind": "prompt_lookup", "placement": {"collocate": "target"}}
ON_GPU = merged(group(gpu={"count": 1}), VOLUME)


def target(**fields: Any) -> dict[str, Any]:
    return {"target": fields}


def config(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"config": merged(*parts, fields)}


def model(**placement: Any) -> dict[str, Any]:
    return {"kind": "model", "name": "small", "path": "zoo:b", "placement": placement}


#: By name: values that `FlotillaConfig` refuses, too, and what the message must say.
INVALID: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "more cells at least than at most, of which one is the default": (
        config(scaling={"cells": {"min": 3}}),
        ("config.scaling.cells.max 1", "config.scaling.cells.min 3"),
    ),
    "more cells at least than at most": (
        config(scaling={"cells": {"min": 3, "max": 2}}),
        ("config.scaling.cells.max 2", "config.scaling.cells.min 3"),
    ),
    "administration of several cells": (
        merged(config(http={"admin": True}, scaling={"cells": {"max": 2}}), KEYS),
        ("config.http.admin", "config.scaling.cells.max", "config.scaling.drafters"),
    ),
    "two drafters of one name, which is that of their kind": (
        config(drafters=[LOOKUP, LOOKUP]),
        ("config.drafters[1]", "config.drafters[0]", "prompt-lookup"),
    ),
    "two drafters of one name": (
        config(drafters=[{**LOOKUP, "name": "small"}, model(collocate="target")]),
        ("config.drafters[1]", "config.drafters[0]", "small"),
    ),
    "a drafter with the name of the target's worker": (
        config(drafters=[{**LOOKUP, "name": "verifier"}]),
        ("config.drafters[0]", "verifier"),
    ),
    "a drafter with the name of the target in cost profiles": (
        config(drafters=[{**LOOKUP, "name": "target"}]),
        ("config.drafters[0]", "`target`"),
    ),
    "a drafter with the name of what constraints leave no choice about": (
        config(drafters=[{**LOOKUP, "name": "grammar"}]),
        ("config.drafters[0]", "`grammar`"),
    ),
    "tiers that are downgraded in a circle": (
        config(tiers={name: {"downgrade_to": to} for name, to in (("a", "b"), ("b", "c"), ("c", "a"))}),
        ("config.tiers", "circle", "a -> b -> c -> a"),
    ),
    "a tier that is downgraded to itself": (
        config(tiers={"a": {"downgrade_to": "a"}}),
        ("config.tiers", "a -> a"),
    ),
    "a place for what runs in the target's process": (
        config(drafters=[{"kind": "eagle", "path": "zoo:eagle-1x384", "placement": {"num_cpus": 0.1}}]),
        ("config.drafters[0]", "eagle", "config.target.placement"),
    ),
    "heads and an EAGLE layer": (
        config(
            drafters=[
                {"kind": "heads", "path": "zoo:heads-3x384"},
                {"kind": "eagle", "path": "zoo:eagle-1x384"},
            ]
        ),
        ("config.drafters[1]", "zoo:eagle-1x384", "zoo:heads-3x384"),
    ),
    "a least depth above the default of the greatest": (
        config(policy={"min_depth": 9}),
        ("config.policy.min_depth 9", "max_depth 8"),
    ),
    "a least depth above the greatest": (
        config(policy={"min_depth": 3, "max_depth": 2}),
        ("config.policy.min_depth 3", "max_depth 2"),
    ),
    "a target on a GPU that reserves none": (
        config(target(device="cuda")),
        ("config.target", "device: cuda", "placement.num_gpus"),
    ),
    "a drafter on a GPU that reserves none": (
        config(drafters=[{**model(collocate="target"), "device": "cuda"}]),
        ("config.drafters[0]", "small", "device: cuda", "placement.num_gpus"),
    ),
}
#: By name: values of a configuration that loads, and would not run as it is meant.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a target on the CPU of pods with GPUs": (
        merged(ON_GPU, config(target(path="/models/a"))),
        ("config.target.placement.num_gpus", "CPU", "config.target.device"),
    ),
    "a target that reserves no GPU of pods with GPUs": (
        merged(ON_GPU, config(target(path="/models/a", placement={"num_gpus": 0}))),
        ("config.target.placement.num_gpus",),
    ),
    "the demo's drafters, kept beside another target": (
        merged(VOLUME, config(target(path="/models/a"))),
        ("config.drafters[0]", "zoo:drafter-code-2x128", "config.target.path", "/models/a", "[]"),
    ),
    "resources that no pod has": (
        config(target(placement={"resources": {"verifier": 1}})),
        ("config.target", "verifier", "rayResources"),
    ),
    "more of a resource than a pod has": (
        merged(
            config(drafters=[model(resources={"drafter": 2})]),
            group(rayResources={"drafter": 1}),
        ),
        ("config.drafters[0] (small)", "2", "drafter", "has 1 at most", "rayResources"),
    ),
    "resources of cells that no pod has": (
        config(scaling={"cells": {"placement": {"resources": {"scheduler": 1}}}}),
        ("config.scaling.cells", "scheduler", "rayResources"),
    ),
    "labels that no pod has": (
        config(target(placement={"labels": {"role": "verifier"}})),
        ("config.target", "role=verifier", "rayLabels"),
    ),
    "labels of which no pod has one of the values": (
        merged(
            config(drafters=[model(labels={"role": "in(a, b)"})]),
            group(rayLabels={"role": "c"}),
        ),
        ("config.drafters[0] (small)", "role=in(a, b)", "rayLabels"),
    ),
    "Redis' password in the environment of workers": (
        merged(FAULT_TOLERANCE, group(env=[{"name": "REDIS_PASSWORD", "value": "a"}])),
        ("workerGroups[0] (cpu)", "REDIS_PASSWORD", "gcsFaultTolerance"),
    ),
    "Redis' address in the environment of workers": (
        merged(FAULT_TOLERANCE, group(env=[{"name": "RAY_REDIS_ADDRESS", "value": "a"}])),
        ("workerGroups[0] (cpu)", "RAY_REDIS_ADDRESS", "gcsFaultTolerance"),
    ),
    "Redis' password among the start parameters of workers": (
        merged(FAULT_TOLERANCE, group(rayStartParams={"redis-password": "a"})),
        ("workerGroups[0] (cpu)", "redis-password", "gcsFaultTolerance.redisPassword"),
    ),
    "a model below models.mountPath, with a volume beside it": (
        {
            "pods": {
                "volumes": [{"name": "more", "emptyDir": {}}],
                "volumeMounts": [{"name": "more", "mountPath": "/models-extra"}],
            },
            **config(target(path="/models/a")),
        },
        ("config.target.path", "/models/a", "models.source"),
    ),
}


@pytest.mark.parametrize("name", [*INVALID, *REFUSED])
def test_it_is_refused_by_name(name: str) -> None:
    values, named = (INVALID | REFUSED)[name]
    message = refusal(values)
    for part in named:
        assert part in message


@pytest.mark.parametrize("name", INVALID)
def test_flotilla_refuses_it_too(name: str) -> None:
    """So that nothing is refused that would have run."""
    with pytest.raises(ValidationError):
        FlotillaConfig.model_validate(merged(flotilla_args(), INVALID[name][0]["config"]))


#: What is near to what is refused, and runs.
TAKEN: dict[str, dict[str, Any]] = {
    "a target that is to be on the CPU of pods with GPUs": merged(
        ON_GPU, config(target(path="/models/a", device="cpu"), drafters=[])
    ),
    "a target with a share": merged(
        ON_GPU, config(target(path="/models/a", placement={"num_gpus": 0.8}), drafters=[LOOKUP])
    ),
    "tiers one below the other": config(
        tiers={"a": {"downgrade_to": "b"}, "b": {"downgrade_to": "default"}, "c": {"downgrade_to": "b"}}
    ),
    "an EAGLE layer": config(drafters=[{"kind": "eagle", "path": "zoo:eagle-1x384"}, LOOKUP]),
    "a fixed number of cells": merged(config(scaling={"cells": {"min": 3, "max": 3}}), group()),
    "administration of one cell": merged(config(http={"admin": True}), KEYS),
    "two drafters of one kind and two names": config(drafters=[LOOKUP, {**LOOKUP, "name": "other"}]),
    "no drafts at all, of which no least depth is meant": config(policy={"max_depth": 0, "min_depth": 3}),
    "resources that pods have, and those of cells": merged(
        config(target(placement={"resources": {"verifier": 0.5, "flotilla-cell": 0.001}})),
        group(rayResources={"verifier": 1}),
    ),
    "resources that Ray counts itself": config(
        target(placement={"resources": {"accelerator_type:L4": 0.001}})
    ),
    "labels that pods have": merged(
        config(
            target(placement={"labels": {"role": "in(a, b)", "zone": "!far", "ray.io/node-group": "cpu"}})
        ),
        group(rayLabels={"role": "b"}),
    ),
    "Redis' password in the environment of workers without fault tolerance": group(
        env=[{"name": "REDIS_PASSWORD", "value": "a"}]
    ),
    "a volume below models.mountPath": {
        "pods": {
            "volumes": [{"name": "more", "emptyDir": {}}],
            "volumeMounts": [{"name": "more", "mountPath": "/models/a"}],
        },
        **config(target(path="/models/a"), drafters=[]),
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_near_to_it_is_taken(name: str) -> None:
    assert files(TAKEN[name])
    FlotillaConfig.model_validate(flotilla_args(TAKEN[name]))


@pytest.mark.parametrize(
    ("drafter", "mistake"),
    [
        ({"kind": "model", "name": "a", "path": "/a", "plcement": {}}, "'plcement' not allowed"),
        ({"kind": "own", "name": "a", "import_path": "a:B"}, "/config/drafters/0/import_path': 'a:B'"),
        ({"kind": "modell", "name": "a", "path": "/a"}, "'eagle', 'heads', 'model', 'own', 'prompt_lookup'"),
        ({"name": "a", "path": "/a"}, "missing property 'kind'"),
    ],
)
def test_of_a_drafter_its_own_mistake_is_told_alone(drafter: dict[str, object], mistake: str) -> None:
    """Not also what it would have to be for each of the other kinds."""
    told = [line for line in refusal(config(drafters=[drafter])).splitlines() if "/config/drafters/0" in line]
    assert mistake in told[-1]
    assert len(told) <= 2


@pytest.mark.parametrize(
    "host", ["https://llm.example.com", "LLM.example.com", "llm.example.com:443", "a_b", "*"]
)
def test_what_is_no_host_name_is_refused(host: str) -> None:
    """By the API server, else, once the other objects are there."""
    assert "/ingress/host" in refusal({"ingress": {"enabled": True, "host": host}})
    route = {"enabled": True, "parentRefs": [{"name": "a"}], "hostnames": [host]}
    assert "/httpRoute/hostnames/0" in refusal({"httpRoute": route})


def test_host_names_may_stand_for_all_below_one() -> None:
    assert files({"ingress": {"enabled": True, "host": "*.example.com"}})
    assert files({"ingress": {"enabled": True, "host": "localhost"}})
