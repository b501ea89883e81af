"""What became of a request's rows: the verdict on its tree, log-probabilities, and what ranks compare."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from engine.devices import to_device
from engine.grammar import GrammarError
from engine.logprobs import raw_logprobs
from engine.proposals import Proposals
from engine.tree import TokenTree
from verifier.messages import TokenLogprobs, Verdict
from verifier.planning import Planned
from verifier.request_state import RequestState
from verifier.tree_walk import walk

logger = logging.getLogger(__name__)


def failure_of(request_id: str, error: GrammarError) -> Verdict:
    """The verdict of a request that its grammar ends."""
    logger.error("request %s: its grammar cannot be followed: %s", request_id, error)
    return Verdict(request_id=request_id, tokens=[], error=str(error))


def broken(planned: Planned) -> Verdict:
    """The verdict of a request for which the model gave NaN: any token taken of that would be made up."""
    state = planned.state
    logger.error(
        "request %s: the model's logits are NaN or infinite after %d tokens (the last one is %d): either its "
        "weights are broken, or numbers overflow in its `dtype`",
        state.request_id,
        len(state.tokens),
        state.tokens[-1],
    )
    return Verdict(request_id=state.request_id, tokens=[], is_broken=True)


def verdict_of(
    planned: Planned,
    tree: TokenTree,
    decided: Sequence[int],
    gaps: Sequence[float],
    logits: torch.Tensor,
    first: int,
) -> tuple[Verdict, list[int]]:
    """What becomes of a tree, and the nodes (root included) whose successors were committed.

    `decided` and `gaps` are those of its nodes, whose rows of `logits` begin at `first`.
    """
    state = planned.state
    if planned.is_chain and planned.nodes is None and state.params.logprobs is None:
        return _of_chain(state, tree, decided, gaps)
    accepted, _ = walk(tree, decided)
    path = [0, *accepted]
    path = path[: state.cut([decided[node] for node in path])]
    tokens = [decided[node] for node in path]
    logprobs: list[TokenLogprobs] = []
    if state.params.logprobs is not None and tokens:
        rows = logits.index_select(0, to_device(torch.tensor(path) + first, logits.device))
        found = raw_logprobs(rows, tokens, state.params.logprobs)
        logprobs = [TokenLogprobs(*one) for one in found]
    nodes, drafted, num_forced = planned.nodes, accepted, 0
    slow, error = state.slow_masks, ""
    if slow.is_slow and state.goes_on_after(tokens):
        error = slow.error
        if error:
            logger.error("request %s is ended: of its grammar, %s", state.request_id, error)
    if nodes is not None:
        drafted = [nodes[node] for node in accepted if nodes[node] >= 0]
        num_forced = sum(node < 0 for node in nodes)
    verdict = Verdict(
        request_id=state.request_id,
        tokens=tokens,
        num_accepted=len(drafted),
        nodes=drafted,
        logprobs=logprobs,
        min_gap=min([gaps[node] for node in path], default=float("inf")),
        num_forced=num_forced,
        num_forced_accepted=len(accepted) - len(drafted),
        is_slow=slow.is_slow,
        error=error,
    )
    return verdict, path


def _of_chain(
    state: RequestState, tree: TokenTree, decided: Sequence[int], gaps: Sequence[float]
) -> tuple[Verdict, list[int]]:
    """As `verdict_of`, of a chain or a root alone, of which there may be hundreds in a call."""
    if len(decided) == 1:
        if state.remaining > 0:
            return Verdict(request_id=state.request_id, tokens=[decided[0]], min_gap=gaps[0]), [0]
        return Verdict(request_id=state.request_id, tokens=[]), []
    accepted, _ = walk(tree, decided, is_chain=True)
    size = state.cut(decided[: len(accepted) + 1])
    verdict = Verdict(
        request_id=state.request_id,
        tokens=list(decided[:size]),
        num_accepted=len(accepted),
        nodes=accepted,
        min_gap=min(gaps[:size], default=float("inf")),
    )
    return verdict, list(range(size))


def with_proposals(
    planned: Sequence[Planned], verdicts: Sequence[Verdict | None], proposals: Mapping[int, Proposals]
) -> list[Verdict | None]:
    """The verdicts, with what is proposed after some of them by their places; requests keep that, too."""
    found = list(verdicts)
    for place, (p, verdict) in enumerate(zip(planned, verdicts, strict=True)):
        if verdict is not None:
            p.state.proposals = proposed = proposals.get(place)
            if proposed is not None:
                found[place] = msgspec.structs.replace(verdict, proposals=proposed)
    return found


def prompt_logprobs_of(planned: Sequence[Planned], logits: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
    """Of the prompt tokens after the rows of `logits`, by request."""
    found: dict[str, list[TokenLogprobs]] = {}
    first = 0
    for p in planned:
        num_top = p.state.params.prompt_logprobs
        if num_top is None or not p.is_prefill or not p.state.wants_prompt_logprobs:
            continue
        start, end = int(p.segment.positions[0]) + 1, first + p.num_context
        tokens = p.state.tokens[start : start + p.num_context]
        rows = raw_logprobs(logits[first:end], tokens, num_top) if tokens else []
        found[p.state.request_id] = [TokenLogprobs(*row) for row in rows]
        first = end
    return found


def digest_of(verdicts: Sequence[Verdict | None]) -> int:
    """CRC-32 over all committed tokens in order."""
    tokens = [token for verdict in verdicts if verdict is not None for token in verdict.tokens]
    return zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
