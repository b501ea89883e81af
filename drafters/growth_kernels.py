"""The kernel in Triton that grows one layer of every beam.

Imported only where it is launched, since it imports Triton (see `engine.row_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# They lie in one piece of memory, and begin anywhere in it: of that nothing is assumed either, or each number
# of requests would be compiled for.
_TENSORS = (
    "values", "tokens", "first_row", "widths", "least", "stops", "own_column", "old_logp", "old_open",
    "old_seen", "token", "parent", "logp", "is_open", "seen", "row_tokens", "layer", "is_given",
)  # fmt: skip


@triton.jit(
    do_not_specialize=("num_rows", "num_choices", "num_stops", "num_columns"),
    do_not_specialize_on_alignment=_TENSORS,
)
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
    is_given,
    num_rows,
    num_choices,
    num_stops,
    num_columns,
    CHOICES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
):
    """The next layer of one beam, as `drafters.device_beam.DeviceBeams.grow`, and what its rows see.

    Grid: (beams,). values float32 and tokens int64 [rows, num_choices], next tokens of the rows forwarded, a
    beam's from first_row on, as many as widths says (both int64 [beams]); least float64 [beams]; stops int64
    [beams, num_stops]; own_column int64 [beams], column of the first row of layer 0; layer int64 [beams],
    number of the new layer. is_given int64 [beams], whether layer 0 is known, and left as it is. old_logp
    float64 and old_open uint8 [beams, num_rows], old_seen uint8 [beams, num_rows, num_columns], of the layer
    before. Written: token, parent int64, logp float64, is_open uint8 [beams, num_rows], seen as old_seen, and
    row_tokens int64 [rows]; what is of the layer before may be written over. CHOICES, CANDIDATES, STOPS,
    ROWS, COLUMNS: powers of two that hold num_choices, num_rows * CHOICES, stops, num_rows and columns.
    """
    beam = tl.program_id(0).to(tl.int64)
    number_of_layer = tl.load(layer + beam)
    if (number_of_layer == 0) & (tl.load(is_given + beam) != 0):
        return
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
    first_own = tl.load(own_column + beam) + number_of_layer * width
    if HAS_SEEN:
        old_row = tl.arange(0, ROWS)
        above = old_seen + (beam * num_rows + old_row)[:, None] * num_columns + column[None, :]
        is_above = (old_row < num_rows)[:, None] & is_column[None, :]
        all_seen = tl.load(above, mask=is_above, other=0)
    tl.debug_barrier()  # other threads write what these have read
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
            inherited = tl.max(tl.where((old_row == from_row)[:, None], all_seen, 0), 0)
            sees = (inherited != 0) | (column == first_own + number)
            tl.store(seen + line * num_columns + column, sees.to(tl.uint8), mask=is_column)
        loss = tl.where(candidate == place, float("inf"), loss)
