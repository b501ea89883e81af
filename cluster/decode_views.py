"""Requests in the papers' terms: what policies are shown of those that draft next, one view each a step."""

from __future__ import annotations

from collections.abc import Callable

from cluster.drafter_pool import DrafterPool
from cluster.drafter_state import DrafterState
from cluster.head_proposals import HeadProposals
from cluster.policies.base import DecodeRequest
from cluster.requests import Request


class DecodeViews:
    """Makes views of requests.

    Attributes:
        pool: of the drafters that serve them.
        heads: what the target's decoding heads proposed.
        may_read: whether a drafter should read a request that it does not know.
    """

    def __init__(self, pool: DrafterPool, heads: HeadProposals, may_read: Callable[[Request], bool]) -> None:
        self.pool, self.heads, self.may_read = pool, heads, may_read

    def of(self, request: Request, now: float, max_model_tokens: int) -> DecodeRequest:
        """The request as it stands.

        Args:
            request: which is prefilled.
            now: the scheduler's clock.
            max_model_tokens: longest sequence served.
        """
        max_draft, max_width, num_heads, rate = 0, 1, 0, 0.0
        drafter = self.pool.drafters.get(request.drafter)
        if drafter is not None and self._drafts(request, drafter):
            capabilities, num_tokens = drafter.capabilities, request.num_tokens
            longest = min(max_model_tokens - 1, capabilities.max_tokens)
            max_draft = min(capabilities.max_depth, request.num_remaining - 1, longest - num_tokens)
            most = request.submit.speculation.max_tokens
            if most is not None:
                max_draft = min(max_draft, most)
            if capabilities.num_candidates:
                num_heads = capabilities.max_depth
                max_draft = min(max_draft, self.heads.num_proposed(request))
            max_draft, max_width = max(0, max_draft), capabilities.max_width
            rate = self.pool.acceptance.rate(request.request_id, drafter.kind)
        tpot_ms, first_token_at = request.pace.tpot_ms, request.first_token_at
        # By position, which takes half as long.
        return DecodeRequest(
            request.request_id,
            request.drafter if max_draft else "",
            max(0, len(request.output) - 1 - request.num_resubmitted),
            0.0 if first_token_at is None else now - first_token_at,
            None if tpot_ms is None else tpot_ms / 1e3,
            max_draft,
            max_width,
            request.num_tokens,
            rate,
            request.num_remaining,
            num_heads,
        )

    def _drafts(self, request: Request, drafter: DrafterState) -> bool:
        """Whether its drafter may draft for it at all."""
        if request.submit.speculation.mode == "off":
            return False
        has_read = request.request_id in drafter.known or drafter.capabilities.num_candidates > 0
        return has_read or self.may_read(request)
