"""What a request may expect of drafters: tokens per second, less what moving there costs."""

from __future__ import annotations

from selector.goodput import best_goodput
from selector.protocol import PoolView, RequestView

# How much longer a request lasts is not known: as long as it has lasted, but at least so many tokens, and
# never beyond its limit.
LEAST_TOKENS = 64


class Outlook:
    """Costs and expectations of one request at its present length."""

    __slots__ = (
        "_context",
        "_costs",
        "_layer_s",
        "_max_depth",
        "_token_s",
        "_verify_s",
        "none",
        "num_expected",
    )

    def __init__(self, request: RequestView, pool: PoolView) -> None:
        costs, context = pool.costs, request.num_context
        self._costs, self._context, self._max_depth = costs, context, pool.max_depth
        self._verify_s, self._token_s = costs.verify_s(context), costs.token_s(context)
        self._layer_s: dict[str, float] = {}
        # Goodput without a drafter.
        self.none = 1.0 / self._verify_s
        output = context - request.num_prompt
        self.num_expected = max(1, min(request.num_remaining, max(LEAST_TOKENS, output)))

    def goodput(self, kind: str, rate: float) -> float:
        """Tokens per second on a drafter of this kind that serves the request already."""
        layer_s = self._layer_s.get(kind)
        if layer_s is None:
            layer_s = self._layer_s[kind] = self._costs.layer_s(kind, self._context)
        return best_goodput(rate, layer_s, self._verify_s, self._token_s, self._max_depth, is_drafted=True)

    def after_moving(self, kind: str, goodput: float) -> float:
        """Tokens per second over all that is expected, if the drafter must first read the request.

        Until it has, the request is decoded without a drafter.
        """
        lost = self._costs.rebuild_s(kind, self._context) * max(0.0, goodput - self.none)
        return goodput / (1.0 + lost / self.num_expected)
