"""Why the pool of drafters cannot be changed as asked."""

from __future__ import annotations


class PoolError(ValueError):
    """The pool cannot be changed as asked; the message says why."""


class UnknownDrafter(PoolError):
    """There is no drafter of that name."""


class DrafterFailed(PoolError):
    """A drafter cannot be loaded as configured."""


class NotServing(PoolError):
    """The cell is still starting."""
