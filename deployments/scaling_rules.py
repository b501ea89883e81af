"""How many cells and front ends there should be: pure functions of their load, which know no Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.scaling_config import CellScalingConfig, FrontEndScalingConfig

Stats = Mapping[str, float]

#: Seconds between reports of replicas to Ray Serve's controller, and those it averages over.
METRICS_INTERVAL_S = 0.5
LOOK_BACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a policy remembers between two looks; times on the caller's clock, in seconds.

    Attributes:
        few_since: when there began to be too few. many_since: too many. None while there are not.
        changed_at: when the number was changed last.
    """

    # Not a msgspec.Struct: Serve pickles policies by value, and those come out without their fields.

    few_since: float | None = None
    many_since: float | None = None
    changed_at: float | None = None


def overload_parts(cells: Sequence[Stats], config: CellScalingConfig) -> dict[str, float]:
    """What makes up `overload`, each part over its limit.

    `queue` and `kv`: mean predicted queue delay and mean KV use; `objectives`: the share of requests that is
    predicted to miss its objectives, over the share that may.
    """
    if not cells:
        return {"queue": 0.0, "kv": 0.0, "objectives": 0.0}
    objectives = sum(cell.get("objectives", 0.0) for cell in cells)
    missed = 0.0
    if objectives:
        attained = sum(cell.get("objectives", 0.0) * cell.get("attainment", 1.0) for cell in cells)
        may_miss = max(1.0 - config.target_attainment, 1e-3)
        missed = (1.0 - attained / objectives) / may_miss
    return {
        "queue": _mean(cells, "queue_s") / (config.target_queue_ms / 1e3),
        "kv": _mean(cells, "kv_use") / config.kv_high,
        "objectives": missed,
    }


def overload(cells: Sequence[Stats], config: CellScalingConfig) -> float:
    """How far above its limits the load of the cells is, the largest of `overload_parts`; above 1 there are
    too few of them.
    """
    return max(overload_parts(cells, config).values())


def overload_with(cells: Sequence[Stats], fewer: int, config: CellScalingConfig) -> float:
    """`overload` as predicted if `fewer` cells had to bear the same arrivals; infinite if they could not.

    By Little's law a cell holds `b = r t(b)` requests, `r` the tokens that arrive for it per second and `t`
    the time per token, which grows about linearly with `b` from that of a request alone: `t = a + c b`. So
    `1 - a / t = r c`, the share of the time per token that is due to load, grows as `r` does, and
    the new time per token is `a / (1 - r' c)`.
    """
    if fewer < 1 or not cells:
        return math.inf
    growth = len(cells) / fewer
    worst = 0.0
    running, waiting = _mean(cells, "running"), _mean(cells, "waiting")
    tpot_s, idle_s = _mean(cells, "tpot_s"), _mean(cells, "idle_tpot_s")
    later_s = tpot_s
    if running and tpot_s > 0.0 and idle_s > 0.0:
        share = growth * max(0.0, 1.0 - idle_s / tpot_s)
        if share >= 1.0:
            return math.inf
        later_s = max(tpot_s, idle_s / (1.0 - share))
    held = growth * (later_s / tpot_s if tpot_s > 0.0 else 1.0)
    places = max(1.0, _mean(cells, "max_running"))
    worst = max(worst, (running * held + growth * waiting) / places)
    worst = max(worst, held * _mean(cells, "kv_use") / config.kv_high)
    worst = max(worst, growth * _mean(cells, "queue_s") / (config.target_queue_ms / 1e3))
    wanted = [cell["objective_tpot_s"] for cell in cells if cell.get("objective_tpot_s")]
    if wanted:
        objective_s = sum(wanted) / len(wanted)
        if objective_s <= idle_s:
            return math.inf
        worst = max(worst, (later_s - idle_s) / (objective_s - idle_s))
    return worst


