"""The `flotilla` command: options, refusals, and no slow imports before they are needed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.config import FlotillaConfig
from deployments import chat_client, cli
from deployments.chat_client import ChatOptions, ServerError, describe_receipt, run_chat, stream_chat
from deployments.demo import demo_config
from deployments.server_url import server_root
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec


def test_help_needs_none_of_the_heavy_imports() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from deployments.cli import app;"
        "print(CliRunner().invoke(app, ['--help']).output);"
        "print([name for name in ('ray', 'torch', 'fastapi', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert all(name in done.stdout for name in ("serve", "chat", "profile", "bench", "zoo", "version"))


@pytest.mark.parametrize("asked", ["--version", "version"])
def test_the_version_is_told_in_the_ways_that_are_tried(asked: str) -> None:
    told = CliRunner().invoke(cli.app, [asked])
    assert told.exit_code == 0
    assert told.output.strip() == installed("flotilla")


def test_a_front_end_needs_no_torch() -> None:
    code = (
        "import sys; from zoo.registry import TARGET, weights_dir;"
        "import deployments.front_end; from deployments.text_codec import TextCodec;"
        "codec = TextCodec.load(weights_dir(TARGET));"
        "assert codec.decode(codec.encode('naïve 🙂')) == 'naïve 🙂';"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_package_breaks_only_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zoo.cli", None)
    result = CliRunner().invoke(cli.app, ["zoo", "train"])
    assert result.exit_code == 2
    assert "not installed" in result.output
    assert CliRunner().invoke(cli.app, ["--help"]).exit_code == 0


def test_demo_is_a_whole_configuration() -> None:
    config = demo_config()
    assert config.target.path.startswith("zoo:")
    assert len(config.drafters) >= 5


def test_options_change_the_configuration(tmp_path: Path) -> None:
    config = cli.load_config(None, "0.0.0.0", 0, "adaserve", "prompt-lookup", 2, "bfloat16")
    assert (config.http.host, config.http.port) == ("0.0.0.0", 0)
    assert config.policy.name == "adaserve"
    assert [drafter.name for drafter in config.drafters] == ["prompt-lookup"]
    assert (config.target.tensor_parallel, config.target.dtype) == (2, "bfloat16")
    assert cli.load_config(None, drafters="none").drafters == ()
    target = cli.load_config(None, adapters=["terse=zoo:lora", "a/b=/models/a=b"]).target
    assert [(one.name, one.path) for one in target.adapters] == [
        ("terse", "zoo:lora"),
        ("a/b", "/models/a=b"),
    ]
    file = tmp_path / "config.yaml"
    file.write_text("target: {path: /models/big}\nhttp: {port: 9000}\n")
    assert cli.load_config(file, host="::1") == FlotillaConfig.model_validate(
        {"target": {"path": "/models/big"}, "http": {"port": 9000, "host": "::1"}}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "nobody"], "no drafter called nobody"),
        (["--drafters", " , "], "say `none`"),
        (["--policy", "luck"], "unknown policy"),
        (["--adapter", "terse"], "say NAME=DIRECTORY"),
        (["--adapter", "a=/x", "--adapter", "a=/y"], "two models would be called `a`"),
        (["--adapter", "a=/nowhere"], "no adapter at /nowhere"),
        (["--dtype", "int4"], "target.dtype"),
        (["--config", "/nowhere.yaml"], "cannot read"),
        (["--config", "BAD"], "target.size"),
        (["--config", "MODEL"], "no model at"),
        (["--config", "ZOO"], "unknown model"),
        (["--config", "TWICE"], "`path` is given twice"),
        (["--config", "LATIN"], "cannot read"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    texts = {
        "BAD": "{path: x, size: 3}",
        "MODEL": "{path: /nowhere}",
        "ZOO": "{path: 'zoo:nothing'}",
        "TWICE": "{path: x, path: y}",
        "LATIN": "{path: modèle}",
    }
    for index, argument in enumerate(arguments):
        if argument in texts:
            file = tmp_path / "config.yaml"
            file.write_text(f"target: {texts[argument]}\n", encoding="latin-1")
            arguments = [*arguments[:index], str(file)]
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize("url", ["flotilla", "localhost:1", "http://[::1"])
@pytest.mark.parametrize("command", [["drafters", "list"], ["timeline"]])
def test_an_address_that_is_none_is_told(command: list[str], url: str) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--url", url])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, url in result.output) == (2, True)


REFUSAL = b'{"error": {"message": "A valid API key is needed."}}'


def answered_once(answer: bytes, call: Callable[[str], None]) -> None:
    """Make a call, with its URL, to a server that gives every client this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        call(f"http://127.0.0.1:{listener.getsockname()[1]}")
        serving.join()


