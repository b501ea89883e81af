"""Drafters changed while the cell serves: an instance's end is never another's, whatever it is called."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config import FlotillaConfig
from cluster.drafter_config import DrafterConfig, OwnDrafterConfig, PromptLookupConfig
from cluster.events import DrafterReady, Event, VerifierReady, WorkerLost
from cluster.lifecycle import Lifecycle
from cluster.linear_cost import LinearCost
from cluster.pool_changes import PoolChanges
from cluster.pool_errors import DrafterFailed, PoolError, UnknownDrafter
from cluster.worker_set import WorkerSet
from drafters.protocol import Capabilities

CAPABILITIES = Capabilities(
    kind="prompt_lookup",
    max_depth=8,
    max_width=1,
    has_probabilities=False,
    needs_prefill=False,
    vocab_size=50,
    max_tokens=100,
)


class Workers:
    """Processes by the name of their instance; they load as fast as `loads` lets them."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.standby = SimpleNamespace(fill=lambda: None)
        self.loads = asyncio.Event()
        self.loads.set()
        self.ends = asyncio.Event()
        self.ends.set()
        self.broken: set[str] = set()
        self.broken_costs = False

    async def reserve_added(self, name: str, config: DrafterConfig, report: object) -> None:
        """There is always a place."""

    async def load_drafter(self, name: str, config: DrafterConfig, target: VerifierReady) -> DrafterReady:
        assert name not in self.workers, "nobody would end the process that was there"
        self.workers[name] = SimpleNamespace(where=[], waits_for="")
        await self.loads.wait()
        if name in self.broken:
            raise OSError("no such model")
        return DrafterReady(name, CAPABILITIES, 8, kind=config.name)

    async def measure_drafter(self, name: str) -> LinearCost:
        if self.broken_costs:
            raise ConnectionError("it died")
        return LinearCost()

    async def remove(self, name: str) -> None:
        await self.ends.wait()
        self.workers.pop(name, None)  # who was given up before it began has no process


class Shell:
    """Notes what the scheduler is told; it knows what the drafter costs."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.ready: list[str] = []
        self.serving: set[str] = set()
        self.learnt: list[str] = []
        profile = SimpleNamespace(drafters={"small": LinearCost()})
        self.core = SimpleNamespace(
            pool=SimpleNamespace(drafters={}), cost=SimpleNamespace(profile=profile), is_idle=False
        )

    def learn_cost(self, kind: str, cost: LinearCost) -> None:
        self.learnt.append(kind)

    def handle(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self.lost.append(event.name)
            self.serving.discard(event.name)
        if isinstance(event, DrafterReady):
            self.ready.append(event.name)
            self.serving.add(event.name)


class Cell:
    """One that serves with so many instances of `small`."""

    def __init__(self, replicas: int) -> None:
        self.small = PromptLookupConfig(name="small", replicas=replicas)
        raw = {"target": {"path": "unused"}, "drafters": [self.small.model_dump()]}
        config = FlotillaConfig.model_validate(raw)
        self.workers, self.shell = Workers(), Shell()
        workers = cast(WorkerSet, self.workers)
        self.lifecycle = Lifecycle(config, workers, cast(Any, self.shell))
        self.lifecycle._target = VerifierReady(100, 100, 50)
        for life in self.lifecycle.lives.values():
            life.state = "ready"
            self.workers.workers[life.name] = SimpleNamespace(where=[], waits_for="")
        self.changes = PoolChanges(config, self.lifecycle, workers, cast(Any, self.shell))

    @property
    def states(self) -> dict[str, str]:
        return {life.name: life.state for life in self.lifecycle.of_kind("small")}


async def turns() -> None:
    """Let whoever can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_kind_added_again_while_an_instance_of_it_drains_gets_other_names() -> None:
    cell = Cell(2)
    await cell.changes.drain("small")
    cell.changes.drained("small/0")
    await turns()
    assert not cell.lifecycle.kinds, "none is left but one that drains, so the kind may be added"
    await cell.changes.add(cell.small, 5.0)
    assert cell.states == {"small/1": "draining", "small/0": "ready", "small/2": "ready"}
    cell.changes.drained("small/1")
    await turns()
    assert cell.states == {"small/0": "ready", "small/2": "ready"}
    assert cell.workers.workers.keys() == {"verifier", "small/0", "small/2"}
    assert cell.lifecycle.kinds == {"small": cell.small}


