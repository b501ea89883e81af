"""Classes of users, named in a configuration by their dotted import path."""

from __future__ import annotations

import pkgutil
from typing import Any


def is_own(name: str) -> bool:
    """Whether a policy or selector is named by an import path, as in `my_policies.Cautious`."""
    return "." in name


def own_class(name: str, what: str) -> Any:
    """The class, or whatever else can be called, that a dotted name stands for.

    Args:
        name: of a module that can be imported, and of what is in it.
        what: it is meant to be, for the error.

    Raises:
        ValueError: if it cannot be imported, or cannot be called.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the {what} `{name}` cannot be imported: {error}. Its module must be installed, or lie in a "
            "directory on PYTHONPATH, where the cell runs"
        ) from error
    if not callable(found):
        raise ValueError(f"the {what} `{name}` is no class: it cannot be called")
    return found
