"""Names of the shipped models and prompts, and where they lie. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

WEIGHTS = Path(__file__).parent / "weights"
PROMPTS = WEIGHTS / "prompts.jsonl"

TARGET = "target-8x384"
DRAFTERS: tuple[str, ...] = (
    "drafter-general-2x192",
    "drafter-code-2x128",
    "drafter-chat-2x128",
    "drafter-summary-1x128",
)
MODELS: tuple[str, ...] = (TARGET, *DRAFTERS)
#: Drafters with a tokenizer of their own: they draft by retokenization.
OTHER_VOCABULARY: tuple[str, ...] = ("drafter-vocab1024-2x128",)
#: Decoding heads of the target: no model of their own (``engine.heads``).
HEADS = "heads-3x384"
#: The target's EAGLE-3 draft layer (``engine.eagle``).
EAGLE = "eagle-1x384"
#: An adapter of the target (LoRA, in PEFT's file format): it answers questions in one sentence.
ADAPTER = "lora-terse-8x384"
#: All that ships.
_FAMILY: tuple[str, ...] = (*MODELS, *OTHER_VOCABULARY, HEADS, EAGLE, ADAPTER)

#: A larger pair of the same corpus and tokenizer, trained on a GPU (`flotilla zoo pair`); not shipped.
LARGER_TARGET = "target-32x1024"
LARGER_DRAFTER = "drafter-general-2x384"

Domain = Literal["code", "chat", "summary"]
DOMAINS: tuple[Domain, ...] = ("code", "chat", "summary")


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt with the corpus's own answer; ``max_tokens`` bounds the output, in tokens."""

    domain: Domain
    kind: Literal["chat", "completion"]
    reference: str
    max_tokens: int
    prompt: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)


def weights_dir(name: str) -> Path:
    """The Hugging Face directory of a shipped model; ``KeyError`` for a name that is not in the family."""
    if name not in _FAMILY:
        raise KeyError(f"unknown model {name!r}; the family is {', '.join(_FAMILY)}")
    return WEIGHTS / name


def load_prompts(domain: str | None = None, path: Path = PROMPTS) -> list[Prompt]:
    """The shipped held-out prompts, in file order, of one domain or of all."""
    if domain is not None and domain not in DOMAINS:
        raise KeyError(f"unknown domain {domain!r}; the domains are {', '.join(DOMAINS)}")
    found: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            if domain is None or record["domain"] == domain:
                found.append(Prompt(**record))
    return found


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many prompts at equal distances, all domains alike: their file has one after another."""
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]
