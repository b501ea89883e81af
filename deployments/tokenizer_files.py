"""Whether a model directory has a tokenizer, and its files are whole, known without loading one."""

from __future__ import annotations

import json
from pathlib import Path

from engine.model_files import check_no_pointer, read_json

#: Files that hold vocabularies, by the formats of Transformers' tokenizers.
_VOCABULARIES = (
    "tokenizer.*", "tekken.json", "vocab.*", "*.model", "*.tiktoken", "*.spm", "*.vocab",
)  # fmt: skip
#: Classes whose vocabulary is in no file: bytes, or characters.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")


class MissingTokenizer(ValueError):
    """A model directory in which no tokenizer is; the message says what to do."""


def check_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a directory in which Transformers would look for a tokenizer in vain, and say something else.

    Args:
        directory: of a model.
        trust_remote_code: whether code in it may make one of whatever files it likes.

    Raises:
        MissingTokenizer: naming the files that are missing.
    """
    if trust_remote_code or any(any(directory.glob(pattern)) for pattern in _VOCABULARIES):
        return
    if _class_name(directory) in _WITHOUT_FILES:
        return
    raise MissingTokenizer(
        f"{directory} has no tokenizer: neither tokenizer.json nor tokenizer.model nor any other file with a "
        "vocabulary is there. Copy all `tokenizer*` files there from where the weights came from; of a "
        "model of the Hub's, `hf download MODEL --include 'tokenizer*' '*.model' 'vocab*' 'merges.txt' "
        f"'*.jinja' --local-dir {directory}` fetches them"
    )


def check_tokenizer_files(directory: Path) -> None:
    """Refuse files of a tokenizer that are cut off, or not fetched yet; what is in them is not looked at.

    Raises:
        BrokenFiles: naming the file.
    """
    for name in ("tokenizer_config.json", "tokenizer.json"):
        if (directory / name).exists():
            read_json(directory / name)
    if not (directory / "tokenizer.json").exists():  # else nobody reads the others
        for pattern in _VOCABULARIES:
            for file in directory.glob(pattern):
                if file.is_file():
                    check_no_pointer(file)


def _class_name(directory: Path) -> str | None:
    try:
        name = json.loads((directory / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return str(name)
