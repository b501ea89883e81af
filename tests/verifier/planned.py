"""The same steps twice: with trees that are sent once proposals are known, and with plans sent before."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.sampling_params import RequestSpec
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier

DEPTH, WIDTH = 3, 2


def in_turn(
    verifier: Verifier, specs: Sequence[RequestSpec], plan: DraftPlan, steps: int
) -> list[VerifyResult]:
    """Each call is made from the answer before."""
    result = verifier.step(_opening(specs))
    results, tokens = [result], {spec.request_id: list(spec.tokens) for spec in specs}
    proposed: dict[str, Proposals | None] = {}
    for number in range(1, steps + 1):
        for verdict in verdicts_of(result):
            tokens[verdict.request_id] += verdict.tokens
            proposed[verdict.request_id] = verdict.proposals
        items = []
        for item in _planned(specs, plan):
            name = item.request_id
            stops = frozenset(specs[0].sampling.stop_token_ids)
            tree = grown(tokens[name][-1], plan, stops, proposed[name])
            items.append(msgspec.structs.replace(item, tree=tree, plan=None))
        result = verifier.step(VerifyCall(call_id=number, verify=items))
        results.append(result)
    return results


def ahead(
    verifier: Verifier, specs: Sequence[RequestSpec], plan: DraftPlan, steps: int
) -> tuple[list[VerifyResult], list[bool]]:
    """Each call waits while the one before is computed; also whether it was begun by that one's answer."""
    calls = [_opening(specs)]
    calls += [VerifyCall(call_id=number, verify=_planned(specs, plan)) for number in range(1, steps + 1)]
    overlapped, results, begun = OverlappedCalls(verifier), [], []
    for number, call in enumerate(calls):
        following = calls[number + 1] if number < steps else None
        results.append(overlapped.answer(call, lambda following=following: following))
        begun.append(overlapped.has_begun)
    return results, begun


def verdicts_of(result: VerifyResult) -> list[Verdict]:
    """Of prompts that are complete, too."""
    return [*result.verdicts, *(one.verdict for one in result.prefills if one.verdict is not None)]


def _opening(specs: Sequence[RequestSpec]) -> VerifyCall:
    prefill = [
        PrefillItem(
            request_id=spec.request_id, num_tokens=99, spec=spec, num_candidates=WIDTH, num_heads=DEPTH
        )
        for spec in specs
    ]
    return VerifyCall(call_id=0, prefill=prefill)


def _planned(specs: Sequence[RequestSpec], plan: DraftPlan) -> list[VerifyItem]:
    return [
        VerifyItem(request_id=spec.request_id, num_candidates=WIDTH, num_heads=DEPTH, plan=plan)
        for spec in specs
    ]