def test_whoever_has_no_valid_key_is_told_which_one_was_sent() -> None:
    """That it is to be sent as a header helps nobody at a command line."""
    length = str(len(REFUSAL)).encode()
    refused = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: " + length + b"\r\n\r\n" + REFUSAL

    def drafters(url: str) -> None:
        result = CliRunner().invoke(cli.app, ["drafters", "list", "--url", url])
        assert result.exit_code == 2
        assert "needed. (The key that is sent is that of FLOTILLA_API_KEY.)" in " ".join(
            result.output.split()
        )

    answered_once(refused, drafters)

    async def chat(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async for _ in stream_chat(session, url, {}):
                pass

    def chats(url: str) -> None:
        with pytest.raises(ServerError, match=r"needed\. \(The key that is sent .* FLOTILLA_API_KEY"):
            asyncio.run(chat(url))

    answered_once(refused, chats)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # as of a port for gRPC
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"data":',
    ],
    ids=["another protocol", "a page", "a list", "broken off"],
)
@pytest.mark.parametrize("command", [["drafters", "list"], ["timeline", "-o"]])
def test_a_server_of_another_kind_is_told(tmp_path: Path, command: list[str], answer: bytes) -> None:
    output = tmp_path / "timeline.json"

    def call(url: str) -> None:
        arguments = [*command, str(output)] if command[-1] == "-o" else command
        result = CliRunner().invoke(cli.app, [*arguments, "--url", url])
        assert isinstance(result.exception, SystemExit), result.exception
        assert (result.exit_code, url in result.output) == (2, True)
        assert "\x00" not in result.output

    answered_once(answer, call)
    assert not output.exists()


