"""`flotilla zoo`: whose target a run is of, and what is refused before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.zoo import written_answers
from tests.zoo.test_pair import data_of
from zoo import (
    adapter,
    adapter_evaluate,
    cli,
    distill,
    eagle,
    eagle_evaluate,
    evaluate,
    heads,
    heads_evaluate,
    tokenizer,
)
from zoo.registry import ADAPTER, EAGLE, HEADS, TARGET, WEIGHTS, load_prompts
from zoo.run_folder import find_target


def ran(*arguments: object) -> tuple[int, str]:
    """Exit status, and all that was said, as one line."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_the_shipped_target_does_not_replace_one_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "run", lambda *given: pytest.fail("drafters of two targets"))
    data_of(load_prompts("code")[:2], tmp_path)
    own = tmp_path / TARGET / "model"
    written_answers.small_target(own)
    before = (own / "model.safetensors").read_bytes()
    status, said = ran("distill", "--shipped", "--out", tmp_path)
    assert status == 2
    assert "has a target of its own" in said
    assert (own / "model.safetensors").read_bytes() == before


def test_the_shipped_target_is_given_no_data_in_another_tokenizer(tmp_path: Path) -> None:
    data_of(load_prompts("code")[:2], tmp_path)
    tokenizer.train(["def nothing(): pass"] * 9, vocabulary=300).save_pretrained(str(tmp_path / "tokenizer"))
    status, said = ran("eagle", "--shipped", "--out", tmp_path)
    assert status == 2
    assert "another tokenizer" in said
    assert not (tmp_path / TARGET).exists()


def test_the_shipped_target_is_not_taken_for_one_trained_here(tmp_path: Path) -> None:
    data_of(load_prompts("code")[:2], tmp_path)
    find_target(tmp_path, cli.console, shipped=True)
    find_target(tmp_path, cli.console, shipped=True)  # again, as after a run that was killed
    status, said = ran("train", "--out", tmp_path)
    assert status == 2
    assert "has the shipped target" in said


@pytest.mark.parametrize(
    ("name", "model", "stages", "measuring"),
    [
        ("eagle", EAGLE, eagle, eagle_evaluate),
        ("heads", HEADS, heads, heads_evaluate),
        ("adapter", ADAPTER, adapter, adapter_evaluate),
    ],
)
def test_what_is_trained_is_measured_on_its_target(
    name: str, model: str, stages: Any, measuring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, where no target was published before."""
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    out.mkdir()
    data_of(load_prompts("code")[:2], out)
    find_target(out, cli.console, shipped=True)
    figures.write_text("{}")
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.json").touch()
    monkeypatch.setattr(stages, "run", lambda *given: trained)
    monkeypatch.setattr(evaluate, "read", lambda weights, samples: weights / TARGET)
    monkeypatch.setattr(
        measuring, "measure", lambda target, weights: sorted(f.name for f in target.iterdir())
    )
    monkeypatch.setattr("zoo.card.heads_tables", str)
    monkeypatch.setattr("zoo.card.eagle_table", str)
    monkeypatch.setattr("zoo.card.adapter_table", str)
    assert ran(name, "--out", out, "--json", figures)[0] == 0
    found = json.loads(figures.read_text())[name]
    assert set(found) >= {path.name for path in (WEIGHTS / TARGET).iterdir()}
    assert (out / "weights" / model).is_dir()
    # Unless a file is named, a run's figures stay with its models, too.
    shipped = (WEIGHTS / "evaluation.json").read_bytes()
    assert ran(name, "--out", out, "--evaluate-only")[0] == 0
    assert (WEIGHTS / "evaluation.json").read_bytes() == shipped
    assert json.loads((out / "weights" / "evaluation.json").read_text()) == {name: found}


@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "--limit", 0),
        ("train", "--minutes", 0),
        ("distill", "--minutes", 0),
        ("pair", "--drafter-minutes", 0),
        ("heads", "--json", "nowhere.json"),
        ("adapter", "--minutes", 0),
        ("train", "--processes", 0),
        ("train", "--out", __file__),
        ("distill", "--score-minutes", "nan"),
        ("distill", "--shipped", "--drafter", "nobody"),
        ("heads", "--read-minutes", -1),
        ("heads", "--out", Path(__file__).parent),
        ("pair", "--teach-minutes", "nan"),
        ("prepare", "--out", __file__),
        ("evaluate", "--weights", "nowhere"),
        ("card", "--json", "nowhere.json"),
        ("card", "--card", "nowhere.md"),
        ("card", "--json", __file__),
        ("train", "--out", f"{__file__}/out"),
        ("distill", "--weights", f"{__file__}/weights"),
        ("eagle", "--json", __file__),
        ("heads", "--evaluate-only", "--weights", Path(__file__).parent),
        ("evaluate", "--weights", Path(__file__).parent),
        ("evaluate", "--json", f"{__file__}/out/figures.json"),
    ],
)
def test_what_could_only_fail_in_the_end_is_refused(
    arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.prepare.prepare", lambda *given: pytest.fail("the corpus was read"))
    assert ran(*arguments)[0] == 2
