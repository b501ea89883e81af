"""Figures in the documentation are those of the records beside it, where a table can be held against one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def record(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def table(document: str, head: str, section: str = "") -> list[list[str]]:
    """Cells of the first table of a section whose head begins so, without the head."""
    text = (DOCS / document).read_text()
    lines = text[text.index(section) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def numbers(cell: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[+-]?\d[\d,]*\.?\d*", cell)]


def as_written(value: float, written: float, digits: int) -> bool:
    """Whether a value may be rounded, up or down, to what is written."""
    return abs(value - written) <= 0.51 * 10.0**-digits


def test_what_the_way_to_the_client_costs() -> None:
    rows = table("benchmarks.md", "| requests at once | way |")
    ways = record("overhead")["ways"]
    assert [row[1] for row in rows] == [one["way"] for one in ways]
    for row, one in zip(rows, ways, strict=True):
        first, each, ratio, rate = (numbers(cell)[0] for cell in row[2:])
        assert as_written(one["median_ttft_ms"], first, 1), row
        assert as_written(one["median_tpot_ms"], each, 2), row
        assert as_written(one["tpot_ratio"]["median"], ratio, 2), row
        assert as_written(one["median_tokens_per_s"], rate, 0), row


@pytest.mark.parametrize(("name", "column"), [("pool-fixed", 1), ("pool", 2)])
def test_the_pool_of_drafters(name: str, column: int) -> None:
    rows, held = table("benchmarks.md", "| tokens per second | drafts of three"), record(name)
    assert len(rows) == len(held["contenders"])
    for row, contender in zip(rows, held["contenders"], strict=True):
        ratios = held["ratios"][contender["label"]]
        rate, to_none, to_best = numbers(row[column])
        assert as_written(median(contender["goodput"]), rate, 0), row
        assert as_written(ratios["no speculation"], to_none, 2), row
        assert as_written(ratios["best single"], to_best, 2), row


def test_micro_batches() -> None:
    rows, batches = table("benchmarks.md", "| setting | 8 requests"), record("pipeline")["batches"]
    settings = ["no speculation", "no overlap", "1", "2", "3", "4", "spin", "auto"]
    for row, setting in zip(rows, settings, strict=True):
        for cell, of in zip(row[1:], batches.values(), strict=True):
            goodput = of["goodput"]
            rate, *ratio = numbers(cell)
            assert as_written(goodput[setting], rate, 0), row
            assert all(as_written(goodput[setting] / goodput["no overlap"], one, 2) for one in ratio), row


def test_the_simulator_beside_the_running_cell() -> None:
    rows = table("simulator.md", "| policy | load | latency")
    points = {(one["policy"], one["load"]): one["figures"] for one in record("fidelity")["points"]}
    assert len(rows) == len(points)
    policy = ""
    for row in rows:
        policy = row[0].strip("`") or policy
        figures = points[policy, float(row[1])]
        three = ("served", "simulated", "own costs")
        for cell, name, digits in (
            (row[2], "latency_ms", 0),
            (row[3], "tpot_ms", 1),
            (row[4], "attainment", 2),
            (row[5], "goodput_tokens_s", 0),
        ):
            for said, which in zip(numbers(cell), three, strict=False):
                assert as_written(figures[name][which], said, digits), (row, name)
        for cell, name in ((row[6], "drafted_share"), (row[7], "tokens_per_request_step")):
            for said, which in zip(numbers(cell), ("served", "own costs"), strict=True):
                assert as_written(figures[name][which], said, 2), (row, name)


@pytest.mark.parametrize(
    ("name", "which"), [("engine-deep", "1.82x (code 2.26x"), ("engine-grown-135m", "1.92x (code 2.2x")]
)
def test_engines_side_by_side(name: str, which: str) -> None:
    """Of one request and of eight, over each of the others."""
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if which in line)
    cells = record(name)["cells"]
    for line, concurrency in ((lines[at], 1), (lines[at + 1], 8)):
        said = [numbers(cell)[0] for cell in line.strip("|").split("|")[1:] if numbers(cell)]
        found = [
            one["flotilla / this"]
            for one in cells
            if (one["domain"], one["concurrency"]) == ("all", concurrency) and one["engine"] != "flotilla"
        ]
        assert len(said) == len(found)
        assert all(abs(one - other) <= 0.051 for one, other in zip(said, found, strict=True)), line


def test_claims_of_the_papers() -> None:
    page = (DOCS / "reproduction" / "README.md").read_text()
    held = re.search(r"Of the papers' claims (\d+ of \d+) hold", page)
    assert held is not None
    papers, whole = held[1].split(" of ")
    assert f"{papers} of the papers' {whole} claims hold" in (DOCS.parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "section", "num_loads"),
    [("compare", "## What a comparison shows", 5), ("compare-deep", "### A costlier target", 4)],
)
def test_policies_side_by_side(name: str, section: str, num_loads: int) -> None:
    """The record holds means over seeds; ratios of goodput are of those."""
    found = table("benchmarks.md", "| requests that met their objective", section)
    rows = {row[0].strip("`"): row[1:] for row in found}
    points = record(name)["summary"]
    for place, point in enumerate(points):
        figures = {one["policy"].partition(":")[0]: one for one in point["policies"]}
        for policy, one in figures.items():
            row = rows["fixed`, depth 3" if policy == "fixed" else policy]
            assert as_written(100 * one["attainment"]["mean"], numbers(row[place])[0], 0), policy
        goodput = {policy: one["goodput_tokens_per_s"]["mean"] for policy, one in figures.items()}
        best = point["against_best"][0]["baseline"].partition(":")[0]
        for label, other, digits in (("that other", best, 2), ("`autoregressive`", "autoregressive", 1)):
            said = numbers(rows[f"goodput in tokens, `flotilla` to {label}".strip("`")][place])[0]
            assert as_written(goodput["flotilla"] / goodput[other], said, digits), (point["key"], label)
    assert len(points) == num_loads


def test_policies_since_prompts_wait_for_nobody() -> None:
    """Means with their intervals; times are in pairs with the default policy's."""
    rows = table("benchmarks.md", "| at 1.5, then 2.9 requests/s")
    points = {point["key"]: point for point in record("compare-deep-prompts")["summary"]}
    assert len(rows) == 4
    for key, place, label in ((k, p, n) for k, p in (("rate=1.5", 1), ("rate=2.9", 4)) for n in range(4)):
        policies = {one["policy"]: one for one in points[key]["policies"]}
        paired = {one["policy"]: one for one in points[key]["paired"]}
        policy = ("flotilla", "smartspec", "fixed:fixed_depth=3", "flotilla:batching=sarathi")[label]
        met, goodput, times = rows[label][place : place + 3]
        if policy not in policies:
            assert (met, goodput, times) == ("", "", "")
            continue
        held = [
            (policies[policy]["attainment"], 100.0, 1),
            (policies[policy]["goodput_tokens_per_s"], 1.0, 1),
        ]
        held += [(paired[policy][time], 1.0, 2) for time in ("tpot", "ttft") if policy in paired]
        said = numbers(met) + numbers(goodput) + (numbers(times) if policy in paired else [])
        wanted = [
            (scale * one[bound], digits) for one, scale, digits in held for bound in ("mean", "low", "high")
        ]
        assert len(said) == len(wanted)
        for (value, digits), written in zip(wanted, said, strict=True):
            assert as_written(value, written, digits), (key, policy)


