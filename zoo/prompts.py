"""Choose the held-out prompts that ship with the weights, for tests and benchmarks that have no corpus at
hand.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from zoo.corpus import DOMAINS, Corpus, Domain, Example

PER_DOMAIN = 160

#: Bound on the output in tokens, about twice the domain's mean answer.
MAX_TOKENS: dict[Domain, int] = {"code": 128, "chat": 96, "summary": 64}

_PER_MODULE = 4
_MIN_RESPONSE_CHARS: dict[Domain, int] = {"code": 60, "chat": 60, "summary": 40}


def _opening(example: Example) -> str:
    """The first 60 characters of an answer: what makes two answers near copies."""
    return example.response.strip()[:60]


def choose(corpus: Corpus, per_domain: int = PER_DOMAIN, seed: int = 7) -> list[Example]:
    """Held-out examples of each domain whose answers open unlike any training answer, at most four of one
    module.
    """
    known = {(e.domain, _opening(e)) for e in corpus.train}
    chosen: list[Example] = []
    for domain in DOMAINS:
        candidates = [e for e in corpus.held_out if e.domain == domain and (domain, _opening(e)) not in known]
        random.Random(f"{seed}:{domain}").shuffle(candidates)
        times: Counter[str] = Counter()
        taken: list[Example] = []
        for example in candidates:
            if len(example.response) < _MIN_RESPONSE_CHARS[domain] or len(taken) == per_domain:
                continue
            times[example.module] += 1
            if times[example.module] <= _PER_MODULE:
                taken.append(example)
        chosen += taken
    return chosen


def write(examples: Iterable[Example], path: Path) -> None:
    """One JSON record a line, in the form ``zoo.registry.Prompt`` reads."""
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            record: dict[str, object] = {
                "domain": example.domain,
                "kind": example.kind,
                "reference": example.response,
                "max_tokens": MAX_TOKENS[example.domain],
            }
            if example.messages:
                record["messages"] = example.chat()
            else:
                record["prompt"] = example.prompt
            file.write(json.dumps(record) + "\n")
