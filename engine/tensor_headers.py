"""What the headers of a checkpoint's files say of its tensors; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open


class UnreadableCheckpoint(ValueError):
    """A checkpoint that is not what its configuration says; the message says where."""


class DescribedTensors(Protocol):
    """Tensors by their names, as far as headers tell."""

    @property
    def names(self) -> Set[str]:
        """Of all tensors."""
        ...

    def kind(self, name: str) -> str:
        """Of what numbers a tensor is, in safetensors' words ("BF16")."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        ...

    def integers(self, name: str) -> list[int]:
        """What is in a tensor [numbers] of a few integers."""
        ...


class TensorHeaders:
    """The tensors of files of safetensors, of which headers are read."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Look what there is.

        Raises:
            OSError: if a file cannot be read.
            safetensors.SafetensorError: if one is broken.
        """
        self._where: dict[str, Any] = {}
        for file in files:
            opened = safe_open(file, framework="numpy")
            self._where |= dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> Set[str]:
        """Of all tensors."""
        return self._where.keys()

    def kind(self, name: str) -> str:
        """Of what numbers a tensor is, in safetensors' words ("BF16")."""
        kind: str = self._where[name].get_slice(name).get_dtype()
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def integers(self, name: str) -> list[int]:
        """What is in a tensor [numbers] of a few integers."""
        found: list[int] = self._where[name].get_tensor(name).tolist()
        return found
