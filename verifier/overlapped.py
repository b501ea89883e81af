"""Verify calls one after the other, of which the next is begun while the device computes the one before."""

from __future__ import annotations

from collections.abc import Callable

from verifier.begun import Begun
from verifier.messages import VerifyCall, VerifyResult
from verifier.verifier import Verifier


class OverlappedCalls:
    """Answers calls in order; what the host does for one is done while the device computes another.

    Without that a device idles while verdicts are made and sent and the next rows are planned. It takes calls
    that wait already, as steps which are sent ahead do, and those of other micro-batches. A plain step is
    begun while the one before is computed; one that verifies what was proposed in that, once it is finished.
    """

    def __init__(self, verifier: Verifier) -> None:
        """Of a verifier that nobody else gives calls to."""
        self._verifier = verifier
        self._begun: Begun | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the call that is to be answered next is begun."""
        return self._begun is not None

    def answer(self, call: VerifyCall, waiting: Callable[[], VerifyCall | None]) -> VerifyResult:
        """The answer to `call`, as `Verifier.step`.

        Args:
            call: the one that `waiting` returned last, if it is begun already.
            waiting: the call after it, if it has come; asked until the device is done, or one has.

        Raises:
            Exception: whatever the model's forward raises.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun.call is not call:
            self._verifier.finish(begun)  # of a scheduler that is gone
            begun = None
        if begun is None:
            begun = self._verifier.begin(call)
        while begun.is_open:
            following = waiting()
            if following is not None:
                self._begun = self._verifier.begin_following(following, begun)
                break
            if begun.is_decided:
                break
        result = self._verifier.finish(begun)
        # What verifies proposals of this one is launched before anybody hears of it: else the device idles.
        if self._begun is None and self._verifier.overlaps:
            following = waiting()
            if following is not None and any(item.plan is not None for item in following.verify):
                self._begun = self._verifier.begin(following)
        return result

    def forget_all(self, *, with_prefixes: bool) -> None:
        """Drop all requests, as `Verifier.forget_all`, and the call that is begun."""
        if self._begun is not None:
            self._verifier.finish(self._begun)
            self._begun = None
        self._verifier.forget_all(with_prefixes=with_prefixes)
