"""Where benchmark prompts come from: the zoo's held-out ones, JSONL files, AdaServe workload files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arrivals import read_text
from benchmarks.objectives import METRICS, NO_SLO_SPEC, Limit, SloSpec

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to ask.

    Attributes:
        domain: its class in reports.
        text: the prompt of a completion, or None for a chat.
        messages: the messages of a chat, or None.
        token_ids: the tokens of a completion's prompt, where every engine must see the same ones, or None.
        max_tokens: most tokens to generate; None leaves it to the caller.
        slo: objectives that came with it.
        arrival_s: when it arrives, if its source says so.
    """

    domain: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    slo: SloSpec = NO_SLO_SPEC
    arrival_s: float | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.text, self.messages, self.token_ids)) != 1:
            raise ValueError("a prompt has one of text, messages and token_ids")


# AdaServe's files name no class; the objective tells it (a multiple for code, fixed milliseconds else).
_ADASERVE_FIXED = {50.0: "chat", 150.0: "summary"}


def adaserve_category(slo_ratio: float) -> tuple[str, Limit]:
    """Class and time-per-output-token objective meant by the `slo_ratio` of an AdaServe workload row."""
    if slo_ratio > 0:
        return "code", Limit(slo_ratio, relative=True)
    return _ADASERVE_FIXED.get(-slo_ratio, f"tpot{-slo_ratio:g}"), Limit(-slo_ratio)


def _adaserve_prompt(row: Mapping[str, Any]) -> Prompt:
    ratio, emitted_ms = float(row["slo_ratio"]), float(row["emission_time_ms"])
    if not math.isfinite(ratio) or ratio == 0.0:
        raise ValueError(f"slo_ratio must be a multiple, or milliseconds below 0, not {ratio:g}")
    if not 0.0 <= emitted_ms < math.inf:
        raise ValueError(f"emission_time_ms must be 0 or more and finite, not {emitted_ms:g}")
    domain, limit = adaserve_category(ratio)
    return Prompt(
        domain=domain,
        text=row["prompt"],
        max_tokens=_bound(row["output_length"], "output_length"),
        slo=SloSpec(tpot=limit),
        arrival_s=emitted_ms / 1000.0,
    )


def _bound(value: Any, name: str) -> int:
    """A bound on an answer's tokens, by the name of its field."""
    bound = int(value)
    if bound < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return bound


def _objectives(slo: Mapping[str, float | None]) -> SloSpec:
    """In milliseconds, by field of `slo`; one that is null is none."""
    limits = {}
    for name, value in slo.items():
        metric = name.removesuffix("_ms")
        if metric not in METRICS:
            raise ValueError(f"slo has {name}, and not {', '.join(f'{known}_ms' for known in METRICS)} alone")
        if value is not None:
            if not 0 < float(value) < math.inf:
                raise ValueError(f"{name} of slo must be positive and finite, not {value}")
            limits[metric] = Limit(float(value))
    return SloSpec(**limits)


def _prompt(row: Mapping[str, Any]) -> Prompt:
    """A prompt from the fields that zoo files, vLLM's custom data sets and Spec-Bench use."""
    text = messages = None
    if row.get("messages") is not None:
        messages = tuple(dict(message) for message in row["messages"])
    elif row.get("turns"):
        messages = ({"role": "user", "content": str(row["turns"][0])},)
    elif row.get("prompt") is not None:
        text = str(row["prompt"])
    elif row.get("instruction") is not None:
        content = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        messages = ({"role": "user", "content": content},)
    else:
        raise ValueError(f"none of messages, turns, prompt, instruction among {sorted(row)}")
    max_tokens = row.get("max_tokens", row.get("output_length", row.get("output_tokens")))
    return Prompt(
        domain=str(row.get("domain") or row.get("category") or "all"),
        text=text,
        messages=messages,
        max_tokens=None if max_tokens is None else _bound(max_tokens, "max_tokens"),
        slo=_objectives(row.get("slo") or {}),
    )


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, in its order: a JSON list or JSON lines, optionally gzipped.

    Rows with `slo_ratio` and `emission_time_ms` are AdaServe workload rows.
    """
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            # Not `splitlines`: texts may hold what Unicode has besides for ends of lines.
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: neither a JSON list nor JSON lines: {error}") from None
    prompts = []
    for number, row in enumerate(rows):
        where = f"{path.name} entry {number + 1}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object")
        is_adaserve = "slo_ratio" in row and "emission_time_ms" in row
        try:
            prompts.append(_adaserve_prompt(row) if is_adaserve else _prompt(row))
        except KeyError as error:
            raise ValueError(f"{where}: there is no {error}") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from None
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def zoo_prompts() -> list[Prompt]:
    """The held-out prompts of the embedded demo family."""
    from zoo.registry import load_prompts

    return [
        Prompt(
            domain=held.domain,
            text=None if held.messages else held.prompt,
            messages=tuple(held.messages) if held.messages else None,
            max_tokens=held.max_tokens,
        )
        for held in load_prompts()
    ]


def load(source: str) -> list[Prompt]:
    """Prompts of `zoo`, or of a file by its path."""
    return zoo_prompts() if source == "zoo" else read_prompts(Path(source))
