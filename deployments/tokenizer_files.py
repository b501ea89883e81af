"""Whether a model directory has a tokenizer, and its files are whole, known without loading one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from engine.model_files import check_no_pointer, read_json

#: Files that hold vocabularies which Transformers reads by itself.
_VOCABULARIES = ("tokenizer.json", "vocab.*")
#: And those that take a package more: its module, and what to install.
_BY_PACKAGE = {
    "tekken.json": ("mistral_common", "mistral-common"),
    "*.tiktoken": ("tiktoken", "tiktoken"),
    "*.model": ("sentencepiece", "sentencepiece"),
    "*.spm": ("sentencepiece", "sentencepiece"),
    "*.vocab": ("sentencepiece", "sentencepiece"),
}
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
        MissingTokenizer: naming the files that are missing, or the package that reads the one there is.
    """
    if trust_remote_code or any(any(directory.glob(pattern)) for pattern in _VOCABULARIES):
        return
    if _class_name(directory) in _WITHOUT_FILES:
        return
    found = [(file, *needed) for pattern, needed in _BY_PACKAGE.items() for file in directory.glob(pattern)]
    if any(importlib.util.find_spec(module) for _, module, _ in found):
        return
    for file, _, package in found:
        raise MissingTokenizer(
            f"{file} is not read without a package that is not installed here: `pip install {package}`. Or "
            "make a tokenizer.json where it is, by "
            "`AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)`, or copy the one that "
            "most models come with, too"
        )
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
        for pattern in (*_VOCABULARIES, *_BY_PACKAGE):
            for file in directory.glob(pattern):
                if file.is_file():
                    check_no_pointer(file)


def _class_name(directory: Path) -> str | None:
    try:
        name = json.loads((directory / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return str(name)
