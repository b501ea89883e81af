"""A server that is told to read its configuration again: what it follows, and what it says."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from cluster.config import FlotillaConfig
from deployments.preflight import StartError
from deployments.reloading import roll_out
from deployments.rollout import Progress, RolloutError

RUNNING = FlotillaConfig.model_validate({"target": {"path": "zoo:target-8x384"}})


def test_a_server_whose_rollout_does_not_come_to_its_end_hears_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new cells wait for resources that never come; the signal that was to mend that was never heard."""
    hangups, seen = 0, 0

    def begin(_: FlotillaConfig, **__: bool) -> Iterator[Progress]:
        nonlocal hangups, seen
        while seen < 1000:
            seen += 1
            hangups += seen == 3
            yield Progress("DEPLOYING", "", (), frozenset())

    monkeypatch.setattr("deployments.reloading.begin", begin)
    console = Console(record=True, file=io.StringIO())
    roll_out(lambda: RUNNING, console, lambda: hangups > 0, iter(()))
    assert seen == 3
    assert "another one is asked for" in console.export_text()


def test_a_server_whose_new_cells_cannot_start_says_that_the_former_file_is_to_be_rolled_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Serve makes nothing of the old version anew: a cell that was lost later stayed away."""
    failed = Progress("DEPLOY_FAILED", "the cell could not start", (), frozenset())
    monkeypatch.setattr("deployments.reloading.begin", lambda _, **__: iter([failed]))
    console = Console(record=True, file=io.StringIO(), width=1000)
    roll_out(lambda: RUNNING, console, lambda: False, iter(()))
    told = console.export_text()
    assert "not replaced if it is lost: roll out the former file. the cell could not start" in told


@pytest.mark.parametrize("refused_by", ["file", "system"])
def test_a_rollout_goes_on_being_told_of_where_another_one_is_refused(
    refused_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody said how it ended, and "nothing is changed" was the last that was heard while all was."""
    hangups = 0

    def begin(_: FlotillaConfig, **__: bool) -> Iterator[Progress]:
        nonlocal hangups
        if hangups:
            raise RolloutError("these cannot change while the system serves: http.port")
        yield Progress("DEPLOYING", "", (), frozenset())
        hangups += 1
        yield Progress("DEPLOYING", "", (), frozenset())
        yield Progress("DEPLOY_FAILED", "no room", (), frozenset())

    def reload() -> FlotillaConfig:
        if hangups and refused_by == "file":
            raise StartError("nothing is changed")
        return RUNNING

    monkeypatch.setattr("deployments.reloading.begin", begin)
    console = Console(record=True, file=io.StringIO(), width=1000)
    former = roll_out(reload, console, lambda: hangups > 0, iter(()))
    assert list(roll_out(reload, console, lambda: False, former)) == []
    *_, asked, refusal, end = console.export_text().splitlines()
    assert "another one is asked for" in asked
    assert ("nothing is changed" if refused_by == "file" else "cannot change") in refusal
    assert "no room" in end
