"""Recorded choices are given back as they were, and a fit to choices of a known model finds that model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.acceptance_table import AcceptanceTable
from simulator.acceptance import AcceptanceModel, DraftQuality, choices
from simulator.acceptance_fit import FittedDrafters, checks, fit
from simulator.cli import app
from simulator.recorded import RecordedAcceptance

MODEL = AcceptanceModel(
    request_spread=0.5,
    own_spread=0.3,
    concentration=2.0,
    second_share=0.35,
    persistence=0.3,
    shared_confidence=0.7,
)
DRAFTERS = {
    "one": DraftQuality(rate={"chat": 0.7, "code": 0.85}, sharpness=0.9, offset=-1.2),
    "two": DraftQuality(rate={"chat": 0.8, "code": 0.6}, sharpness=1.0, offset=0.0),
}


def made(
    num_answers: int, num_positions: int, drafters: Mapping[str, DraftQuality] = DRAFTERS
) -> AcceptanceTable:
    """A log of answers of both classes in turn, as the model gives them."""
    domains = [("chat", "code")[answer % 2] for answer in range(num_answers)]
    columns: dict[str, list[np.ndarray]] = {
        "drafter": [], "answer": [], "position": [], "logp": [], "rank": [],
    }  # fmt: skip
    for index, quality in enumerate(drafters.values()):
        for answer, domain in enumerate(domains):
            said = choices(
                MODEL, quality, domain, answer, index, num_positions=num_positions, num_astray=0, width=4
            )
            columns["drafter"].append(np.full(num_positions, index, np.int16))
            columns["answer"].append(np.full(num_positions, answer, np.int32))
            columns["position"].append(np.arange(1, num_positions + 1, dtype=np.int32))
            columns["logp"].append(said.logp.astype(np.float32))
            columns["rank"].append(said.rank.astype(np.int8))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return AcceptanceTable(drafters=list(drafters), domains=domains, width=4, **joined)


@pytest.fixture(scope="module")
def table() -> AcceptanceTable:
    return made(num_answers=240, num_positions=80)


@pytest.fixture(scope="module")
def fitted(table: AcceptanceTable) -> FittedDrafters:
    return fit(table.of_answers(0, 2))


def test_a_fit_finds_the_model_that_made_the_log(fitted: FittedDrafters) -> None:
    model = fitted.model
    assert model.request_spread == pytest.approx(MODEL.request_spread, abs=0.15)
    assert model.concentration == pytest.approx(MODEL.concentration, rel=0.25)
    assert model.second_share == pytest.approx(MODEL.second_share, abs=0.03)
    assert model.persistence == pytest.approx(MODEL.persistence, abs=0.15)
    assert model.shared_confidence == pytest.approx(MODEL.shared_confidence, abs=0.1)
    for name, quality in DRAFTERS.items():
        found = fitted.drafters[name]
        assert found.rate["chat"] == pytest.approx(quality.rate["chat"], abs=0.04)
        assert found.rate["code"] == pytest.approx(quality.rate["code"], abs=0.04)
        assert found.sharpness == pytest.approx(quality.sharpness, abs=0.1)
        assert found.offset == pytest.approx(quality.offset, abs=0.2)


def test_checks_on_other_answers_agree_for_the_right_model_and_not_for_a_wrong_one(
    table: AcceptanceTable, fitted: FittedDrafters
) -> None:
    held_out = table.of_answers(1, 2)
    right = checks(fitted, held_out)["one"]["chat"]
    assert right["rate"]["model"] == pytest.approx(right["rate"]["measured"], abs=0.04)
    assert right["survival"]["model"] == pytest.approx(right["survival"]["measured"], abs=0.06)
    assert right["calibration error"]["model"] == pytest.approx(
        right["calibration error"]["measured"], abs=0.05
    )
    assert right["calibration error"]["measured"] > 0.1  # this drafter is far less sure than it is right
    swapped = {"one": DRAFTERS["two"], "two": DRAFTERS["one"]}
    wrong = checks(FittedDrafters(model=MODEL, drafters=swapped), held_out)["one"]["chat"]
    assert abs(wrong["calibration error"]["model"] - wrong["calibration error"]["measured"]) > 0.08


def test_a_request_repeats_one_answer_of_its_class_position_by_position(table: AcceptanceTable) -> None:
    recorded = RecordedAcceptance(table)
    for seed in range(5):
        said = {
            name: recorded.choices(name, "code", seed, num_positions=61, num_astray=7, width=4)
            for name in DRAFTERS
        }
        answers = []
        for index, name in enumerate(DRAFTERS):
            ranks = said[name].rank
            assert (ranks[61:] == 4).all()
            # The row before the first token is never drafted from; from there on it is one answer's.
            fits = [
                int(table.answer[rows[0]])
                for rows in table.answers(index, "code")
                if (table.rank[rows][:60] == ranks[1:61]).all()
                and np.allclose(table.logp[rows][:60], said[name].logp[1:61], atol=1e-6)
            ]
            assert len(fits) == 1
            answers += fits
        assert answers[0] == answers[1]  # drafters read the same text


def test_a_request_longer_than_any_answer_goes_on_with_its_second_half(table: AcceptanceTable) -> None:
    said = RecordedAcceptance(table).choices("one", "chat", 3, num_positions=161, num_astray=1, width=2)
    assert said.logp.shape == (162, 2)
    np.testing.assert_array_equal(said.rank[81:121], said.rank[41:81])


def test_what_the_log_does_not_have_is_named(table: AcceptanceTable) -> None:
    with pytest.raises(ValueError, match=r"not three$"):
        RecordedAcceptance(table).choices("three", "chat", 0, num_positions=4, num_astray=1, width=4)


def test_answers_that_not_all_drafters_read_are_left_out() -> None:
    """A request that got such an answer ended the run with a traceback."""
    table = made(num_answers=20, num_positions=40)
    by_two, code = table.drafter == 1, table.answer % 2 == 1
    recorded = RecordedAcceptance(table.where(~(by_two & np.isin(table.answer, [3, 5]))))
    for seed in range(60):
        recorded.choices("two", "code", seed, num_positions=30, num_astray=1, width=4)
    with pytest.raises(ValueError, match="no answer of class 'code' that all drafters read"):
        RecordedAcceptance(table.where(~(by_two & code)))


def test_a_log_is_read_as_it_was_written(table: AcceptanceTable, tmp_path: Path) -> None:
    table.save(tmp_path / "log.npz")
    again = AcceptanceTable.load(tmp_path / "log.npz")
    assert (again.drafters, again.domains, again.width) == (table.drafters, table.domains, table.width)
    np.testing.assert_array_equal(again.logp, table.logp)
    np.testing.assert_array_equal(again.rank, table.rank)


def test_folds_share_no_answer_and_hold_every_row(table: AcceptanceTable) -> None:
    folds = [table.of_answers(place, 3) for place in range(3)]
    assert sum(map(len, folds)) == len(table)
    seen = [set(fold.answer.tolist()) for fold in folds]
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_the_command_simulates_a_served_gpu_with_a_log(tmp_path: Path) -> None:
    """A drafter that is hardly ever right in the log brings nothing, whatever the profile says of it."""
    arguments = ["--profile", "llama-8b-h200-served", "--policy", "fixed-4", "--async-scheduling", "--json"]
    arguments += ["--lengths", "code=60:40,chat=40:20", "--at-once", "2", "--seconds", "4"]
    found = {}
    for rate in (0.1, 0.9):
        said = DraftQuality(rate={"chat": rate, "code": rate})
        table = made(num_answers=20, num_positions=50, drafters={"general-2x192": said})
        log = tmp_path / f"{rate}.npz"
        table.save(log)
        ran = CliRunner().invoke(app, [*arguments, "--acceptance", str(log)])
        assert ran.exit_code == 0, ran.output
        found[rate] = json.loads(ran.stdout)["runs"][0]["classes"]["all"]["accepted_per_step"]
    assert found[0.1] < 1.3
    assert found[0.9] > 2.5
    wrong = CliRunner().invoke(app, [*arguments, "--profile", "llama-8b-h200", "--acceptance", str(log)])
    assert wrong.exit_code == 2
    assert "the log has general-2x192" in wrong.output
    np.savez(tmp_path / "other.npz", numbers=np.zeros(3))
    assert CliRunner().invoke(app, [*arguments, "--acceptance", str(tmp_path / "other.npz")]).exit_code == 2


def test_a_file_that_is_no_log_is_told(table: AcceptanceTable, tmp_path: Path) -> None:
    table.save(tmp_path / "whole.npz")
    contents = {"empty": b"", "text": b"{}", "cut": (tmp_path / "whole.npz").read_bytes()[:-50]}
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "array.npy"):
        with pytest.raises(ValueError, match=f"{name} is no log of drafters' choices"):
            AcceptanceTable.load(tmp_path / name)
