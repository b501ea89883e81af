"""torch's `tree_leaves` and `tree_map` for what operations take and return, in a third of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree


def tree_leaves(tree: Any) -> list[Any]:
    """Whatever is no list, tuple or dictionary."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return [leaf for one in tree for leaf in tree_leaves(one)]
    if kind is dict:
        return [leaf for one in tree.values() for leaf in tree_leaves(one)]
    # Of some other kinds torch knows what is in them.
    return _pytree.tree_leaves(tree) if isinstance(tree, (tuple, list, dict)) else [tree]


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree of changed leaves."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(change, one) for one in tree])
    if kind is list:
        return [tree_map(change, one) for one in tree]
    if kind is dict:
        return {name: tree_map(change, one) for name, one in tree.items()}
    return _pytree.tree_map(change, tree) if isinstance(tree, (tuple, list, dict)) else change(tree)
