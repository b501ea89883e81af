"""When EAGLE's drafts end before the depth they were asked for: asked after every layer of all beams.

By each request's own bounds, and by the rule of a policy that looks at the whole batch, as
`drafters.forwards.grow` asks of a model's drafts. On a GPU a question costs as much as a layer does.
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


# After so many calls in a row whose drafts hardly ended before they had to, one in so many is asked about.
CALLS_UNENDED = 8


class Endings:
    """Whether it is asked at all if drafts end, by how many requests are drafted for, in powers of two.

    Of many requests some are nearly always likely enough to go on. Then each question is a transfer for
    nothing, for which the device may have to wait: on an H200 those of six layers took 0.5 ms for 5 requests
    and 1.2 for 13, each as long as a layer. A draft that is too deep costs its layers, and no token: the
    scheduler cuts it.
    """

    def __init__(self, device: torch.device) -> None:
        """On a CPU, where answers are at hand and layers take long, it is always asked."""
        self._is_free = device.type == "cpu"
        self._unended: dict[int, int] = {}

    def are_asked(self, num_requests: int) -> bool:
        """Whether it is asked of the next call for so many; counts the call."""
        size = num_requests.bit_length()
        calls = self._unended.get(size, 0)
        self._unended[size] = calls + 1
        return self._is_free or calls < CALLS_UNENDED or calls % CALLS_UNENDED == 0

    def ended(self, num_requests: int, num_asked: int, num_spared: int) -> None:
        """Drafts of that call have ended after so many questions, with so many layers spared."""
        if num_spared >= num_asked:  # so others will, and it pays to ask
            self._unended[num_requests.bit_length()] = 0


class Ending:
    """Whether another layer is worth its forward: while some request that asked for it has a path worth one.

    A device is asked about the layer before the last one, so that it has a layer to compute while the host
    hears of that: at most one is computed for nothing (docs/decisions/0051).
    """

    def __init__(
        self,
        asking: Sequence[Asking],
        depth: int,
        device: torch.device,
        rule: StopRule | None = None,
        endings: Endings | None = None,
    ) -> None:
        """For these requests, whose beams have at most `depth` layers; a `rule` ends them all.

        By `endings`, if given, they are left to grow where none of such has ended lately.
        """
        self._most = np.array([one.num_heads or depth for one in asking])
        self._least = np.array([one.least_logp for one in asking])
        # A stop token alone ends a draft so seldom that nobody waits for it.
        is_bounded = (self._least > -np.inf) | np.array([one.stop_token_logp > -np.inf for one in asking])
        self._endings, self._num_requests, self._depth = endings, len(asking), depth
        self._may_end = rule is not None or bool((is_bounded | (self._most < depth)).all())
        if self._may_end and endings is not None:
            self._may_end = endings.are_asked(len(asking))
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
        if len(self._sent) <= self._ahead or self._pays(self._sent.popleft().wait().numpy()):
            return True
        if self._endings is not None:
            num_spared = self._depth - self._num_layers - self._ahead
            self._endings.ended(self._num_requests, self._num_layers, num_spared)
        return False

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
