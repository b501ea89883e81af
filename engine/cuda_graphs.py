"""Captured forwards: one launch for a whole forward of a shape met before, in place of hundreds.

A decoding forward of a small model is some ten kernels a layer, each done in less time than its launch takes
the host; a CUDA graph replays them all at once. A graph has fixed shapes and addresses, so a batch is padded
to a shape met before (`engine.padded_segments`) and copied into tensors that stay where they are. Padding
rows write to a slot of their own, which no request reads. Long prompts, and shapes that come once and that no
captured one holds, go the ordinary way.

On a CPU, where nothing can be captured, a replay computes the same again from the same tensors: so all but
the capture itself is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from engine.adapted_linear import adapters_of
from engine.capturable import CapturableRunner
from engine.captured_shapes import CAPTURE_AT, CapturedShapes
from engine.capturing import captured
from engine.device_rows import DeviceRows, all_rows
from engine.devices import overwrite
from engine.moving_rows import BeamShape, MovingRows
from engine.padded_segments import MOST_PROMPT_ROWS, MOST_TREE_ROWS, Shape, pad_rows, shape_of
from engine.rectangles import key_counts
from engine.runner import KeyTokens, ModelShape, Segment
from engine.static_attention import MOST_COLUMNS, MOST_READS, StaticAttention, has_workspace, static_attention
from engine.triton_attention import TritonAttention
from engine.windows import check_trees

Int32 = NDArray[np.int32]

#: Larger batches have enough work per launch.
MOST_ROWS = 512
#: Shapes captured, at most: each holds its tensors, and a capture takes about as long as ten forwards.
MOST_SHAPES = 256


class _Static:
    """The tensors of one shape, and its graph once captured.

    Attributes:
        shape: which.
        numbers: int64 [4 or 5, rows], all that the host says of the rows, in one transfer: tokens, positions,
            slots to write to, which rows are wanted, and where some may have one, their adapters.
        attention: what they attend to.
        graph: None before the first forward.
    """

    def __init__(self, shape: Shape, attend: Callable[[torch.Tensor], StaticAttention], device: torch.device):
        self.shape = shape
        self.numbers = torch.zeros(4 + shape.is_adapted, shape.num_rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, write = self.numbers[:3].unbind(0)
        self.adapters = self.numbers[4] if shape.is_adapted else None
        self.attention = attend(write)
        self.graph: torch.cuda.CUDAGraph | None = None


class GraphedRunner:
    """A runner whose small forwards are captured; also a `FeatureRunner` and a `DeviceRowsRunner`.

    With tensor parallelism all ranks capture at the same calls, for the same calls decide it. One of the
    runner's slots is its own: `num_slots` is one less.
    """

    def __init__(self, runner: CapturableRunner, *, capture_at: int = CAPTURE_AT) -> None:
        """Wrap `runner`, of whose slots the last is kept for padding; capture shapes met so often."""
        self._runner = runner
        self._scratch = runner.num_slots - 1
        self._captured = CapturedShapes[Shape, _Static](MOST_SHAPES, capture_at=capture_at)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # What forwards of all shapes leave: each is read before the next is begun, and what a graph keeps
        # for itself no other graph can use.
        self._logits = self._final = self._features = torch.empty(0, device=runner.device)
        self._pool = torch.cuda.graph_pool_handle() if runner.device.type == "cuda" else None

    @property
    def shape(self) -> ModelShape:
        """See `ModelRunner`."""
        return self._runner.shape

    @property
    def num_slots(self) -> int:
        """See `ModelRunner`."""
        return self._scratch

    @property
    def key_tokens(self) -> KeyTokens:
        """See `ModelRunner`."""
        return self._runner.key_tokens

    @property
    def shapes(self) -> list[Shape]:
        """Those that are replayed, in the order of their capture."""
        return self._captured.shapes

    @property
    def pads_rows(self) -> bool:
        """Whether requests have equally many rows in a shape."""
        return self._runner.attention.pads_rows

    @property
    def pads_keys(self) -> bool:
        """Whether shapes depend on how many keys requests have."""
        return self._runner.attention.pads_keys

    @property
    def device(self) -> torch.device:
        """See `DeviceRowsRunner`."""
        return self._runner.device

    @property
    def takes_trees(self) -> bool:
        """See `DeviceRowsRunner`."""
        return self._runner.takes_trees

    @property
    def moves_rows(self) -> bool:
        """Whether layers of beams can be captured, by `moving_rows` and the two after it."""
        runner = self._runner
        has_triton = runner.device.type == "cuda" and isinstance(runner.attention, TritonAttention)
        return has_triton and not runner.is_sharded

    def moving_rows(self, shape: BeamShape, tokens: torch.Tensor) -> MovingRows:
        """For layers of beams of a shape; `tokens` int64 [rows] is where they are found."""
        attention = self._runner.attention
        assert isinstance(attention, TritonAttention)
        longest = self._runner.shape.max_tokens
        return MovingRows(attention, shape, max_tokens=longest, spare=self._scratch, tokens=tokens)

    def compute_rows(self, rows: MovingRows) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of the layer the rows are at; may be captured."""
        return self._runner.compute(rows.tokens, rows.positions, rows.plan, None).logits.float()

    def captured(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what is launched with forwards of this runner, in the memory that they share."""
        return captured(compute, self._pool, self._graphs)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """See `ModelRunner`."""
        logits = self._replayed(segments, keep, max(_columns(segment) for segment in segments))
        return self._runner.forward(segments, keep) if logits is None else logits

    @torch.inference_mode()
    def capture(self, segments: Sequence[Segment]) -> None:
        """Forward a batch, and capture its shape if that is possible and there is room for one more.

        Raises:
            torch.cuda.OutOfMemoryError: if there is none after all; then this was the last capture.
        """
        keep = all_rows(segments)
        try:
            static = self._static_for(segments, keep, max(map(_columns, segments)), at_once=True)
            if static is not None:
                self._replay(static, segments, keep)
        except torch.cuda.OutOfMemoryError:
            self._captured.has_room = False
            raise

    @torch.inference_mode()
    def forward_rows(
        self, segments: Sequence[Segment], rows: DeviceRows, keep: Int32 | None = None
    ) -> torch.Tensor:
        """See `DeviceRowsRunner`."""
        keep = all_rows(segments) if keep is None else keep
        logits = self._replayed(segments, keep, 0 if rows.seen is None else rows.seen.shape[2], rows)
        return self._runner.forward_rows(segments, rows, keep) if logits is None else logits

    def _replayed(
        self, segments: Sequence[Segment], keep: Int32, columns: int, rows: DeviceRows | None = None
    ) -> torch.Tensor | None:
        """Logits of the rows `keep`; None if the batch is to go the ordinary way.

        So does one of a new shape that finds no memory. But not with tensor parallelism: the other ranks
        would wait for sums that this one has left out.
        """
        static: _Static | None = None
        try:
            is_device_masked = rows is not None and rows.seen is not None
            static = self._static_for(segments, keep, columns, is_device_masked=is_device_masked)
            return None if static is None else self._replay(static, segments, keep, rows)
        except torch.cuda.OutOfMemoryError:
            self._captured.has_room = False
            is_new = static is None or static.shape not in self._captured
            if not is_new or self._runner.is_sharded:
                raise
            return None

    def _replay(
        self, static: _Static, segments: Sequence[Segment], keep: Int32, rows: DeviceRows | None = None
    ) -> torch.Tensor:
        """Logits of the rows `keep`, by the graph of the batch's shape, captured now if it is new."""
        check_trees(segments, self._runner.shape.windows)
        padded = pad_rows(segments, static.shape, self._scratch)
        numbers = np.zeros(static.numbers.shape, dtype=np.int64)
        numbers[:3] = padded.tokens, padded.positions, padded.write
        numbers[3, : len(keep)] = padded.batch_rows[keep]
        if static.adapters is not None:
            numbers[4, padded.batch_rows] = adapters_of(segments)
        overwrite(static.numbers, numbers)
        batch_rows = static.numbers[3, : len(keep)]
        if rows is not None:
            static.tokens.index_copy_(0, batch_rows[: len(rows.tokens)], rows.tokens)
        key_tokens = static.attention.fill(segments, rows)
        self._run(static)
        # Not before: a shape whose capture has failed is not one that others may be padded to.
        self._captured.keep(static.shape, static)
        num_rows = len(keep)
        if np.array_equal(numbers[3, :num_rows], np.arange(num_rows)):
            # Where they lie, until the next forward.
            logits, final = self._logits[:num_rows], self._final[:num_rows]
        else:
            logits = self._logits.index_select(0, batch_rows)
            final = self._final.index_select(0, batch_rows)
        self._runner.note(final, self._features, padded.batch_rows.astype(np.int32), key_tokens)
        return logits

    def _static_for(
        self,
        segments: Sequence[Segment],
        keep: Int32,
        columns: int,
        *,
        is_device_masked: bool = False,
        at_once: bool = False,
    ) -> _Static | None:
        """Tensors of a shape that holds the batch; None if it is to go the ordinary way.

        `columns` is the most keys that any of its masks has, which the device has made if `is_device_masked`;
        `at_once` if its own shape is to be captured now.
        """
        attention = self._runner.attention
        if len(keep) == 0 or columns > MOST_COLUMNS:
            return None
        counts = [len(segment.slots) for segment in segments]
        is_long = attention.pads_rows or sum(counts) > MOST_PROMPT_ROWS or is_device_masked
        if is_long and max(counts) > MOST_TREE_ROWS:
            return None
        if not attention.pads_keys and sum(key_counts(segments)) > MOST_READS * attention.num_slots:
            return None
        shape = shape_of(segments, with_keys=attention.pads_keys, is_rectangle=attention.pads_rows)
        found = self._captured[shape]
        if found is not None or shape.num_rows > MOST_ROWS:
            return found
        runner = self._runner
        is_due = self._captured.is_due(shape, at_once=at_once)
        if not is_due or not has_workspace(attention, shape, runner.heads):
            return self._captured.serving(shape)
        if not self.shapes:
            self._logits = torch.zeros(MOST_ROWS, runner.shape.vocab_size, device=runner.device)
            self._final = runner.no_final.new_zeros(MOST_ROWS, runner.no_final.shape[1])
            self._features = runner.no_features.new_zeros(MOST_ROWS, runner.no_features.shape[1])
        attend = partial(
            static_attention,
            attention,
            shape,
            self._scratch,
            q_heads=runner.heads,
            scale=runner.scale,
            max_tokens=runner.shape.max_tokens,
        )
        return _Static(shape, attend, runner.device)

    def _run(self, static: _Static) -> None:
        """Compute what its tensors say, by its graph, captured now if there is none."""
        if self._runner.device.type != "cuda":
            self._compute(static)
            return
        if static.graph is None:
            self._capture(static)
        assert static.graph is not None
        static.graph.replay()

    def _compute(self, static: _Static) -> None:
        plan = static.attention.plan
        computed = self._runner.compute(static.tokens, static.positions, plan, None, static.adapters)
        logits, final, features = computed
        self._logits[: len(logits)].copy_(logits)  # widens them, too
        self._final[: len(final)].copy_(final)
        if features.numel():
            self._features[: len(features)].copy_(features)

    def _capture(self, static: _Static) -> None:
        def forget() -> None:
            for group in static.attention.plan.groups:
                group.folded.clear()  # else the graph would read what the rehearsal derived

        static.graph = captured(lambda: self._compute(static), self._pool, self._graphs, forget)

    @property
    def hidden_scale(self) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._runner.hidden_scale

    def last_hidden(self, rows: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._runner.last_hidden(rows)

    def embed(self, tokens: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._runner.embed(tokens)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._runner.project(hidden)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureRunner`."""
        return self._runner.feature_layers

    def features(self, rows: Int32) -> torch.Tensor:
        """See `FeatureRunner`."""
        return self._runner.features(rows)

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `FeatureRunner`."""
        return self._runner.embed_ids(tokens)


def _columns(segment: Segment) -> int:
    return 0 if segment.visible is None else segment.visible.shape[1]
