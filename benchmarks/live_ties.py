"""Answers of a live run that differ, judged by the target itself: a near tie, or a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.live_client import Choice, Delivery
from benchmarks.live_requests import LiveRequest
from engine.quantization import Quantization


def explain_differences(
    target: str,
    differences: Sequence[tuple[Delivery, str]],
    references: Mapping[int, Mapping[int, Choice]],
    quantization: Quantization | None = None,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """For every choice that differs, where, by how much the target preferred its own, and whether
    rounding explains it (`benchmarks.near_ties`).

    Args:
        target: `zoo:NAME` or a directory.
        differences: deliveries and in what way they differ.
        references: the right answers, by the request's index.
        quantization: of the target, which is another model when it is rounded.
        dtype: of the target.
    """
    found = []
    judge: Callable[..., Any] | None = None
    for delivery, verdict in differences:
        request, right = delivery.request, references[delivery.request.index]
        for index in sorted(right.keys() | delivery.last.choices.keys()):
            expected = right.get(index, Choice())
            got = delivery.last.choices.get(index, Choice())
            if got == expected:
                continue
            if got.tokens == expected.tokens:
                # The same tokens shown as another text, or ended for another reason: no rounding does that.
                found.append(_unproven(request, index, verdict, len(expected.tokens)))
                continue
            judge = judge or _judge(target, quantization, dtype)
            difference = judge(request, index, expected.tokens, got.tokens)
            found.append({**asdict(difference), "verdict": verdict, "choice": index})
    return found


def _judge(target: str, quantization: Quantization | None, dtype: str) -> Callable[..., Any]:
    """Loads the target, which takes seconds: only where tokens differ."""
    from benchmarks import demo
    from benchmarks.near_ties import Difference, explain
    from benchmarks.transformers_engine import Reference

    reference = Reference(demo.directory(target), dtype, quantization)

    def judge(request: LiveRequest, choice: int, expected: list[int], got: list[int]) -> Difference:
        return explain(
            reference,
            _params(request, choice),
            reference.encode(request.prompt),
            expected,
            got,
            index=request.index,
            domain=request.domain,
        )

    return judge


def _unproven(request: LiveRequest, choice: int, verdict: str, position: int) -> dict[str, Any]:
    return {
        "prompt": request.index,
        "domain": request.domain,
        "choice": choice,
        "verdict": verdict,
        "position": position,
        "gap": None,
        "proven": False,
    }


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
