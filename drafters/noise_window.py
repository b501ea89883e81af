"""Gumbel noise around the positions a draft call decides, computed once for all its layers.

Noise costs a counter-based generator's work for the whole vocabulary, about half of it per call whatever
the number of rows (measured: 0.19 ms for one row of 4096, 0.36 ms for five). So a draft call computes the
rows of all its layers and requests together, and a request keeps those that its next call will want again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.noise import gumbel_noise
from engine.triton_support import runs_triton

_KEEP_UP_TO_VOCABULARY = 32768  # a larger one's rows weigh more than they save: 0.5 MB each at 128k


class NoiseWindow:
    """Noise of one request at the output positions it is deciding now."""

    __slots__ = ("rows", "seed")

    def __init__(self, seed: int) -> None:
        """Of the request with this seed; empty."""
        self.seed = seed
        self.rows: dict[int, torch.Tensor] = {}

    def get(self, position: int) -> torch.Tensor | None:
        """float32 [vocab], or None outside the window."""
        return self.rows.get(position)


def move_windows(
    windows: Sequence[tuple[NoiseWindow, Iterable[int]]], vocab_size: int, device: torch.device
) -> None:
    """Make each window hold exactly the given output positions, computing what is new in one go.

    None where Triton adds the noise to the scores: that costs less than to read it.
    """
    if runs_triton(device):
        return
    missing: list[tuple[NoiseWindow, int]] = []
    for window, positions in windows:
        old = window.rows
        window.rows = {}
        for position in positions:
            row = old.get(position)
            if row is None:
                missing.append((window, position))
            else:
                window.rows[position] = row
    if missing:
        noise = gumbel_noise(
            [window.seed for window, _ in missing],
            [position for _, position in missing],
            vocab_size,
            device=device,
        )
        for (window, position), row in zip(missing, noise, strict=True):
            window.rows[position] = row


def close_windows(windows: Iterable[NoiseWindow], vocab_size: int) -> None:
    """After the call: give back the memory of rows too large to keep until the next one."""
    if vocab_size > _KEEP_UP_TO_VOCABULARY:
        for window in windows:
            window.rows = {}
