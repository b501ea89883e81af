"""`flotilla bench lossless-matrix`: the losslessness suite over every way of serving the demo family."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from benchmarks import demo, environment, lossless, tables
from cluster.config import FlotillaConfig
from deployments.demo import demo_config
from deployments.serving import running
from zoo.registry import ADAPTER

PREEMPTION = "preemption forced"
# Changes to the demo configuration, by section. AdaServe drafts trees for every request in every step,
# also where the default policy would refrain.
CONFIGURATIONS: MappingProxyType[str, dict[str, dict[str, Any]]] = MappingProxyType(
    {
        "trees, each drafter": {"policy": {"name": "adaserve"}},
        "chains": {"policy": {"name": "fixed", "fixed_depth": 4}},
        "default policy": {},
        "two micro-batches": {"policy": {"name": "adaserve"}, "scheduler": {"micro_batches": 2}},
        "micro-batches by load": {"policy": {"name": "adaserve"}, "scheduler": {"micro_batches": "auto"}},
        "tensor parallel 2": {"policy": {"name": "adaserve"}, "target": {"tensor_parallel": 2}},
        PREEMPTION: {"policy": {"name": "adaserve"}, "target": {"num_slots": 480}},
        "decomposed attention": {"policy": {"name": "adaserve"}, "target": {"attention": "decomposed"}},
        "weights of eight bits": {"policy": {"name": "adaserve"}, "target": {"quantization": "fp8"}},
        "weights of four bits": {"policy": {"name": "adaserve"}, "target": {"quantization": "int4"}},
        "every kind, each drafter": {"policy": {"name": "adaserve"}},
        "EAGLE, each drafter": {"policy": {"name": "adaserve"}},
        # Drafts are planned ahead where nobody is drafted for by others than the target's heads.
        "EAGLE alone, chains sent ahead": {"policy": {"name": "fixed", "fixed_depth": 4}},
        "EAGLE alone, default policy": {},
        "decoding heads alone, chains sent ahead": {"policy": {"name": "fixed", "fixed_depth": 3}},
        "a LoRA adapter, each drafter": {
            "policy": {"name": "adaserve"},
            "target": {"adapters": [{"name": ADAPTER, "path": f"zoo:{ADAPTER}"}]},
        },
        # Exploration that never ends: every three steps each request draws another drafter.
        "switching every 3 steps": {
            "policy": {"name": "adaserve"},
            "selector": {"name": "lbss", "alpha": 100_000, "beta": 3},
        },
    }
)


def configuration(name: str) -> FlotillaConfig:
    """The demo configuration with one entry of the matrix applied, on any free port."""
    config = demo_config()
    if name.startswith("every kind"):
        config = demo.every_kind()
        config = config.model_copy(update={"drafters": (*config.drafters, demo.other_vocabulary())})
    elif name.startswith("EAGLE alone"):
        config = config.model_copy(update={"drafters": (demo.eagle(),)})
    elif name.startswith("EAGLE"):
        config = config.model_copy(update={"drafters": (*config.drafters, demo.eagle())})
    elif name.startswith("decoding heads alone"):
        config = config.model_copy(update={"drafters": (demo.heads(),)})
    raw = config.model_dump()
    raw["http"]["port"] = 0
    for section, changes in CONFIGURATIONS[name].items():
        raw[section].update(changes)
    for drafter in raw["drafters"]:
        if drafter["kind"] == "model":
            drafter["quantization"] = raw["target"]["quantization"]
    return FlotillaConfig.model_validate(raw)


def run(names: Sequence[str], num_prompts: int, max_tokens: int | None, seed: int) -> dict[str, Any]:
    """Serve each configuration in turn and run the suite against it; prints a summary at the end."""
    reports: dict[str, Any] = {}
    for name in names:
        tables.console.rule(name)
        config = configuration(name)
        # Every drafter alone is asked for once; elsewhere they serve together.
        drafters = tuple(d.name for d in config.drafters) if name.endswith("each drafter") else ()
        adapter = next(iter(config.target.adapters), None)
        with running(config) as url:
            reports[name] = asyncio.run(
                lossless.run(
                    lossless.LosslessOptions(
                        url,
                        num_prompts=num_prompts,
                        max_tokens=max_tokens,
                        drafters=drafters,
                        seed=seed,
                        quantization=config.target.quantization,
                        model=None if adapter is None else adapter.name,
                        adapter=None if adapter is None else adapter.path,
                    )
                )
            )
    rows = []
    for name, report in reports.items():
        results = report["results"]
        differing = sum(len(result["differences"]) for result in results)
        outputs = sum(result["num_outputs"] for result in results)
        rows.append(
            [
                name,
                f"{outputs - differing}/{outputs}",
                str(differing - report["num_unproven"]),
                str(report["num_unproven"]),
                f"{sum(result['num_tokens'] for result in results):,}",
                f"{sum((result['receipts'] or {}).get('num_accepted', 0) for result in results):,}",
                str(sum(result["num_preemptions"] for result in results)),
            ]
        )
    heads = [
        "configuration",
        "identical",
        "near ties",
        "unproven",
        "tokens",
        "accepted drafts",
        "preemptions",
    ]
    tables.console.print(tables.plain_table("Losslessness of every configuration", heads, rows))
    forced = reports.get(PREEMPTION)
    if forced is not None and not any(result["num_preemptions"] for result in forced["results"]):
        tables.console.print(
            f"[yellow]Nothing was preempted in `{PREEMPTION}`: that shows nothing about preemption. More "
            "prompts and longer answers fill the slots.[/yellow]"
        )
    return {
        "benchmark": "lossless-matrix",
        "environment": environment.describe(),
        "num_unproven": sum(report["num_unproven"] for report in reports.values()),
        "configurations": reports,
    }
