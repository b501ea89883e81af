"""Which cell a request goes to, chosen by a front end: objective first, then prefix, then load; pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cluster.batching.background import comes_behind
from cluster.members import Member
from cluster.stream_messages import Submit

#: Prompt tokens per remembered block; prefixes are compared in whole blocks.
BLOCK_TOKENS = 16
#: Blocks of a prompt that are looked at: beyond them prompts count as different.
MAX_BLOCKS = 256
#: Blocks remembered per cell, unless its KV pool holds fewer.
MAX_REMEMBERED = 32_768

#: Of requests, in what cells report.
_COUNTS = ("running", "waiting", "background_running", "background_waiting")
#: By how much predicted misses may differ, as a share of the objective, to count as the same.
_ALIKE_MISS = 0.01
# By how much more than twice the shortest the longest queue must take, to be worth the moving.
_UNEVEN_S = 0.5


@dataclass(frozen=True, slots=True)
class CellLoad:
    """A cell as the router sees it; times in seconds.

    Attributes:
        cell: its id.
        requests: running, queued, and sent there since it last told; those of the background, too.
        queue_s: predicted delay until a request that comes now begins its prefill.
        background_queue_s: the same of one in the background, before which all others are.
        prefill_s_per_token: predicted for a token of the prompt.
        step_s: one iteration.
        tpot_s: predicted per output token with one request more.
        kv_slots: tokens its KV pool holds; 0 if unknown.
    """

    cell: str
    requests: float = 0.0
    queue_s: float = 0.0
    background_queue_s: float = 0.0
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    tpot_s: float = 0.0
    kv_slots: float = 0.0

    @classmethod
    def of(cls, member: Member, sent: int = 0, sent_tokens: int = 0, sent_behind: int = 0) -> CellLoad:
        """What a cell reported, with `sent` requests that it may not have counted.

        It has `sent_tokens` tokens of them to read, of which `sent_behind` are the background's.
        """
        stats = member.stats
        per_token_s, queue_s = stats.get("prefill_s_per_token", 0.0), stats.get("queue_s", 0.0)
        return cls(
            cell=member.id,
            requests=sum([stats.get(name, 0.0) for name in _COUNTS]) + sent,
            queue_s=queue_s + (sent_tokens - sent_behind) * per_token_s,
            background_queue_s=stats.get("background_queue_s", queue_s) + sent_tokens * per_token_s,
            prefill_s_per_token=per_token_s,
            step_s=stats.get("step_s", 0.0),
            tpot_s=stats.get("tpot_s", 0.0),
            kv_slots=stats.get("kv_slots", 0.0),
        )

    def delay_s(self, *, is_behind: bool) -> float:
        """Until a request that comes now, in the background or not, begins its prefill."""
        return self.background_queue_s if is_behind else self.queue_s


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What is predicted for the request on a cell: miss of its objectives (0: none), time to first token."""

    load: CellLoad
    miss: float
    delay_s: float


