"""Building a drafter of a configuration, in an actor or in this process; imports torch only for models."""

from __future__ import annotations

from pathlib import Path

from cluster.drafter_config import (
    DrafterConfig,
    EagleConfig,
    HeadsConfig,
    ModelDrafterConfig,
    OwnDrafterConfig,
    SuffixAutomatonConfig,
)
from cluster.model_paths import model_directory
from drafters.factory import build_drafter
from drafters.heads_drafter import HeadsDrafter
from drafters.own_drafter import OwnDrafter, OwnDrafterSettings
from drafters.protocol import Drafter
from engine.eagle_config import read_eagle_config
from engine.heads_config import read_description

# Deepest draft, in the drafter's own tokens: of another tokenizer it may take more to spell a plan.
MODEL_DEPTH, RETOKENIZED_DEPTH = 16, 32


def build_pool_drafter(config: DrafterConfig, vocab_size: int, max_tokens: int, target_path: str) -> Drafter:
    """Load or make one drafter.

    Args:
        config: of the drafter.
        vocab_size, max_tokens: vocabulary and context length of the target.
        target_path: the target's, as configured: a drafter with another tokenizer needs both.

    Raises:
        ValueError: if its vocabulary is not the target's, and it cannot or may not draft by retokenization.
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
    elif isinstance(config, EagleConfig):
        drafter = HeadsDrafter(
            kind="eagle",
            num_heads=config.max_depth,
            vocab_size=read_eagle_config(model_directory(config.path)).vocab_size,
            max_tokens=max_tokens,
            num_candidates=config.max_width,
            max_width=config.max_width,
        )
    elif isinstance(config, ModelDrafterConfig):
        drafter = _build_model(config, vocab_size, model_directory(target_path))
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
    elif isinstance(config, OwnDrafterConfig):
        settings = OwnDrafterSettings(
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            max_depth=config.max_depth,
            max_width=config.max_width,
            options=config.options,
        )
        drafter = OwnDrafter(config.import_path, settings)
    else:
        drafter = build_drafter(
            "prompt_lookup",
            max_ngram=config.max_ngram,
            min_ngram=config.min_ngram,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )
    drafted = drafter.capabilities.vocab_size
    # A model's may lack some of the target's, see `_build_model`.
    if drafted > vocab_size or (drafted < vocab_size and not isinstance(config, ModelDrafterConfig)):
        raise ValueError(
            f"drafter `{config.name}` has a vocabulary of {drafted} tokens and the target one of "
            f"{vocab_size}; it must have been made for this target"
        )
    return drafter


def _build_model(config: ModelDrafterConfig, vocab_size: int, target: Path) -> Drafter:
    """A model drafter, in a retokenizing one if its tokens are not the target's."""
    from drafters.first_drafts import draft_first
    from drafters.model_drafter import ModelDrafter
    from drafters.retokenize_vocabulary import have_same_tokens
    from engine.devices import resolve_device
    from engine.triton_support import runs_triton

    directory = model_directory(config.path)
    same = have_same_tokens(target, directory)
    if same is False and not config.retokenize:
        raise ValueError(
            f"drafter `{config.name}` has another tokenizer than the target, and `retokenize` is off: turn "
            "it on, or choose a drafter with the target's tokenizer"
        )
    drafter = build_drafter(
        "model",
        path=str(directory),
        dtype=config.dtype,
        num_slots=config.num_slots,
        max_tokens=config.max_model_len,
        runner=config.runner,
        attention=config.attention,
        device=config.device,
        memory_fraction=config.memory_fraction,
        device_share=config.device_share,
        graphs=config.cuda_graphs,
        quantization=config.quantization,
        prefix_sharing=config.prefix_sharing,
        max_depth=RETOKENIZED_DEPTH if same is False else MODEL_DEPTH,
    )
    if runs_triton(resolve_device(config.device)):
        draft_first(drafter)
        if isinstance(drafter, ModelDrafter):
            drafter.warm_up()
    num_tokens = drafter.capabilities.vocab_size
    # Models of one family round the same tokenizer's vocabulary up differently (Qwen2.5: 151,936 for 0.5B to
    # 3B, 152,064 from 7B on): what only the target has is no token of any text.
    if (num_tokens == vocab_size and same is not False) or (num_tokens < vocab_size and same):
        return drafter
    if same is None or not config.retokenize:
        raise ValueError(
            f"drafter `{config.name}` has a vocabulary of {num_tokens} tokens and the "
            f"target one of {vocab_size}; such a drafter drafts by retokenization, for which `retokenize` "
            f"must be on and there must be a tokenizer.json in {target} and in {directory}"
        )
    from drafters.retokenizing_drafter import RetokenizingDrafter

    try:
        return RetokenizingDrafter.of(drafter, target, directory, vocab_size)
    except ValueError as error:
        raise ValueError(f"drafter `{config.name}` cannot draft by retokenization: {error}") from error
