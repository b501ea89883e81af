"""`flotilla bench vllm`: our server beside vLLM's CPU build, on the same weights, prompts and client.

All servers are up for the whole run, but only one is given requests at a time, once the others are idle; what
idle ones use of the processor is measured and reported. vLLM runs with its own defaults, with prompt lookup,
and with one of our drafters.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import demo, environment, tables, vllm_install
from benchmarks import prompts as prompt_sources
from benchmarks.engine import ALL, Comparison, Deck, compare, print_comparison, to_json
from benchmarks.greedy_differences import print_differences
from benchmarks.http_engine import HttpEngine
from benchmarks.report import Distribution
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.transformers_engine import Reference
from cluster.adapter_config import AdapterConfig
from cluster.config import FlotillaConfig

OWN = "flotilla"
PLAIN_PEER = "vllm base"
SERVED_NAME = "demo"
#: What both call the LoRA adapter that they serve besides.
ADAPTER_NAME = "terse"
MODES = ("base", "ngram", "draft")
# vLLM's processes look for messages without a pause for a second after the last one (0.32), which takes the
# cores from whoever is asked next. A server is idle again once it uses no more than this beyond its usual.
IDLE_MARGIN_CORES = 0.1
_LOOK_S, _SETTLE_WITHIN_S = 0.3, 15.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What `flotilla bench vllm` was asked to do; see its help for the meaning of each."""

    venv: Path = vllm_install.DEFAULT_VENV
    config: Path | None = None
    source: str = "zoo"
    modes: tuple[str, ...] = MODES
    concurrencies: tuple[int, ...] = (1, 8)
    per_domain: int = 8
    rounds: int = 5
    max_tokens: int | None = None
    draft_model: str = f"zoo:{demo.GENERAL_DRAFTER}"
    num_speculative_tokens: int = 4
    eager: bool = False
    seed: int = 0
    arguments: tuple[str, ...] = ()
    adapter: str | None = None

    @property
    def asked_model(self) -> str:
        """Whom requests are for: the adapter, where there is one."""
        return SERVED_NAME if self.adapter is None else ADAPTER_NAME


def with_adapter(options: VllmOptions, config: FlotillaConfig) -> FlotillaConfig:
    """The configuration of a cell that serves the LoRA adapter of the options, if there is one."""
    if options.adapter is None:
        return config
    adapters = (AdapterConfig(name=ADAPTER_NAME, path=options.adapter),)
    return config.model_copy(update={"target": config.target.model_copy(update={"adapters": adapters})})


