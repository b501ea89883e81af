"""Decoding heads beside a target: what comes after the next token, from the hidden state that decided it.

Medusa (Cai et al. 2024, arXiv 2401.10774): head i is a residual block on the last hidden state, followed by
the output projection, and predicts the token i places after the next one. Two things differ there. All heads
share the target's own output projection, so that a head is one square matrix. And when heads are evaluated
the next token has been decided already, so its embedding is added to the block's input: the heads need not
guess what is known. (Hydra, Ankner et al. 2024, arXiv 2402.05109, goes on to let every head see the tokens
drafted before it, which takes as many evaluations as there are heads.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.heads_config import (
    CONFIG,
    WEIGHTS,
    HeadsDescription,
    UnsuitableHeads,
    check_target,
    read_description,
)
from engine.linear import Linear
from engine.runner import ModelRunner

Int32 = NDArray[np.int32]

# A final norm that scales some dimension by less than this hides it from the heads.
_LEAST_SCALE = 1e-4
_WARM_ROWS = 16


@runtime_checkable
class HiddenStateRunner(ModelRunner, Protocol):
    """A runner that also shows what its output projection works on."""

    @property
    def hidden_scale(self) -> torch.Tensor:
        """float [hidden]: `last_hidden` times it is the last hidden state, after the final norm."""
        ...

    def last_hidden(self, rows: Int32) -> torch.Tensor:
        """[rows, hidden], inputs of the output projection in the latest forward; rows among those kept."""
        ...

    def embed(self, tokens: Int32) -> torch.Tensor:
        """[tokens, hidden], input embeddings."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab], the output projection of [rows, hidden] in the scale of `last_hidden`."""
        ...


class DecodingHeads:
    """The heads of one target, evaluated on the hidden states its runner left from the latest forward.

    With tensor parallelism every rank holds all heads, and all ranks make the same calls.
    """

    def __init__(self, runner: ModelRunner, weight: torch.Tensor, *, last_token_scale: float = 0.0) -> None:
        """Heads as trained on Transformers' hidden states.

        Args:
            runner: of the target.
            weight: float [heads, hidden, hidden].
            last_token_scale: what the last token's embedding counts for in the input.

        Raises:
            UnsuitableHeads: if the runner does not show its hidden states, or they are of another size.
        """
        if not isinstance(runner, HiddenStateRunner):
            raise UnsuitableHeads(f"{type(runner).__name__} does not show the hidden states that heads read")
        scale = runner.hidden_scale.float()
        self.num_heads, width = weight.shape[:2]
        if weight.shape[1:] != (len(scale), len(scale)):
            raise UnsuitableHeads(f"heads of width {width}; the target's hidden states have {len(scale)}")
        if float(scale.abs().min()) < _LEAST_SCALE * float(scale.abs().max()):
            raise UnsuitableHeads("the target's final norm hides dimensions; heads need `runner: hf` here")
        self._runner = runner
        self._last_token_scale = last_token_scale
        dtype = runner.embed(np.zeros(1, dtype=np.int32)).dtype
        self._scale = scale.to(dtype)
        self._unscale = (1.0 / scale).to(dtype)
        self._block = Linear(weight.to(device=scale.device, dtype=dtype).flatten(0, 1))

    @torch.inference_mode()
    def logits(self, rows: Int32, last_tokens: Int32, num_heads: int | None = None) -> torch.Tensor:
        """Logits of the first `num_heads` heads, of all if None: float32 [n, heads, vocab].

        Args:
            rows: int32 [n], among the rows kept in the latest forward, that decided a last token each.
            last_tokens: int32 [n], those tokens.
            num_heads: how many heads are wanted.
        """
        return self._logits(self._runner.last_hidden(rows), last_tokens, num_heads or self.num_heads)

    def _logits(self, hidden: torch.Tensor, last_tokens: Int32, num_heads: int) -> torch.Tensor:
        n, width = hidden.shape
        x = hidden * self._scale
        if self._last_token_scale:
            x = x.add_(self._runner.embed(last_tokens), alpha=self._last_token_scale)
        # h + silu(W x), in the scale of the runner's own output projection.
        # The block is one product for all heads; what costs is the projection of those that are wanted.
        block = self._block(x).view(n, self.num_heads, width)[:, :num_heads]
        added = F.silu(block) * self._unscale
        added += hidden[:, None]
        return self._runner.project(added.reshape(n * num_heads, width)).view(n, num_heads, -1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """First evaluations of small batches, whose cost no request should pay."""
        for n in range(1, _WARM_ROWS + 1):
            hidden = torch.zeros(n, len(self._scale), dtype=self._scale.dtype, device=self._scale.device)
            self._logits(hidden, np.zeros(n, dtype=np.int32), self.num_heads)


def load_heads(directory: Path, runner: ModelRunner, target_directory: Path) -> DecodingHeads:
    """The heads in `directory` for the target in `target_directory`, which `runner` runs.

    Raises:
        UnsuitableHeads: if there are none, or they are for another target.
    """
    described = read_description(directory)
    check_target(described, target_directory)
    try:
        weight = load_file(str(directory / WEIGHTS))["weight"]
    except (OSError, KeyError, ValueError) as error:
        raise UnsuitableHeads(f"cannot read {directory / WEIGHTS}: {error}") from error
    if len(weight) != described.num_heads:
        raise UnsuitableHeads(f"{directory} describes {described.num_heads} heads and holds {len(weight)}")
    heads = DecodingHeads(runner, weight, last_token_scale=described.last_token_scale)
    heads.warm_up()
    return heads


def save_heads(directory: Path, described: HeadsDescription, weights: Sequence[torch.Tensor]) -> None:
    """Write heads, [hidden, hidden] each, in float16."""
    import msgspec

    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.stack([w.detach().to(torch.float16) for w in weights])}, directory / WEIGHTS)
    (directory / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
