"""First stage of the recipe: corpus, tokenizer, encoded splits and held-out prompts in one data folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from zoo import corpus, dataset, prompts, tokenizer


def prepare(data: Path, taught: Path | None = None) -> dict[str, int]:
    """Build what is missing in ``data``; returns the number of training examples by domain (empty if
    nothing to do).

    With ``taught``, the directory of a trained target, its tokenizer is used instead of a new one.
    """
    done = data / "prompts.jsonl"
    if done.exists():
        return {}
    data.mkdir(parents=True, exist_ok=True)
    built = corpus.build(corpus.read_functions())
    if taught is not None:
        learned = tokenizer.load(taught)
    else:
        learned = tokenizer.train(dataset.prompt_text(e) + e.response for e in built.train)
    learned.save_pretrained(str(data / "tokenizer"))
    dataset.encode(learned, built.train).save(data / "train.npz")
    dataset.encode(learned, built.held_out).save(data / "held_out.npz")
    prompts.write(prompts.choose(built), done)
    return dict(Counter(e.domain for e in built.train))
