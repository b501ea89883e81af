"""Building a drafter of a configuration, in an actor or in this process; imports torch only for models."""

from __future__ import annotations

from cluster.config import DrafterConfig, HeadsConfig, ModelDrafterConfig, SuffixAutomatonConfig
from cluster.model_paths import model_directory
from drafters.factory import build_drafter
from drafters.heads_drafter import HeadsDrafter
from drafters.protocol import Drafter
from engine.heads_config import read_description


def build_pool_drafter(config: DrafterConfig, vocab_size: int, max_tokens: int) -> Drafter:
    """Load or make one drafter.

    Raises:
        ValueError: if its vocabulary is not the target's.
    """
    drafter: Drafter
    if isinstance(config, HeadsConfig):
        described = read_description(model_directory(config.path))
        drafter = HeadsDrafter(
            num_heads=described.num_heads,
            vocab_size=described.vocab_size,
            max_tokens=max_tokens,
            num_candidates=config.num_candidates,
        )
    elif isinstance(config, ModelDrafterConfig):
        drafter = build_drafter(
            "model",
            path=str(model_directory(config.path)),
            dtype=config.dtype,
            num_slots=config.num_slots,
            runner=config.runner,
            prefix_sharing=config.prefix_sharing,
        )
    elif isinstance(config, SuffixAutomatonConfig):
        drafter = build_drafter(
            "suffix_automaton",
            max_match=config.max_match,
            min_match=config.min_match,
            scope=config.scope,
            capacity=config.capacity,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )
    else:
        drafter = build_drafter(
            "prompt_lookup",
            max_ngram=config.max_ngram,
            min_ngram=config.min_ngram,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )
    drafted = drafter.capabilities.vocab_size
    if drafted != vocab_size:
        raise ValueError(
            f"drafter `{config.name}` has a vocabulary of {drafted} tokens and the target one of "
            f"{vocab_size}; drafters must share the target's tokenizer"
        )
    return drafter
