"""`flotilla bench vllm answers`: what this server and vLLM say to the same requests, and what differs."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import answer_differences, demo, environment, tables, vllm_install
from benchmarks.answer_differences import Difference
from benchmarks.transformers_engine import Reference
from benchmarks.vllm_known_differences import KNOWN, explained
from benchmarks.vllm_peer import OWN, SERVED_NAME, VllmOptions, start_servers, with_adapter
from benchmarks.vllm_requests import Question, questions
from zoo.registry import ADAPTER

#: What vLLM needs for calls of tools, and to tell what it had cached.
VLLM_ARGUMENTS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP status and what came with it: JSON, a stream as one value, or text."""

    status: int
    content: Any


def ask(url: str, question: Question) -> Answer:
    """The answer of a server to one request.

    Raises:
        OSError: if the server cannot be reached or does not answer.
    """
    body = question.body
    headers = dict(question.headers)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        headers.setdefault("Content-Type", "application/json")
    request = urllib.request.Request(url + question.path, data=body, headers=headers, method=question.method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return _read(answer.status, answer.headers.get_content_type(), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return _read(error.code, error.headers.get_content_type(), error.read())


def _read(status: int, kind: str, content: bytes) -> Answer:
    text = content.decode(errors="replace")
    if kind == "text/event-stream":
        events = [
            line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")
        ]
        return Answer(status, answer_differences.of_stream(events))
    if kind == "application/json":
        return Answer(status, json.loads(text))
    return Answer(status, text)


def differences(ours: Answer, theirs: Answer) -> list[Difference]:
    """Where two answers differ; of two refusals with one status only fields and types count."""
    if ours.status != theirs.status:
        here, there = (json.dumps(answer.content)[:300] for answer in (ours, theirs))
        return [Difference("", "status", f"{ours.status} {here}", f"{theirs.status} {there}")]
    if ours.status < 400:
        return answer_differences.of_values(ours.content, theirs.content)
    found = answer_differences.of_values(ours.content, theirs.content)
    return [difference for difference in found if not difference.where.endswith("message")]


def run(venv: Path, config_file: Path | None) -> dict[str, Any]:
    """Install vLLM if needed, ask both servers everything, print what differs and return the record."""
    vllm_install.install(venv)
    options = VllmOptions(
        venv=venv,
        config=config_file,
        modes=("base",),
        eager=True,
        arguments=VLLM_ARGUMENTS,
        adapter=f"zoo:{ADAPTER}",
    )
    config = with_adapter(options, demo.load_config(config_file))
    reference = Reference(demo.directory(config.target.path), config.target.dtype)
    length = int(reference.model.config.max_position_embeddings)
    logs = Path(tempfile.mkdtemp(prefix="flotilla-bench-vllm-"))
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = start_servers(options, config, length, logs, stack)
        other = next(name for name in servers if name != OWN)
        for question in questions(SERVED_NAME):
            ours, theirs = (ask(servers[name].url, question) for name in (OWN, other))
            differing = [
                dataclasses.asdict(one) | {"reason": explained(question.name, one)}
                for one in differences(ours, theirs)
            ]
            found.append({"request": question.name, "status": ours.status, "differences": differing})
    show(found)
    return {
        "benchmark": "vllm answers",
        **environment.of_cell(config, __name__),
        "vllm_version": vllm_install.VERSION,
        "vllm_arguments": list(VLLM_ARGUMENTS),
        "answers": found,
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print how many requests each reason is of, and what has none."""
    rows = [[known.reason, str(sum(known.reason in reasons(entry) for entry in found))] for known in KNOWN]
    tables.console.print(tables.plain_table("What differs, and in how many answers", ["", "answers"], rows))
    rows = [
        [entry["request"], one["where"], one["kind"], one["ours"], one["theirs"]]
        for entry in found
        for one in entry["differences"]
        if one["reason"] is None
    ]
    if rows:
        tables.console.print(
            tables.plain_table("Not explained", ["request", "where", "", "here", "vLLM"], rows)
        )
    tables.console.print(f"{len(found)} requests; {len(rows)} differences without a reason.")


def reasons(entry: dict[str, Any]) -> set[str]:
    """Those of a request's differences."""
    return {one["reason"] for one in entry["differences"] if one["reason"] is not None}
