"""Which Ray resources a cell reserves for its workers, from the configuration. No Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.config import FlotillaConfig
from cluster.drafter_config import DrafterConfig
from cluster.placement_config import PlacementConfig, ResourcesConfig

#: A bundle of a placement group must hold something: for a worker that asks for nothing, so much of a CPU.
TOKEN_CPUS = 0.001
#: The label with which Ray marks every node by its id.
NODE_ID = "ray.io/node-id"

Resources = dict[str, float]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class PlacementError(ValueError):
    """What is asked for contradicts itself; the message says how."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one worker asks Ray for.

    Attributes:
        num_cpus, num_gpus, resources: as Ray counts them.
        labels: node labels it needs, in Ray's syntax of label selectors.
    """

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, placement: ResourcesConfig) -> Demand:
        """What the configuration says."""
        return cls(placement.num_cpus, placement.num_gpus, placement.resources, placement.labels)

    @property
    def amounts(self) -> Resources:
        """By Ray's names, without what is zero."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount > 0}


@dataclass(slots=True)
class Bundle:
    """What is reserved on one node, for all who sit there.

    Attributes:
        resources: by Ray's names; never empty in a finished plan.
        labels: what the node must carry.
        seats: names of the workers.
    """

    resources: Resources = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    seats: list[str] = field(default_factory=list)

    def seat(self, name: str, demand: Demand) -> None:
        """Give one more worker a place in it.

        Raises:
            PlacementError: if a label would have to have two values.
        """
        for resource, amount in demand.amounts.items():
            self.resources[resource] = round(self.resources.get(resource, 0.0) + amount, 4)
        for label, value in demand.labels.items():
            if self.labels.setdefault(label, value) != value:
                raise PlacementError(
                    f"`{name}` needs a node with {label}={value}, and must share one that has "
                    f"{label}={self.labels[label]} with {', '.join(self.seats)}"
                )
        self.seats.append(name)

    def finish(self) -> None:
        """Make it one that Ray takes: not empty, and GPUs whole unless it is a share of one."""
        gpus = self.resources.get("GPU", 0.0)
        if gpus > 1:
            self.resources["GPU"] = float(-(-gpus // 1))
        if not self.resources:
            self.resources["CPU"] = TOKEN_CPUS


@dataclass(slots=True)
class Plan:
    """A placement group: bundles, and who sits in which.

    Attributes:
        strategy: Ray's, for the bundles among each other.
        bundles: reserved together, or not at all; may be empty.
    """

    strategy: Strategy = "PACK"
    bundles: list[Bundle] = field(default_factory=list)

    def resources(self) -> Resources:
        """Of all bundles together."""
        wanted: Resources = {}
        for bundle in self.bundles:
            for resource, amount in bundle.resources.items():
                wanted[resource] = wanted.get(resource, 0.0) + amount
        return wanted

    def seat_of(self, name: str) -> int | None:
        """Index of the worker's bundle; None if it needs none."""
        for index, bundle in enumerate(self.bundles):
            if name in bundle.seats:
                return index
        return None


def rank_name(rank: int) -> str:
    """How a rank of the target is called in a plan."""
    return f"verifier rank {rank}"


def instance_names(kind: str, replicas: int) -> list[str]:
    """Names of a drafter's instances at the start: its own for one, else with a number."""
    return [kind] if replicas == 1 else [f"{kind}/{number}" for number in range(replicas)]


def free_names(kind: str, taken: Sequence[str], count: int) -> list[str]:
    """Names for `count` more instances beside those there; nobody is renamed, a lone `KIND` counts as 0."""
    if not taken and count == 1:
        return [kind]
    numbers = {0 if name == kind else int(name.rpartition("/")[2]) for name in taken}
    found: list[str] = []
    number = 0
    while len(found) < count:
        if number not in numbers:
            found.append(f"{kind}/{number}")
        number += 1
    return found


def plan_cell(config: FlotillaConfig) -> Plan:
    """What the cell reserves for the target's ranks and the drafters' instances.

    Every worker that asks for resources or labels has a bundle of its own; drafters collocated with the
    target sit in the bundle of its first rank, so that they share its node and, where that bundle has one
    device, its device. Who asks for nothing has no bundle: Ray starts it wherever it likes.

    With a drafter on a node of its own, each bundle is on another node; so all ranks are one bundle then,
    together with those that may be anywhere and need no labels.

    Raises:
        PlacementError: if somebody would have to be on two kinds of node.
    """
    target = Demand.of(config.target.placement)
    drafters = [
        (name, drafter.placement)
        for drafter in config.drafters
        for name in instance_names(drafter.name, drafter.replicas)
    ]
    ranks = range(config.target.tensor_parallel)
    if any(placement.collocate == "own-node" for _, placement in drafters):
        return _spread(target, ranks, drafters, config.pool.strategy)
    plan = Plan(config.pool.strategy)
    joins = [entry for entry in drafters if entry[1].collocate == "target"]
    if target.amounts or target.labels or joins:
        for rank in ranks:
            plan.bundles.append(Bundle())
            plan.bundles[-1].seat(rank_name(rank), target)
    for name, placement in drafters:
        demand = Demand.of(placement)
        if placement.collocate == "target":
            plan.bundles[0].seat(name, demand)
        elif demand.amounts or demand.labels:
            plan.bundles.append(Bundle())
            plan.bundles[-1].seat(name, demand)
    return _finished(plan)


def reserved_cpus(config: FlotillaConfig) -> float:
    """CPUs that all cells and front ends reserve, with those that take their places in a rollout."""
    scaling = config.scaling
    of_cell = config.target.tensor_parallel * config.target.placement.num_cpus
    of_cell += sum(drafter.replicas * drafter.placement.num_cpus for drafter in config.drafters)
    of_cell += scaling.cells.placement.num_cpus
    front_ends = scaling.front_ends.max or config.http.front_ends
    # Who comes is there before who goes.
    return 2 * (of_cell * scaling.cells.max + front_ends * scaling.front_ends.placement.num_cpus)


def plan_added(name: str, config: DrafterConfig, target_node: str, nodes: Sequence[str]) -> Plan:
    """What is reserved for one instance added while the cell serves; Ray's groups cannot grow.

    Args:
        name: of the instance.
        config: of its kind.
        target_node: id of the node where the target's first rank runs.
        nodes: ids of all nodes where workers of the cell run.

    Raises:
        PlacementError: if its labels contradict where it must be.
    """
    demand, labels = Demand.of(config.placement), {}
    if config.placement.collocate == "target":
        labels = {NODE_ID: target_node}
    elif config.placement.collocate == "own-node":
        labels = {NODE_ID: f"!in({','.join(sorted(set(nodes)))})"}
    if not (demand.amounts or demand.labels or labels):
        return Plan()
    bundle = Bundle(labels=labels, seats=["the cell"] if labels else [])
    bundle.seat(name, demand)
    return _finished(Plan("PACK", [bundle]))


def shortage(plan: Plan, nodes: Sequence[Mapping[str, object]]) -> str:
    """Why the plan does not fit, for people: what is wanted, and what there is.

    Args:
        plan: what is waited for.
        nodes: per living node its `Resources` (amounts by name) and `Labels`, as of `ray.nodes()`.
    """
    wanted = plan.resources()
    there: Resources = dict.fromkeys(wanted, 0.0)
    for node in nodes:
        for resource, there_is in _mapping(node["Resources"]).items():
            if resource in there:
                there[resource] += float(str(there_is))
    parts = [
        f"{_amount(wanted[resource])} {resource}" for resource in wanted if wanted[resource] > TOKEN_CPUS
    ]
    labels = {_labels(bundle.labels) for bundle in plan.bundles if bundle.labels}
    parts += [f"a node with {text}" for text in sorted(labels)]
    have = [f"{_amount(there[resource])} {resource}" for resource in wanted if wanted[resource] > TOKEN_CPUS]
    message = f"waiting for {', '.join(parts) or 'a node'} for {_names(plan)}; the cluster has "
    message += f"{', '.join([*have, f'{len(nodes)} node' + ('s' if len(nodes) != 1 else '')])}"
    if labels:
        known = sorted({_labels(found) for node in nodes if (found := _own_labels(node))})
        message += f", labelled {' and '.join(known)}" if known else ", none of them labelled"
    if any(there[resource] < amount for resource, amount in wanted.items()):
        return f"{message}: it must grow"
    return f"{message}: others may be using them, or no one node has what must be together"


def lacks(plan: Plan, node: Mapping[str, object]) -> str:
    """What the only node there will ever be has too little of for the plan, for people; empty if nothing.

    Args:
        plan: of a cell.
        node: its `Resources`, as of `ray.nodes()`.
    """
    if plan.strategy == "STRICT_SPREAD" and len(plan.bundles) > 1:
        return f"{len(plan.bundles)} nodes, which {_names(plan)} are to be spread over"
    wanted = plan.resources()
    there = _mapping(node["Resources"])
    parts = [
        f"{_amount(amount)} {resource} (it has {_amount(has)})"
        for resource, amount in wanted.items()
        if (has := float(str(there.get(resource, 0.0)))) < amount
    ]
    return f"{', '.join(parts)} for {_names(plan)}" if parts else ""


def _spread(
    target: Demand, ranks: range, drafters: Sequence[tuple[str, PlacementConfig]], strategy: Strategy
) -> Plan:
    if strategy == "STRICT_PACK":
        raise PlacementError("a drafter with `collocate: own-node` contradicts `pool.strategy: STRICT_PACK`")
    shared = Bundle()
    for rank in ranks:
        shared.seat(rank_name(rank), target)
    plan = Plan("STRICT_SPREAD", [shared])
    for name, placement in drafters:
        demand = Demand.of(placement)
        is_free = placement.collocate == "anywhere" and not demand.labels
        if is_free and not demand.amounts:
            # It could be started on a node that is somebody's own.
            shared.seat(name, demand)
        elif is_free or placement.collocate == "target":
            shared.seat(name, demand)
        else:
            plan.bundles.append(Bundle())
            plan.bundles[-1].seat(name, demand)
    return _finished(plan)


def _finished(plan: Plan) -> Plan:
    for bundle in plan.bundles:
        bundle.finish()
    return plan


def _names(plan: Plan) -> str:
    names = [name for bundle in plan.bundles for name in bundle.seats if name != "the cell"]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _amount(amount: float) -> str:
    return f"{amount:g}"


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{label}={value}" for label, value in sorted(labels.items()))


def _own_labels(node: Mapping[str, object]) -> dict[str, str]:
    """Those that a person gave it."""
    labels = _mapping(node.get("Labels") or {})
    return {str(label): str(value) for label, value in labels.items() if not str(label).startswith("ray.io/")}


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value
