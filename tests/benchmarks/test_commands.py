"""The command line: every command explains itself, and wrong options end with status 2 and a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import vllm_install
from benchmarks.cli import app
from benchmarks.vllm_peer import VllmOptions, speculation, vllm_command

runner = CliRunner()


class Idle:
    """An engine that is only named."""

    max_concurrency = None

    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "engine",
        "lossless",
        "vllm",
        "compare",
        "selection",
        "kills",
        "soak",
        "fidelity",
        "acceptance",
        "simulator",
    ],
)
def test_help(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize("command", ["serve", "engine", "pool", "compare", "regret", "vllm"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    command: str, tmp_path: Path
) -> None:
    for path, reason in ((tmp_path / "nowhere" / "x.json", "no directory"), (tmp_path, "is a directory")):
        result = runner.invoke(app, [command, "--json", str(path)], env={"COLUMNS": "300", "TERM": "dumb"})
        assert (result.exit_code, reason in result.output) == (2, True), result.output


@pytest.mark.parametrize("command", ["engine", "pool", "overhead", "pipeline"])
@pytest.mark.parametrize(
    ("text", "reason"), [("target: a: b", "cannot read"), ("target: {path: x, size: 3}", "target.size")]
)
def test_a_configuration_that_is_none_is_told(command: str, text: str, reason: str, tmp_path: Path) -> None:
    config = tmp_path / "cell.yaml"
    config.write_text(text)
    result = runner.invoke(app, [command, "--config", str(config)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, reason in result.output) == (2, True), result.output


def test_a_model_that_the_family_lacks_is_told() -> None:
    result = runner.invoke(app, ["lossless", "--target", "zoo:nothing"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, "unknown model 'nothing'" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slo", "30"], "name a class first"),
        (["--mix", "code"], "CLASS=SHARE"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--arrivals", "poisson"], "--request-rate"),
        (["--timeout", "nan"], "0.1"),
        (["--timeout", "0"], "0.1"),
        (["--prompts", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompts", __file__], "test_commands.py: neither a JSON list nor JSON lines"),
    ],
)
def test_wrong_options(arguments: list[str], reason: str, tmp_path: Path) -> None:
    if "--prompts" not in arguments:
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"domain": "code", "prompt": "x"}))
        arguments = [*arguments, "--prompts", str(path)]
    result = runner.invoke(app, ["serve", "--url", "http://127.0.0.1:9", *arguments])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "magic"], "unknown policy `magic`"),
        (["--rate", "fast"], "neither requests per second"),
        (["--mix", "chat=1", "--urgent-share", "0.5"], "urgent class `code` has no share"),
        (["--slo", "30"], "name a class first"),
        (["--workload", "/nowhere.json"], "nowhere.json"),
        (["--mix", "code=1", "--urgent-share", "0.3"], "the only one"),
    ],
)
def test_wrong_options_of_a_comparison_end_it_before_anything_starts(
    arguments: list[str], reason: str
) -> None:
    result = runner.invoke(app, ["compare", *arguments])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["decomposition", "--plot"],
        ["pipeline", "--plot"],
        ["dashboards", "--scrape"],
        ["fidelity", "folder", "--plot"],
        ["fidelity", "folder", "--write-profile"],
    ],
)
def test_a_plot_that_cannot_be_written_is_told_before_anything_is_measured(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("decomposition.run", "pipeline.run", "dashboards.run", "fidelity.measured"):
        monkeypatch.setattr(f"benchmarks.{name}", lambda *given: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, [*arguments, str(tmp_path / "nowhere" / "x.png")], env={"COLUMNS": "300"})
    assert (result.exit_code, "no directory" in result.output) == (2, True), result.output


@pytest.mark.parametrize("command", ["decomposition", "pipeline", "soak"])
@pytest.mark.parametrize("name", ["x.txt", "x"])
def test_a_plot_of_no_format_is_told_before_anything_is_measured(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("decomposition", "pipeline", "soak"):
        monkeypatch.setattr(f"benchmarks.{module}.run", lambda *given: pytest.fail("it was measured"))
    result = runner.invoke(app, [command, "--plot", str(tmp_path / name)], env={"COLUMNS": "300"})
    assert (result.exit_code, "must end in .png" in result.output) == (2, True), result.output


def test_files_that_may_not_be_written_are_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.soak.run", lambda *given: pytest.fail("it was measured"))
    held = tmp_path / "held.json"
    held.touch()
    refused = {tmp_path, held}
    # Not by the rights of the file: root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or path not in refused)
    for path in (held, tmp_path / "new.json"):
        result = runner.invoke(app, ["soak", "--json", str(path)], env={"COLUMNS": "300"})
        assert (result.exit_code, "permission denied" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["pool", "--selector", "lbss", "--selector", "magic"], "selector.name: unknown selector `magic`"),
        (["pool", "--fixed-depth", "5000"], "policy.fixed_depth: "),
        (["pipeline", "--policy", "magic"], "policy.name: unknown policy `magic`"),
        (["engine", "--policy", "magic"], "policy.name: unknown policy `magic`"),
    ],
)
def test_what_a_cell_does_not_have_is_told_before_one_is_started(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pool.PoolCell", "pipeline.PipelineCell", "engine_run.Reference"):
        monkeypatch.setattr(f"benchmarks.{name}", lambda *given: pytest.fail("it was started"))
    result = runner.invoke(app, arguments)
    assert (result.exit_code, reason in result.output) == (2, True), result.output


@pytest.mark.parametrize("command", ["soak", "kills"])
def test_what_cannot_be_served_is_told_in_a_sentence(command: str, tmp_path: Path) -> None:
    config = tmp_path / "cell.yaml"
    config.write_text("policy: {name: magic}")
    for arguments in (["--policy", "magic"], ["--config", str(config)]):
        result = runner.invoke(app, [command, *arguments, "--logs", str(tmp_path)])
        assert result.exit_code == 2
        assert "policy.name: unknown policy `magic`" in result.output
        assert "pydantic" not in result.output
        assert f"flotilla bench {command}: 2" not in result.output


@pytest.mark.parametrize("command", ["soak", "kills"])
def test_what_a_served_configuration_says_is_no_option_beside_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("soak", "kills"):
        monkeypatch.setattr(f"benchmarks.{module}.run", lambda *given: pytest.fail("it was served"))
    config = tmp_path / "cell.yaml"
    config.touch()
    arguments = [command, "--config", str(config), "--policy", "fixed", "--front-ends", "1"]
    result = runner.invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "--front-ends, --policy: the configuration says it" in result.output


@pytest.mark.parametrize("command", ["serve", "regret", "pool"])
def test_a_seed_below_zero_is_refused_by_its_name(command: str) -> None:
    result = runner.invoke(app, [command, "--seed", "-1"], env={"COLUMNS": "300"})
    assert (result.exit_code, "Invalid value for '--seed'" in result.output) == (2, True), result.output


def test_an_adapter_that_the_family_does_not_have_is_told() -> None:
    result = runner.invoke(app, ["lossless", "--adapter", "zoo:nobody"])
    assert (result.exit_code, "unknown model 'nobody'" in result.output) == (2, True), result.output


def test_a_mode_that_is_named_twice_is_served_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[VllmOptions] = []

    def run(options: VllmOptions) -> dict[str, Any]:
        asked.append(options)
        return {"differences": []}

    monkeypatch.setattr("benchmarks.vllm_peer.run", run)
    result = runner.invoke(app, ["vllm", "--mode", "ngram", "--mode", "base", "--mode", "ngram"])
    assert result.exit_code == 0, result.output
    assert asked[0].modes == ("ngram", "base")


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("engine", "engine_run.run"),
        ("pool", "pool.run"),
        ("pipeline", "pipeline.run"),
        ("vllm", "vllm_peer.run"),
    ],
)
@pytest.mark.parametrize("proven", [True, False])
def test_outputs_that_differ_end_a_command_with_an_error_unless_at_near_ties(
    command: str, runs: str, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"benchmarks.{runs}", lambda options: {"differences": [{"proven": proven}]})
    assert runner.invoke(app, [command]).exit_code == (0 if proven else 1)


def test_a_variant_without_a_name_is_told() -> None:
    result = runner.invoke(app, ["lossless", "--variant", '{"top_k": 3}'], env={"COLUMNS": "300"})
    assert (result.exit_code, "is not NAME=JSON" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://127.0.0.1:9", "--policy", "fixed"], "leave out --url"),
        (["--url", "http://127.0.0.1:9", "--no-peers", "--profile", __file__], "leave out --url"),
        (["--url", "http://127.0.0.1:9", "--no-peers", "--no-processes"], "leave out --url"),
        (["--no-peers"], "which --no-peers leaves out"),
        (["--domain", "code", "--domain", "poetry"], "no prompts of poetry"),
        (["--no-processes", "--policy", "fixed", "--policy", "fixed"], "measured already"),
    ],
)
def test_what_engines_cannot_be_told_apart_by_is_refused(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engine_run.own_engine", lambda name, *given: Idle(name))
    result = runner.invoke(app, ["engine", "--rounds", "1", "--peer-threads", "1", *arguments])
    assert (result.exit_code, reason in result.output) == (2, True), result.output


def test_a_server_that_does_not_start_ends_the_matrix_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("the cell did not start")

    monkeypatch.setattr("benchmarks.lossless_matrix.run", fails)
    result = runner.invoke(app, ["lossless-matrix"])
    assert (result.exit_code, "the cell did not start" in result.output) == (2, True), result.output


@pytest.mark.thorough
def test_a_few_requests_of_a_small_budget_have_one(tmp_path: Path) -> None:
    sizes = ["--requests", "16", "--requests", "1", "--budget", "8"]
    result = runner.invoke(
        app, ["selection", "--policy", "flotilla", *sizes, "--candidates", "4", "--repeats", "2"]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["regret", "--slots", "64", "--shift-slots", "1024", "--seeds", "1"],
        ["forward", "--repeats", "1", "--context", "8", "--device", "cpu"],
    ],
)
def test_a_record_says_where_it_is_from(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    result = runner.invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["environment"]["versions"]["flotilla"]


def test_selection_is_measured_for_policies_and_parts(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    arguments = ["--policy", "flotilla", "--policy", "adaserve", "--requests", "6", "--budget", "24"]
    result = runner.invoke(
        app, ["selection", *arguments, "--candidates", "8", "--repeats", "3", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    times = json.loads(path.read_text())["times"]
    assert [entry["work"] for entry in times][:2] == ["flotilla", "adaserve"]
    assert all(0.0 < entry["median_ms"] <= entry["p99_ms"] for entry in times)
    assert next(entry["selected"] for entry in times if entry["work"] == "adaserve") == 24
    wrong = runner.invoke(app, ["selection", "--policy", "magic"])
    assert wrong.exit_code == 2
    assert "unknown policy magic" in wrong.output


def test_unknown_vllm_mode() -> None:
    result = runner.invoke(app, ["vllm", "--mode", "warp"])
    assert result.exit_code == 2
    assert "warp" in result.output


def test_vllm_requirements_leave_out_what_is_not_needed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    needed = ["torch==2.13.0+cpu", "torchvision", "TorchAudio==1", "einops", 'boto3; extra == "s3"']
    report.write_text(json.dumps({"install": [{"metadata": {"requires_dist": needed}}]}))
    assert vllm_install.requirements(report) == ["torch==2.13.0+cpu", "einops", "pandas"]


def test_vllm_modes() -> None:
    options = VllmOptions(venv=Path("/venv"), draft_model="/models/small", concurrencies=(1, 40))
    assert speculation(options, "base") is None
    draft = speculation(options, "draft")
    assert draft == {"method": "draft_model", "model": "/models/small", "num_speculative_tokens": 4}
    command = vllm_command(options, "/models/large", "float32", 1024, "ngram", 81)
    assert command[:3] == ["/venv/bin/vllm", "serve", "/models/large"]
    assert command[command.index("--max-num-seqs") + 1] == "40"
    assert json.loads(command[-1])["method"] == "ngram"


def test_an_environment_counts_as_installed_when_it_is_complete(tmp_path: Path) -> None:
    assert not vllm_install.is_installed(tmp_path)
    (tmp_path / "bin").mkdir()
    vllm_install.executable(tmp_path).touch()
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    assert not vllm_install.is_installed(tmp_path)
    vllm_install._write_shim(tmp_path)
    assert vllm_install.is_installed(tmp_path)