def desired_cells(
    cells: Sequence[Stats], current: int, now: float, config: CellScalingConfig, memory: Memory
) -> tuple[int, Memory]:
    """How many cells there should be, and what to remember until the next look.

    Cells are added when the load was above a limit at every look for `upscale_delay_s`, and only once those
    added before serve; cells are removed, at most `max_step_down` at once, when for `downscale_delay_s` the
    others would have stayed below `low_load` of every limit. Between the two nothing changes, so that a
    steady load finds a number that stays.

    Args:
        cells: stats of those that serve (`cluster.cell_stats`).
        current: how many there are to be at present, those that start included.
        now: seconds.
        config: limits and delays.
        memory: what the last look returned; `Memory()` at first.
    """
    current = min(max(current, config.min), config.max)
    serving = [cell for cell in cells if cell.get("ready", 1.0) > 0.5]
    # Some start, or are being replaced: what they will bear is not seen yet, so no more are added. They may
    # wait for resources for ever, so they do not keep others from being removed.
    is_complete = len(serving) >= current
    load = overload(serving, config)
    step = min(config.max_step, max(1, math.ceil(current * (min(load, 4.0) - 1.0))))
    return _decide(
        current,
        more=min(config.max, current + step) if load > 1.0 and is_complete else current,
        fewer=current - _spared(serving, current, config) if load <= 1.0 else current,
        now=now,
        delays=(config.upscale_delay_s, config.downscale_delay_s),
        memory=memory,
    )


def _spared(serving: Sequence[Stats], current: int, config: CellScalingConfig) -> int:
    """How many cells, at most `max_step_down`, the others are predicted to do without."""
    spared, most = 0, min(config.max_step_down, current - config.min)
    # The load of those that stay grows with the number removed.
    while spared < most:
        tried = spared + 1 if spared == 0 else (spared + most + 1) // 2
        if overload_with(serving, current - tried, config) < config.low_load:
            spared = tried
        else:
            most = tried - 1
    return spared


def desired_front_ends(
    streams: Sequence[float],
    current: int,
    now: float,
    least: int,
    config: FrontEndScalingConfig,
    memory: Memory,
) -> tuple[int, Memory]:
    """How many front ends there should be, and what to remember until the next look.

    Args:
        streams: open streams of each.
        current: how many there are to be at present.
        now: seconds.
        least: never fewer.
        config: what one should bear, and delays.
        memory: what the last look returned.
    """
    most = max(config.max or least, least)
    wanted = math.ceil(sum(streams) / config.streams_per_replica)
    # A fifth of room, so that one stream more or less does not change the number.
    wanted_less = math.ceil(1.25 * sum(streams) / config.streams_per_replica)
    return _decide(
        current,
        more=max(current, min(most, wanted)),
        fewer=min(current, max(least, wanted_less)),
        now=now,
        delays=(config.upscale_delay_s, config.downscale_delay_s),
        memory=memory,
    )


def _decide(
    current: int, *, more: int, fewer: int, now: float, delays: tuple[float, float], memory: Memory
) -> tuple[int, Memory]:
    """Change the number once there was reason to for long enough, and the last change is as long ago."""
    # Later than now, it was before the clock was put back.
    few_since, many_since, changed_at = (
        None if at is None else min(at, now)
        for at in (memory.few_since, memory.many_since, memory.changed_at)
    )
    few_since = (now if few_since is None else few_since) if more > current else None
    many_since = (now if many_since is None else many_since) if fewer < current else None
    for wanted, since, delay_s in ((more, few_since, delays[0]), (fewer, many_since, delays[1])):
        if since is None or now - since < delay_s:
            continue
        if changed_at is None or now - changed_at >= delay_s:
            return wanted, Memory(changed_at=now)
    return current, Memory(few_since=few_since, many_since=many_since, changed_at=changed_at)


def _mean(cells: Sequence[Stats], name: str) -> float:
    return sum(cell.get(name, 0.0) for cell in cells) / len(cells)
