"""Requests in the papers' terms: what policies are shown of those that draft next, one view each a step."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.drafter_pool import DrafterPool
from cluster.head_proposals import HeadProposals
from cluster.policies.base import DecodeRequest
from cluster.requests import Request


class DecodeViews:
    """Makes views of requests.

    Attributes:
        pool: of the drafters that serve them.
        heads: what the target's decoding heads proposed.
    """

    def __init__(self, pool: DrafterPool, heads: HeadProposals) -> None:
        self.pool, self.heads = pool, heads

    def of(self, request: Request, now: float, max_model_tokens: int) -> DecodeRequest:
        """The request as it stands; arguments as of `of_all`."""
        return self.of_all((request,), now, max_model_tokens)[0]

    def of_all(
        self,
        requests: Iterable[Request],
        now: float,
        max_model_tokens: int,
        *,
        has_proposals: bool = True,
    ) -> list[DecodeRequest]:
        """The requests as they stand, as if their drafters had read them all.

        Whether drafting pays is a question of all that could draft. Those that no drafter has read yet catch
        up once the policy drafts for them; were they shown as drafting nothing, the few that are read would
        be all that speaks for drafting, and nobody would ever be read.

        Args:
            requests: which are prefilled.
            now: the scheduler's clock.
            max_model_tokens: longest sequence served.
            has_proposals: whether the target's heads may have proposed; if not, as if they will have.
        """
        views = []
        drafters, rate_of = self.pool.drafters, self.pool.acceptance.rate
        name, drafter = "", None
        for request in requests:
            if request.drafter != name:  # mostly neighbours have the same
                name = request.drafter
                drafter = drafters.get(name)
            max_draft, max_width, num_heads, rate = 0, 1, 0, 0.0
            num_tokens, num_remaining = request.num_tokens, request.num_remaining
            if drafter is not None:
                capabilities = drafter.capabilities
                if request.is_unrestricted or request.submit.speculation.mode != "off":
                    longest = min(max_model_tokens - 1, capabilities.max_tokens)
                    max_draft = min(capabilities.max_depth, num_remaining - 1, longest - num_tokens)
                    if not request.is_unrestricted:
                        most = request.submit.speculation.max_tokens
                        max_draft = max_draft if most is None else min(max_draft, most)
                    if capabilities.num_candidates:
                        num_heads = capabilities.max_depth if capabilities.has_independent_layers else 0
                        if has_proposals:
                            max_draft = min(max_draft, self.heads.num_proposed(request))
                    max_draft, max_width = max(0, max_draft), capabilities.max_width
                    rate = rate_of(request.request_id, drafter.kind)
            tpot_ms, first_token_at = request.pace.tpot_ms, request.first_token_at
            num_decoded = len(request.output) - 1 - request.num_resubmitted
            # By position, which takes half as long.
            views.append(
                DecodeRequest(
                    request.request_id,
                    name if max_draft else "",
                    num_decoded if num_decoded > 0 else 0,
                    0.0 if first_token_at is None else now - first_token_at,
                    None if tpot_ms is None else tpot_ms / 1e3,
                    max_draft,
                    max_width,
                    num_tokens,
                    rate,
                    num_remaining,
                    num_heads,
                )
            )
        return views


def resting_view(request: Request, now: float) -> DecodeRequest:
    """The request as it stands while the policy rests: nobody drafts for it, and no estimate is asked for it.

    Estimates are made when they are first asked for, so that asking for the record alone would change them.
    """
    tpot_ms, first_token_at = request.pace.tpot_ms, request.first_token_at
    return DecodeRequest(
        request_id=request.request_id,
        drafter="",
        num_decoded=max(0, len(request.output) - 1 - request.num_resubmitted),
        decoding_s=0.0 if first_token_at is None else now - first_token_at,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        max_draft=0,
        max_width=1,
        num_context=request.num_tokens,
        rate=0.0,
        num_remaining=request.num_remaining,
    )
