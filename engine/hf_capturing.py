"""Whether the forwards of a Transformers model can be captured, which is up to the model's code."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from engine.capturable import CapturableRunner
from engine.flashinfer_attention import FlashInferAttention
from engine.runner import Segment

# Rows of the forward that is tried.
_ROWS = 2


@torch.inference_mode()
def why_not_captured(runner: CapturableRunner) -> str | None:
    """What about a runner on a GPU keeps its forwards from being captured; None if nothing.

    One is computed on slots that hold nothing yet, with waits for the device forbidden: models that choose
    experts on the host wait, and those whose rotary embeddings depend on the longest sequence.
    """
    if runner.is_sharded:
        return "several ranks share it"
    if runner.shape.windows and not runner.attention.scores_by_layer:
        return f"layers see windows of {runner.shape.windows[0]} tokens, which are planned layer by layer"
    if isinstance(runner.attention, FlashInferAttention):
        return "attention `flashinfer` plans captured forwards for one number of heads and scale"
    numbers = np.arange(_ROWS, dtype=np.int32)
    plan = runner.attention.plan([Segment(numbers, numbers, numbers, numbers[:0])])
    rows = torch.arange(_ROWS, device=runner.device)
    # Once as ever: what is made at the first forward is not made again.
    logits = runner.compute(rows, rows, plan, None).logits
    if logits.shape[1] != runner.shape.vocab_size:
        return f"its logits are of {logits.shape[1]} tokens, and its vocabulary has {runner.shape.vocab_size}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.compute(rows, rows, plan, None)
        except RuntimeError as error:
            return f"its forward waits for the device: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return None
