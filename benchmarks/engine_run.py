"""Which engines `flotilla bench engine` sets side by side, and the run itself."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import demo, environment, tables
from benchmarks import prompts as prompt_sources
from benchmarks.engine import Comparison, Deck, compare, print_comparison, to_json
from benchmarks.engine_under_test import EngineUnderTest
from benchmarks.greedy_differences import Judged, print_differences
from benchmarks.local_engine import InProcessEngine, without_speculation
from benchmarks.transformers_engine import GenerateBatchEngine, GenerateEngine, Reference, generate
from cluster.config import FlotillaConfig

OWN = "flotilla"
PLAIN = "no speculation"
GENERATE = "HF generate"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `flotilla bench engine` was asked to do; see its help for the meaning of each."""

    config: Path | None = None
    profile: Path | None = None
    source: str = "zoo"
    domains: tuple[str, ...] = ()
    concurrencies: tuple[int, ...] = (1, 8, 32)
    per_domain: int = 8
    rounds: int = 3
    max_tokens: int | None = None
    processes: bool = True
    url: str | None = None
    api_key: str | None = None
    peers: bool = True
    assistants: tuple[str, ...] = ()
    prompt_lookup: int = 8
    policies: tuple[str, ...] = ()
    peer_threads: int = 0
    seed: int = 0
    json_file: Path | None = None


def own_engine(
    name: str, config: FlotillaConfig, end_tokens: Sequence[int], processes: bool
) -> EngineUnderTest:
    """This engine: a Ray cell with its processes, or everything in this one."""
    if not processes:
        return InProcessEngine(name, config, end_tokens)
    from benchmarks.cell_engine import CellEngine

    return CellEngine(name, config, end_tokens)


def best_threads(reference: Reference, prompt: list[int]) -> int:
    """The thread count at which `generate` is fastest: a small model may be slower on more cores."""
    fastest, chosen = float("inf"), 1
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first is warm-up
            start = time.perf_counter()
            generate(reference.model, [prompt], 16, reference.end_tokens)
            seconds = time.perf_counter() - start
        if seconds < fastest:
            fastest, chosen = seconds, threads
    return chosen


def build_engines(
    options: EngineOptions, config: FlotillaConfig, reference: Reference, threads: int, stack: ExitStack
) -> list[EngineUnderTest]:
    """All engines of the comparison; the stack closes them."""
    engines: list[EngineUnderTest] = []

    def add(engine: EngineUnderTest) -> None:
        stack.callback(engine.close)
        if any(engine.name == other.name for other in engines):
            raise ValueError(f"{engine.name} is measured already: two of one name could not be told apart")
        engines.append(engine)

    if options.url is not None:
        from benchmarks.http_engine import HttpEngine
        from benchmarks.serve import SPECULATION_OFF

        model = config.target.served_name or os.path.basename(demo.directory(config.target.path))
        # One server: both find in its prefix cache what was read for either.
        for name, extra in ((PLAIN, SPECULATION_OFF), (OWN, {})):
            add(HttpEngine(name, options.url, model, extra, reads_first=True, api_key=options.api_key))
    else:
        # Two separate cells, so that neither finds the other's prompts in its prefix cache.
        add(own_engine(PLAIN, without_speculation(config), reference.end_tokens, options.processes))
        add(own_engine(OWN, config, reference.end_tokens, options.processes))
        for name in options.policies:
            other = config.model_copy(update={"policy": config.policy.model_copy(update={"name": name})})
            add(own_engine(f"{OWN}, {name}", other, reference.end_tokens, options.processes))
    if options.peers:
        add(GenerateEngine(reference, threads=threads))
        for name in options.assistants or (f"zoo:{demo.GENERAL_DRAFTER}",):
            add(GenerateEngine(reference, threads=threads, assistant=demo.directory(name)))
        add(GenerateEngine(reference, threads=threads, prompt_lookup=options.prompt_lookup))
        add(GenerateBatchEngine(reference, threads=threads))
    return engines


def _check(options: EngineOptions) -> None:
    if options.url is not None and options.policies:
        raise ValueError("--policy: a server that runs has the policy it was started with; leave out --url")
    if options.url is not None and options.profile is not None:
        raise ValueError("--profile: a server that runs has the profile it was started with; leave out --url")
    if options.url is not None and not options.processes:
        raise ValueError("--no-processes: a server that runs has its processes; leave out --url")
    if not options.peers and (options.assistants or options.peer_threads):
        raise ValueError("--assistant and --peer-threads are Transformers', which --no-peers leaves out")


def run(options: EngineOptions) -> dict[str, Any]:
    """Run the comparison, print its tables and return its JSON record, which is written after each round.

    Raises:
        ValueError: for options that do not go together, before anything is started.
    """
    config = demo.load_config(options.config)
    _check(options)
    for name in options.policies:
        demo.changed(config, policy={"name": name})
    if options.profile is not None:
        config = config.model_copy(update={"profile": str(options.profile)})
    reference = Reference(demo.directory(config.target.path), config.target.dtype, config.target.quantization)
    loaded = [
        prompt
        for prompt in prompt_sources.load(options.source)
        if not options.domains or prompt.domain in options.domains
    ]
    missing = sorted(set(options.domains) - {prompt.domain for prompt in loaded})
    if missing:
        raise ValueError(f"no prompts of {', '.join(missing)} in {options.source}")
    encoded = [reference.encode(prompt) for prompt in loaded]
    deck = Deck(loaded, encoded, bound=options.max_tokens, seed=options.seed)
    threads = options.peer_threads
    if options.peers and not threads:
        threads = best_threads(reference, encoded[0])
    baselines = [PLAIN, GENERATE] if options.peers else [PLAIN]

    def keep(comparison: Comparison, judged: Sequence[Judged] | None = None) -> dict[str, Any]:
        record = to_json(comparison, OWN, baselines) | {
            "differences": judged,  # None until all rounds are done
            "options": asdict(options) | {"api_key": None},
            **environment.of_cell(config, __name__),
            "target": os.path.basename(reference.path),
            "dtype": config.target.dtype,
            "transformers_threads": threads if options.peers else None,
            "prompts_repeated": deck.repeats,
        }
        tables.write_json(options.json_file, record)
        return record

    against = GENERATE if options.peers else PLAIN
    with ExitStack() as stack:
        with tables.console.status("Starting engines..."):
            engines = build_engines(options, config, reference, threads, stack)
        comparison = compare(
            engines,
            deck,
            concurrencies=sorted(set(options.concurrencies)),
            per_domain=options.per_domain,
            rounds=options.rounds,
            end_tokens=reference.end_tokens,
            reference=against,
            after_round=keep,
        )
    where = options.url or ("Ray cell, through its stream" if options.processes else "one process")
    tables.console.print(
        f"{os.path.basename(reference.path)} in {config.target.dtype}, greedy, medians of "
        f"{options.rounds} rounds; flotilla: {where}"
        + (f"; Transformers: {threads} thread(s)." if options.peers else ".")
    )
    if deck.repeats:
        tables.console.print(
            "[yellow]More prompts were needed than there are: some were repeated, which favours engines "
            "that cache prefixes.[/yellow]"
        )
    print_comparison(comparison, [engine.name for engine in engines], OWN, baselines)
    judged = comparison.differences.judge(lambda: reference)
    print_differences(judged, sum(comparison.differences.num_outputs.values()), f"those of {against}")
    return keep(comparison, judged)
