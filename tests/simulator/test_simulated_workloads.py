"""Workloads of a simulated cell: files, traces, the built-in mix, arrivals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.objectives import parse_slos
from simulator import workloads
from simulator.cli import app as simulate_app
from simulator.plan_cli import app as plan_app


def test_adaserve_rows_give_class_objective_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    rows = [
        {
            "emission_time_ms": 1000.0,
            "input_length": 12,
            "output_length": 256,
            "prompt": "x",
            "slo_ratio": 1.2,
        },
        {
            "emission_time_ms": 3000.0,
            "input_length": 700,
            "output_length": 256,
            "prompt": "x",
            "slo_ratio": -150,
        },
    ]
    path.write_text(json.dumps(rows))
    shapes = workloads.adaserve_file(path)
    requests = workloads.arrive(shapes, 0.03, own_times=True)
    assert [request.kind for request in requests] == ["code", "summary"]
    assert requests[0].objective.tpot_ms == pytest.approx(36.0)
    assert requests[1].objective.tpot_ms == 150.0
    assert [request.arrival_s for request in requests] == [1.0, 3.0]
    path.write_text("[{}]")
    with pytest.raises(ValueError, match="no AdaServe workload"):
        workloads.adaserve_file(path)


def test_traces_keep_their_lengths(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "moon.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,2\n2023-11-16 18:15:48.0,30,4\n"
    )
    # Seconds are numbers: 9 comes before 10, with the lengths that stand beside it.
    numbered = tmp_path / "numbered.csv"
    numbered.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10.5,10,2\n9.0,30,4\n")
    assert [(shape.num_prompt, shape.arrival_s) for shape in workloads.trace_file(numbered)] == [
        (30, 0.0),
        (10, 1.5),
    ]
    mooncake.write_text('{"timestamp": 0, "input_length": 5, "output_length": 6}\n')
    shapes = workloads.trace_file(azure)
    assert [(shape.num_prompt, shape.num_output, shape.arrival_s) for shape in shapes] == [
        (10, 2, 0.0),
        (30, 4, 2.0),
    ]
    assert workloads.trace_file(mooncake)[0].num_output == 6
    assert workloads.cut(shapes, 1.0, 5.0)[0].arrival_s == 1.0


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
# Without the time of packing: the test is named after it, and its two processes must name it alike.
CUT_OFF = gzip.compress((HEAD + "1,2,3\n" * 100).encode(), mtime=0)[:-12]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("arrivals.csv", b"TIMESTAMP\n2023-11-16 18:15:46.0\n", "no 'ContextTokens'"),
        ("short.csv", HEAD.encode() + b"2023-11-16 18:15:46.0,10\n", "no lengths ContextTokens"),
        ("words.csv", HEAD.encode() + b"2023-11-16 18:15:46.0,ten,2\n", "no lengths ContextTokens"),
        ("timeless.csv", HEAD.encode() + b"2023-11-16 18:15:46.0,1,2\n,1,2\n", "row 2 has no time"),
        ("timeless.jsonl", b'{"input_length": 3, "output_length": 4}\n', "line 1 has no `timestamp`"),
        ("short.jsonl", b'{"timestamp": 3, "output_length": 4}\n', "no 'input_length'"),
        ("list.jsonl", b"[1, 2]\n", "line 1 has no `timestamp`"),
        ("endless.jsonl", b'{"timestamp": 3, "input_length": 1e999, "output_length": 4}\n', "no lengths"),
        (
            "endless.json",
            b'[{"emission_time_ms": 1, "slo_ratio": 1.2, "input_length": 1, "output_length": 1e999}]',
            "is no AdaServe workload",
        ),
        ("half.csv.gz", CUT_OFF, "cannot be unpacked"),
        ("plain.csv.gz", HEAD.encode() + b"1,2,3\n", "cannot be unpacked"),
        ("nothing.csv", b"", "the file is empty"),
        ("cut.jsonl", b'{"timestamp": 3, "input_length": 1, "output_length": 4}\n{"time', "line 2 has no"),
        ("yesterday.csv", HEAD.encode() + b"2023-11-16 18:15:46,1,2\nlate,1,2\n", "row 2 is no time: 'late'"),
        ("below.csv", HEAD.encode() + b"1,2,3\n2,-10,3\n", "row 2: no lengths"),
        ("long.csv", HEAD.encode() + b"1,9000000,3\n", "every request has more than 131,072 tokens"),
        ("none.json", b"[]", "no requests"),
        (
            "never.json",
            b'[{"emission_time_ms": NaN, "slo_ratio": 1.2, "input_length": 1, "output_length": 1}]',
            "entry 1: emission_time_ms is nan",
        ),
        (
            "before.json",
            b'[{"emission_time_ms": -9, "slo_ratio": 1.2, "input_length": 1, "output_length": 1}]',
            "entry 1: emission_time_ms is -9",
        ),
        (
            "less.json",
            b'[{"emission_time_ms": 9, "slo_ratio": 1.2, "input_length": 1, "output_length": -2}]',
            "entry 1: a length is -2",
        ),
        (
            "words.json",
            b'[{"emission_time_ms": "x", "slo_ratio": 1.2, "input_length": 1, "output_length": 1}]',
            "is no AdaServe workload",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_what_is_wrong_with_it(
    tmp_path: Path, name: str, content: bytes, wrong: str
) -> None:
    """Most of them ended in a traceback, and a row without a time moved all others by 292 years."""
    path = tmp_path / name
    path.write_bytes(content)
    ran = CliRunner().invoke(simulate_app, ["--workload", str(path)])
    assert (ran.exit_code, name in ran.output, wrong in ran.output) == (2, True, True), ran.output


def test_the_mix_has_its_shares_and_the_same_requests_at_every_rate() -> None:
    shapes = workloads.synthetic(3000, seed=1)
    share = np.mean([shape.kind == "code" for shape in shapes])
    assert abs(share - 0.6) < 0.04
    slow, fast = (workloads.arrive(shapes, 0.03, rate=rate, seed=1) for rate in (2.0, 4.0))
    assert [r.seed for r in slow] == [r.seed for r in fast]
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s)
    limited = workloads.arrive(shapes, 0.03, rate=2.0, slos=parse_slos(["*:tpot=25,ttft=900"]))
    assert {r.objective.tpot_ms for r in limited} == {25.0}
    assert {r.objective.ttft_ms for r in limited} == {900.0}
    with pytest.raises(ValueError, match="in the built-in mix"):
        workloads.synthetic(3, 0, {"poems": 1.0})


def test_peaks_come_one_after_the_other() -> None:
    requests = workloads.arrive(workloads.synthetic(2000, 3), 0.03, rate=10.0, peaks=True)
    middle = [
        np.median([r.arrival_s for r in requests if r.kind == kind]) for kind in ("chat", "code", "summary")
    ]
    assert middle[0] < middle[1] < middle[2]


def test_classes_with_lengths_come_in_turns_or_by_share() -> None:
    lengths = {"code": (110, 41), "chat": (60, 24)}
    assert [shape.kind for shape in workloads.of_lengths(4, 0, lengths)] == ["code", "chat"] * 2
    shapes = workloads.of_lengths(2000, 0, lengths, {"chat": 1.0, "code": 3.0})
    code = [shape for shape in shapes if shape.kind == "code"]
    assert len(code) / len(shapes) == pytest.approx(0.75, abs=0.04)
    assert np.median([shape.num_output for shape in code]) == pytest.approx(41, abs=2)
    with pytest.raises(ValueError, match="summary"):
        workloads.of_lengths(4, 0, lengths, {"summary": 1.0})


def servegen_files(folder: Path, clients: int, variation: float) -> tuple[Path, Path]:
    """Clients that all send as often, in two windows, each the more variably the larger `variation` is."""
    rates, lengths = folder / "r.csv", folder / "l.jsonl"
    rows = ["client,window_start_s,rate_req_per_s,cv,arrival_pattern,param1,param2"]
    rows += [f"{client},{start},1,{variation},Gamma,1,1" for client in range(clients) for start in (0, 600)]
    rates.write_text("\n".join(rows) + "\n")
    dataset = {"0": {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}}
    lengths.write_text("\n".join(json.dumps({"client": c, "dataset": dataset}) for c in range(clients)))
    return rates, lengths


def test_servegen_draws_lengths_and_the_rate_asked_for(tmp_path: Path) -> None:
    shapes = workloads.servegen(*servegen_files(tmp_path, 2, 1.5), 900.0, 5.0, seed=0)
    assert abs(len(shapes) / 900.0 - 5.0) < 1.0
    assert {shape.num_prompt for shape in shapes} == {100, 200}
    assert {shape.num_output for shape in shapes} == {7}


@pytest.mark.parametrize(("clients", "variation"), [(200, 1.0), (40, 3.0)])
def test_servegen_keeps_the_rate_of_many_rare_clients_and_of_bursts(
    tmp_path: Path, clients: int, variation: float
) -> None:
    """Each sends every 17 minutes on average, or every 3 and in bursts."""
    files = servegen_files(tmp_path, clients, variation)
    counts = [len(workloads.servegen(*files, 600.0, 0.2, seed)) for seed in range(12)]
    assert np.mean(counts) == pytest.approx(120.0, rel=0.12)


@pytest.mark.parametrize("command", [simulate_app, plan_app])
def test_an_objective_of_a_class_that_is_not_there_is_refused(command: typer.Typer) -> None:
    """A name mistyped would be nobody's objective, and the class's own would be judged by."""
    told = CliRunner().invoke(command, ["--rate", "1", "--slo", "cdoe:tpot=20"])
    assert (told.exit_code, "no class cdoe among" in told.output) == (2, True), told.output
    workloads.check_classes(parse_slos(["code:tpot=20,*:ttft=9"]), ["code", "chat"])


@pytest.mark.parametrize("options", [["--rate", "inf"], ["--rate", "1e300"], ["--seconds", "inf"]])
def test_more_requests_than_can_be_simulated_are_refused(options: list[str]) -> None:
    told = CliRunner().invoke(simulate_app, options)
    assert (told.exit_code, "and the most are 10,000,000" in told.output) == (2, True), told.output