def test_beside_vllm() -> None:
    rows = table("../benchmarks/README.md", "| | demo target, one stream |", "## Beside vLLM")
    engines = ("flotilla", "vllm base", "vllm ngram", "vllm draft")
    in_readme = (DOCS.parent / "README.md").read_text()
    for name, first, short in (("vllm-compiled", 0, ""), ("vllm-compiled-deep", 2, "costlier target ")):
        held = record(name)
        for place, streams in ((first, 1), (first + 1, 8)):
            column = [numbers(row[1:][place]) for row in rows]
            rates = {
                one["engine"]: one["tokens_per_s"]
                for one in held["cells"]
                if (one["domain"], one["concurrency"]) == ("all", streams)
            }
            assert len(rates) == len(engines)
            for engine, said in zip(engines, column[:4], strict=True):
                assert as_written(rates[engine], said[0], 0), (name, streams, engine)
            times = {one["engine"]: one for one in held["latency"] if one["concurrency"] == streams}
            for key, row in (("tpot_ms", column[4]), ("ttft_ms", column[5])):
                for engine, said in zip(engines, row, strict=True):
                    digits = 1 if said != int(said) or said < 20 else 0
                    assert as_written(times[engine][key]["p50"], said, digits), (name, streams, key, engine)
            ratios = " / ".join(f"{rates['flotilla'] / rates[engine]:.1f}x" for engine in engines[1:])
            assert f"{short}{ratios} |" in in_readme or f"{short}{ratios};" in in_readme, ratios


