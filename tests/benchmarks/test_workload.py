"""Workloads are the same for the same seed, and hold what was asked for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import arrivals, prompts, serve, workload
from benchmarks.arrivals import Arrivals
from benchmarks.objectives import Limit, Slo, SloSpec, parse_slos
from benchmarks.prompts import Prompt

ADASERVE = {"slo_ratio": 1.2, "emission_time_ms": 3, "output_length": 4, "prompt": "x"}
POOL = [Prompt(domain, text=f"{domain} {n}") for domain in ("code", "chat", "summary") for n in range(10)]


def test_same_seed_same_workload() -> None:
    def build(seed: int) -> list[workload.BenchRequest]:
        return workload.build(POOL, count=50, arrivals=Arrivals.poisson, rate=5.0, seed=seed)

    assert build(3) == build(3)
    assert build(3) != build(4)


def test_rate_does_not_change_prompts() -> None:
    slow = workload.build(POOL, count=20, arrivals=Arrivals.poisson, rate=1.0)
    closed = workload.build(POOL, count=20)
    assert [request.prompt for request in slow] == [request.prompt for request in closed]
    assert all(request.arrival_s is None for request in closed)


def test_mix_is_exact_and_draws_without_replacement() -> None:
    shares = workload.parse_mix("code=60,chat=20,summary=20")
    requests = workload.build(POOL, count=15, shares=shares)
    assert Counter(request.domain for request in requests) == {"code": 9, "chat": 3, "summary": 3}
    assert len({request.prompt.text for request in requests}) == 15
    # More than there are: each is used again only after all were used.
    many = workload.build(POOL, count=25, shares={"code": 1.0})
    assert max(Counter(request.prompt.text for request in many).values()) == 3


def test_mix_rounds_to_the_count() -> None:
    requests = workload.build(POOL, count=10, shares=workload.parse_mix("code=1,chat=1,summary=1"))
    assert len(requests) == 10
    assert sorted(Counter(request.domain for request in requests).values()) == [3, 3, 4]


@pytest.mark.parametrize("text", ["", "code", "code=-1", "code=0", "code=x", "code=inf"])
def test_bad_mix(text: str) -> None:
    with pytest.raises(ValueError, match="--mix"):
        workload.parse_mix(text)


def test_unknown_class_is_named() -> None:
    with pytest.raises(ValueError, match="poetry"):
        workload.build(POOL, count=5, shares={"poetry": 1.0})
    named = workload.build(POOL, count=4, shares={"summarization": 1.0})
    assert {request.domain for request in named} == {"summary"}


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_gaps(burstiness: float, variation: float) -> None:
    times = arrivals.renewal_times(20_000, 8.0, burstiness, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 8.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_constant_gaps() -> None:
    requests = workload.build(POOL, count=4, arrivals=Arrivals.constant, rate=2.0)
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 1.0, 1.5]


def test_arrivals_are_stretched_by_the_last_of_them_wherever_it_stands() -> None:
    """By the one that stands last, a file out of order came at another rate than asked for."""
    assert arrivals.rescale([3.0, 0.0, 1.0], 2.0) == pytest.approx([1.0, 0.0, 1.0 / 3.0])
    assert arrivals.rescale([], 2.0) == []


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(
        f"2023-11-16 18:17:{second}00,1,1" for second in ("03.50000", "03.75000", "05.50000")
    )
    path.write_bytes(gzip.compress(rows.encode()))
    assert arrivals.trace_times(path) == pytest.approx([0.0, 0.25, 2.0])
    requests = workload.build(POOL, count=3, arrivals=Arrivals.trace, trace=path, rate=4.0)
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.0625, 0.5])
    with pytest.raises(ValueError, match="3 arrivals"):
        workload.build(POOL, count=4, arrivals=Arrivals.trace, trace=path)


def test_adaserve_file(tmp_path: Path) -> None:
    def row(ms: float, prompt: str, ratio: float) -> dict[str, object]:
        return {
            "emission_time_ms": ms,
            "input_length": 3,
            "output_length": 256,
            "prompt": prompt,
            "slo_ratio": ratio,
        }

    path = tmp_path / "emission.json"
    path.write_text(json.dumps([row(0.0, "a", 1.2), row(1500.0, "b", -50), row(2000.0, "c", -150)]))
    loaded = prompts.load(str(path))
    requests = workload.build(loaded, arrivals=Arrivals.workload, max_tokens=100)
    assert [request.domain for request in requests] == ["code", "chat", "summary"]
    assert [request.arrival_s for request in requests] == [0.0, 1.5, 2.0]
    assert {request.max_tokens for request in requests} == {100}
    resolved = workload.with_slos(requests, {"code": Slo(tpot_ms=10.0)})
    assert [request.slo.tpot_ms for request in resolved] == pytest.approx([12.0, 50.0, 150.0])


def test_jsonl_fields(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"domain": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7},
        {"category": "math", "turns": ["one", "two"]},
        {"prompt": "def f():", "slo": {"tpot_ms": 20}},
        {"instruction": "Add.", "input": "1 1"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    chat, math, plain, instruction = prompts.load(str(path))
    assert (chat.max_tokens, chat.messages) == (7, ({"role": "user", "content": "hi"},))
    assert math.messages == ({"role": "user", "content": "one"},)
    assert (plain.domain, plain.text, plain.slo) == ("all", "def f():", SloSpec(tpot=Limit(20.0)))
    assert instruction.messages == ({"role": "user", "content": "Add.\n\n1 1"},)


def test_texts_of_any_language_and_a_mark_of_utf8(tmp_path: Path) -> None:
    """Unicode has further ends of lines, which JSON does not need to escape."""
    path = tmp_path / "prompts.jsonl"
    texts = ["one\u2028two\u2029", "\x85three", "four"]
    rows = "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    path.write_bytes(rows.encode("utf-8-sig"))
    assert [prompt.text for prompt in prompts.load(str(path))] == texts
    path = tmp_path / "azure.csv"
    path.write_bytes("TIMESTAMP,ContextTokens\n2,5\n4,5\n".encode("utf-8-sig"))
    assert arrivals.trace_times(path) == [0.0, 2.0]


def test_an_objective_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x", "slo": {"tpot_ms": 20, "ttft_ms": None}}))
    (prompt,) = prompts.load(str(path))
    assert prompt.slo == SloSpec(tpot=Limit(20.0))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "slo": {"speed_ms": 3}}, "slo has speed_ms"),
        ({"prompt": "x", "slo": 5}, "entry 2"),
        ({"slo_ratio": 1.2, "emission_time_ms": 3}, "there is no 'prompt'"),
        ({"prompt": "x", "max_tokens": "many"}, "entry 2"),
        ({"text": "x"}, "none of messages"),
        ({"prompt": "x", "slo": {"tpot_ms": -1}}, "tpot_ms of slo must be positive"),
        ({"prompt": "x", "slo": {"e2e_ms": float("nan")}}, "e2e_ms of slo must be positive"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "x", "max_tokens": float("inf")}, "infinity"),
        (ADASERVE | {"emission_time_ms": float("inf")}, "emission_time_ms must be 0 or more"),
        (ADASERVE | {"emission_time_ms": -1}, "emission_time_ms must be 0 or more"),
        (ADASERVE | {"slo_ratio": 0}, "slo_ratio must be a multiple"),
        (ADASERVE | {"slo_ratio": float("nan")}, "slo_ratio must be a multiple"),
        (ADASERVE | {"output_length": 0}, "output_length must be at least 1"),
    ],
)
def test_which_entry_of_a_prompt_file_is_wrong_is_told(
    row: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"prompt": "right"}, row])))
    with pytest.raises(ValueError, match=f"prompts.jsonl entry 2: .*{reason.removeprefix('entry 2')}"):
        prompts.load(str(path))


@pytest.mark.parametrize("line", ['{"time": 1}', "hello", "[1]"])
def test_a_trace_without_times_is_told(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 1 has no `timestamp`"):
        arrivals.trace_times(path)


def test_slo_options() -> None:
    specs = parse_slos(["code:tpot=30,ttft=200", "chat:2x,summary:e2e=4x", "*:50"])
    assert specs["code"] == SloSpec(tpot=Limit(30.0), ttft=Limit(200.0))
    assert specs["chat"] == SloSpec(tpot=Limit(2.0, relative=True))
    assert specs["summary"] == SloSpec(e2e=Limit(4.0, relative=True))
    assert specs["*"] == SloSpec(tpot=Limit(50.0))
    chat = specs["chat"].resolve(Slo(tpot_ms=8.0))
    assert chat == Slo(tpot_ms=16.0)
    with pytest.raises(ValueError, match="baseline"):
        specs["chat"].resolve(None)


@pytest.mark.parametrize("option", ["30", "code:speed=1", "code:-1", "code:0x", "code:nanx", "code:tpot="])
def test_bad_slo(option: str) -> None:
    with pytest.raises(ValueError, match="--slo"):
        parse_slos([option])


def test_default_class_and_own_objectives() -> None:
    own = [Prompt("code", text="a", slo=SloSpec(tpot=Limit(9.0))), Prompt("chat", text="b")]
    requests = workload.build(own, slos={"chat": SloSpec(ttft=Limit(1.0))}, seed=1)
    specs = {request.domain: request.spec for request in requests}
    assert specs == {"code": SloSpec(tpot=Limit(9.0)), "chat": SloSpec(ttft=Limit(1.0))}


@pytest.mark.parametrize("process", [Arrivals.closed, Arrivals.workload, Arrivals.poisson])
@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_told(process: Arrivals, rate: float) -> None:
    """A trace stretched to a negative one would be sent all at once."""
    timed = [replace(prompt, arrival_s=float(n)) for n, prompt in enumerate(POOL)]
    with pytest.raises(ValueError, match="rate must be positive"):
        workload.build(timed, arrivals=process, rate=rate)


def test_part_of_a_workload_is_stretched_to_its_own_rate() -> None:
    """It begins later, and its file need not be in the order of time."""
    timed = [Prompt("code", text="x", arrival_s=at) for at in (62.0, 60.0, 61.0)]
    times = [
        request.arrival_s or 0.0 for request in workload.build(timed, arrivals=Arrivals.workload, rate=4.0)
    ]
    assert max(times) - min(times) == pytest.approx(2 / 4.0)
    assert times == pytest.approx([15.5, 15.0, 15.25])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"request_rate": 4.0, "arrivals": Arrivals.closed}, "--request-rate"),
        ({"burstiness": 0.5}, "--burstiness"),
        ({"burstiness": 0.5, "request_rate": 4.0, "arrivals": Arrivals.poisson}, "--burstiness"),
        ({"trace": Path("trace.csv"), "request_rate": 4.0, "arrivals": Arrivals.constant}, "--trace"),
        ({"mix": "code=1,chat=1", "arrivals": Arrivals.workload}, "--mix"),
    ],
)
def test_options_that_arrivals_do_not_look_at_are_refused(options: dict[str, Any], named: str) -> None:
    """A run at another load than was asked for looks like any other."""
    with pytest.raises(ValueError, match=f"^{named}: of no use with"):
        serve.build_load(serve.ServeOptions(url="http://nowhere", **options))
    held = serve.ServeOptions(url="http://nowhere", request_rate=4.0, burstiness=0.5, mix="code=1,chat=1")
    assert serve.build_load(held).arrivals is Arrivals.gamma
