"""A drafter as a user would write one."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.own_drafter import OwnDrafterSettings


class Repeats:
    """Proposes what followed the last `n` tokens when they occurred before; else nonsense, or it fails."""

    def __init__(self, settings: OwnDrafterSettings) -> None:
        self._n = settings.options.get("n", 2)
        self._raises = settings.options.get("raises", False)
        self._num_asked = 0

    def propose(self, request_id: str, tokens: Sequence[int], depth: int, width: int) -> Sequence[int]:
        """See `drafters.own_drafter.Proposer`."""
        self._num_asked += 1
        if self._raises and self._num_asked % 3 == 0:
            raise RuntimeError("every third time")
        n, suffix = self._n, tokens[-self._n :]
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == suffix:
                return tokens[at + n : at + n + depth]
        return [5] * depth
