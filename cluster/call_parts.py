"""A verify forward in parts: the rows that decode, and those that read prompts."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """Totals over some of a forward's rows, as `LinearCost.seconds` takes them.

    Attributes:
        num_requests: requests they belong to.
        num_tokens: rows.
        num_context: context tokens of those requests.
        num_attended: sum over rows of their context lengths.
    """

    num_requests: int = 0
    num_tokens: float = 0.0
    num_context: int = 0
    num_attended: float = 0.0

    def with_rows(self, other: Rows) -> Rows:
        """Both in one forward."""
        return Rows(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_context + other.num_context,
            self.num_attended + other.num_attended,
        )


NO_ROWS = Rows()


def chunk_rows(num_computed: int, num_tokens: float) -> Rows:
    """A chunk of n tokens of a prompt of which c = `num_computed` were read: `n * (c + n / 2)` attended.

    Earlier tokens are its context, as where forwards are measured (`StepPoint`); each row attends to them and
    to the rows of the chunk before it. All who predict, send or simulate chunks count by this: prompts are
    corrected by what calls that were sent took, and the correction is applied to those being planned.
    """
    return Rows(1, num_tokens, num_computed, num_tokens * (num_computed + num_tokens / 2))


class CallParts(NamedTuple):
    """Predicted seconds of a verify forward.

    Attributes:
        kind: under which name decoding is corrected.
        decoding_s: a forward of what decodes alone; 0 if nothing does.
        prompts_s: what prompts add to that.
        profile_s: the whole, as the profile without corrections says.
        profile_decoding_s: of that, what decodes alone.
        num_decoding: rows that decode.
    """

    kind: str
    decoding_s: float
    prompts_s: float
    profile_s: float
    profile_decoding_s: float
    num_decoding: float

    @property
    def seconds(self) -> float:
        """The whole."""
        return self.decoding_s + self.prompts_s
