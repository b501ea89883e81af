"""How long sequences may be by a model's configuration. Imports no torch."""

from __future__ import annotations

from typing import Any

# Rotary variants that stretch positions by a factor, which model cards have users add to a configuration
# whose `max_position_embeddings` stays what it was.
_STRETCHED = frozenset({"linear", "yarn"})


def most_positions(config: Any) -> int | None:
    """The longest sequence that may be asked for of a Transformers configuration; None if it names none."""
    own = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if own is None or rope.get("rope_type") not in _STRETCHED:
        return None if own is None else int(own)
    original = rope.get("original_max_position_embeddings") or own
    return max(int(own), int(float(rope.get("factor") or 1) * original))


def longest_sequence(config: Any, max_tokens: int | None) -> int | None:
    """The longest sequence to run a model with: `max_tokens` as far as it may be asked for, else its own."""
    own = getattr(config, "max_position_embeddings", None)
    most = most_positions(config)
    if own is None or most is None:
        return None
    return int(own) if max_tokens is None else min(most, max_tokens)
