"""Log-probabilities reported to clients: of the model itself, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def raw_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[tuple[float, list[int], list[float]]]:
    """Log-probability of each row's token and of its most probable alternatives.

    Taken before temperature, penalties and truncation, as vLLM's default `raw_logprobs`.

    Args:
        logits: float32 [n, vocab], raw.
        tokens: n token ids.
        num_top: alternatives per row, at most the vocabulary's size; 0 for none.

    Returns:
        n times (natural log-probability of the token, ids of the alternatives by falling probability,
        their log-probabilities). The token is among the alternatives when it is probable enough.
    """
    logprobs = logits.log_softmax(dim=-1)
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    if num_top <= 0:
        return [(value, [], []) for value in chosen]
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return list(zip(chosen, ids.tolist(), values.tolist(), strict=True))
