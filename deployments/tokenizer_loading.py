"""The tokenizer of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"

#: The class that is nothing but `tokenizer.json`, by its name in Transformers 4 and in 5.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a Hugging Face directory, splitting text as its `tokenizer.json` says if it has one.

    Names, special tokens, and chat templates are those of `tokenizer_config.json`. Code that comes with a
    model runs only if it is trusted.
    """
    has_file = (directory / _FILE).is_file()
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    # Besides, AutoTokenizer loads torch: 2 s and 200 MB.
    if has_file and (config.get("tokenizer_class") in _GENERIC_CLASSES or "auto_map" not in config):
        return _as_the_file_says(directory)
    from transformers import AutoTokenizer

    # Said outright: by default Transformers asks at the terminal whether to run it.
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=trust_remote_code
    )
    is_own = not type(tokenizer).__module__.startswith("transformers.")
    return tokenizer if is_own or not has_file else _as_the_file_says(directory)


def _as_the_file_says(directory: Path) -> Any:
    """By the generic class, whatever other is named.

    Most classes of Transformers 5 take only the vocabulary from the file and make the rest anew: SmolLM2's
    and StarCoder2's `GPT2Tokenizer` would not cut numbers into digits, as their models learned them.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory))
