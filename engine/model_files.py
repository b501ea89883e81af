"""Whether the files of a model directory are whole: found by their beginnings, before anything is loaded.

Of weights only headers are read, so that it takes no longer for large models. Imports no torch.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from engine.quantized_files import DESCRIBED_IN

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: With what the file begins that Git has in a large one's place until that is fetched.
_POINTER = b"version https://git-lfs"
#: As the safetensors library limits headers; a longer one is no header.
_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8


class BrokenFiles(ValueError):
    """A model directory with a file that is missing, cut off or another's; the message says which."""


def check_model_files(directory: Path) -> None:
    """Check the JSON files that loading a model reads, and that its weights are there as a whole.

    Raises:
        BrokenFiles: naming the file.
    """
    config = read_json(directory / "config.json")
    if (directory / "generation_config.json").exists():
        read_json(directory / "generation_config.json")
    files = weight_files(directory)
    # Quantized ones are read by ourselves, whatever their files are called (`engine.checkpoint`).
    is_named = not config.keys().isdisjoint((*DESCRIBED_IN, "transformers_weights"))
    if not files or not (is_named or (directory / WHOLE).exists() or (directory / INDEX).exists()):
        there = f"; {files[0].name} is neither" if files else ""
        if (directory / "adapter_config.json").exists():
            there += ". It holds an adapter: name its model here, and the adapter in `target.adapters`"
        raise BrokenFiles(
            f"no weights in {directory}: neither {WHOLE} nor {INDEX} with the files it names{there}; copy "
            "all *.safetensors files and their index there from where config.json came from"
        )
    if not is_named and not (directory / WHOLE).exists() and "metadata" not in read_json(directory / INDEX):
        raise BrokenFiles(
            f"{directory / INDEX} has no `metadata`, without which Transformers reads no index: add "
            '`"metadata": {}` beside its `weight_map`'
        )
    for file in files:
        check_weights(file)


def check_ranks(directory: Path, num_ranks: int) -> None:
    """Check that a model's heads can be divided over so many ranks, as far as its configuration says.

    Raises:
        ValueError: if they cannot.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config", config)
    for field, name in (("num_attention_heads", "attention"), ("num_key_value_heads", "key-value")):
        number = text.get(field) if isinstance(text, dict) else None
        if isinstance(number, int) and number % num_ranks:
            raise ValueError(
                f"target.tensor_parallel is {num_ranks}, and the {number} {name} heads of the model in "
                f"{directory} cannot be divided by it"
            )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        BrokenFiles: if it cannot be read, or holds something else.
    """
    check_no_pointer(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenFiles(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of JSON, or of UTF-8
        if file.read_bytes().startswith(BOM_UTF8):
            raise BrokenFiles(f"{file} begins with a byte order mark: save it as UTF-8 without one") from None
        raise BrokenFiles(
            f"{file} is no JSON ({error}): it may be cut off; copy it again from where the model came from"
        ) from None
    if not isinstance(found, dict):
        raise BrokenFiles(f"{file} holds no JSON object, but a {type(found).__name__}")
    return found


def check_no_pointer(file: Path) -> None:
    """Refuse what a clone without Git LFS has in a file's place.

    Raises:
        BrokenFiles: naming the file.
    """
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_POINTER)) == _POINTER
    except OSError as error:
        raise BrokenFiles(f"{file} cannot be read: {error.strerror}") from None
    if is_pointer:
        raise BrokenFiles(f"{file} is a Git LFS pointer: run `git lfs pull` in {file.parent}")


def check_weights(file: Path) -> None:
    """Refuse a file of safetensors that is not whole, by its header and its size.

    Raises:
        BrokenFiles: naming the file.
    """
    check_no_pointer(file)
    again = "it is cut off or damaged; copy it again from where the model came from"
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 0 < length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
            raise BrokenFiles(f"{file} ({size} bytes) has no safetensors header: {again}")
        header = opened.read(length)
    try:
        described = json.loads(header)
        ends = [one["data_offsets"][1] for name, one in described.items() if name != "__metadata__"]
        told = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise BrokenFiles(f"the header of {file} is none of a safetensors file: {again}") from None
    if told != size:
        raise BrokenFiles(f"{file} has {size} bytes, and by its header it should have {told}: {again}")


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the model, in the order in which Transformers looks.

    Raises:
        BrokenFiles: if an index names files that are not there, or is none.
    """
    if (directory / WHOLE).exists():
        return [directory / WHOLE]
    index = directory / INDEX
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise BrokenFiles(f"{index} has no `weight_map` from names of tensors to files")
    files = sorted({directory / file for file in named.values()})
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise BrokenFiles(
            f"{index} names {len(files)} files of weights, and {len(missing)} of them are not there, among "
            f"them {missing[0]}: copy them there from where the model came from"
        )
    return files
