"""The file of a comparison: finished runs are added as they end, so that an interrupted one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare_cell import StepTotals
from benchmarks.compare_plan import Run
from benchmarks.load_client import LoadResult
from benchmarks.report import meets_all, report
from benchmarks.tables import plain_data

VERSION = 1
# Of an environment: objectives and rates are multiples of what such a machine once took.
_MACHINE = ("machine", "processor", "cpus", "gpu")


@dataclass(slots=True)
class Record:
    """Everything a comparison has measured so far.

    Attributes:
        settings: what all runs share; runs under other settings do not belong into the same file.
        environment: where the first runs were taken.
        baseline: latencies without load and speculation by class, milliseconds; empty until measured.
        saturation: requests per second plain decoding sustains; None until measured.
        points: by key, what each point of the sweep stands for.
        runs: finished runs.
        outputs: for each prompt the tokens first returned for it.
        summary: figures by point and policy, when all runs were taken.
        path: where it is kept; None keeps it nowhere.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    path: Path | None = None
    baseline: dict[str, dict[str, float | None]] = field(default_factory=dict)
    saturation: float | None = None
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    summary: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def resume(cls, path: Path | None, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Record:
        """The record in the file, to be continued, or a new one.

        Raises:
            ValueError: if the file holds something else, or runs under other settings or of another machine.
        """
        plain = json.loads(json.dumps(plain_data(settings), default=str))
        if path is None or not path.exists():
            return cls(plain, dict(environment), path)
        try:
            held = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        fields = ("environment", "baseline", "saturation", "points", "runs", "outputs")
        is_one = (
            isinstance(held, dict) and held.get("benchmark") == "compare" and held.get("version") == VERSION
        )
        if not is_one or not {"settings", *fields} <= held.keys():
            raise ValueError(f"{path} holds no runs of `flotilla bench compare` of this version")
        names = {*plain, *held["settings"]}
        differing = sorted(name for name in names if plain.get(name) != held["settings"].get(name))
        if differing:
            raise ValueError(
                f"{path} holds runs with another {', '.join(differing)}; name another file, or remove it"
            )
        here, there = (
            {name: each.get(name) for name in _MACHINE} for each in (environment, held["environment"])
        )
        if here != there:
            raise ValueError(
                f"{path} holds runs of another machine, {there}; name another file, or remove it"
            )
        return cls(settings=plain, path=path, **{name: held[name] for name in fields})

    def has(self, run: Run) -> bool:
        """Whether the run is finished."""
        return any(asdict(run) == held["run"] for held in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "path"}
        return {"benchmark": "compare", "version": VERSION, **data}

    def save(self) -> None:
        """Write the file in one piece, so that an interruption cannot leave half of it."""
        if self.path is None:
            return
        text = json.dumps(plain_data(self.to_json()), default=str, allow_nan=False, separators=(",", ":"))
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(text + "\n")
        os.replace(partial, self.path)


def run_record(
    run: Run, result: LoadResult, before: StepTotals, after: StepTotals, differences: Sequence[Any]
) -> dict[str, Any]:
    """What is kept of a run.

    The requests are kept by column; `steps` are seconds of the run's decode steps by what they went into.
    """
    outcomes = result.outcomes
    earlier = asdict(before)
    return {
        "run": asdict(run),
        "report": report(result).to_json(),
        "steps": {name: value - earlier[name] for name, value in asdict(after).items()},
        "requests": {
            "domain": [outcome.request.domain for outcome in outcomes],
            "arrival_s": [outcome.request.arrival_s for outcome in outcomes],
            "tokens": [outcome.num_output_tokens for outcome in outcomes],
            "ttft_ms": [_rounded(outcome.ttft_ms) for outcome in outcomes],
            "tpot_ms": [_rounded(outcome.tpot_ms) for outcome in outcomes],
            "slo_tpot_ms": [_rounded(outcome.request.slo.tpot_ms) for outcome in outcomes],
            "met": [meets_all(outcome) for outcome in outcomes],
            "error": [outcome.error for outcome in outcomes],
        },
        "differences": list(differences),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
