"""Ctrl-C while several processes simulate."""

from __future__ import annotations

import time

import pytest

from simulator.process_pool import process_pool


def interrupted() -> None:
    with process_pool(2) as pool:
        for _ in range(6):
            pool.submit(time.sleep, 10.0)
        time.sleep(0.2)
        raise KeyboardInterrupt


def test_an_interrupt_does_not_wait_for_what_was_submitted() -> None:
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 9.0


def test_what_is_left_in_peace_has_its_results() -> None:
    with process_pool(2) as pool:
        assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
