"""The kernel in Triton that moves the rows of beams on to their next layer.

Imported only where it is launched, since it imports Triton (see `engine.row_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("width", "num_layers", "last_position"),
    do_not_specialize_on_alignment=("first_position", "widths", "layer", "layer_slots", "positions", "write"),
)
def move_on(
    segments,
    first_position,
    widths,
    layer,
    layer_slots,
    positions,
    write,
    width,
    num_layers,
    last_position,
    WIDTH: tl.constexpr,
):
    """Positions, slots and keys of the rows of one beam's layer, whose number goes up by one.

    Grid: (beams,). segments: see `SegmentTable`. first_position, widths, layer int64 [beams]: position of
    layer 0, rows that are somebody's, number of the layer; layer_slots int64 [num_layers, beams * width];
    positions, write int64 [beams * width], written. WIDTH: power of two that holds width.
    """
    beam = tl.program_id(0).to(tl.int64)
    number = tl.load(layer + beam)
    about = segments + beam * 7
    keys = tl.load(about + 3)
    first_seen = tl.load(about + 5)
    own = tl.load(widths + beam)
    position = tl.minimum(tl.load(first_position + beam) + number, last_position)
    row = tl.arange(0, WIDTH)
    is_row = row < width
    line = beam * width + row
    of_layer = tl.minimum(number, num_layers - 1) * tl.num_programs(0) * width
    slot = tl.load(layer_slots + of_layer + line, mask=is_row, other=0)
    tl.debug_barrier()  # what is read above is written below
    tl.store(positions + line, position + row * 0, mask=is_row)
    tl.store(write + line, slot, mask=is_row)
    tl.store(about + 3, keys + own.to(tl.int32))
    if first_seen < 0:  # a chain: all keys but its own row's are committed
        tl.store(about + 4, keys)
    tl.store(layer + beam, number + 1)
