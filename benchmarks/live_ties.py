"""Answers of a live run that differ, judged by the target itself: a near tie, or a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.live_client import Choice, Delivery
from benchmarks.live_requests import LiveRequest


def explain_differences(
    target: str, differences: Sequence[tuple[Delivery, str]], references: Mapping[int, Mapping[int, Choice]]
) -> list[dict[str, Any]]:
    """For every choice whose tokens differ, where, by how much the target preferred its own, and whether
    rounding explains it (`benchmarks.near_ties`).

    Args:
        target: `zoo:NAME` or a directory.
        differences: deliveries and in what way they differ.
        references: the right answers, by the request's index.
    """
    if not differences:
        return []
    from benchmarks import demo
    from benchmarks.near_ties import explain, first_difference
    from benchmarks.transformers_engine import Reference

    reference = Reference(demo.directory(target), "float32")
    found = []
    for delivery, verdict in differences:
        request = delivery.request
        for index, expected in references[request.index].items():
            got = delivery.last.choices.get(index, Choice())
            if got.tokens == expected.tokens:
                continue
            at = first_difference(expected.tokens, got.tokens)
            difference = explain(
                reference,
                _params(request, index),
                reference.encode(request.prompt),
                expected.tokens,
                got.tokens,
                index=request.index,
                domain=request.domain,
            )
            found.append({**asdict(difference), "verdict": verdict, "choice": index, "position": at})
    return found


def _params(request: LiveRequest, choice: int) -> Any:
    """The sampling parameters of one choice, as the server understands the body."""
    from deployments.structured_outputs import StructuredFields, constraint_of
    from engine.sampling_params import SamplingParams

    fields = dict(request.sampling)
    asked = {"structured_outputs": fields.pop("structured_outputs", None)}
    constraint = constraint_of(StructuredFields.model_validate(asked))
    return SamplingParams(
        **fields, constraint=None if constraint is None else constraint[0], seed=request.seed + choice
    )
