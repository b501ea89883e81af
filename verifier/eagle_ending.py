"""When EAGLE's drafts end before the depth they were asked for: asked after every layer of all beams."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import Transfer
from verifier.eagle_beams import Beams
from verifier.proposing import Asking

Float32 = NDArray[np.float32]


class Ending:
    """Whether another layer is worth its forward: while some request that asked for it has a path worth one.

    A device is asked about the layer before the last one, so that it has a layer to compute while the host
    hears of that: at most one is computed for nothing (docs/decisions/0051).
    """

    def __init__(self, asking: Sequence[Asking], depth: int, device: torch.device) -> None:
        """For these requests, whose beams have at most `depth` layers."""
        self._most = np.array([one.num_heads or depth for one in asking])
        self._least = np.array([one.least_logp for one in asking])
        # A stop token alone ends a draft so seldom that nobody waits for it.
        is_bounded = (self._least > -np.inf) | np.array([one.stop_token_logp > -np.inf for one in asking])
        self._may_end = bool((is_bounded | (self._most < depth)).all())
        self._ahead = 0 if device.type == "cpu" else 1
        self._sent: deque[Transfer] = deque()
        self._num_layers = 0  # that were asked about

    def another(self, layer: Beams) -> bool:
        """Whether to forward `layer`, which is the last one and was not asked about before."""
        if not self._may_end:
            return True
        self._sent.append(Transfer(layer.open_logp))
        if len(self._sent) <= self._ahead:
            return True
        return self._pays(self._sent.popleft().wait().numpy())

    def _pays(self, open_logp: Float32) -> bool:
        """The same, of a layer whose paths that go on have the log-probabilities `open_logp`."""
        self._num_layers += 1
        best = open_logp.max(axis=1)
        return bool(((self._most > self._num_layers) & (best > -np.inf) & (best >= self._least)).any())
