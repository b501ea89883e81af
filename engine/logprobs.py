"""Log-probabilities reported to clients: of the model itself, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.devices import to_device, to_host


def raw_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[tuple[float, list[int], list[float], int]]:
    """Log-probability of each row's token and of its most probable alternatives.

    Taken before temperature, penalties and truncation, as vLLM's default `raw_logprobs`.

    Args:
        logits: float32 [n, vocab], raw.
        tokens: n token ids.
        num_top: alternatives per row, at most the vocabulary's size; 0 for none.

    Returns:
        n times (natural log-probability of the token, ids of the alternatives by falling probability,
        their log-probabilities, the token's rank among all, from 1). The token is among the alternatives when
        it is probable enough. For all of it the host waits for the device once.
    """
    logprobs = logits.log_softmax(dim=-1)
    index = to_device(torch.tensor(tokens, dtype=torch.int64), logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, index)
    rank = (logprobs > chosen).sum(dim=1, keepdim=True) + 1
    values, ids = logprobs.topk(max(0, min(num_top, logits.shape[1])), dim=-1)
    # Token ids and float32 are exact in float64.
    found = to_host(torch.cat((chosen.double(), rank.double(), values.double(), ids.double()), dim=1))
    first, ranks, values, ids = found.tensor_split((1, 2, 2 + values.shape[1]), dim=1)
    return list(
        zip(
            first[:, 0].tolist(),
            ids.long().tolist(),
            values.tolist(),
            ranks[:, 0].long().tolist(),
            strict=True,
        )
    )
