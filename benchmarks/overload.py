"""`flotilla bench overload`: several times what a system can serve, from one of several API keys."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import environment
from benchmarks.live_system import SystemOptions, serving
from benchmarks.load_client import LoadClient
from benchmarks.overload_load import Phases, play, saturate
from benchmarks.overload_summary import lateness, series, summary
from benchmarks.prompts import Prompt, zoo_prompts
from deployments.api_keys import hash_key, new_key

KEYS = ("greedy", "one", "two", "three")
# Objectives of the tiers that have some, as multiples of the median latencies at saturation.
TPOT_TIMES = {"interactive": 1.5, "standard": 2.5}
TTFT_TIMES = {"interactive": 3.0, "standard": 6.0}
# What a first token may take at least: below, the machine's mood decides.
LEAST_TTFT_MS = 300.0


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """What is run.

    Attributes:
        times: load during the overload, as a multiple of the saturated rate.
        minutes: how long it lasts.
        usual: load before and after, as a share of the saturated rate.
        before_s, after_s: how long before and after.
        saturation_s: how long saturation is measured.
        max_running, max_waiting: places and queue of the cell.
        max_tokens: bound on every answer.
        fair: whether keys are told apart.
        system: what is served.
        seed: of arrivals and prompts.
        logs: where the server's log goes.
    """

    times: float = 4.0
    minutes: float = 5.0
    usual: float = 0.8
    before_s: float = 60.0
    after_s: float = 60.0
    saturation_s: float = 20.0
    max_running: int = 8
    max_waiting: int = 64
    max_tokens: int = 48
    fair: bool = True
    system: SystemOptions = field(default_factory=lambda: SystemOptions(front_ends=1))
    seed: int = 0
    logs: Path = Path("overload-logs")

    def __post_init__(self) -> None:
        if self.times <= self.usual:
            raise ValueError(f"--times {self.times:g} is no more than the usual load of {self.usual:g}")

    def phases(self, rate: float) -> Phases:
        """The load, given the saturated rate: all keys the same, and what is too much from one of them."""
        each = self.usual * rate / len(KEYS)
        greedy_rate = self.times * rate - each * (len(KEYS) - 1)
        usual = dict.fromkeys(KEYS, each)
        return Phases(usual, KEYS[0], greedy_rate, self.before_s, 60.0 * self.minutes, self.after_s)


def configured(options: OverloadOptions, keys: dict[str, str]) -> Path:
    """Write the configuration that is served, with its keys."""
    options.logs.mkdir(parents=True, exist_ok=True)
    keys_file = options.logs / "keys.yaml"
    keys_file.write_text(
        yaml.safe_dump({"keys": [{"name": name, "hash": hash_key(key)} for name, key in keys.items()]})
    )
    raw = options.system.served().model_dump(mode="json")
    raw["scheduler"] |= {"max_running": options.max_running, "max_waiting": options.max_waiting}
    raw["fairness"] |= {"enabled": options.fair}
    raw["security"] |= {"keys_file": str(keys_file.absolute())}
    raw["tiers"] = {"interactive": {"priority": -1}, "standard": {}, "batch": {"priority": 10}}
    file = options.logs / "overload.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def run(options: OverloadOptions) -> dict[str, Any]:
    """Serve, measure saturation, overload, and sum up."""
    keys = {name: new_key() for name in KEYS}
    system = SystemOptions(config=configured(options, keys))
    with serving(system, options.logs) as live:
        record = asyncio.run(_measured(options, live.url, keys))
    return {
        "environment": environment.describe(),
        **environment.of_cell(live.config, __name__),
        **record,
    }


def asked(seed: int) -> list[Prompt]:
    """The held-out prompts in random order: in their file's, one class comes after another, and as many as
    saturation is measured with could be of the one with the longest answers."""
    held = zoo_prompts()
    return [held[place] for place in np.random.default_rng((seed, 1)).permutation(len(held))]


async def _measured(options: OverloadOptions, url: str, keys: dict[str, str]) -> dict[str, Any]:
    prompts = asked(options.seed)
    async with LoadClient(url, "", send_slo=False, api_key=keys[KEYS[0]]) as client:
        client.model = (await client.models())[0]["id"]
        streams, every = options.max_running, list(keys.values())
        await saturate(client, prompts, options.max_tokens, every, options.saturation_s / 4, streams)
        rate, answers = await saturate(
            client, prompts, options.max_tokens, every, options.saturation_s, streams
        )
        if not answers:
            raise RuntimeError("no request ended while saturation was measured; make --saturation-s longer")
        tpot_ms = statistics.median(one.tpot_ms for one in answers if one.tpot_ms is not None)
        ttft_ms = statistics.median(one.ttft_ms for one in answers if one.ttft_ms is not None)
        objectives = {
            tier: {
                "tpot_ms": round(TPOT_TIMES[tier] * tpot_ms, 3),
                "ttft_ms": round(max(LEAST_TTFT_MS, TTFT_TIMES[tier] * ttft_ms), 3),
            }
            for tier in TPOT_TIMES
        }
        phases = options.phases(rate)
        arrivals = phases.arrivals(options.seed)
        attempts = await play(client, arrivals, prompts, options.max_tokens, keys, objectives)
    return {
        "options": {
            name: getattr(options, name)
            for name in (
                "times",
                "minutes",
                "usual",
                "max_running",
                "max_waiting",
                "max_tokens",
                "fair",
                "seed",
            )
        },
        "saturated_rate": rate,
        "objectives": objectives,
        "phases": asdict(phases),
        "overload_s": [phases.starts_s, phases.ends_s],
        "client_late_s": lateness(attempts, arrivals),
        **summary(attempts, phases),
        "attainment": series(attempts, max(2.0, phases.total_s / 60.0)),
        "attempts": [asdict(one) for one in attempts],
    }
