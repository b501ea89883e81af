"""Which part of a draft tree the target agrees with (SpecInfer's verification, by token identity)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tree import TokenTree


def walk(tree: TokenTree, decided: Sequence[int], *, is_chain: bool = False) -> tuple[list[int], int]:
    """Walk from the root while some child holds the token the target decided on.

    Args:
        tree: the draft tree; of siblings with the same token the first counts.
        decided: the target's next token after each node, one per node.
        is_chain: whether it is known to be one; if not, that is found out.

    Returns:
        (accepted nodes from the top down, root excluded; the bonus token: the decision at the last of
        them, or at the root if none was accepted).
    """
    if len(decided) == 1:
        return [], decided[0]
    tokens = tree.token.tolist()
    size = len(tokens)
    parents = [] if is_chain else tree.parent.tolist()
    # A chain, as most trees are.
    if is_chain or (parents[-1] == size - 2 and parents[1:] == list(range(size - 1))):
        node = 0
        while node + 1 < size and tokens[node + 1] == decided[node]:
            node += 1
        return list(range(1, node + 1)), decided[node]
    # Backwards, so that the first of equal siblings is what stays.
    child = {(parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1)}
    accepted: list[int] = []
    node = 0
    while (following := child.get((node, decided[node]))) is not None:
        accepted.append(following)
        node = following
    return accepted, decided[node]