def speculation(options: VllmOptions, mode: str) -> dict[str, Any] | None:
    """vLLM's speculative configuration of a mode; None for none."""
    count = {"num_speculative_tokens": options.num_speculative_tokens}
    if mode == "ngram":
        return {"method": "ngram", **count, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if mode == "draft":
        return {"method": "draft_model", "model": demo.directory(options.draft_model), **count}
    return None


def vllm_command(
    options: VllmOptions, target: str, dtype: str, length: int, mode: str, port: int
) -> list[str]:
    """How vLLM is started; the weights on disk are float16, so the type must be said."""
    command = [str(vllm_install.executable(options.venv)), "serve", target]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    command += ["--dtype", dtype, "--max-model-len", str(length)]
    command += ["--max-num-seqs", str(max(32, *options.concurrencies))]
    if options.eager:
        command.append("--enforce-eager")
    command += options.arguments
    if options.adapter is not None:
        path = demo.adapter(options.adapter)
        command += ["--enable-lora", "--lora-modules", f"{ADAPTER_NAME}={path}"]
    config = speculation(options, mode)
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    return command


def own_command(config_file: Path, port: int) -> list[str]:
    """How our server is started."""
    return [
        sys.executable,
        "-m",
        "deployments.cli",
        "serve",
        "--config",
        str(config_file),
        "--port",
        str(port),
    ]


def start_servers(
    options: VllmOptions, config: FlotillaConfig, length: int, logs: Path, stack: ExitStack
) -> dict[str, ServerProcess]:
    """All servers, ready, by name; started one after the other so that start-up costs do not pile up."""
    target = demo.directory(config.target.path)
    named = config.model_copy(
        update={"target": config.target.model_copy(update={"served_name": SERVED_NAME})}
    )
    config_file = logs / "flotilla.yaml"
    # JSON is YAML.
    config_file.write_text(named.model_dump_json(indent=1))
    servers = {}
    for name in (OWN, *(f"vllm {mode}" for mode in options.modes)):
        port = free_port()
        if name == OWN:
            command, ready, variables = own_command(config_file, port), "/ready", dict(os.environ)
        else:
            mode = name.removeprefix("vllm ")
            command = vllm_command(options, target, config.target.dtype, length, mode, port)
            ready, variables = "/health", vllm_install.environment(options.venv)
        with tables.console.status(f"Starting {name} (log: {logs / name.replace(' ', '-')}.log)..."):
            log = logs / f"{name.replace(' ', '-')}.log"
            server = ServerProcess(name, command, port, ready, log=log, environment=variables, cwd=_ROOT)
            servers[name] = stack.enter_context(server)
            server.wait_until_ready()
    return servers


def idle_cores(servers: Sequence[ServerProcess], seconds: float = 3.0) -> dict[str, float]:
    """Cores each server uses while nobody asks it anything."""
    before = [server.cpu_seconds() for server in servers]
    time.sleep(seconds)
    return {
        server.name: (server.cpu_seconds() - start) / seconds
        for server, start in zip(servers, before, strict=True)
    }


def settle(servers: Sequence[ServerProcess], idle: Mapping[str, float]) -> None:
    """Wait until every server uses as little of the processor as before it was asked anything.

    Raises:
        RuntimeError: if one goes on working.
    """
    deadline = time.monotonic() + _SETTLE_WITHIN_S
    while True:
        used = idle_cores(servers, _LOOK_S)
        busy = [name for name, cores in used.items() if cores > idle[name] + IDLE_MARGIN_CORES]
        if not busy:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{', '.join(busy)}: still busy {_SETTLE_WITHIN_S:.0f} s after the last answer: figures of "
                "whoever is asked next would mean nothing"
            )


def measure(
    engines: Sequence[HttpEngine],
    deck: Deck,
    options: VllmOptions,
    end_tokens: Sequence[int],
    before_run: Callable[[], None],
) -> Comparison:
    """Ask the servers in turns; they keep the requests that count (`latencies`), and none of their warm-ups.

    Raises:
        RuntimeError: if a request fails.
    """

    def forget_warm_ups() -> None:
        for engine in engines:
            engine.outcomes.clear()

    return compare(
        engines,
        deck,
        concurrencies=sorted(set(options.concurrencies)),
        per_domain=options.per_domain,
        rounds=options.rounds,
        end_tokens=end_tokens,
        reference=PLAIN_PEER if "base" in options.modes else OWN,
        before_run=before_run,
        after_warm_ups=forget_warm_ups,
    )


def latencies(engines: Sequence[HttpEngine]) -> list[dict[str, Any]]:
    """Time to first token and per output token by server and concurrency, over all measured requests."""
    return [
        {
            "engine": engine.name,
            "concurrency": concurrency,
            "ttft_ms": asdict(Distribution.of([o.ttft_ms for o in outcomes if o.ttft_ms is not None])),
            "tpot_ms": asdict(Distribution.of([o.tpot_ms for o in outcomes if o.tpot_ms is not None])),
        }
        for engine in engines
        for concurrency, outcomes in sorted(engine.outcomes.items())
    ]


