"""What a server does that is told to read its configuration again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from rich.console import Console

from cluster.config import FlotillaConfig
from deployments.api_keys import with_environment_key
from deployments.rollout import Progress, begin


def roll_out(
    reload: Callable[[], FlotillaConfig],
    console: Console,
    is_superseded: Callable[[], bool],
    former: Iterator[Progress],
) -> Iterator[Progress]:
    """Go over to the configuration as it is now; what is wrong with it is said, and changes nothing.

    One whose cells wait for resources that never come is not followed for ever: another takes its place.

    Args:
        reload: reads the configuration.
        console: where it is told how far it has come.
        is_superseded: whether another one is asked for.
        former: what is left of the one that this takes the place of; it goes on if this one is refused.

    Returns:
        What is left of it, where another one is asked for.
    """
    following = former
    with _telling(console):
        wanted = reload()
        # A key that was taken out of the file opens nothing any longer; that of the environment does.
        wanted = wanted.model_copy(update={"security": with_environment_key(wanted.security)})
        begun = begin(wanted, keeps_key=False)
        following = chain(list(islice(begun, 1)), begun)  # where it is refused, it is so by now
    shown = ""
    with _telling(console):
        for progress in following:
            if is_superseded():
                console.print("rollout: another one is asked for", markup=False, highlight=False)
                return following
            line = progress.failure if progress.has_failed else progress.summary()
            if line != shown:
                console.print(f"rollout: {line}", markup=False, highlight=False, soft_wrap=True)
            shown = line
    return iter(())


@contextmanager
def _telling(console: Console) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # who serves is not to end for the sake of a change
        console.print(f"rollout: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
