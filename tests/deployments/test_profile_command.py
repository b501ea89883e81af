"""`flotilla profile` on real small models: what it measures, predicts, writes and shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster import profile_measure
from cluster.profile_file import load_profile, read_profile
from deployments import cli
from deployments.preflight import StartError
from deployments.profile_cli import run_profile

# The smallest of the family in both roles.
SMALLEST = "zoo:drafter-summary-1x128"
CONFIG = f"""
target: {{path: '{SMALLEST}'}}
drafters:
- {{kind: model, name: small, path: '{SMALLEST}', num_slots: 8192}}
- {{kind: prompt_lookup, name: lookup}}
"""


@pytest.mark.thorough
def test_real_forwards_are_measured_stored_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_measure, "REPEATS", 5)  # nobody is to serve by these figures
    config, out, plot = tmp_path / "config.yaml", tmp_path / "profile.json", tmp_path / "profile.png"
    config.write_text(CONFIG)
    arguments = ["profile", "--config", str(config), "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ("target", "small", "lookup", "token", "error"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    profile = read_profile(out)
    assert load_profile(out, cli.load_config(config))[1] == []
    for name, model in profile.models.items():
        # Other tests and whoever else uses this machine make noise; the aim is a median of 10 %.
        assert model.quality.median < 0.35, name
        assert model.quality.num_held_out >= 8
        assert all(point.seconds > 0 for point in model.points)
    small, lookup = profile.drafters["small"], profile.drafters["lookup"]
    assert 1e-5 < small.cost.seconds(1, 1, 32) < 0.1
    assert small.cost.seconds(16, 64, 16 * 480) > 2 * small.cost.seconds(1, 1, 32)
    assert lookup.cost.seconds(1, 1, 32) < small.cost.seconds(1, 1, 32) / 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("out", "nowhere/profile.json"), "there is no directory"),
        (("out", "."), "is a directory"),
        (("plot", "nowhere/plot.png"), "there is no directory"),
        (("plot", "plot.txt"), "plot.txt: its name must end in .png"),
        (("path", "zoo:nothing"), "unknown model"),
    ],
)
def test_what_cannot_be_measured_says_why(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "target: {path: 'PATH'}".replace("PATH", changed[1] if changed[0] == "path" else SMALLEST)
    )
    out = tmp_path / (changed[1] if changed[0] == "out" else "profile.json")
    arguments = ["--plot", str(tmp_path / changed[1])] if changed[0] == "plot" else []
    result = CliRunner().invoke(cli.app, ["profile", "--config", str(config), "--json", str(out), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_pool_too_small_to_measure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_measure, "REPEATS", 1)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("8192", "64"))
    settings = cli.load_config(config)
    with pytest.raises(StartError, match=r"small: only 3 shapes.*num_slots"):
        run_profile(settings, tmp_path / "profile.json", console=Console(file=io.StringIO()))
    assert not (tmp_path / "profile.json").exists()