async def test_chat_in_the_terminal(url: str, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "", "again", "/new", "once more", "x" * 3000, "/quit"])
    console = Console(record=True, width=200, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    options = ChatOptions(url=url, system="be brief", seed=7, slo={"tpot_ms": 50.0}, tier="flex")
    assert options.body([])["service_tier"] == "flex"
    assert await asyncio.to_thread(run_chat, options, console) == 0
    shown = console.export_text()
    assert shown.count(ANSWER.partition("\n")[0]) == 3
    assert "objective met · seed 7" in shown
    # A turn too long for the window is refused with a reason and can be repeated shorter.
    assert "maximum context length" in shown
    lengths = [len(submit.prompt) for submit in cell.submissions]
    assert lengths[0] < lengths[1]
    assert lengths[2] < lengths[1]


def test_one_interrupt_ends_a_chat_that_waits_for_a_line() -> None:
    command = [sys.executable, "-m", "deployments.cli", "chat", "--url", "http://127.0.0.1:9"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as chat:
        assert chat.stdout is not None
        assert chat.stderr is not None
        shown = b""
        while not shown.endswith(b"> "):
            more = chat.stdout.read(1)
            assert more, shown
            shown += more
        time.sleep(0.2)  # it is shown before the line is awaited
        chat.send_signal(signal.SIGINT)
        try:
            assert chat.wait(5.0) == 0
            assert chat.stderr.read() == b""
        finally:
            chat.kill()


async def test_chat_shows_a_server_s_error_as_it_is(
    url: str, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*arguments: object) -> str:
        raise ServerError("no [/closing] of what was [red]not opened[/]")

    lines = iter(["hello", "/quit"])
    console = Console(record=True, width=200, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    monkeypatch.setattr(chat_client, "_turn", failing)
    assert await asyncio.to_thread(run_chat, ChatOptions(url=url), console) == 0
    assert "no [/closing] of what was [red]not opened[/]" in console.export_text()


async def test_chat_says_which_server_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "/quit"])
    console = Console(record=True, width=200, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert await asyncio.to_thread(run_chat, ChatOptions(url=url), console) == 0
    shown = console.export_text()
    assert f"cannot reach {url}: " in shown
    assert "ssl" not in shown
    lines = iter(["hello", "/quit"])
    assert await asyncio.to_thread(run_chat, ChatOptions(url="127.0.0.1:99999"), console) == 0
    assert "cannot reach 127.0.0.1:99999: that is no address of a server" in console.export_text()


async def test_chat_sends_what_a_terminal_of_another_encoding_types(
    url: str, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = b"caf\xe9 two".decode(errors="surrogateescape")
    lines = iter([typed, "/quit"])
    console = Console(record=True, width=200, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    options = ChatOptions(url=url, system=typed)
    assert await asyncio.to_thread(run_chat, options, console) == 0
    assert ANSWER.partition("\n")[0] in console.export_text()
    assert codec().decode(cell.submissions[0].prompt).count("caf? two") == 2


async def test_chat_reports_a_broken_stream(url: str, cell: CellStandIn) -> None:
    cell.finish_reason = "error"
    async with aiohttp.ClientSession() as session:
        body = ChatOptions(url=url).body([{"role": "user", "content": "hi"}])
        with pytest.raises(ServerError, match="cell failed"):
            [chunk async for chunk in stream_chat(session, url, body)]


def test_receipt_line_leaves_out_what_is_not_there() -> None:
    assert describe_receipt({}) == ""
    for drafted, said in ((0, "none drafted"), (4, "3 of 4 drafted accepted")):
        spec = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": 3, "mean_acceptance_length": 1.5}
        assert describe_receipt({"speculative_decoding": spec}) == f"1.50 tokens/step ({said})"
    assert describe_receipt({"tpot_ms": 2.0, "slo": {"met": None}, "seed": 3}) == "2.0 ms/token · seed 3"


@pytest.mark.parametrize("command", [["serve", "--config"], ["rollout"]])
def test_wrong_fields_of_a_configuration_are_told_one_by_one(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("target: {pth: zoo:target-8x384}\nhttp: 8000\nsecurity: {key_hash: SECRET}\n")
    result = CliRunner().invoke(cli.app, [*command, str(file)])
    assert result.exit_code == 2
    lines = [line.strip() for line in result.output.splitlines()]
    assert lines[0] == f"flotilla: {file}: the configuration is wrong"
    assert {"target.path: is required", "target.pth: there is no such field; did you mean `path`?"} <= set(
        lines
    )
    assert "http: must be fields with values, as in `{field: value}`" in lines
    assert "SECRET" not in result.output
    assert "pydantic" not in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["meta/Llama"], "target: {path: meta/Llama}"),
        (["--port", "80", "/models/m", "--max-model-len", "9"], "target: {path: /models/m}"),
        (["--model", "/models/m"], "target: {path: /models/m}"),
        (["--model=/models/m"], "target: {path: /models/m}"),
        (["--model"], "target: {path: DIRECTORY}"),
        (["a.yaml"], "flotilla serve --config a.yaml"),
    ],
)
def test_a_model_named_as_vllm_wants_it_is_told_where_to_go(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert (result.exit_code, told in result.output) == (2, True), result.output


def test_options_with_values_are_no_models(tmp_path: Path) -> None:
    arguments = ["-c", str(tmp_path / "none.yaml"), "--port=0", "--host", "::1"]
    assert "cannot read" in CliRunner().invoke(cli.app, ["serve", *arguments]).output
    assert CliRunner().invoke(cli.app, ["serve", "--help"]).exit_code == 0


def test_a_key_of_a_name_that_is_taken_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    assert CliRunner().invoke(cli.app, ["keys", "create", "a", "--file", str(file)]).exit_code == 0
    result = CliRunner().invoke(cli.app, ["keys", "create", "a", "--file", str(file)])
    assert result.exit_code == 2
    assert result.output.strip() == f"flotilla: {file}: keys must differ by name: a"


@pytest.mark.parametrize("given", ["http://{}", "http://{}/", "http://{}/v1", "{}", "{}/v1/"])
def test_a_server_may_be_given_as_openai_clients_are_given_it(given: str) -> None:
    assert server_root(given.format("127.0.0.1:8000")) == "http://127.0.0.1:8000"
    assert server_root("https://llm.example.org/team/v1") == "https://llm.example.org/team"
