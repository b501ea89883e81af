"""Sliding windows: which keys rows see where layers attend to the last so many tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runner import Segment

# Keys of a tree are no further back than this, so that windows cut off committed tokens only.
LEAST_WINDOW = 48


def within(segment: Segment, window: int) -> Segment:
    """The segment for layers in which a token sees itself and the `window - 1` before it.

    Transformers' rule: a row at position p sees keys at positions above p - window.

    Args:
        segment: whose keys before those that `visible` is about are the tokens 0, 1, ... of its sequence.
        window: tokens, at least `LEAST_WINDOW`.

    Raises:
        ValueError: if a tree is deeper than the window is wide.
    """
    num_rows, num_past = len(segment.slots), len(segment.past)
    if segment.visible is None:
        first, most = int(segment.positions[0]) - num_past, num_past + np.arange(num_rows)
    else:
        recent = segment.visible.shape[1]
        first, most = 0, np.full(num_rows, num_past + num_rows - recent)
    lows = np.maximum(segment.positions - first - (window - 1), 0)
    if (lows > most).any():
        raise _too_deep(window)
    cut = int(lows.min())
    unseen = (lows - cut).astype(np.int32)
    if cut == 0 and not unseen.any():
        return segment
    return Segment(
        tokens=segment.tokens,
        positions=segment.positions,
        slots=segment.slots,
        past=segment.past[cut:],
        visible=segment.visible,
        adapter=segment.adapter,
        unseen=unseen if unseen.any() else None,
    )


def check_trees(segments: Sequence[Segment], windows: Sequence[int]) -> None:
    """Refuse what `within` does, where attention cuts windows off by itself.

    Raises:
        ValueError: if a tree is deeper than one of the windows, in ascending order, is wide.
    """
    for segment in segments if windows else ():
        if segment.visible is not None:
            num_before = len(segment.past) + len(segment.slots) - segment.visible.shape[1]
            if int(segment.positions.max()) - (windows[0] - 1) > num_before:
                raise _too_deep(windows[0])


def _too_deep(window: int) -> ValueError:
    return ValueError(f"a tree reaches back {window} tokens, beyond the window of the target's layers")
