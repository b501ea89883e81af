"""Our attention within a model of Transformers: its place in their registry, and where it finds its keys."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.attention import PaddedAttention, PaddedPlan
from engine.attention_kinds import AttentionKind
from engine.runner import Segment
from engine.scored_attention import ScoredAttention
from engine.scoring import USUAL, Scoring
from engine.unsupported_model import UnsupportedModel
from engine.windows import LEAST_WINDOW, within

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


class Seen(NamedTuple):
    """What a layer asked its attention for.

    Attributes:
        window: tokens that a row sees, itself included; None for all.
        is_scored: whether it does with its scores what PyTorch's attention does not.
    """

    window: int | None
    is_scored: bool


class Pass:
    """One forward pass in progress: where its attention layers find their keys, and how many ran."""

    __slots__ = ("_of_window", "_segments", "attention", "calls", "max_tokens", "plan")

    def __init__(
        self,
        attention: PaddedAttention,
        plan: PaddedPlan,
        max_tokens: int,
        segments: Sequence[Segment] | None = None,
    ) -> None:
        """Begin.

        Args:
            attention: holds keys and values.
            plan: of layers that see all keys, of all where attention `scores_by_layer`.
            max_tokens: longest sequence; wider windows are none.
            segments: what is planned, for layers with windows.
        """
        self.attention = attention
        self.plan = plan
        self.max_tokens = max_tokens
        self.calls = 0
        self._segments = segments
        self._of_window: dict[int, PaddedPlan] = {}

    def narrow(self, window: int | None) -> int | None:
        """A layer's window; None if all sequences are within it."""
        return None if window is None or window >= self.max_tokens else window

    def plan_of(self, window: int | None) -> PaddedPlan:
        """For layers whose rows see `window` tokens, None for all."""
        if window is None or self.attention.scores_by_layer:
            return self.plan
        if window not in self._of_window:
            assert self._segments is not None
            segments = [within(segment, window) for segment in self._segments]
            is_whole = all(map(is_, segments, self._segments))
            self._of_window[window] = self.plan if is_whole else self.attention.plan(segments)
        return self._of_window[window]


class Current(threading.local):
    # Thread-local and not a keyword argument: several architectures do not hand keyword arguments of
    # `forward` down to their attention layers.
    running: Pass | None = None
    seen: list[Seen] | None = None


current = Current()


@contextmanager
def looking() -> Iterator[list[Seen]]:
    """Note what layers ask for in the forwards within, in place of giving it to them."""
    found: list[Seen] = []
    current.seen = found
    try:
        yield found
    finally:
        current.seen = None


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
    window = kwargs.pop("sliding_window", None)
    scoring = Scoring(softcap=kwargs.pop("softcap", None), sinks=kwargs.pop("s_aux", None))
    if kwargs.pop("is_causal", None) is False:
        raise UnsupportedModel("the model has an attention layer that is not causal")
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"the model's attention uses {', '.join(unknown)}, not implemented here")
    layer = running.calls
    running.calls += 1
    plan = running.plan
    if current.seen is not None:
        current.seen.append(Seen(window, scoring != USUAL))
    else:
        window = running.narrow(window)
        plan = running.plan_of(window)
        running.attention.set_scoring(layer, scoring._replace(window=window))
    out = running.attention.run(
        plan,
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, _tree_attention)


def windows_of(model: PreTrainedModel, seen: Sequence[Seen], max_tokens: int) -> tuple[int, ...]:
    """Windows that layers have and that sequences of `max_tokens` reach beyond, in ascending order.

    Args:
        model: which may have windows of its own.
        seen: what its layers asked for.
        max_tokens: longest sequence.

    Raises:
        UnsupportedModel: if the model has windows that not all layers with them ask for, or narrow ones.
    """
    config = model.config.get_text_config()
    configured = getattr(config, "sliding_window", None) or max_tokens
    named = [one.window for one in seen if one.window is not None]
    narrow = tuple(sorted({window for window in named if window < max_tokens}))
    types = getattr(config, "layer_types", None)
    expected = len(seen) if types is None else list(types).count("sliding_attention")
    has_windows = _builds_windows(model)
    if narrow and not has_windows:
        raise UnsupportedModel(
            f"the model tells its attention of a sliding window of {narrow[0]} tokens that its own masks do "
            f"not have: set max_model_len to {narrow[0]} at most"
        )
    is_told = not has_windows or len(named) >= expected
    if configured < max_tokens and not is_told:
        raise UnsupportedModel(
            f"the model attends to a sliding window of {configured} tokens, shorter than its longest "
            f"sequence of {max_tokens}, and does not tell its attention so: set max_model_len to "
            f"{configured} at most"
        )
    if narrow and narrow[0] < LEAST_WINDOW:
        raise UnsupportedModel(
            f"the model attends to a sliding window of {narrow[0]} tokens, too few for token trees: set "
            f"max_model_len to {narrow[0]} at most"
        )
    return narrow


def special_attention(
    kind: AttentionKind | None, attention: PaddedAttention, windows: Sequence[int], seen: Sequence[Seen]
) -> PaddedAttention:
    """The attention in place of `attention`, made by `kind`, of a model with windows or scores of its own.

    Raises:
        UnsupportedModel: if another kind was asked for by name.
    """
    is_scored = any(one.is_scored for one in seen)
    if attention.scores_by_layer or (not windows and not is_scored):
        return attention
    if kind not in (None, "auto", "padded"):
        what = "sinks or a softcap in attention" if is_scored else "layers with sliding windows"
        raise UnsupportedModel(f"the model has {what}, which attention `{kind}` has not: set it to `auto`")
    made = ScoredAttention if is_scored else PaddedAttention
    return made(attention.num_slots, dtype=attention.dtype, device=attention.device)


def _builds_windows(model: PreTrainedModel) -> bool:
    """Whether a window that the configuration has would be in a mask that the model makes.

    Not all that make one name the window in the call of their attention, too (Qwen2-MoE, PhiMoE do not), and
    for ours no mask is made.
    """
    types = getattr(model.config.get_text_config(), "layer_types", None)
    if types is not None:
        return "sliding_attention" in types
    module = sys.modules[type(model.get_decoder()).__module__]
    return hasattr(module, "create_sliding_window_causal_mask")
