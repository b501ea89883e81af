"""The target reads corpus text and leaves its distribution at every response token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from zoo import clock, models
from zoo.dataset import SHARES, Tokens, order
from zoo.generate import top_of
from zoo.scored import Scored, ScoredBuilder


def score(model_dir: Path, tokens: Tokens, minutes: float, part: int, parts: int, batch: int = 32) -> Scored:
    """As ``read``, by the model in a directory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return read(models.load(model_dir).to(torch.bfloat16).to(device), tokens, minutes, part, parts, batch)


@torch.inference_mode()
def read(
    model: LlamaForCausalLM, tokens: Tokens, minutes: float, part: int, parts: int, batch: int
) -> Scored:
    """Score a balanced random sample of the corpus for a budget of minutes; ``part`` of ``parts`` disjoint
    ones.
    """
    device = next(model.parameters()).device
    rng = np.random.default_rng(5)
    queue = np.unique(order(tokens, SHARES, rng))
    queue = rng.permutation(queue)[part::parts]
    builder = ScoredBuilder()
    begun = clock.seconds()
    # Sorted within blocks, so that rows of a batch are about equally long while any prefix stays a fair
    # sample.
    for block in range(0, len(queue), batch * 16):
        members = queue[block : block + batch * 16]
        members = members[np.argsort(np.diff(tokens.starts)[members])]
        for at in range(0, len(members), batch):
            if builder.response_tokens and clock.seconds() - begun > minutes * 60.0:
                return builder.build()
            rows = members[at : at + batch]
            _score_batch(model, tokens, rows.tolist(), builder, device)
    return builder.build()


def _score_batch(
    model: LlamaForCausalLM, tokens: Tokens, rows: list[int], builder: ScoredBuilder, device: torch.device
) -> None:
    spans = [slice(tokens.starts[i], tokens.starts[i + 1]) for i in rows]
    longest = max(int(s.stop - s.start) for s in spans)
    ids = np.zeros((len(rows), longest), np.int64)
    answer = np.zeros((len(rows), longest), bool)
    for row, span in enumerate(spans):
        ids[row, : span.stop - span.start] = tokens.ids[span]
        answer[row, : span.stop - span.start] = tokens.answer[span]
    # Padding lies to the right, where causal attention never looks from.
    hidden = model.model(torch.from_numpy(ids).to(device), use_cache=False).last_hidden_state
    top_ids, top_logp = top_of(model.lm_head(hidden[:, :-1][torch.from_numpy(answer[:, 1:]).to(device)]))
    at = 0
    for i, span in zip(rows, spans, strict=True):
        marks = tokens.answer[span].astype(bool)
        count = int(marks.sum())
        text = tokens.ids[span]
        builder.add(
            int(tokens.domain[i]),
            text[~marks].tolist(),
            text[marks].tolist(),
            top_ids[at : at + count],
            top_logp[at : at + count],
        )
        at += count
