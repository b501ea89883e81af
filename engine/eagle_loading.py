"""An EAGLE-3 drafter beside its target: what it needs of the device, and loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.attention_kinds import make_attention
from engine.eagle import EagleLayer, FeatureRunner
from engine.eagle_config import (
    CONFIG,
    EagleDescription,
    UnsuitableEagle,
    check_eagle_target,
    feature_layers,
    read_eagle_config,
)
from engine.eagle_weights import load_eagle_weights
from engine.kv_budget import Beside, NotEnoughMemory
from engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """A drafter that was looked at and fits its target, before anything is loaded.

    Attributes:
        directory: of the drafter.
        config: what it says of itself.
        layers: of the target whose inputs it reads.
    """

    directory: Path
    config: EagleDescription
    layers: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, target: Path) -> EagleFiles:
        """The drafter in `directory`, for the target in the directory `target`.

        Raises:
            UnsuitableEagle: if it cannot be used with it.
        """
        config = read_eagle_config(directory)
        check_eagle_target(config, target)
        described = msgspec.json.decode((target / CONFIG).read_bytes())
        num_layers = int(described.get("text_config", described)["num_hidden_layers"])
        layers = config.feature_layers or feature_layers(num_layers)
        if min(layers) < 0 or max(layers) >= num_layers:
            raise UnsuitableEagle(
                f"the EAGLE-3 drafter in {directory} reads what enters layers {', '.join(map(str, layers))}; "
                f"the target in {target} has {num_layers}"
            )
        return cls(directory, config, layers)

    def beside(self, dtype: str, num_draft_slots: int) -> Beside:
        """Bytes that it takes in the type of numbers called `dtype`, with so many slots of its own."""
        layer, size = self.config.layer, getattr(torch, dtype).itemsize
        heads = int(layer["num_attention_heads"])
        dim = int(layer.get("head_dim") or self.config.hidden_size // heads)
        slot = 2 * int(layer.get("num_key_value_heads") or heads) * dim * size
        files = sorted(self.directory.glob("*.safetensors")) or [self.directory / "pytorch_model.bin"]
        stored = sum(file.stat().st_size for file in files if file.is_file())
        return Beside(stored * max(1, size // 2) + num_draft_slots * slot, slot)

    def load(self, runner: ModelRunner, num_draft_slots: int) -> tuple[EagleLayer, FeatureRunner]:
        """The layer on the target that `runner` runs, which keeps the features of `layers`.

        Raises:
            UnsuitableEagle: if its weights are not what it says, or the runner keeps no such features.
            NotEnoughMemory: if it does not fit on the device.
        """
        try:
            return self._loaded(runner, num_draft_slots)
        except torch.cuda.OutOfMemoryError as error:
            raise NotEnoughMemory(
                f"the EAGLE-3 drafter in {self.directory} does not fit beside the target: use fewer num_slots"
                f" ({str(error).splitlines()[0]})"
            ) from error

    def _loaded(self, runner: ModelRunner, num_draft_slots: int) -> tuple[EagleLayer, FeatureRunner]:
        if not isinstance(runner, FeatureRunner) or runner.feature_layers != self.layers:
            raise UnsuitableEagle(
                f"{type(runner).__name__} does not keep the hidden states that EAGLE-3 reads"
            )
        device = runner.device
        weights = load_eagle_weights(
            self.directory,
            self.config,
            max_tokens=runner.shape.max_tokens,
            dtype=runner.embed_ids(torch.zeros(1, dtype=torch.int64, device=device)).dtype,
            device=device,
        )
        attention = make_attention(
            None,
            runner.num_slots + num_draft_slots,
            dtype=weights.output_scale.dtype,
            device=device,
        )
        layer = EagleLayer(weights, runner, attention)
        attention.prepare(0, weights.heads)
        return layer, runner
