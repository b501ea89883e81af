"""The whole system over HTTP, as a user meets it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from typing import Any

import grpc
import httpx
import jsonschema
import psutil
import pytest
from google.protobuf import json_format
from openai import OpenAI

from benchmarks import grpc_cancel
from benchmarks.lossless import LosslessOptions, run
from cluster.metric_catalog import CATALOG, exposed_by
from deployments.proto.flotilla.v1 import generation_pb2, generation_pb2_grpc
from tests.browser import needs_chromium
from tests.own_processes import own_processes
from tests.system import (
    adapter_over_http,
    api_over_http,
    console_in_browser,
    kept_cores,
    objectives_over_http,
)
from tests.system.conftest import Server
from tests.system.scraping import scrape, value

pytestmark = pytest.mark.system

PROMPT = "def read_lines(path):\n    "


def test_outputs_are_the_targets_own_whatever_is_drafted(server: Server) -> None:
    """Greedy against Transformers, sampling against this server without speculation, all at once."""
    drafters = tuple(drafter.name for drafter in server.config.drafters)
    options = LosslessOptions(server.url, server.model, num_prompts=4, max_tokens=20, drafters=drafters)
    report = asyncio.run(run(options))
    assert report["num_unproven"] == 0
    variants = {(r["mode"], r["variant"]) for r in report["results"]}
    assert ("greedy", "all drafters") in variants
    assert len(variants) == 4 * (2 + len(drafters))
    # Over all modes: a variant takes half a second, for which other programs may starve a drafter.
    drafted: Counter[str] = Counter()
    for result in report["results"]:
        drafted[result["variant"]] += result["receipts"]["num_verified"]
    for name in drafters:
        assert drafted[f"{name} alone"] > 0, f"{name} never drafted"


def test_an_adapter_is_a_model_of_its_own(server: Server) -> None:
    adapter_over_http.check_adapter(server)


def test_workers_have_the_priority_of_other_programs_and_share_what_is_freed(server: Server) -> None:
    """By default Ray starts them at a lower one, and a client on this machine would slow them down."""
    own = psutil.Process()
    workers = [child for child in own.children(recursive=True) if child.name().startswith("ray::")]
    # Agents write their title over their environment.
    served = [worker for worker in workers if "Agent" not in worker.name()]
    assert {worker.environ().get("MALLOC_ARENA_MAX") for worker in served} == {"2"}
    names = " ".join(worker.name() for worker in workers)
    assert "VerifierWorker" in names, names
    assert "DrafterWorker" in names, names
    assert {worker.nice() for worker in workers} == {own.nice()}


def test_the_official_client_streams_a_chat(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    messages = [{"role": "user", "content": "What does `os.path.join` do?"}]
    request: Any = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert text
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_official_client_completes(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=16, temperature=0)
    assert answer.choices[0].text == server.complete(PROMPT, max_tokens=16)["choices"][0]["text"]


def test_every_response_carries_a_receipt(server: Server) -> None:
    metrics = server.complete(PROMPT, slo={"tpot_ms": 500, "ttft_ms": 5000})["metrics"]
    assert metrics["slo"] == {
        "tpot_ms": 500.0,
        "ttft_ms": 5000.0,
        "e2e_ms": None,
        "met": True,
        "tpot_met": True,
        "ttft_met": True,
        "e2e_met": None,
    }
    speculation = metrics["speculative_decoding"]
    assert speculation["num_draft_tokens"] >= speculation["num_verified_tokens"]
    assert speculation["num_verified_tokens"] >= speculation["num_accepted_draft_tokens"]
    assert speculation["mean_acceptance_length"] >= 1.0
    assert metrics["time_to_first_token_ms"] > 0
    assert set(metrics["drafters"]) <= {d.name for d in server.config.drafters}


def test_objectives_are_predicted_kept_to_and_refused(server: Server) -> None:
    objectives_over_http.check_headers_and_multiples(server)
    objectives_over_http.check_downgrade(server)
    objectives_over_http.check_refusals(server)


def test_speculation_off_is_the_same_text_without_drafts(server: Server) -> None:
    plain = server.complete(PROMPT, speculation={"mode": "off"})
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert plain["choices"][0]["text"] == server.complete(PROMPT)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"model": "no-such-model", "prompt": "x"}, 404, "model"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "x", "temperature": 3}, 400, "temperature"),
        ({"prompt": "x", "n": 0}, 400, "n"),
        ({"prompt": "x", "colour": "red"}, 400, "colour"),
        ({"prompt": "word " * 4000}, 400, "prompt"),
        ({"prompt": "x", "slo": {"tpot_ms": 0}}, 400, "tpot_ms"),
        ({"prompt": "x", "slo": {"tpot_ms": 1e-6}}, 400, "tpot_ms"),
        ({"prompt": "x", "speculation": {"drafters": ["nobody"]}}, 400, "drafters"),
    ],
)
def test_bad_input_is_a_4xx_that_names_the_field(
    server: Server, body: dict[str, object], status: int, field: str
) -> None:
    response = server.post("/v1/completions", {"model": server.model, "max_tokens": 4, **body})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert field in f"{error['param']} {error['message']}"
    assert error["message"]
    assert error["type"]


def test_structured_outputs_are_complete_and_the_same_without_speculation(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["file", "folder"]},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    }
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Describe a file."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "file", "schema": schema}},
        "n": 3,
        "seed": 5,
        "max_tokens": 60,
        "logprobs": True,
        "presence_penalty": 0.5,
    }
    answers = []
    for speculation in ({"mode": "off"}, {"mode": "auto"}):
        answer = server.post("/v1/chat/completions", {**body, "speculation": speculation}).json()
        answers.append([choice["message"]["content"] for choice in answer["choices"]])
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert answers[0] == answers[1]
    assert "grammar" in answer["metrics"]["drafters"]

    cut = server.complete(PROMPT, max_tokens=3, structured_outputs={"json": schema})["choices"][0]
    assert cut["finish_reason"] == "length"
    chosen = server.complete(PROMPT, guided_choice=["return path", "pass"])["choices"][0]
    assert chosen["text"] in ("return path", "pass")
    digits = server.complete(PROMPT, guided_regex="[0-9]{4}-[0-9]{2}")["choices"][0]["text"]
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", digits)
    stopped = server.complete(PROMPT, structured_outputs={"json": schema}, stop=[","])["choices"][0]
    assert stopped["text"].startswith('{"name":')
    assert "," not in stopped["text"]
    refused = server.post(
        "/v1/completions", {"model": server.model, "prompt": PROMPT, "guided_json": {"type": "strin"}}
    )
    assert refused.status_code == 400
    assert "strin" in refused.json()["error"]["message"]


def test_bad_json_is_a_400(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=b'{"model": ', headers=headers, timeout=30)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


# tests/deployments/test_bad_requests.py sends more of them to the same front end, with fewer parts behind it.
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_bad_requests_leave_the_server_well(server: Server, every: int) -> None:
    api_over_http.check_bad_requests(server, every)


@pytest.mark.api("chat.completions", "tools", "tool_choice", "parallel_tool_calls")
def test_forced_calls_keep_to_their_schemas(server: Server) -> None:
    api_over_http.check_forced_calls(server)


@pytest.mark.api("responses", "input", "stream", "text", "max_output_tokens", "temperature")
def test_the_official_client_creates_responses(server: Server) -> None:
    api_over_http.check_responses(server)


@pytest.mark.api("messages", "messages", "stream", "max_tokens", "temperature")
def test_anthropics_client_gets_messages(server: Server) -> None:
    api_over_http.check_messages(server)


@pytest.mark.api("completions", "prompt_logprobs", "echo", "logprobs", "max_tokens")
def test_log_probabilities_of_prompts_are_those_of_outputs(server: Server) -> None:
    api_over_http.check_prompt_logprobs(server)


@pytest.mark.api("completions", "allowed_token_ids", "bad_words")
@pytest.mark.api("tokenize", "prompt", "messages", "tools")
@pytest.mark.api("detokenize", "tokens")
def test_ruled_out_tokens_and_tokenization(server: Server) -> None:
    api_over_http.check_ruled_out_tokens(server)
    api_over_http.check_tokenize(server)


def test_health_readiness_and_metrics(server: Server) -> None:
    server.complete(PROMPT)
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    assert httpx.get(f"{server.url}/ready", timeout=10).status_code == 200
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    for name in ("flotilla_requests_total", "flotilla_time_per_output_token_seconds_bucket"):
        assert name in text
    assert value(server, "flotilla_accepted_tokens_total") > 0


def test_one_scrape_has_every_metric_of_every_process_once(server: Server) -> None:
    for number, tpot_ms in enumerate((0.2, 500)):
        body = {"slo": {"tpot_ms": 500 if number else 5, "ttft_ms": tpot_ms, "e2e_ms": 60000}}
        server.complete(f"def scraped_{number}(value):\n    ", **body)
    text, families = scrape(server)
    assert set(families) == set(CATALOG)
    assert {name: family.type for name, family in families.items()} == {
        name: metric.kind for name, metric in CATALOG.items()
    }
    own: dict[str, set[str]] = {"cell": set(), "front_end": set()}
    for name, family in families.items():
        seen = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
        assert len(seen) == len(set(seen)), f"{name} has a series twice"
        assert seen, f"{name} has no series"
        for sample in family.samples:
            for process in set(own) & set(sample.labels):
                own[process].add(sample.labels[process])
            if "gathered" not in CATALOG[name].processes:
                assert len(set(own) & set(sample.labels)) == 1, f"{name}: whose is it?"
    assert {process: len(ids) for process, ids in own.items()} == {"cell": 1, "front_end": 1}
    assert value(server, "flotilla_slo_requests_total", objective="all", attained="true") > 0
    missed = value(server, "flotilla_slo_requests_total", objective="ttft", attained="false")
    assert missed == value(server, "flotilla_slo_violations_total", objective="ttft") > 0
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_each_process_can_be_scraped_by_itself(server: Server) -> None:
    targets = httpx.get(f"{server.url}/metrics/targets", timeout=10).json()
    kinds = [target["labels"]["__meta_flotilla_kind"] for target in targets]
    assert sorted(kinds) == ["cell", "front_end"]
    for kind, target in zip(kinds, targets, strict=True):
        text = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert names == {metric.name for metric in exposed_by(kind)}


def test_traces_hold_the_accepted_paths_and_change_no_text(server: Server) -> None:
    console_in_browser.check_traces(server)


@needs_chromium
def test_the_console_shows_answers_and_cells_in_a_browser(server: Server) -> None:
    console_in_browser.check_page(server)


def test_drafters_keep_off_the_cores_of_target_and_scheduler(server: Server) -> None:
    kept_cores.check_kept_cores(server)


def test_a_client_that_goes_away_frees_its_request(server: Server) -> None:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 800, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if value(server, "flotilla_requests_running") == 0:
            return
        time.sleep(0.1)
    raise AssertionError("the abandoned request still runs")


def test_grpc_gives_what_http_gives(server: Server) -> None:
    fields = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "return_token_ids": True}
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for conversation in (False, True):
            body = {"prompt": PROMPT}
            if conversation:
                body = {"messages": [{"role": "user", "content": "What does os.path.join do?"}]}  # type: ignore[dict-item]
            path = "/v1/chat/completions" if conversation else "/v1/completions"
            over_http = server.post(path, {**body, **fields}).json()
            message = json_format.ParseDict({**body, **fields}, generation_pb2.GenerateRequest())
            whole = stub.Generate(message)
            chunks = list(stub.GenerateStream(message))
            theirs, ours = over_http["choices"][0], whole.choices[0]
            text = theirs["message"]["content"] if conversation else theirs["text"]
            assert ours.text == text == "".join(chunk.choice.text for chunk in chunks)
            assert list(ours.token_ids) == theirs["token_ids"]
            assert ours.finish_reason == theirs["finish_reason"] == chunks[-1].choice.finish_reason
            assert whole.metrics.seed == over_http["metrics"]["seed"] == 7
            assert whole.usage.total_tokens == over_http["usage"]["total_tokens"]


def test_requests_given_up_over_grpc_leave_the_cell(server: Server) -> None:
    trials = asyncio.run(grpc_cancel.run_trials(server.grpc_address, grpc_cancel.cell_requests(), 18))
    lost = [trial for trial in trials if trial.freed_ms is None]
    assert not lost
    assert {trial.status for trial in trials} == {"CANCELLED", "DEADLINE_EXCEEDED"}
    assert all(trial.num_cancelled == 1 for trial in trials if trial.way == "Cancel")


@pytest.fixture(scope="module")
def expected(server: Server) -> list[tuple[str, str]]:
    """Prompts, and what each is continued with when nothing is killed."""
    prompts = [f"def function_{number}(value):\n    " for number in range(8)]
    return [(prompt, server.complete(prompt, max_tokens=48)["choices"][0]["text"]) for prompt in prompts]


@pytest.mark.thorough  # In test_pool.py both are lost, too.
@pytest.mark.parametrize("kind", ["DrafterWorker", "VerifierWorker"])
def test_killing_a_worker_under_load_changes_no_text(
    server: Server, expected: list[tuple[str, str]], kind: str
) -> None:
    got: dict[int, list[str]] = {number: [] for number in range(len(expected))}
    failures: list[BaseException] = []
    stop = threading.Event()

    def load(number: int) -> None:
        try:
            while not stop.is_set() or not got[number]:
                got[number].append(server.complete(expected[number][0], max_tokens=48)["choices"][0]["text"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(len(expected))]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    victims = own_processes(kind)
    assert victims, f"no process of {kind}"
    os.kill(victims[0], signal.SIGKILL)
    time.sleep(1.5)  # it is missed at once, and requests under way end when another is there
    stop.set()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a request hangs"
    assert not failures
    for number, texts in got.items():
        assert set(texts) == {expected[number][1]}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not set(own_processes(kind)) - set(victims[:1]):
        time.sleep(0.2)
    assert set(own_processes(kind)) - set(victims[:1]), "nobody took the place of the dead worker"