class CellRouter:
    """Chooses cells, and remembers which prefixes each has seen.

    Order of what counts: the least predicted miss of the request's objectives; then the least predicted time
    to its first token, in which a prefix that the cell holds counts with the prefill it saves. Cells that
    differ by less than a step are alike: of two of them, drawn by the request's id, the one with fewer
    requests is taken ("power of two choices", Mitzenmacher 2001), so that front ends which all look at the
    same, somewhat old numbers do not all choose the same cell.
    """

    def __init__(self) -> None:
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def choose(self, request: Submit, cells: Sequence[CellLoad]) -> str:
        """The id of one of `cells`.

        Raises:
            ValueError: without cells.
        """
        if not cells:
            raise ValueError("there is no cell to choose from")
        if len(cells) == 1:
            return cells[0].cell
        blocks = list(block_hashes(request))
        outlooks = [self._outlook(request, blocks, load) for load in cells]
        least_miss = min(outlook.miss for outlook in outlooks)
        outlooks = [outlook for outlook in outlooks if outlook.miss <= least_miss + _ALIKE_MISS]
        best = min(outlooks, key=lambda outlook: outlook.delay_s)
        alike = [outlook for outlook in outlooks if outlook.delay_s <= best.delay_s + best.load.step_s]
        drawn = sorted(alike, key=lambda outlook: _draw(request.request_id, outlook.load.cell))[:2]
        return min(drawn, key=lambda outlook: outlook.load.requests).load.cell

    def placed(self, request: Submit, load: CellLoad) -> int:
        """The request went there: its prompt will be in the cell's prefix cache; tokens that are already."""
        seen = self._seen.setdefault(load.cell, OrderedDict())
        blocks = list(block_hashes(request))
        num_shared = self._num_shared(blocks, load.cell)
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        most = MAX_REMEMBERED
        if load.kv_slots:
            most = min(most, int(load.kv_slots) // BLOCK_TOKENS)
        while len(seen) > most:
            seen.popitem(last=False)
        return num_shared

    def forget(self, cell: str) -> None:
        """The cell is gone, and its prefix cache with it."""
        self._seen.pop(cell, None)

    def num_shared(self, request: Submit, cell: str) -> int:
        """Tokens of the request's prompt that the cell has seen before, from the first on."""
        return self._num_shared(list(block_hashes(request)), cell)

    @property
    def num_remembered(self) -> int:
        """Blocks remembered in all."""
        return sum(map(len, self._seen.values()))

    def _num_shared(self, blocks: Sequence[int], cell: str) -> int:
        seen: Mapping[int, None] = self._seen.get(cell, {})
        shared = 0
        for block in blocks:
            if block not in seen:
                break
            shared += BLOCK_TOKENS
        return shared

    def _outlook(self, request: Submit, blocks: Sequence[int], load: CellLoad) -> _Outlook:
        to_read = len(request.prompt) + len(request.output) - self._num_shared(blocks, load.cell)
        ttft_s = load.delay_s(is_behind=comes_behind(request)) + to_read * load.prefill_s_per_token
        objective, miss = request.objective, 0.0
        if objective.ttft_ms is not None:
            miss += _miss(ttft_s, objective.ttft_ms)
        if objective.tpot_ms is not None:
            miss += _miss(load.tpot_s, objective.tpot_ms)
        if objective.e2e_ms is not None:
            left = request.sampling.max_tokens - len(request.output) - 1
            miss += _miss(ttft_s + max(0, left) * load.tpot_s, objective.e2e_ms)
        return _Outlook(load, miss, ttft_s)


def uneven(cells: Sequence[CellLoad], *, is_behind: bool) -> tuple[str, float]:
    """The cell with the longest queue, and what share of that is to leave, 0 where others are much alike."""
    if len(cells) < 2:
        return "", 0.0
    delays_s = {load.cell: load.delay_s(is_behind=is_behind) for load in cells}
    longest = max(delays_s, key=delays_s.__getitem__)
    longest_s, shortest_s = delays_s[longest], min(delays_s.values())
    if longest_s < _UNEVEN_S + 2 * shortest_s:
        return longest, 0.0
    return longest, (longest_s - shortest_s) / longest_s / len(cells)


def block_hashes(request: Submit) -> Iterator[int]:
    """A number for each whole block of the prompt, which tells it with all that comes before it.

    Requests of different adapters or salts share no keys and values, and no numbers.
    """
    prompt = request.prompt
    before = hash((request.adapter, request.cache_salt)) if request.adapter or request.cache_salt else 0
    for start in range(0, min(len(prompt) // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        before = hash((before, *prompt[start : start + BLOCK_TOKENS]))
        yield before


def _miss(seconds: float, objective_ms: float) -> float:
    """By what share of it an objective is missed; 0 if it is met."""
    return max(0.0, 1e3 * seconds / objective_ms - 1.0)


def _draw(request_id: str, cell: str) -> bytes:
    """A draw that depends on request and cell alone, and is alike in every process."""
    return blake2b(f"{request_id}\0{cell}".encode(), digest_size=8).digest()
