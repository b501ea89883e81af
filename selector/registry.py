"""Selectors by name."""

from __future__ import annotations

from collections.abc import Sequence

from engine.own_classes import is_own
from selector.acceptance import AcceptanceEstimates
from selector.epsilon_greedy import EpsilonGreedy
from selector.fixed import Fixed
from selector.flotilla import Flotilla
from selector.greedy_length import GreedyLength
from selector.lbss import Lbss
from selector.own import own_selector
from selector.protocol import Selector

SELECTORS = ("flotilla", "lbss", "epsilon-greedy", "greedy-length", "fixed")


def make_selector(
    name: str,
    *,
    estimates: AcceptanceEstimates | None = None,
    drafters: Sequence[str] = (),
    alpha: int = 16,
    beta: int = 4,
    switching_weight: float = 1.0,
    epsilon: float = 0.2,
    seed: int = 0,
) -> Selector:
    """A selector; settings that are not its own are ignored.

    Args:
        name: one of `SELECTORS`, or the import path of a class that is called with `estimates`.
        estimates: `flotilla`: acceptance rates that somebody else feeds; its own if None.
        drafters: `fixed`: the instances or kinds to use; all if empty.
        alpha: `lbss`: slots of exploration per epoch.
        beta: `lbss`: slots of a chunk.
        switching_weight: `lbss`: SPIN's lambda.
        epsilon: `epsilon-greedy`: share of slots that explore.
        seed: of whatever is drawn.

    Raises:
        ValueError: for a name that is not known, a path that cannot be imported, or settings that make no
            sense.
    """
    if is_own(name):
        return own_selector(name, estimates)
    match name:
        case "flotilla":
            return Flotilla(estimates)
        case "lbss":
            return Lbss(alpha, beta, switching_weight, seed)
        case "epsilon-greedy":
            return EpsilonGreedy(epsilon, seed)
        case "greedy-length":
            return GreedyLength()
        case "fixed":
            return Fixed(drafters)
        case _:
            raise ValueError(f"no selector is called {name!r}; there are: {', '.join(SELECTORS)}")
