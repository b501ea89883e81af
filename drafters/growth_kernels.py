"""The kernel in Triton that grows one layer of every beam.

Imported only where it is launched, since it imports Triton (see `engine.triton_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("layer", "num_rows", "num_choices", "num_stops", "num_columns"))
def grow(
    values,
    tokens,
    first_row,
    widths,
    least,
    stops,
    own_column,
    old_logp,
    old_open,
    old_seen,
    token,
    parent,
    logp,
    is_open,
    seen,
    row_tokens,
    layer,
    num_rows,
    num_choices,
    num_stops,
    num_columns,
    CHOICES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """The next layer of one beam, as `drafters.device_beam.DeviceBeams.grow`, and what its rows see.

    Grid: (beams,). values float32 and tokens int64 [rows, num_choices], next tokens of the rows forwarded, a
    beam's from first_row on, as many as widths says (both int64 [beams]); least float64 [beams]; stops int64
    [beams, num_stops]; own_column int64 [beams], column of the first row of layer 0. old_logp float64 and
    old_open uint8 [beams, num_rows], old_seen uint8 [beams, num_rows, num_columns], of the layer before.
    Written: token, parent int64, logp float64, is_open uint8 [beams, num_rows], seen as old_seen, and
    row_tokens int64 [rows]. CHOICES, CANDIDATES, STOPS, COLUMNS: powers of two that hold num_choices,
    num_rows * CHOICES, stops and columns.
    """
    beam = tl.program_id(0).to(tl.int64)
    width = tl.load(widths + beam)
    start = tl.load(first_row + beam)
    threshold = tl.load(least + beam)
    candidate = tl.arange(0, CANDIDATES)
    row = candidate // CHOICES
    choice = candidate % CHOICES
    # A row whose path has ended is not asked, and one beyond the beam's width was never forwarded.
    exists = (row < num_rows) & (row < width) & (choice < num_choices) & (choice < width)
    value = tl.load(values + (start + row) * num_choices + choice, mask=exists, other=-float("inf"))
    path = tl.load(old_logp + beam * num_rows + row, mask=exists, other=0.0)
    was_open = tl.load(old_open + beam * num_rows + row, mask=exists, other=0)
    counts = exists & (was_open != 0) & (value > -float("inf"))
    loss = tl.where(counts, -path - value.to(tl.float64), float("inf"))
    stop = tl.arange(0, STOPS)
    ending = tl.load(stops + beam * num_stops + stop, mask=stop < num_stops, other=-1)
    column = tl.arange(0, COLUMNS)
    is_column = column < num_columns
    first_own = tl.load(own_column + beam) + layer * width
    for number in range(num_rows):
        # The first of equals: ties by row, then by choice.
        least_loss = tl.min(loss, 0)
        place = tl.argmin(loss, 0)
        from_row = place // CHOICES
        is_node = (least_loss < float("inf")) & (number < width)
        at = (start + from_row) * num_choices + place % CHOICES
        chosen = tl.load(tokens + at, mask=is_node, other=0)
        how_sure = tl.load(values + at, mask=is_node, other=-float("inf"))
        is_stop = tl.sum((ending == chosen).to(tl.int32), 0) > 0
        line = beam * num_rows + number
        tl.store(token + line, chosen)
        tl.store(parent + line, from_row.to(tl.int64))
        tl.store(logp + line, -least_loss)
        keeps_on = is_node & (how_sure.to(tl.float64) >= threshold) & (is_stop == 0)
        tl.store(is_open + line, keeps_on.to(tl.uint8))
        tl.store(row_tokens + start + number, chosen, mask=number < width)
        if HAS_SEEN:
            above = old_seen + (beam * num_rows + from_row) * num_columns + column
            inherited = tl.load(above, mask=is_column, other=0)
            sees = (inherited != 0) | (column == first_own + number)
            tl.store(seen + line * num_columns + column, sees.to(tl.uint8), mask=is_column)
        loss = tl.where(candidate == place, float("inf"), loss)
