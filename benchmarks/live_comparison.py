"""Whether what a client received is the answer of the undisturbed system, and in what way it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from benchmarks.live_client import Choice, Delivery

#: `duplicated`: a run of tokens comes twice in a row, and the answer is right without one of them.
#: `missing`: a run of tokens is left out. `differing`: anything else.
Verdict = Literal["same", "duplicated", "missing", "differing"]


def compare_tokens(expected: Sequence[int], found: Sequence[int]) -> Verdict:
    """What became of the expected tokens; the texts' own tokens are compared, no positions are trusted."""
    expected, found = list(expected), list(found)
    if expected == found:
        return "same"
    surplus = len(found) - len(expected)
    if surplus > 0:
        # An inserted run that repeats the tokens just before it.
        for at in range(surplus, len(expected) + 1):
            run = expected[at - surplus : at]
            if found[at : at + surplus] == run and found[:at] + found[at + surplus :] == expected:
                return "duplicated"
    elif surplus < 0:
        for at in range(len(found) + 1):
            if expected[:at] + expected[at - surplus :] == found:
                return "missing"
    return "differing"


def compare_choices(expected: Mapping[int, Choice], found: Mapping[int, Choice]) -> Verdict:
    """The worst of all choices; texts and finish reasons count too."""
    if expected.keys() != found.keys():
        return "missing" if found.keys() < expected.keys() else "differing"
    verdicts: set[Verdict] = set()
    for index, wanted in expected.items():
        got = found[index]
        verdict = compare_tokens(wanted.tokens, got.tokens)
        if verdict == "same" and (wanted.text, wanted.finish_reason) != (got.text, got.finish_reason):
            verdict = "differing"
        verdicts.add(verdict)
    order: tuple[Verdict, ...] = ("differing", "duplicated", "missing", "same")
    return next(verdict for verdict in order if verdict in verdicts or verdict == "same")


def is_beginning(expected: Mapping[int, Choice], found: Mapping[int, Choice]) -> bool:
    """Whether what came before a connection broke is the beginning of the answer."""
    return all(
        index in expected
        and expected[index].tokens[: len(choice.tokens)] == choice.tokens
        and expected[index].text.startswith(choice.text)
        for index, choice in found.items()
    )


class Comparison:
    """Compares deliveries with references and counts.

    Args:
        references: choices of the undisturbed system, by the request's index.
    """

    def __init__(self, references: Mapping[int, Mapping[int, Choice]]) -> None:
        self._references = references
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.differences: list[tuple[Delivery, Verdict]] = []
        self.lost: list[Delivery] = []

    def add(self, delivery: Delivery) -> None:
        """Count a delivery."""
        reference = self._references[delivery.request.index]
        self.counts["requests"] += 1
        self.counts["refused"] += delivery.number("refused")
        self.counts["broken"] += delivery.number("broken")
        for attempt in delivery.attempts:
            if attempt.end == "refused":
                self.refusals[f"{attempt.code or attempt.status}, {attempt.retry_after_s:g} s"] += 1
            if attempt.end == "broken" and attempt.choices:
                self.counts["broken in their midst"] += 1
                if not is_beginning(reference, attempt.choices):
                    self.counts["broken with a wrong beginning"] += 1
        if delivery.is_turned_away:
            self.counts["turned away"] += 1
            return
        if not delivery.is_answered:
            self.counts["lost"] += 1
            self.lost.append(delivery)
            return
        verdict = compare_choices(reference, delivery.last.choices)
        self.counts[verdict] += 1
        if verdict != "same":
            self.differences.append((delivery, verdict))

    def summary(self) -> dict[str, Any]:
        """Counts, and what is needed to look into the rest; at most 20 of each."""
        names = ("requests", "same", "lost", "duplicated", "missing", "differing", "refused", "broken")
        more = ("turned away", "broken in their midst", "broken with a wrong beginning")
        return {
            **{name.replace(" ", "_"): self.counts[name] for name in (*names, *more)},
            "refusals": dict(self.refusals.most_common()),
            "lost_requests": [
                {
                    "index": one.request.index,
                    "request_id": one.request_id,
                    "mode": one.request.mode,
                    "sent_s": one.sent_s,
                    "attempts": [
                        {"end": a.end, "status": a.status, "error": a.error, "ended_s": a.ended_s}
                        for a in one.attempts[-4:]
                    ],
                }
                for one in self.lost[:20]
            ],
            "differing_requests": [
                {
                    "index": one.request.index,
                    "request_id": one.request_id,
                    "mode": one.request.mode,
                    "sent_s": one.sent_s,
                    "verdict": verdict,
                    "attempts": len(one.attempts),
                    "expected": _shown(self._references[one.request.index]),
                    "found": _shown(one.last.choices),
                }
                for one, verdict in self.differences[:20]
            ],
        }


def _shown(choices: Mapping[int, Choice]) -> dict[str, Any]:
    return {str(index): asdict(choice) for index, choice in choices.items()}
