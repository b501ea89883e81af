"""Small tokenizers of different kinds, as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, returns and initializes 12345 values.",
    "def initialize(self, values):\n    return [value for value in values if value]\n",
    "naïve café ☃ 漢字 🎈 — \u00e9\u0301 aaaa bbbb\t\tx\r\n" * 3,
    "return returns returned returning; initial initialize initialization",
] * 4


def byte_level(directory: Path, size: int, *, digits: bool = False, nfc: bool = False) -> Path:
    """GPT-2's kind; with `digits` numbers are cut apart as by Llama 3, with `nfc` text is normalised."""
    core = Tokenizer(models.BPE())
    if nfc:
        core.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=digits, use_regex=not digits)
    if digits:
        split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        core.pre_tokenizer = level
    core.decoder = decoders.ByteLevel()
    begin, end = ("<s>", "</s>") if digits else ("<|bos|>", "<|end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[begin, end, "<|both|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    return _saved(core, directory, begin, end)


def byte_fallback(directory: Path) -> Path:
    """Llama 2's kind: spaces as a mark, a space before the text, bytes for what has no token."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    # Trained on words, as SentencePiece would; characters beyond ASCII are left to the bytes.
    words = [word for text in TEXTS for word in text.encode("ascii", "ignore").decode().split()]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(words, trainer)
    data = json.loads(core.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    return _saved(Tokenizer.from_str(json.dumps(data)), directory, "<s>", "</s>")


def spaces_added(directory: Path) -> Path:
    """Gemma's kind: bytes for what has no token, and added ones of several spaces or lines."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = ["\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n", "</w>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *added, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator([text.encode("ascii", "ignore").decode() for text in TEXTS], trainer)
    data = json.loads(core.to_str())
    data["added_tokens"] = data["added_tokens"][:7]
    for token in data["added_tokens"][3:]:
        token["special"] = False
        token["lstrip"] = token["rstrip"] = token["content"] == "</w>"
    space = "\u2581"
    data["model"]["merges"] = [
        [space, space],
        [space * 2, space * 2],
        *(pair for pair in data["model"]["merges"] if set("".join(pair)) != {space}),
    ]
    return _saved(Tokenizer.from_str(json.dumps(data)), directory, "<s>", "</s>")


def word_piece(directory: Path) -> Path:
    """A kind that cannot spell every text."""
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return _saved(core, directory, "[CLS]", "[SEP]")


def _saved(core: Tokenizer, directory: Path, begin: str, end: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": {"content": end}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
