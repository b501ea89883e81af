"""Which layers of draft calls are captured, and when."""

from __future__ import annotations

import logging
import time
from itertools import product

import torch

from drafters.captured_layers import CapturedLayers, LayerShape, is_captured
from drafters.device_layers import BeamCall
from engine.captured_shapes import CAPTURE_AT, CapturedShapes
from engine.cuda_graphs import GraphedRunner
from engine.moving_rows import BeamShape
from engine.padded_segments import power_of_two

_log = logging.getLogger(__name__)

#: Rows of a captured layer, over all requests.
MOST_ROWS = 256
#: Shapes captured, at most.
MOST_SHAPES = 48
#: Beams of two and three rows are computed as beams of so many, and of so many next tokens all are kept.
LEAST_WIDTH = 4
#: Beams that are captured before the first request.
USUAL_REQUESTS, USUAL_WIDTHS = (1, 2, 4, 8, 16, 32), (1, LEAST_WIDTH)


class LayerGraphs:
    """The captured layers of a drafter."""

    def __init__(self, runner: GraphedRunner) -> None:
        """None yet; the runner `moves_rows`."""
        self._runner = runner
        self._captured = CapturedShapes[LayerShape, CapturedLayers](MOST_SHAPES, capture_at=CAPTURE_AT)

    @property
    def shapes(self) -> list[LayerShape]:
        """Those that are captured."""
        return self._captured.shapes

    def num_choices(self, wanted: int) -> int:
        """How many next tokens are kept of each row where at least so many are wanted."""
        return power_of_two(max(wanted, LEAST_WIDTH))

    def layers(self, call: BeamCall) -> CapturedLayers | None:
        """Of the beams of `call`; None if their layers are to be laid out."""
        growths = call.growths
        width = max(growth.width for growth in growths)
        shape = LayerShape(
            BeamShape(power_of_two(len(growths)), _rounded(width)),
            call.num_choices,
            any(not growth.job.held.is_plain for growth in growths),
        )
        if not self._is_possible(shape) or not all(map(is_captured, growths)):
            return None
        found = self._captured[shape]
        if found is None and self._captured.is_due(shape):
            found = self._capture(shape)
        if found is None:
            found = self._captured.serving(shape)
        return found if found is not None and found.begin(call) else None

    def capture_usual(self) -> None:
        """Capture the layers that most calls need, the largest first; before the first request.

        Where memory runs out, smaller ones may yet find room.
        """
        began = time.perf_counter()
        for requests, width, is_sampled in product(
            reversed(USUAL_REQUESTS), reversed(USUAL_WIDTHS), (False, True)
        ):
            shape = LayerShape(BeamShape(requests, width), self.num_choices(width), is_sampled)
            if self._is_possible(shape) and shape not in self._captured:
                self._captured.has_room = self._capture(shape) is not None
        seconds = time.perf_counter() - began
        _log.info("captured layers of %d usual drafts, %.1f s", len(self.shapes), seconds)

    def _is_possible(self, shape: LayerShape) -> bool:
        return shape.num_rows <= MOST_ROWS and shape.num_choices <= self._runner.shape.vocab_size

    @torch.inference_mode()
    def _capture(self, shape: LayerShape) -> CapturedLayers | None:
        """The layers of a new shape; None if memory runs out, and then there are no more."""
        try:
            made = CapturedLayers(self._runner, shape)
            made.graph = self._runner.captured(made.compute)
        except torch.cuda.OutOfMemoryError:
            self._captured.has_room = False
            _log.warning("memory is left for captured layers of %d drafts only", len(self.shapes))
            return None
        self._captured.keep(shape, made)
        return made


def _rounded(width: int) -> int:
    return 1 if width == 1 else max(LEAST_WIDTH, power_of_two(width))
