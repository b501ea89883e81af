"""How a cell behaves under load, measured on simulated cells that hold a fixed number of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.admission import SLOT_MARGIN
from cluster.chunk_size import chunk_tokens
from cluster.events import Action
from simulator import hardware
from simulator.fleet.arrivals import Arrivals, Requests
from simulator.fleet.cells import FleetCell, Told, cell_system
from simulator.fleet.reports import COLUMN, NAMES
from simulator.fleet.scenario import Scenario
from simulator.process_pool import process_pool
from simulator.run import Options
from simulator.workloads import SimRequest

Floats = NDArray[np.float64]

#: Requests that are told apart by how slowly they are decoded.
NUM_RANKS = 64
_SAMPLE_S = 0.5
_MEASURED = 41
#: Requests measured at each load, at least, and per place.
_LEAST_REQUESTS, _PER_PLACE = 400, 12


@dataclass(frozen=True, slots=True)
class Surface:
    """A cell by the number `n` of requests it runs, 0 to `max_running`.

    With `n` requests the share `busy` of its time goes to their prompts, as many as keep `n` constant. Where
    more or fewer prompts come than that, decoding has what they leave.

    Attributes:
        tpot_s: seconds per token of a request, shape (classes, max_running + 1, NUM_RANKS), ranks from
            fast to slow.
        first_s: from when its prompt has been read to the first token; shape (max_running + 1).
        prefill_s: seconds until a prompt is read, per token of it, shape (max_running + 1).
        chunk_s: of these, how long a token keeps the next prompt waiting: several share a step.
        busy: share of the cell's time that prompts take, shape (max_running + 1).
        reports: what the cell reports, shape (max_running + 1, columns).
        mean_output: tokens of an answer.
        token_s: what a token of a prompt adds to a forward.
        ageing_s: of the rule that serves, by which requests wait in the order of `cluster.batching.flotilla`;
            None: they wait in order of arrival.
    """

    tpot_s: Floats
    first_s: Floats
    prefill_s: Floats
    chunk_s: Floats
    busy: Floats
    reports: Floats
    mean_output: float
    token_s: float
    ageing_s: float | None

    @property
    def max_running(self) -> int:
        """Requests that a cell runs at once."""
        return int(self.tpot_s.shape[1]) - 1


@dataclass(frozen=True, slots=True)
class _Held:
    """One load: requests that ended, with class, prompt, time to first token and per token; mean report."""

    number: int
    kinds: NDArray[np.int64]
    prompts: Floats
    ttft_s: Floats
    tpot_s: Floats
    outputs: Floats
    report: Floats
    prompt_rate: float


class _ClosedLoop(FleetCell):
    """A cell in which the next request comes as soon as one has ended."""

    def hold(self, requests: list[SimRequest], number: int) -> None:
        """Keep so many running."""
        self._coming = requests[::-1]
        for index in range(number):
            self._next(self.clock.now + 0.05 * index)

    def _next(self, at: float) -> None:
        if self._coming:
            one = self._coming.pop()
            self.submit(_at(one, at))

    def _act(self, action: Action) -> None:
        before = len(self.receipts)
        super()._act(action)
        for _ in range(len(self.receipts) - before):
            self._next(self.clock.now)


def requests_that_fit(scenario: Scenario, count: int, seed: int) -> Requests:
    """So many requests of a scenario's mix with prompts that its cells take; all at time 0.

    A cell refuses longer ones, and nothing would come after them where the next comes as one ends.

    Raises:
        ValueError: where hardly one fits.
    """
    arrivals, profile = scenario_arrivals(scenario), hardware.load(scenario.profile)
    longest = min(profile.max_tokens, profile.num_slots - SLOT_MARGIN)
    drawn = count
    while drawn <= 100 * count:
        requests = arrivals.sample(drawn, seed)
        fitting = np.flatnonzero(requests.prompt < longest)
        if len(fitting) >= count:
            return requests.take(fitting[:count])
        drawn *= 2
    raise ValueError(f"a cell of {profile.name} takes prompts of less than {longest} tokens: too few fit")


def _at(one: SimRequest, at: float) -> SimRequest:
    return SimRequest(
        request_id=one.request_id,
        kind=one.kind,
        arrival_s=at,
        num_prompt=one.num_prompt,
        num_output=one.num_output,
        objective=one.objective,
        seed=one.seed,
    )


def loads(max_running: int) -> list[int]:
    """Numbers of requests that are measured: powers of two and those between."""
    found = {1, max_running}
    step = 2
    while step < max_running:
        found |= {step, min(max_running, step + step // 2)}
        step *= 2
    return sorted(found)


def measure(
    scenario: Scenario,
    processes: int = 1,
    done: Callable[[int], None] | None = None,
    num_requests: int | None = None,
) -> Surface:
    """Measure the cells of a scenario.

    Args:
        scenario: whose cells, and whose mix of requests.
        processes: to share the loads.
        done: told of each load that was measured.
        num_requests: at each load; enough for percentiles if None.
    """
    numbers = loads(scenario.max_running)
    # The most requests take longest.
    calls = [(scenario, number, num_requests) for number in reversed(numbers)]
    held: list[_Held] = []
    if processes > 1:
        with process_pool(processes) as pool:
            for one in pool.map(_measure_at, calls):
                held.append(one)
                if done is not None:
                    done(one.number)
    else:
        for call in calls:
            held.append(_measure_at(call))
            if done is not None:
                done(call[1])
    return _fit(held[::-1], scenario)


def scenario_arrivals(scenario: Scenario) -> Arrivals:
    """The requests of a scenario."""
    baseline_s = hardware.load(scenario.profile).baseline_s()
    return Arrivals(scenario.arrivals, baseline_s, scenario.front_ends, scenario.seed)


def _measure_at(call: tuple[Scenario, int, int | None]) -> _Held:
    scenario, number, num_requests = call
    count = num_requests or max(_LEAST_REQUESTS, _PER_PLACE * number)
    requests = requests_that_fit(scenario, count + 3 * number, _MEASURED + number)
    listed = scenario_arrivals(scenario).singly(requests, requests.arrived)
    system = cell_system(scenario.system, scenario.max_running, scenario.max_waiting)
    cell = _ClosedLoop(hardware.load(scenario.profile), system, Options(seed=scenario.seed), 0.0)
    cell.advance(0.0)
    cell.hold(listed, number)
    by_id = {one.request_id: index for index, one in enumerate(listed)}
    ended: list[tuple[int, float, float]] = []
    rows, began, prompts, now = [], 0.0, 0, 0.0
    # The first ones came together; the last leave the cell emptier.
    while len(ended) < count + 2 * number:
        now += _SAMPLE_S
        cell.advance(now)
        told = Told()
        for request_id, (_, receipt) in cell.receipts.items():
            index = by_id[request_id]
            ended.append((index, 1e-3 * (receipt.ttft_ms or 0.0), 1e-3 * (receipt.tpot_ms or 0.0)))
            if began:
                prompts += int(requests.prompt[index])
        cell.tell(told, now, 0)
        if len(ended) >= 2 * number:
            began = began or now
            rows.append(told.reports[0])
    which = np.array([index for index, _, _ in ended[2 * number :]])
    return _Held(
        number=number,
        kinds=requests.kind[which],
        prompts=requests.prompt[which].astype(float),
        ttft_s=np.array([ttft for _, ttft, _ in ended[2 * number :]]),
        tpot_s=np.array([tpot for _, _, tpot in ended[2 * number :]]),
        outputs=requests.output[which].astype(float),
        report=np.mean(rows, axis=0),
        prompt_rate=prompts / max(now - began, 1e-9),
    )


def _fit(held: list[_Held], scenario: Scenario) -> Surface:
    num_kinds, max_running = len(scenario_arrivals(scenario).kinds), scenario.max_running
    scheduler = cell_system(scenario.system, max_running, scenario.max_waiting).config.scheduler
    cost = hardware.load(scenario.profile).cost
    chunk = chunk_tokens(scheduler, cost)
    token_s = (cost.seconds(1, 1 + chunk, 0) - cost.seconds(1, 1, 0)) / chunk
    numbers = np.array([float(one.number) for one in held])
    every = np.arange(max_running + 1.0)
    middles = (np.arange(NUM_RANKS) + 0.5) / NUM_RANKS
    ranked = np.array([[_ranked(one, kind, middles) for one in held] for kind in range(num_kinds)])
    tpot_s = np.empty((num_kinds, max_running + 1, NUM_RANKS))
    for kind in range(num_kinds):
        for rank in range(NUM_RANKS):
            tpot_s[kind, :, rank] = np.interp(every, numbers, ranked[kind, :, rank])
    lines = np.array([_line(one, token_s) for one in held])
    reports = np.array([one.report for one in held])
    steps_s = reports[:, COLUMN["step_s"]] / chunk
    busy = np.array([one.prompt_rate for one in held]) * token_s
    return Surface(
        tpot_s=tpot_s,
        first_s=np.interp(every, numbers, lines[:, 0]),
        prefill_s=np.interp(every, numbers, lines[:, 1]),
        chunk_s=np.interp(every, numbers, np.minimum(lines[:, 1], steps_s)),
        busy=np.interp(every, numbers, np.minimum(busy, 0.9)),
        reports=np.stack(
            [np.interp(every, numbers, reports[:, column]) for column in range(len(NAMES))], axis=1
        ),
        mean_output=float(np.concatenate([one.outputs for one in held]).mean()),
        token_s=token_s,
        ageing_s=scheduler.ageing_ms / 1e3 if scheduler.batching == "flotilla" else None,
    )


def _ranked(one: _Held, kind: int, middles: Floats) -> Floats:
    """Quantiles of the time per token; of all classes where this one hardly came."""
    values = one.tpot_s[(one.kinds == kind) & (one.outputs > 1)]
    if len(values) < 8:
        values = one.tpot_s[one.outputs > 1]
    ranked: Floats = np.quantile(values, middles)
    return ranked


def _line(one: _Held, least: float) -> tuple[float, float]:
    """Time to the first token as a line over the prompt's length: its start, and its slope."""
    slope = np.polyfit(one.prompts, one.ttft_s, 1)[0]
    slope = max(float(slope), least)
    return max(0.0, float(one.ttft_s.mean() - slope * one.prompts.mean())), slope