def test_what_adapters_cost_a_forward() -> None:
    rows = table("adapters.md", "| requests, rows each |")
    held = record("adapter-cost")["results"]
    assert len(rows) == len(held)
    for row, one in zip(rows, held, strict=True):
        without, *others = one["ms"].values()
        assert row[0] == f"{one['requests']}, {one['rows']}"
        assert as_written(without, numbers(row[1])[0], 1), row
        for milliseconds, cell in zip(others, row[2:], strict=True):
            assert as_written(milliseconds / without, numbers(cell)[0], 2), row


def test_outputs_with_an_adapter() -> None:
    (suite,) = record("lossless-adapter")["configurations"].values()
    outputs = sum(one["num_outputs"] for one in suite["results"])
    assert not any(one["differences"] for one in suite["results"])
    assert f"0 of {outputs:,}" in (DOCS / "measurements.md").read_text()
    page = (DOCS / "adapters.md").read_text()
    (without,) = record("lossless-adapter-without")["configurations"].values()

    def tokens_a_step(suite: Any, mode: str) -> dict[str, float]:
        return {
            one["variant"]: one["receipts"]["mean_acceptance_length"]
            for one in suite["results"]
            if one["mode"] == mode and not one["variant"].startswith("off")
        }

    greedy, greedy_without = tokens_a_step(suite, "greedy"), tokens_a_step(without, "greedy")
    every, every_without = greedy.pop("all drafters"), greedy_without.pop("all drafters")
    assert f"with all drafters {every:.2f} tokens a step and {every_without:.2f}" in page
    best, best_without = max(greedy.values()), max(greedy_without.values())
    assert f"with the best single one {best:.2f} and {best_without:.2f}" in page
    both = [tokens_a_step(one, "sampled")["all drafters"] for one in (suite, without)]
    assert f"{both[0]:.2f} and {both[1]:.2f}: its answers" in page


def test_an_adapter_beside_vllm() -> None:
    held = record("vllm-adapter")
    one, eight = (held["summary"][number] for number in ("1", "8"))
    row = (
        f"{one['vs_base']:.1f}x / {one['vs_best']:.1f}x; eight streams "
        f"{eight['vs_base']:.1f}x / {eight['vs_best']:.1f}x"
    )
    assert row in (DOCS / "measurements.md").read_text()
    beside = (DOCS.parent / "benchmarks" / "README.md").read_text()
    assert (
        f"one stream is {one['vs_base']:.1f} times vLLM's, eight are {eight['vs_base']:.1f} times" in beside
    )
    assert not any(held["outputs_different"].values())
    compared = sum(held["outputs_compared"].values())
    assert f"all {compared} outputs were equal" in (DOCS / "adapters.md").read_text()
