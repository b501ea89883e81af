"""What a front end knows of a request between cells: how long it has waited, and since when it is refused."""

from __future__ import annotations

import time

import msgspec
import pytest

from cluster.stream_messages import Rejected, Submit, TokenEvent
from deployments.pending_requests import Pending
from engine.sampling_params import SamplingParams

FULL = Rejected(request_id="r", code="queue_full", message="full", retry_after_s=2.0)
ASKED = Submit(request_id="r", prompt=[1, 2], sampling=SamplingParams(max_tokens=9))


def sent(pending: Pending, cell: str = "one") -> Submit:
    message = pending.next_life(cell)
    assert message is not None
    return message


def test_who_is_sent_at_once_has_not_waited() -> None:
    assert sent(Pending(ASKED, [])).waited_s == 0.0


@pytest.mark.parametrize("how", ["lost", "withdrawn", "refused", "no cell"])
def test_the_next_cell_is_told_how_long_it_was_elsewhere(how: str) -> None:
    pending = Pending(ASKED, [])
    if how != "no cell":
        sent(pending)
    pending.begun = time.monotonic() - 2.0
    if how == "lost":
        pending.lost()
    elif how == "withdrawn":
        pending.withdrawn()
    elif how == "refused":
        pending.refused(FULL)
    assert sent(pending, "two").waited_s == pytest.approx(2.0, abs=0.5)


def test_what_came_after_its_first_token_is_no_wait_for_it() -> None:
    """The next cell is told when it had its tokens, by which its objectives are judged."""
    pending = Pending(ASKED, [])
    assert sent(pending).resumed is None
    pending.begun = time.monotonic() - 3.0
    pending.accept(TokenEvent(request_id="r", position=0, tokens=[3]))
    pending.begun -= 2.0
    pending.accept(TokenEvent(request_id="r", position=0, tokens=[3]))  # again: nothing new
    pending.accept(TokenEvent(request_id="r", position=1, tokens=[4]))
    pending.begun -= 1.0
    pending.lost()
    message = sent(pending)
    assert msgspec.structs.replace(message, request_id="r", resumed=None) == msgspec.structs.replace(
        ASKED, output=[3, 4], was_taken=True
    )
    assert message.resumed is not None
    times = message.resumed
    # All of it came in this moment, before which the request is made to have come ever earlier.
    assert times.first_token_s == pytest.approx(times.last_token_s, abs=0.5)
    assert 6.0 <= times.first_token_s <= times.last_token_s <= times.sent_s < 6.5


@pytest.mark.parametrize("how", ["lost", "withdrawn", "given back"])
def test_a_refusal_before_a_cell_had_it_is_forgotten(how: str) -> None:
    """Who was refused in passing, taken and in a queue for long was turned away when that cell was lost."""
    pending = Pending(ASKED, [])
    sent(pending)
    pending.refused(FULL)
    pending.refused_at = refused_at = time.monotonic()
    sent(pending, "two")
    pending.refused(FULL)
    assert pending.refused_at == refused_at, "at once: it has been refused since then"
    sent(pending, "two")
    pending.sent_at -= 60.0
    if how == "lost":
        pending.lost()
    elif how == "withdrawn":
        pending.withdrawn()
    else:
        pending.refused(FULL)
    assert pending.refused_at is None