async def test_a_process_that_dies_while_it_drains_ends_nobody_else() -> None:
    cell = Cell(2)
    await cell.changes.drain("small")
    cell.changes.drained("small/1")
    await turns()
    await cell.changes.add(cell.small.model_copy(update={"replicas": 1}), 5.0)
    cell.lifecycle.lost("small/0")
    await turns()
    assert cell.shell.lost == ["small/1", "small/0"]
    assert cell.states == {"small/1": "ready"}
    assert cell.workers.workers.keys() == {"verifier", "small/1"}


async def test_a_name_is_free_only_once_its_process_has_ended() -> None:
    cell = Cell(1)
    cell.workers.ends.clear()
    removed = asyncio.create_task(cell.changes.remove("small"))
    await turns()
    await cell.changes.add(cell.small, 5.0)
    cell.workers.ends.set()
    await removed
    assert cell.states == {"small/1": "ready"}
    assert cell.workers.workers.keys() == {"verifier", "small/1"}
    await cell.changes.remove("small")
    await cell.changes.add(cell.small, 5.0)
    assert cell.states == {"small": "ready"}


async def test_who_drains_is_not_counted_when_some_of_several_cannot_be_loaded() -> None:
    cell = Cell(2)
    await cell.changes.drain("small")
    cell.changes.drained("small/0")
    await turns()
    cell.workers.broken = {"small/2"}
    with pytest.raises(DrafterFailed, match=r"^1 of 2 instances of drafter `small` .* no such model"):
        await cell.changes.add(cell.small, 5.0)
    assert cell.states == {"small/1": "draining", "small/0": "ready"}
    assert cell.lifecycle.kinds["small"].replicas == 1


async def test_a_kind_is_removed_whole_though_its_first_instance_has_its_name() -> None:
    cell = Cell(1)
    await cell.changes.scale("small", 3, 5.0)
    assert cell.states == {"small": "ready", "small/1": "ready", "small/2": "ready"}
    await cell.changes.remove("small/0")
    assert cell.states == {"small/1": "ready", "small/2": "ready"}
    await cell.changes.remove("small")
    assert cell.states == {}
    with pytest.raises(UnknownDrafter, match="no drafter `small/0`"):
        await cell.changes.remove("small/0")


async def test_costs_that_could_not_be_measured_are_not_known_at_the_next_attempt() -> None:
    cell = Cell(1)
    cell.shell.core.is_idle, cell.shell.core.totals = True, SimpleNamespace(steps=0)
    deeper = cell.small.model_copy(update={"max_ngram": 7})
    cell.workers.broken_costs = True
    with pytest.raises(DrafterFailed, match="died"):
        await cell.changes.replace(deeper, 5.0)
    assert cell.states == {"small": "ready"}
    cell.workers.broken_costs = False
    [_, after] = await cell.changes.replace(deeper, 5.0)
    assert after["costs"] == "measured"
    assert cell.shell.learnt == ["small"]


async def replacing(cell: Cell) -> asyncio.Task[list[dict[str, Any]]]:
    """`small` is being replaced, and the new instances still load."""
    cell.shell.core.is_idle, cell.shell.core.totals = True, SimpleNamespace(steps=0)
    cell.workers.loads.clear()
    other = cell.small.model_copy(update={"max_requests": 3})
    task = asyncio.create_task(cell.changes.replace(other, 5.0))
    await turns()
    return task


@pytest.mark.parametrize("wanted", [1, 2, 3])
async def test_a_kind_is_not_scaled_while_it_is_replaced(wanted: int) -> None:
    """Those too many were the new ones, and the old ones went, too: nobody was left."""
    cell = Cell(2)
    task = await replacing(cell)
    with pytest.raises(PoolError, match="scale it once that is done"):
        await cell.changes.scale("small", wanted, 5.0)
    cell.workers.loads.set()
    await task
    assert cell.states == {
        "small/0": "draining",
        "small/1": "draining",
        "small/2": "ready",
        "small/3": "ready",
    }


@pytest.mark.parametrize("change", ["remove", "drain"])
async def test_the_old_ones_stay_if_a_new_one_is_taken_away_while_it_loads(change: str) -> None:
    cell = Cell(1)
    task = await replacing(cell)
    await getattr(cell.changes, change)("small/1")
    with pytest.raises(PoolError, match="not replaced: small/1 was taken away"):
        await task
    assert cell.states == {"small": "ready"}
    assert cell.lifecycle.kinds == {"small": cell.small}


async def test_a_kind_removed_while_it_is_replaced_is_gone() -> None:
    cell = Cell(1)
    task = await replacing(cell)
    await cell.changes.remove("small")
    with pytest.raises(PoolError, match="not replaced"):
        await task
    assert cell.states == {}
    assert cell.lifecycle.kinds == {}


