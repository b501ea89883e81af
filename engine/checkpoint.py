"""The tensors of a model directory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.tensor_headers import UnreadableCheckpoint


class Checkpoint:
    """The tensors of a model directory, each file of which is opened once.

    Attributes:
        names: of all tensors.
    """

    def __init__(self, directory: Path) -> None:
        """Look what there is.

        Raises:
            UnreadableCheckpoint: if two files without an index have a tensor of the same name, or an index
                names one that its file has not.
        """
        self.directory = directory
        self._files: dict[Path, Any] = {}
        # In the order in which Transformers looks.
        index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.is_file() and not whole.is_file():
            named = json.loads(index.read_text())["weight_map"]
            self._where = {name: directory / file for name, file in named.items()}
            there = {file: set(self._open(directory / file).keys()) for file in set(named.values())}
            lacking = sorted(name for name, file in named.items() if name not in there[file])
            if lacking:
                raise UnreadableCheckpoint(
                    f"{index} says that `{lacking[0]}` is in {named[lacking[0]]}, where it is not: copy the "
                    "index and all files that it names again from where the model came from"
                )
        else:
            self._where = {}
            for file in [whole] if whole.is_file() else sorted(directory.glob("*.safetensors")):
                names = set(self._open(file).keys())
                twice = sorted(names & self._where.keys())
                if twice:
                    raise UnreadableCheckpoint(
                        f"`{twice[0]}` in {directory} is in {file.name} and another file"
                    )
                self._where |= dict.fromkeys(names, file)
        self.names = set(self._where)
        self._stored: dict[str, str] = {}  # names in the files, where they are others

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """The same tensors under the names that `rename` makes of theirs.

        Raises:
            UnreadableCheckpoint: if it makes one name of two.
        """
        found = copy.copy(self)
        found._stored, found._where = {}, {}
        for name in sorted(self.names):
            new = rename(name)
            if new in found._where:
                raise UnreadableCheckpoint(f"`{name}` and `{found._stored[new]}` in {self.directory} are one")
            found._stored[new], found._where[new] = self._stored.get(name, name), self._where[name]
        found.names = set(found._where)
        return found

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        tensor: torch.Tensor = self._open(self._where[name]).get_tensor(self._stored.get(name, name))
        return tensor

    def kind(self, name: str) -> str:
        """Of what numbers a tensor is, by the header of its file, in safetensors' words ("BF16")."""
        kind: str = self._slice(name).get_dtype()
        return kind

    def is_float(self, name: str) -> bool:
        """Whether a tensor is of floats of 16 or 32 bits, by the header of its file."""
        return self.kind(name) in ("F32", "F16", "BF16")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, by the header of its file."""
        return tuple(self._slice(name).get_shape())

    def integers(self, name: str) -> list[int]:
        """What is in a tensor [numbers] of a few integers."""
        found: list[int] = self.read(name).tolist()
        return found

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(self._stored.get(name, name))

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]
