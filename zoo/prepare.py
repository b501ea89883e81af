"""First stage of the recipe: corpus, tokenizer, encoded splits and held-out prompts in one data folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from zoo import corpus, dataset, prompts, tokenizer
from zoo.dataset import Tokens
from zoo.registry import load_prompts


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


def drop_shipped(data: Path) -> int:
    """Leave out of the training examples in ``data`` those that have a shipped prompt's reference anywhere in
    their text, as another version of a package may have it elsewhere; returns how many.
    """
    learned, tokens = tokenizer.load(data / "tokenizer"), Tokens.load(data / "train.npz")
    spans = [tokens.ids[a:b].tolist() for a, b in zip(tokens.starts[:-1], tokens.starts[1:], strict=True)]
    texts: list[str] = learned.batch_decode(spans)
    everything = "\x00".join(texts)
    found = [text for text in (prompt.reference.strip() for prompt in load_prompts()) if text in everything]
    keep = np.array([not any(reference in text for reference in found) for text in texts])
    if not keep.all():
        tokens.select(keep).save(data / "train.npz")
    return int((~keep).sum())
