"""A verdict becomes a request's next tokens, and news for its front end."""

from __future__ import annotations

from msgspec import structs

from cluster.forced_tokens import drafter_of
from cluster.outstanding_verify import OutstandingVerify
from cluster.requests import Request, Trigger
from cluster.stream_messages import StepTrace, TokenEvent
from engine.tree import TokenTree
from verifier.messages import PrefillProgress, Verdict


def within(verdict: Verdict, request: Request, max_model_tokens: int) -> Verdict:
    """The verdict without tokens beyond the longest sequence, which a grammar's forced tokens may reach.

    Without speculation the request ends there. Nor do these count as accepted.
    """
    room = max(1, max_model_tokens - request.num_tokens)
    if len(verdict.tokens) <= room:
        return verdict
    num_accepted = min(verdict.num_accepted, room)
    return structs.replace(
        verdict,
        tokens=verdict.tokens[:room],
        logprobs=verdict.logprobs[:room],
        num_accepted=num_accepted,
        num_forced_accepted=min(verdict.num_forced_accepted, room - num_accepted),
    )


def commit(request: Request, verdict: Verdict, now: float) -> TokenEvent:
    """Append the verdict's tokens to the request; what its front end is told."""
    position = len(request.output)
    # The trees are forgotten with the commit.
    trace = step_trace(request, verdict, now) if request.submit.speculation.trace else None
    request.commit(verdict, now)
    if verdict.is_slow and request.submit.speculation.mode != "off":
        draft_no_more(request)
    num_accepted, num_tokens = verdict.num_accepted, len(verdict.tokens)
    num_told = num_accepted + verdict.num_forced_accepted
    return TokenEvent(
        request_id=request.request_id,
        position=position,
        tokens=verdict.tokens,
        logprobs=verdict.logprobs,
        prompt_logprobs=request.prompt_logprobs if position == 0 else [],
        drafter=request.drafted_kind if num_accepted else drafter_of(request, verdict),
        num_accepted=num_told if num_told < num_tokens else num_tokens,
        trace=trace,
        error=verdict.error,
    )


def draft_no_more(request: Request) -> None:
    """As if the request had asked for no drafts: each of their nodes costs the target a mask that is slow."""
    wish = structs.replace(request.submit.speculation, mode="off")
    request.submit = structs.replace(request.submit, speculation=wish)
    request.is_unrestricted = False


def take_progress(request: Request, progress: PrefillProgress, ahead: OutstandingVerify | None) -> int:
    """The request's prefill came so far; how many tokens of its prompt were found in the target's cache.

    It may be in the call `ahead`, after this one, already: to go on, or with the next part of its prompt,
    which that call leaves out if there is none.
    """
    request.advance(Trigger.CHUNK_DONE if progress.verdict is None else Trigger.PREFILLED)
    if ahead is not None:
        if progress.verdict is None and request.request_id in ahead.prefilling:
            request.advance(Trigger.CHUNK_SENT)
        elif progress.verdict is not None and request.request_id in ahead.trees:
            request.drafted(TokenTree.root_only(request.last_token))
            request.advance(Trigger.VERIFY_SENT)
    request.num_computed = progress.num_computed
    request.prompt_logprobs += progress.prompt_logprobs
    if not progress.num_cached or request.num_preemptions:
        return 0
    # Of one that was resubmitted output may be there, too.
    request.num_cached = min(progress.num_cached, request.num_prompt)
    return request.num_cached


def step_trace(request: Request, verdict: Verdict, now: float) -> StepTrace:
    """The step that ends with the verdict, before it is committed."""
    draft = request.tree if request.tree is not None else TokenTree.root_only(request.last_token)
    candidates = request.candidates if request.candidates is not None else draft
    places = _places(candidates, draft)
    if places is None:  # cut from another tree: then only what was verified is known
        candidates, places = draft, list(range(len(draft)))
    tokens, parents = candidates.token.tolist(), candidates.parent.tolist()
    logps = candidates.logp.tolist()
    drafter = request.drafted_kind if candidates.num_drafted else ""
    # A verdict is cut after a stop token or at the most tokens, its nodes are not.
    accepted = [places[node] for node in verdict.nodes][: len(verdict.tokens)]
    start = verdict.num_accepted
    forced = verdict.tokens[start : start + verdict.num_forced_accepted]
    for token in forced:
        above = accepted[-1] if accepted else 0
        accepted.append(len(tokens))
        tokens.append(token)
        parents.append(above)
        logps.append(logps[above])  # nothing else was possible
    return StepTrace(
        step=request.num_steps + 1,
        elapsed_ms=1e3 * (now - request.arrived),
        drafter=drafter,
        tokens=tokens,
        parents=parents,
        logps=logps,
        verified=sorted({*places, *accepted}),
        accepted=accepted,
        num_forced=len(forced),
    )


def _places(candidates: TokenTree, draft: TokenTree) -> list[int] | None:
    """Where each node of the draft tree is among the candidates it was cut from; None if it was not."""
    if len(candidates) == len(draft):
        return list(range(len(draft)))
    child: dict[tuple[int, int], int] = {}
    above = candidates.parent.tolist()
    for node, token in enumerate(candidates.token.tolist()):
        child.setdefault((above[node], token), node)
    places: list[int] = []
    for token, parent in zip(draft.token.tolist(), draft.parent.tolist(), strict=True):
        place = child.get((-1 if parent < 0 else places[parent], token))
        if place is None:
            return None
        places.append(place)
    return places
