"""Our attention within a model of Transformers: its place in their registry, and where it finds its keys."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention import PaddedAttention, PaddedPlan
from engine.unsupported_model import UnsupportedModel

ATTENTION_NAME = "flotilla_tree"
"""Name of our attention in Transformers' registry. It must not contain "sdpa", "flash" or "paged|", which
Transformers treats specially, and must have no mask function of that name, so that none is built."""

# Arguments that say nothing about which keys a row sees or how it weighs them.
_HARMLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class Pass:
    """One forward pass in progress: where its attention layers find their keys, and how many ran."""

    __slots__ = ("attention", "calls", "max_tokens", "plan")

    def __init__(self, attention: PaddedAttention, plan: PaddedPlan, max_tokens: int) -> None:
        self.attention = attention
        self.plan = plan
        self.max_tokens = max_tokens
        self.calls = 0


class Current(threading.local):
    # Thread-local and not a keyword argument: several architectures do not hand keyword arguments of
    # `forward` down to their attention layers.
    running: Pass | None = None


current = Current()


def _tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention signature: q, k, v [1, heads, rows, dim] to [1, rows, heads, v_dim]."""
    running = current.running
    if running is None:
        raise RuntimeError(f"attention {ATTENTION_NAME!r} was called outside an engine forward pass")
    if attention_mask is not None:
        raise UnsupportedModel("the model builds an attention mask of its own")
    check_window(kwargs.pop("sliding_window", None), running.max_tokens)
    if kwargs.pop("is_causal", None) is False:
        raise UnsupportedModel("the model has an attention layer that is not causal")
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"the model's attention uses {', '.join(unknown)}, not implemented here")
    layer = running.calls
    running.calls += 1
    out = running.attention.run(
        running.plan,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, _tree_attention)


def check_window(window: int | None, max_tokens: int) -> None:
    """Raise UnsupportedModel for a sliding window shorter than the longest sequence."""
    if window is not None and window < max_tokens:
        raise UnsupportedModel(
            f"the model attends to a sliding window of {window} tokens, shorter than its longest sequence of "
            f"{max_tokens}: set max_model_len to {window} at most"
        )
