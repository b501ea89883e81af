"""Whether all policies return the same tokens: each output against the first one for its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.compare_load import sampling_seed
from benchmarks.load_client import Outcome
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest
from engine.quantization import Quantization
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from benchmarks.transformers_engine import Reference


def key_of(request: BenchRequest) -> str:
    """A name for what was asked: the prompt and the bound on the answer. The seed follows from the prompt."""
    tokens = np.asarray(request.prompt.token_ids, dtype=np.int32).tobytes()
    return f"{hashlib.sha256(tokens).hexdigest()[:20]}-{request.max_tokens}"


@dataclass(frozen=True, slots=True)
class Differing:
    """An output that is not the first one returned for its prompt."""

    outcome: Outcome
    expected: list[int]


def check(outputs: MutableMapping[str, str], outcomes: Sequence[Outcome]) -> list[Differing]:
    """Compare complete outputs with the first ones, which are added to `outputs` as they come up."""
    differing = []
    for outcome in outcomes:
        if not outcome.is_ok:
            continue
        text = " ".join(map(str, outcome.token_ids))
        first = outputs.setdefault(key_of(outcome.request), text)
        if first != text:
            differing.append(Differing(outcome, [int(token) for token in first.split()]))
    return differing


def unexplained(differing: Sequence[Differing]) -> list[dict[str, Any]]:
    """Differences before anybody has looked at the target's scores: not shown to be near ties.

    With what it takes to look at them later, for the command may be interrupted before (`unseen`).
    """
    return [
        {
            "prompt": one.outcome.request.index,
            "proven": False,
            "unseen": {
                "domain": one.outcome.request.domain,
                "prompt": list(one.outcome.request.prompt.token_ids or ()),
                "max_tokens": one.outcome.request.max_tokens,
                "tokens": list(one.outcome.token_ids),
            },
        }
        for one in differing
    ]


def unseen(differences: Sequence[Mapping[str, Any]], outputs: Mapping[str, str]) -> list[Differing]:
    """Those of a run's differences that nobody has looked at."""
    found = []
    for difference in differences:
        if "unseen" in difference:
            said = difference["unseen"]
            prompt = Prompt(said["domain"], token_ids=tuple(said["prompt"]))
            request = BenchRequest(difference["prompt"], prompt, said["max_tokens"])
            expected = [int(token) for token in outputs[key_of(request)].split()]
            found.append(Differing(Outcome(request, token_ids=said["tokens"]), expected))
    return found


def explain_all(
    differing: Sequence[Differing],
    directory: str,
    temperature: float,
    end_tokens: Sequence[int],
    quantization: Quantization | None = None,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Each difference with whether it is shown to be a near tie of the target (`proven`).

    The target's scores are recomputed in plain Transformers, in its `dtype`, which is slow and happens only
    for what differs; with `quantization` those of the rounded target, which is another model.
    """
    if not differing:
        return []
    from benchmarks.near_ties import explain

    reference = _reference(directory, quantization, dtype)
    found = []
    for one in differing:
        request = one.outcome.request
        prompt = list(request.prompt.token_ids or ())
        params = SamplingParams(
            temperature=temperature,
            max_tokens=request.max_tokens,
            seed=sampling_seed(prompt),
            stop_token_ids=tuple(end_tokens),
        )
        difference = explain(
            reference,
            params,
            prompt,
            one.expected,
            one.outcome.token_ids,
            index=request.index,
            domain=request.domain,
        )
        found.append(asdict(difference))
    return found


@lru_cache(maxsize=1)
def _reference(directory: str, quantization: Quantization | None, dtype: str) -> Reference:
    """Loaded once for all runs: a large one takes longer to load than its differences to explain."""
    from benchmarks.transformers_engine import Reference

    return Reference(directory, dtype, quantization)


def count(runs: Sequence[Mapping[str, Any]], outputs: Mapping[str, str]) -> tuple[int, int, int]:
    """Outputs compared, those that differ, and of those the ones not shown to be near ties.

    The first outputs, which `outputs` holds, are what others are compared with, and were compared with none.
    """
    complete = sum(
        run["report"]["total"]["num_requests"] - run["report"]["total"]["num_errors"] for run in runs
    )
    differences = [difference for run in runs for difference in run["differences"]]
    unproven = sum(not difference["proven"] for difference in differences)
    return complete - len(outputs), len(differences), unproven
