"""What drafters without a model have in common: what they hold of each request, and the frame of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Generic, TypeVar

from drafters.heard import Heard, fit_plan, news
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree

# Most tokens of opened requests that a call takes in, and that a piece of idle work does.
MOST_READ = 4096
PIECE = 256

HeldT = TypeVar("HeldT", bound=Heard)
#: What one item of a call is drafted from, until all items are read.
BegunT = TypeVar("BegunT")


@dataclass(slots=True)
class _Unread:
    """Tokens of a request that are still to be taken in, and the scores of those taken in between calls."""

    tokens: list[int]
    num_scored: int = 0
    num_agreed: int = 0


class ModellessDrafter(ABC, Generic[HeldT, BegunT]):
    """Takes in what each item says of its request, then drafts for those it knows.

    A long prompt is taken in piece by piece, in several calls and between them; until then its request has no
    drafts. But a prefetch is done with its call, for it is answered with the scores.

    Attributes:
        reads_in_pieces: whether taking in a token takes long enough for that.
    """

    reads_in_pieces: ClassVar[bool] = True

    def __init__(self, capabilities: Capabilities) -> None:
        """A drafter that knows no request yet."""
        self._capabilities = capabilities
        self._held: dict[str, HeldT] = {}
        self._unread: dict[str, _Unread] = {}

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        return self._capabilities

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call; a request not held at the position named goes to `unknown`."""
        started = perf_counter()
        ended = [self._held.pop(request_id) for request_id in call.release if request_id in self._held]
        self._released(ended)
        for request_id in call.release:
            self._unread.pop(request_id, None)
        begun: list[BegunT] = []
        reading: list[Draft] = []
        unknown: list[str] = []
        room = MOST_READ
        for item in call.items:
            held, unread = self._held.get(item.request_id), self._unread.pop(item.request_id, None)
            change = news(held, item) if unread is None or item.spec else _news(held, unread, item)
            if change is not None and item.spec is not None:
                held, unread = self._open(item.spec, held), _Unread([])
                self._held[item.request_id] = held
            if change is None or held is None:
                unknown.append(item.request_id)
                continue
            kept, new = change
            if unread is not None:
                most = room if self.reads_in_pieces and item.plan.depth else len(new)
                unread.tokens, new = new[most:], new[:most]
                room = max(0, room - len(new))
            num_scored, num_agreed = self._read(held, kept, new)
            if unread is not None:
                num_scored, num_agreed = num_scored + unread.num_scored, num_agreed + unread.num_agreed
            if unread is not None and unread.tokens:
                self._unread[item.request_id] = _Unread(unread.tokens)
                root = TokenTree.root_only(unread.tokens[-1])
                reading.append(
                    Draft(request_id=item.request_id, tree=root, num_scored=num_scored, num_agreed=num_agreed)
                )
                continue
            plan = fit_plan(item.plan, held, self._capabilities)
            begun.append(self._begin(item, held, plan, num_scored, num_agreed))
        drafts = [*self._drafts(call, begun), *reading]
        elsewhere_s = self._seconds_elsewhere(call)
        return DraftResult(
            call_id=call.call_id,
            drafts=drafts,
            unknown=unknown,
            seconds=perf_counter() - started + elsewhere_s,
            forward_seconds=elsewhere_s,
            num_forwards=1 if elsewhere_s else 0,
        )

    def draft_ahead(self) -> bool:
        """Take in some of what was left unread; drafting costs next to nothing."""
        for request_id, unread in self._unread.items():
            if unread.tokens:
                held, piece = self._held[request_id], unread.tokens[:PIECE]
                del unread.tokens[:PIECE]
                num_scored, num_agreed = self._read(held, len(held.tokens), piece)
                unread.num_scored += num_scored
                unread.num_agreed += num_agreed
                return True
        return False

    @abstractmethod
    def _open(self, spec: RequestSpec, before: HeldT | None) -> HeldT:
        """A request with no tokens read yet; `before` is what was held of it, if it is opened again."""

    @abstractmethod
    def _read(self, held: HeldT, kept: int, new: list[int]) -> tuple[int, int]:
        """Take in `new` tokens after the first `kept`; how many were scored, and how many agreed."""

    @abstractmethod
    def _begin(
        self, item: DraftItem, held: HeldT, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> BegunT:
        """Draft for one item, or prepare it; its request has been read, later items' have not."""

    @abstractmethod
    def _drafts(self, call: DraftCall, begun: Sequence[BegunT]) -> list[Draft]:
        """The drafts of all items that were begun, in their order."""

    def _released(self, ended: Sequence[HeldT]) -> None:
        """These requests have ended; called once in every call, before its items are read."""

    def _seconds_elsewhere(self, call: DraftCall) -> float:
        """Seconds spent for this call in another process, which are the drafter's."""
        return 0.0


def _news(held: Heard | None, unread: _Unread, item: DraftItem) -> tuple[int, list[int]] | None:
    """As `news`, of a request some of which is unread; None also if tokens are sent again."""
    if held is None or item.start != len(held.tokens) + len(unread.tokens):
        return None
    return len(held.tokens), [*unread.tokens, *item.tokens.tolist()]
