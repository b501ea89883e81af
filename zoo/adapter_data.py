"""What the adapter learns from: the corpus, its answers in chat cut to their first sentence."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from zoo.dataset import Tokens, like_length
from zoo.extract import first_sentence
from zoo.registry import DOMAINS, Domain
from zoo.tokenizer import END

#: The domain whose answers are cut.
CUT: Domain = "chat"
#: Shares of the response tokens. A little of the rest, unchanged, so that it is answered as before.
DIET: dict[Domain, float] = {"code": 0.1, "chat": 0.8, "summary": 0.1}


@dataclass(frozen=True)
class AdapterBatch:
    """``ids`` int64 [rows, tokens], padded behind; ``where`` int64 [n] flat positions before the response
    tokens, and ``wanted`` int64 [n] those tokens.
    """

    ids: npt.NDArray[np.int64]
    where: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.int64]


def opening(answer: str) -> str:
    """The first sentence of an answer (its whole first paragraph where no end is found)."""
    return first_sentence(answer.strip().partition("\n\n")[0])


def is_sentence(text: str) -> bool:
    """Whether it can stand for an answer: the openings of lists cannot, which end with a colon."""
    return text.endswith(".")


def cut(tokenizer: PreTrainedTokenizerFast, tokens: Tokens, without: Container[str] = ()) -> Tokens:
    """The examples with answers of ``CUT`` cut to their first sentence, after which they end.

    Left out are those whose first sentence is none, or one of ``without``.
    """
    own = np.flatnonzero(tokens.domain == DOMAINS.index(CUT))
    spans = [np.arange(a, b) for a, b in zip(tokens.starts[:-1], tokens.starts[1:], strict=True)]
    answers = [tokens.ids[spans[i][tokens.answer[spans[i]] > 0]].tolist() for i in own]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    sentences = [opening(text) for text in texts]
    core = tokenizer.backend_tokenizer
    encoded = core.encode_batch([f"{sentence}{END}" for sentence in sentences], add_special_tokens=False)
    cuts = {
        int(i): np.array(new.ids, np.int16) if is_sentence(sentence) and sentence not in without else None
        for i, sentence, new in zip(own, sentences, encoded, strict=True)
    }
    ids, marks, kept = [], [], []
    for i, span in enumerate(spans):
        of_answer = tokens.answer[span] > 0
        new = cuts.get(i, tokens.ids[span[of_answer]])
        if new is not None:
            asked = tokens.ids[span[~of_answer]]
            ids.append(np.concatenate([asked, new]))
            marks.append(np.repeat(np.array([0, 1], np.uint8), [len(asked), len(new)]))
            kept.append(i)
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return Tokens(np.concatenate(ids), np.concatenate(marks), starts, tokens.domain[kept])


def batches(tokens: Tokens, rows: int, seed: int) -> Iterator[AdapterBatch]:
    """Endless batches of whole examples, one a row as they are served, pass after pass."""
    for chosen in like_length(tokens, DIET, rows, np.random.default_rng(seed)):
        spans = [slice(tokens.starts[i], tokens.starts[i + 1]) for i in chosen]
        ids = np.zeros((len(spans), max(span.stop - span.start for span in spans)), np.int64)
        answer = np.zeros(ids.shape, np.bool_)
        for row, span in enumerate(spans):
            ids[row, : span.stop - span.start] = tokens.ids[span]
            answer[row, : span.stop - span.start] = tokens.answer[span] > 0
        # Padding lies to the right, where causal attention never looks from. Before an answer is a prompt.
        at = np.flatnonzero(answer)
        yield AdapterBatch(ids, at - 1, ids.flatten()[at])
