"""When EAGLE's drafts end before the depth they were asked for: asked after every layer of all beams.

By each request's own bounds, and by the rule of a policy that looks at the whole batch, as
`drafters.forwards.grow` asks of a model's drafts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import Transfer
from engine.stop_rules import StopRule
from verifier.eagle_beams import Beams
from verifier.proposing import Asking

Float32 = NDArray[np.float32]


class Ending:
    """Whether another layer is worth its forward: while some request that asked for it has a path worth one.

    A device is asked about the layer before the last one, so that it has a layer to compute while the host
    hears of that: at most one is computed for nothing (docs/decisions/0051).
    """

    def __init__(
        self, asking: Sequence[Asking], depth: int, device: torch.device, rule: StopRule | None = None
    ) -> None:
        """For these requests, whose beams have at most `depth` layers; a `rule` ends them all."""
        self._most = np.array([one.num_heads or depth for one in asking])
        self._least = np.array([one.least_logp for one in asking])
        # A stop token alone ends a draft so seldom that nobody waits for it.
        is_bounded = (self._least > -np.inf) | np.array([one.stop_token_logp > -np.inf for one in asking])
        self._may_end = rule is not None or bool((is_bounded | (self._most < depth)).all())
        self._stopping = rule.begin() if rule is not None else None
        self._ahead = 0 if device.type == "cpu" else 1
        self._sent: deque[Transfer] = deque()
        self._num_layers = 0  # that were asked about

    def another(self, layer: Beams) -> bool:
        """Whether to forward `layer`, which is the last one and was not asked about before."""
        if not self._may_end:
            return True
        paths = layer.open_logp.unsqueeze(0)
        if self._stopping is not None:
            paths = torch.stack((layer.open_logp, layer.path_logp))
        self._sent.append(Transfer(paths))
        if len(self._sent) <= self._ahead:
            return True
        return self._pays(self._sent.popleft().wait().numpy())

    def _pays(self, paths: Float32) -> bool:
        """The same, of a layer's `open_logp`, and with a rule its `path_logp`: [1 or 2, requests, width]."""
        self._num_layers += 1
        open_logp = paths[0]
        best = open_logp.max(axis=1)
        goes_on = (self._most > self._num_layers) & (best > -np.inf) & (best >= self._least)
        if self._stopping is None or not goes_on.any():
            return bool(goes_on.any())
        self._stopping.correct(_acceptance(paths[1, self._most >= self._num_layers]))
        return self._stopping.pays(_acceptance(open_logp[goes_on]))


def _acceptance(paths: Float32) -> list[float]:
    """Product of the drafter's probabilities along each path there is, of log-probabilities [n, width]."""
    return [math.exp(logp) for logp in paths[paths > -np.inf].tolist()]