async def test_who_is_given_up_at_the_moment_it_is_loaded_is_not_ready_afterwards() -> None:
    """It was, behind the news of its loss: the scheduler had a drafter that nobody else knew, and waited for
    its answers."""
    cell = Cell(1)
    cell.workers.loads.clear()
    await cell.changes.scale("small", 2, 0.0)
    cell.workers.loads.set()  # who waits for it goes on after this turn of the loop
    await cell.changes.scale("small", 1, 0.0)
    await turns()
    assert cell.shell.lost == ["small/1"]
    assert not cell.shell.ready
    assert cell.states == {"small": "ready"}
    assert cell.workers.workers.keys() == {"verifier", "small"}


@pytest.mark.parametrize("change", ["remove", "drain"])
async def test_who_adds_a_drafter_is_told_that_it_was_taken_away_while_it_was_loaded(change: str) -> None:
    """The answer was 201, which says that it serves, with nobody in it."""
    cell = Cell(1)
    cell.workers.loads.clear()
    added = asyncio.create_task(cell.changes.add(cell.small.model_copy(update={"name": "other"}), 5.0))
    scaled = asyncio.create_task(cell.changes.scale("small", 2, 5.0))
    await turns()
    for name in ("other", "small/1"):
        await getattr(cell.changes, change)(name)
    for task, kind in ((added, "other"), (scaled, "small")):
        with pytest.raises(PoolError, match=f"`{kind}` was not added: it was taken away"):
            await task
    assert cell.states == {"small": "ready"}


async def test_of_those_too_many_who_does_not_serve_goes_first() -> None:
    """The newest went: the one that served, and the kind had only one left that waited for a lost node."""
    cell = Cell(3)
    cell.lifecycle.lives["small/0"].state = "restarting"
    await cell.changes.scale("small", 1, 5.0)
    await turns()
    assert cell.states == {"small/1": "ready", "small/2": "draining"}
    assert cell.shell.lost == ["small/0"]


async def test_an_instance_is_not_scaled_and_its_kind_is_named() -> None:
    with pytest.raises(UnknownDrafter, match="`small/1` is an instance; name its kind, `small`"):
        await Cell(2).changes.scale("small/1", 2, 5.0)


@pytest.mark.parametrize("seed", range(40))
async def test_in_the_end_the_scheduler_has_who_is_there_whatever_was_asked_for(seed: int) -> None:
    """Changes at any moment of each other: no drafter that nobody knows, and no process without a drafter."""
    rng = random.Random(seed)
    cell = Cell(rng.randint(1, 3))
    serving = cell.shell.serving
    serving.update(cell.states)
    changes, asked = cell.changes, list[asyncio.Future[object]]()
    for _ in range(30):
        names = list(cell.states) or ["small"]
        config = cell.small.model_copy(update={"replicas": rng.randint(1, 3)})
        change = rng.choice(
            [
                lambda config=config: changes.add(config, 0.0),
                lambda: changes.scale("small", rng.randint(1, 4), 0.0),
                lambda config=config: changes.replace(config, 0.0),
                lambda names=names: changes.drain(rng.choice(names)),
                lambda names=names: changes.remove(rng.choice(names)),
            ]
        )
        asked.append(asyncio.ensure_future(change()))
        if rng.random() < 0.5:
            cell.workers.loads.set() if rng.random() < 0.6 else cell.workers.loads.clear()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        for name in [name for name, state in cell.states.items() if state == "draining"]:
            if rng.random() < 0.3 and name in serving:
                changes.drained(name)
    cell.workers.loads.set()
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert error is None or isinstance(error, list | PoolError), error
    await turns()
    assert serving == cell.states.keys()
    assert cell.workers.workers.keys() == {"verifier", *serving}


async def test_a_class_that_the_start_did_not_name_is_not_run() -> None:
    """Who may change drafters would choose code that is run as the server's user."""
    named = {"kind": "own", "name": "mine", "import_path": "my_drafters.Mine"}
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}, "drafters": [named]})
    lifecycle = SimpleNamespace(
        target=SimpleNamespace(num_slots=1), lives={}, kinds={"mine": config.drafters[0]}
    )
    changes = PoolChanges(config, *cast(Any, (lifecycle, Workers(), Shell())))
    for other in ({"name": "other"}, {}):
        drafter = OwnDrafterConfig.model_validate(named | other | {"import_path": "os.system"})
        with pytest.raises(PoolError, match=r"`import_path: os\.system` is not one of the configuration"):
            await (changes.add(drafter, 1.0) if other else changes.replace(drafter, 1.0))
