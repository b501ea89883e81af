"""Drafting with EAGLE-3's layer beside the target, in the step that decides the tokens drafted after.

Of every forward the layer reads the rows that are kept, whoever drafts for their requests
(`verifier.eagle_reading`): its keys and values lie in the target's slots, so that prefixes are shared,
requests preempted and moved as ever, and any request may be drafted for from one step to the next. For those
that asked it then grows a beam, all requests' rows together. Nothing in that waits for the device until the
beams are done; what is drafted lies in slots of its own, which the next step overwrites.

A slot's key depends on the token that came after. Two requests that share a prefix and go on differently
share the first one's key at its end: a worse draft at worst (vLLM computes the last block anew instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from engine.best_tokens import best_on_host, highest_log_probabilities
from engine.captured_shapes import CAPTURE_AT
from engine.devices import Stopwatch, Transfer, index_on
from engine.eagle import EagleLayer, FeatureRunner
from engine.proposals import Proposals
from engine.runner import Segment
from engine.sampling import Row, processed_logits
from engine.sampling_params import RequestSpec, SamplingParams
from engine.stop_rules import StopRule
from engine.triton_attention import TritonAttention
from engine.warm_up import new_requests, usual_batches
from verifier.eagle_beams import Beams, Growth
from verifier.eagle_ending import Ending, Endings
from verifier.eagle_forwards import DraftSlots, Forwards, LaidOutForwards, Roots
from verifier.eagle_graphs import EagleGraphs
from verifier.eagle_reading import EagleReading
from verifier.eagle_reading_graphs import MOST_REQUESTS, MOST_ROWS, LastRows, ReadingGraphs
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState

Int32 = NDArray[np.int32]

#: Slots for drafted tokens, of all requests together: beyond, drafts are cut short.
DRAFT_SLOTS = 4096
_WARM_ROWS, _WARM_WIDTHS, _WARM_DEPTH = (1, 2, 3, 4), (1, 2, 4), 3
# Of layers that are captured then.
_CAPTURED_ROWS = (1, 2, 4, 8, 16, 32)
# For more requests than these beams are chains. Where the first drafts of a few had to be captured, they took
# several times what drafts take, and their requests were soon given to drafters worth half as much.
_MOST_WIDE = 4


class EagleDrafts:
    """Reads and drafts; a `ReadingProposer`.

    Attributes:
        device: where.
    """

    def __init__(
        self, layer: EagleLayer, runner: FeatureRunner, max_tokens: int, *, graphs: bool = True
    ) -> None:
        """Draft with `layer` on the target of `runner`, whose sequences have at most `max_tokens`.

        With `graphs` the layers of beams are captured, where their attention is in Triton.
        """
        self._layer = layer
        self._runner = runner
        self.device = runner.device
        self._last_position = max_tokens - 1
        self._slots = DraftSlots(runner.num_slots, layer.attention.num_slots - runner.num_slots)
        self._graphs: EagleGraphs | None = None
        self._reading_graphs: ReadingGraphs | None = None
        if graphs and isinstance(layer.attention, TritonAttention) and self.device.type == "cuda":
            self._graphs = EagleGraphs(layer, self._slots, max_tokens, runner.shape.vocab_size)
            self._reading_graphs = ReadingGraphs(layer, self._slots.spare, max_tokens)
        self._endings = Endings(self.device)
        self._reading = EagleReading(layer, runner, self._reading_graphs)
        # What was read last, and what the layer made of it.
        self._reads: Sequence[Read] = ()
        self._last = LastRows(torch.empty(0, device=self.device), None)

    @torch.inference_mode()
    def hold(self, num_rows: int) -> torch.Tensor:
        """See `ReadingProposer`."""
        return self._runner.features(np.arange(num_rows, dtype=np.int32))

    @torch.inference_mode()
    def read(self, reads: Sequence[Read], *, is_asked: bool, held: torch.Tensor | None = None) -> Stopwatch:
        """See `ReadingProposer`."""
        watch = Stopwatch(self.device)
        if is_asked:
            self._reads, self._last = self._reading.read(reads, held)
        else:
            self._reading.put_off(reads, held)
        watch.stop()
        return watch

    @torch.inference_mode()
    def release(self, request_id: str) -> None:
        """See `ReadingProposer`."""
        self._reading.release(request_id)

    def forget_all(self) -> None:
        """See `ReadingProposer`."""
        self._reading.forget_all()

    @torch.inference_mode()
    def propose(
        self, asking: Sequence[Asking], rule: StopRule | None = None
    ) -> Callable[[], list[Proposals]]:
        """See `Proposer`; `num_heads` are layers of the beam, `num_candidates` its width."""
        if not asking:
            return list
        watch = Stopwatch(self.device)  # behind what was read, which is not the drafts' time
        n, width = len(asking), max(one.num_candidates for one in asking)
        depth = max(one.num_heads or 1 for one in asking)
        depth = min(depth, 1 + self._slots.most_layers(n, width))
        numbers = self._grow(asking, depth, width, rule)
        watch.stop()
        transfer = Transfer(numbers)
        # Before the tokens are committed.
        positions = [len(one.state.tokens) + len(one.tokens) for one in asking]
        depths = [one.num_heads for one in asking]

        def found() -> list[Proposals]:
            token, parent, logp = transfer.wait().numpy()
            share = watch.seconds() / n
            token, parent, logp = token.astype(np.int32), parent.astype(np.int32), logp.astype(np.float32)
            return [
                Proposals(
                    position=position,
                    token=token[i, :layers],
                    logp=logp[i, :layers],
                    parent=parent[i, :layers],
                    seconds=share,
                )
                for i, (position, layers) in enumerate(zip(positions, depths, strict=True))
            ]

        return found

    @torch.inference_mode()
    def warm_up(self) -> None:
        """First drafts of small batches, whose cost no request should pay, and captures; before the first
        request."""
        states = []
        # Greedy, sampled, and of those whose tokens are not chosen by what is captured.
        for temperature, presence_penalty in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.5)):
            params = SamplingParams(
                temperature=temperature, presence_penalty=presence_penalty, max_tokens=1 << 20, seed=0
            )
            spec = RequestSpec(request_id="warm-up", tokens=[0], prompt_len=1, sampling=params)
            states.append(RequestState(spec, self._runner.shape))
        zero = np.zeros(1, dtype=np.int32)
        rows = _WARM_ROWS if self._graphs is None else _CAPTURED_ROWS
        shapes = [(n, width) for n, width in product(rows, _WARM_WIDTHS) if width == 1 or n <= _MOST_WIDE]
        if self._reading_graphs is not None:  # first: drafts after a captured read are captured by it
            self._runner.forward([Segment(zero, zero, zero, zero[:0])], zero)
            self._capture_reads(self._reading_graphs)
        for n, width in shapes:
            numbers = np.arange(n, dtype=np.int32)
            self._runner.forward(
                [Segment(zero, zero, numbers[i : i + 1], zero[:0]) for i in range(n)], numbers
            )
            slots = [numbers[i : i + 1] for i in range(n)]
            self.read(
                [Read(str(i), one, zero, zero, one, zero[:0]) for i, one in enumerate(slots)], is_asked=True
            )
            for state in states if self._graphs is not None else states[:1]:
                for _ in range(1 if self._graphs is None else CAPTURE_AT):
                    self.propose([Asking(state, [0], i, width, _WARM_DEPTH, i) for i in range(n)])()

    def _capture_reads(self, graphs: ReadingGraphs) -> None:
        """Of what usual steps keep: few rows of each request."""
        for counts in usual_batches(is_rectangle=False):
            rows = sum(counts)
            if rows <= min(MOST_ROWS, self._runner.num_slots) and len(counts) <= MOST_REQUESTS:
                features = self._runner.features(np.zeros(rows, dtype=np.int32))
                graphs.read(new_requests(counts), [features], at_once=True)

    def _grow(self, asking: Sequence[Asking], depth: int, width: int, rule: StopRule | None) -> torch.Tensor:
        """float64 [3, requests, layers, width], tokens, parents and log-probabilities of all beams."""
        has_rankings = not all(one.state.params.ranks_by_logits for one in asking)
        roots = self._roots(asking, depth, width, has_rankings=has_rankings)
        ending = Ending(asking, depth, self.device, rule, self._endings) if depth > 1 else None
        if ending is not None and self._graphs is not None:
            growing = self._graphs.growing(roots, asking)
            if growing is not None:
                newest = growing.newest()
                while growing.num_layers < depth and ending.another(newest):
                    newest = growing.next()
                return growing.found()
        rankings = _rankings(asking, depth) if has_rankings else None
        growth, width = Growth.of(asking, self.device), roots.width
        logp, token = self._best(roots.scores, None if rankings is None else rankings[0], width)
        layers = [growth.first(logp, token)]
        if ending is None:
            return _stacked(layers)
        forwards = self._forwards(roots)
        for below in range(1, depth):
            layer = layers[-1]
            if not ending.another(layer):
                break
            ranked = None if rankings is None else [row for row in rankings[below] for _ in range(width)]
            logp, token = self._best(forwards.next(layer), ranked, width)
            layers.append(growth.next(layer, logp, token))
        return _stacked(layers)

    def _roots(self, asking: Sequence[Asking], depth: int, width: int, *, has_rankings: bool) -> Roots:
        """What was read last of these requests."""
        hidden, scores, held = self._last
        which = [one.read for one in asking]
        if which == list(range(len(which))):  # the first ones: prompts, of which some do not ask, come last
            hidden, scores = hidden[: len(which)], None if scores is None else scores[: len(which)]
        else:
            rows = index_on(np.array(which), self.device)
            hidden, held = hidden.index_select(0, rows), None
            scores = None if scores is None else scores.index_select(0, rows)
        if scores is None:
            scores = self._layer.logits(hidden)
        # A vocabulary may be smaller; the target ranks tokens that are not drafted, too.
        num_tokens = self._runner.shape.vocab_size if has_rankings else scores.shape[1]
        reads = [self._reads[read] for read in which]
        return Roots(reads, hidden, scores, held, min(width, num_tokens), depth, self._last_position)

    def _forwards(self, roots: Roots) -> Forwards:
        found = None if self._graphs is None else self._graphs.forwards(roots)
        return LaidOutForwards(self._layer, roots, self._slots) if found is None else found

    def _best(
        self, scores: torch.Tensor, rankings: Sequence[Row] | None, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` best next tokens of each row of logits, which are overwritten: float32 [rows, k],
        descending, and int64, the tokens.

        Ranked as the target would rank them there (see `verifier.proposing.propose`), if `rankings` says how.
        """
        token_of = self._layer.weights.token_of
        if rankings is not None:
            if token_of is not None:
                logits = scores
                scores = logits.new_full((len(logits), self._runner.shape.vocab_size), -torch.inf)
                scores[:, token_of] = logits
            # A constant per row makes no difference to a log-softmax.
            may_wait = self.device.type == "cpu"
            scores = processed_logits(scores, rankings, perturbed=True, may_wait=may_wait)
            token_of = None
        if scores.device.type == "cpu":
            best, found = best_on_host(scores.log_softmax(-1).numpy(), min(k, scores.shape[1]))
            values, tokens = (torch.from_numpy(one).to(scores.device) for one in (best, found))
        else:
            values, tokens = highest_log_probabilities(scores, k)
        return values, tokens if token_of is None else token_of[tokens]


def _stacked(layers: Sequence[Beams]) -> torch.Tensor:
    """float64 [3, requests, layers, width], in which token ids and places are exact."""
    of_layers = [
        torch.stack(parts, 1)
        for parts in (
            [one.token for one in layers],
            [one.parent for one in layers],
            [one.logp for one in layers],
        )
    ]
    return torch.stack([part.double() for part in of_layers])


def _rankings(asking: Sequence[Asking], depth: int) -> list[list[Row]]:
    """Per layer and request what the target's decision there depends on."""
    ahead = [one.state.rows_ahead(one.tokens, depth) for one in asking]
    return [list(rows) for rows in zip(*ahead, strict=True)]
