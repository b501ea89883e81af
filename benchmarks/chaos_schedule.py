"""Schedules of the fault search: settings and operations, drawn from a seed, readable and repeatable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import msgspec

from benchmarks.chaos_corruptions import CORRUPTIONS
from benchmarks.chaos_workers import KINDS, MAX_TOKENS, VOCAB
from cluster.batching.registry import BATCHING_RULES
from cluster.policies.registry import POLICIES
from cluster.stream_messages import Objective, Speculation, Submit, Tenant, Terms
from engine.sampling_params import SamplingParams
from selector.registry import SELECTORS

#: An operation's name and its arguments. Arguments that choose among things do so modulo their number, and
#: an operation for which there is nothing does nothing: so any part of a schedule is a schedule.
Operation = tuple[str, *tuple[int, ...]]

#: Operations without which nothing happens, and how often each is drawn.
COMMON = {"submit": 10, "burst": 2, "answer": 40, "answers": 5}
#: In half of the schedules, in place of bursts: several choices of one answer. It is not drawn, so that
#: schedules are otherwise what they were.
CHOICES = "choices"
#: Faults and changes; each schedule draws from some of them (swarm testing, Groce et al., ISSTA 2012).
FAULTS = {
    "advance": 3,
    "tick": 3,
    "forward": 1,
    "backward": 1,
    "drop": 2,
    "stale": 2,
    "corrupt": 4,
    "no_slots": 2,
    "forget": 2,
    "evict": 2,
    "lose_drafter": 3,
    "lose_target": 2,
    "return_worker": 4,
    "cancel": 3,
    "cancel_unknown": 1,
    "duplicate": 2,
    "break_client": 2,
    "leave_client": 1,
    "slow_client": 2,
    "add_drafter": 2,
    "drain_drafter": 2,
    "change_policy": 1,
    "restart_scheduler": 1,
    "drain_cell": 1,
    "bad_request": 2,
}
NUM_CLIENTS = 3
MOST_OPERATIONS = 150
KV_SIZES = (130, 165, 220, 400, 2000)
COUNTS: tuple[int | str, ...] = (1, 1, 1, 2, 3, "auto", "spin")
CORRUPTION_NAMES = tuple(sorted(CORRUPTIONS))


@dataclass(frozen=True)
class Settings:
    """What a schedule runs on.

    Attributes:
        seed: of the drafters' guesses.
        policy, batching, selector: by name.
        micro_batches: how many, or the rule that says so.
        num_slots: tokens in the target's KV pool.
        drafters: kinds of the instances there at the start.
        max_running, max_waiting, prefill_chunk, draft_ahead: of the scheduler.
        fast_switching: of the selector.
        async_scheduling: of the scheduler.
        has_beams: whether EAGLE proposes beside the target, where decoding heads would.
        holds_back: whether calls that are sent ahead are held back while there is time.
        shares: whether the target finds some of each prompt in its cache.
    """

    seed: int = 0
    policy: str = "flotilla"
    batching: str = "flotilla"
    selector: str = "flotilla"
    micro_batches: int | str = 1
    num_slots: int = 400
    drafters: tuple[str, ...] = ("good", "short")
    max_running: int = 8
    max_waiting: int = 12
    prefill_chunk: int = 24
    draft_ahead: int = 0
    fast_switching: bool = True
    async_scheduling: bool = True
    has_beams: bool = False
    holds_back: bool = False
    shares: bool = False

    @classmethod
    def drawn(cls, rng: random.Random) -> Settings:
        """Any settings."""
        seed = rng.randrange(1 << 30)
        drawn = cls(
            seed=seed,
            policy=rng.choice(sorted(POLICIES)),
            batching=rng.choice(sorted(BATCHING_RULES)),
            selector=rng.choice(SELECTORS),
            micro_batches=rng.choice(COUNTS),
            num_slots=rng.choice(KV_SIZES),
            drafters=tuple(rng.choice(sorted(KINDS)) for _ in range(rng.randrange(4))),
            max_running=rng.choice([1, 3, 8, 16]),
            max_waiting=rng.choice([1, 4, 12, 40]),
            prefill_chunk=rng.choice([8, 24, 64]),
            draft_ahead=rng.randrange(3),
            fast_switching=rng.random() < 0.7,
            # These are not drawn, so that what is drawn after them stays what it was.
            async_scheduling=seed % 4 > 0,
            has_beams=seed % 3 > 0,
            holds_back=seed % 5 > 1,
            shares=seed % 7 > 2,
        )
        if seed % 3 != 1:
            return drawn
        # Only so are drafts planned, and calls held back, ahead of answers.
        policy = "fixed" if seed % 2 else "flotilla"
        return replace(drawn, policy=policy, selector="flotilla", drafters=("heads",), micro_batches=1)


@dataclass(frozen=True)
class Schedule:
    """Settings and operations; after the last of them everything is repaired, and all requests must end."""

    settings: Settings = Settings()
    operations: tuple[Operation, ...] = field(default=())

    def script(self) -> str:
        """A Python script that runs the schedule once more."""
        settings = asdict(self.settings)
        default = asdict(Settings())
        changed = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value != default[name])
        lines = "\n".join(f"    {operation!r},{_remark(operation)}" for operation in self.operations)
        return (
            "from benchmarks.chaos_schedule import Schedule, Settings\n"
            "from benchmarks.chaos_world import ChaosWorld\n\n"
            f"settings = Settings({changed})\n"
            f"operations = (\n{lines}\n)\n"
            "ChaosWorld.run(Schedule(settings, operations))\n"
        )


def drawn(seed: int, most_operations: int = MOST_OPERATIONS) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    settings = Settings.drawn(rng)
    enabled = [name for name in FAULTS if rng.random() < 0.35]
    weights = COMMON | {name: FAULTS[name] for name in enabled}
    names = rng.choices(list(weights), weights=list(weights.values()), k=rng.randint(10, most_operations))
    if settings.seed % 2:
        names = [CHOICES if name == "burst" else name for name in names]
    return Schedule(settings, tuple((name, rng.randrange(1 << 20)) for name in names))


def request(number: int, draw: int) -> Submit:
    """The request that `draw` stands for: without defects, so that a cell that has room takes it."""
    rng = random.Random(draw)
    max_tokens = rng.choice([1, rng.randint(2, 12), rng.randint(12, 60), rng.randint(12, 60)])
    objective = Objective()
    if rng.random() < 0.4:
        objective = Objective(
            tpot_ms=rng.choice([None, 8.0, 20.0, 200.0]),
            ttft_ms=rng.choice([None, 50.0, 1000.0]),
            e2e_ms=rng.choice([None, None, 800.0]),
        )
    on_miss = rng.choice(["serve", "serve", "reject", "downgrade"])
    return Submit(
        request_id=f"r{number}",
        prompt=[
            rng.randrange(VOCAB) for _ in range(rng.choice([1, rng.randint(1, 20), rng.randint(20, 80)]))
        ],
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 2)) if rng.random() < 0.4 else (),
        ),
        objective=objective,
        tier=rng.choice(["default", "default", "batch"]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        speculation=rng.choice(
            [
                Speculation(),
                Speculation(),
                Speculation(),
                Speculation(trace=True),
                Speculation(mode="off"),
                Speculation(max_tokens=rng.randrange(4)),
                Speculation(drafters=(rng.choice(sorted(KINDS)),)),
            ]
        ),
        on_miss=on_miss,
        downgrades=(Terms(tier="batch", priority=1),) if on_miss == "downgrade" else (),
        tenant=Tenant(label=rng.choice(["", "a", "b"]), weight=rng.choice([1.0, 4.0])),
    )


def choices(number: int, draw: int) -> list[Submit]:
    """The choices of the answer that `draw` stands for, as front ends ask for them: each a request."""
    one = request(number, draw)
    return [msgspec.structs.replace(one, request_id=f"r{number + index}") for index in range(2 + draw % 4)]


#: Codes that refuse a request for its own sake, by what is wrong with it.
DEFECTS: dict[str, dict[str, object]] = {
    "empty_prompt": {"prompt": []},
    "bad_token": {"prompt": [1, VOCAB]},
    "prompt_too_long": {"prompt": [1] * (MAX_TOKENS + 50)},
    "slo_infeasible": {"objective": Objective(tpot_ms=1e-4)},
}


def _remark(operation: Operation) -> str:
    match operation:
        case ("submit", draw):
            made = request(0, draw)
            return f"  # prompt {len(made.prompt)}, max_tokens {made.sampling.max_tokens}"
        case ("choices", draw):
            return f"  # {len(choices(0, draw))} of them"
        case ("corrupt", draw):
            return f"  # {CORRUPTION_NAMES[draw % len(CORRUPTION_NAMES)]}"
        case ("bad_request", draw):
            return f"  # {list(DEFECTS)[draw % len(DEFECTS)]}"
    return ""


def names_of(operations: Sequence[Operation]) -> list[str]:
    """The operations' names, in order."""
    return [operation[0] for operation in operations]