def summary(comparison: Comparison, names: Sequence[str], domains: Sequence[str]) -> dict[str, Any]:
    """Our ratios to vLLM without speculation and to the best of its modes, by concurrency."""
    domain = ALL if len(domains) > 1 else domains[0]
    found = {}
    for concurrency in sorted({key[2] for key in comparison.cells}):
        rates = {name: comparison.rate(name, domain, concurrency) or 0.0 for name in names if name != OWN}
        best = max(rates, key=lambda name: rates[name])
        found[str(concurrency)] = {
            "vs_base": comparison.ratio(OWN, PLAIN_PEER, domain, concurrency),
            "best_mode": best,
            "vs_best": comparison.ratio(OWN, best, domain, concurrency),
        }
    return found


def run(options: VllmOptions) -> dict[str, Any]:
    """Install vLLM if needed, run the comparison, print its tables and return its JSON record."""
    vllm_install.install(options.venv)
    config = with_adapter(options, demo.load_config(options.config))
    if config.target.quantization is not None:
        raise ValueError("vLLM rounds weights otherwise than `target.quantization` does: leave it out")
    reference = Reference(demo.directory(config.target.path), config.target.dtype)
    loaded = prompt_sources.load(options.source)
    encoded = [reference.encode(prompt) for prompt in loaded]
    deck = Deck(loaded, encoded, bound=options.max_tokens, seed=options.seed)
    length = int(reference.model.config.max_position_embeddings)
    logs = Path(tempfile.mkdtemp(prefix="flotilla-bench-vllm-"))
    with ExitStack() as stack:
        servers = start_servers(options, config, length, logs, stack)
        idle = idle_cores(list(servers.values()))
        engines = []
        for name, server in servers.items():
            engine = HttpEngine(name, server.url, options.asked_model)
            stack.callback(engine.close)
            engines.append(engine)
        comparison = measure(
            engines, deck, options, reference.end_tokens, lambda: settle(list(servers.values()), idle)
        )
    if options.adapter is None:
        judged = comparison.differences.judge(lambda: reference)
    else:
        adapter = demo.adapter(options.adapter)
        judged = comparison.differences.judge(
            lambda: Reference(reference.path, reference.dtype, adapter=adapter)
        )
    names = list(servers)
    beside = "" if options.adapter is None else f" with {options.adapter}"
    tables.console.print(
        f"{os.path.basename(reference.path)}{beside} in {config.target.dtype}, greedy, HTTP, medians of "
        f"{options.rounds} rounds; vLLM {vllm_install.VERSION} {'eager' if options.eager else 'compiled'}."
    )
    baselines = [name for name in names if name != OWN]
    print_comparison(comparison, names, OWN, baselines[:1])
    num_outputs = sum(comparison.differences.num_outputs.values())
    print_differences(judged, num_outputs, f"those of {PLAIN_PEER if 'base' in options.modes else OWN}")
    timing = latencies(engines)
    rows = [
        [
            f"{entry['concurrency']} at once: {entry['engine']}",
            *(
                f"{tables.number(entry[key]['p50'], 2)} / {tables.number(entry[key]['p99'], 2)}"
                for key in ("ttft_ms", "tpot_ms")
            ),
        ]
        for entry in sorted(timing, key=lambda entry: entry["concurrency"])
    ]
    heads = ["streams", "TTFT ms", "TPOT ms"]
    tables.console.print(tables.plain_table("Latency (p50 / p99)", heads, rows))
    ratios = summary(comparison, names, deck.domains)
    for concurrency, entry in ratios.items():
        base = "" if entry["vs_base"] is None else f"{entry['vs_base']:,.2f}x vLLM without speculation, "
        tables.console.print(
            f"{concurrency} at once: {base}{tables.number(entry['vs_best'], 2)}x its best mode "
            f"({entry['best_mode']})."
        )
    used = ", ".join(f"{name} {cores:.2f}" for name, cores in idle.items())
    tables.console.print(f"Cores used while idle: {used}. Logs: {logs}")
    return to_json(comparison, OWN, baselines) | {
        "benchmark": "vllm",
        "differences": judged,
        "options": asdict(options),
        **environment.of_cell(config, __name__),
        "vllm_version": vllm_install.VERSION,
        "summary": ratios,
        "latency": timing,
        "idle_cores": idle,
        "prompts_repeated": deck.repeats,
    }
