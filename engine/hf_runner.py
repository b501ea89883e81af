"""Runs any causal language model of Transformers over a ragged batch, with our attention inside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.adapted_linear import adapters_on
from engine.adapter_files import Adapter
from engine.attention import PaddedAttention, PaddedPlan
from engine.attention_kinds import AttentionKind, make_attention
from engine.capturable import Computed
from engine.context_length import longest_sequence
from engine.device_rows import DeviceRows, tokens_of
from engine.devices import index_on
from engine.expert_routing import routing_of
from engine.hf_adapters import attach_adapters
from engine.hf_attention import ATTENTION_NAME, Pass, current, looking, special_attention, windows_of
from engine.runner import KeyTokens, ModelShape, Segment
from engine.triton_attention import TritonPlan
from engine.unsupported_model import UnsupportedModel
from engine.windows import check_trees

Int32 = NDArray[np.int32]

# Layer types of a configuration whose keys are all earlier tokens, or a window of them.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class HFRunner:
    """`ModelRunner` over a Transformers model whose attention goes through the attention interface.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        *,
        max_tokens: int | None = None,
        attention: AttentionKind | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Wrap `model`, in evaluation mode on its device, with a pool of `num_slots` KV slots.

        Runs one token through it, which writes slot 0, to size the storage and to see its attention.

        Args:
            model: a causal language model; its attention implementation is switched to ours.
            num_slots: KV slots of the pool.
            max_tokens: longest sequence; by default what the model's configuration says.
            attention: how ragged keys are padded; see `engine.attention_kinds`.
            adapters: what rows may have added to linear layers; these then do so wherever the model is used.

        Raises:
            UnsupportedModel: if the model does not use the attention interface in every layer, or needs
                attention that is not implemented, or an adapter is another model's.
        """
        config = model.config.get_text_config()
        if model.config.is_encoder_decoder:
            raise UnsupportedModel("encoder-decoder models are not causal language models")
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise UnsupportedModel(f"{type(model).__name__} takes no position_ids, so it cannot run trees")
        if not model._can_set_attn_implementation():
            raise UnsupportedModel(f"{type(model).__name__} does not use Transformers' attention interface")
        unusual = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
        if unusual:
            raise UnsupportedModel(f"the model has layers of type {', '.join(unusual)}")
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model.eval()
        self._device: torch.device = model.device
        self._keeps_logits = "logits_to_keep" in parameters
        self._num_layers = int(config.num_hidden_layers)
        self._num_slots = num_slots
        self._max_tokens = longest_sequence(config, max_tokens) or min(num_slots, max_tokens or num_slots)
        fixed = _longest_with_fixed_rotations(config)
        if fixed is not None and fixed < self._max_tokens:
            raise UnsupportedModel(
                f"the model's rotary embeddings change for sequences of more than {fixed} tokens, and with "
                f"them those of all requests computed beside one: set max_model_len to {fixed} at most"
            )
        size = _largest_head(config)
        self._attention = make_attention(
            attention, num_slots, dtype=model.dtype, device=self._device, head_dim=size
        )
        self._key_tokens = KeyTokens(0, 0)
        self._output: torch.nn.Module = model.get_output_embeddings()
        self._final = torch.empty(0, device=self._device)
        self._output.register_forward_pre_hook(self._note_hidden)
        self._adapters = attach_adapters(model, adapters) if adapters else None
        self._feature_layers: tuple[int, ...] = ()
        self._noted: dict[int, torch.Tensor] = {}  # what enters those layers in the forward under way
        self._features = torch.empty(0, 0, device=self._device)
        self._feature_rows: Int32 | None = None
        self._windows: tuple[int, ...] = ()
        zero = np.zeros(1, dtype=np.int32)
        first = [Segment(tokens=zero, positions=zero, slots=zero, past=zero[:0])]
        with routing_of(model) as routing, looking() as seen:
            self.forward(first, zero)
        self._windows = windows_of(model, seen, self._max_tokens)
        special = special_attention(attention, self._attention, self._windows, seen)
        if special is not self._attention:
            self._attention = special
            self.forward(first, zero)
        self._shape = ModelShape(
            vocab_size=int(config.vocab_size),
            max_tokens=self._max_tokens,
            num_layers=self._num_layers,
            kv_bytes_per_token=self._attention.bytes_per_token,
            expert_share=routing.share,
            windows=self._windows,
        )

    @property
    def shape(self) -> ModelShape:
        """See `ModelRunner`."""
        return self._shape

    @property
    def num_slots(self) -> int:
        """See `ModelRunner`."""
        return self._num_slots

    def resize(self, num_slots: int) -> None:
        """Make the pool one of `num_slots`; what it held is gone."""
        self._attention.resize(num_slots)
        self._num_slots = num_slots

    @property
    def hidden_scale(self) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return torch.ones(self._final.shape[-1], device=self._device)

    @torch.inference_mode()
    def last_hidden(self, rows: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._final.index_select(0, index_on(rows, self._device))

    @torch.inference_mode()
    def embed(self, tokens: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self.embed_ids(index_on(tokens, self._device))

    @torch.inference_mode()
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        final = self._final
        logits: torch.Tensor = self._output(hidden[None])
        self._final = final
        return logits[0].float()

    def _note_hidden(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        """Remember the last hidden states: what goes into the output projection, of the rows kept."""
        if arguments:
            self._final = arguments[0].flatten(0, -2)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureRunner`."""
        return self._feature_layers

    def keep_features(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states that enter these layers, for `features`; to be called once.

        Raises:
            UnsupportedModel: if the model does not have its layers in a list.
        """
        if not layers:
            return
        blocks = getattr(self._model.get_decoder(), "layers", None)
        if blocks is None or len(blocks) != self._num_layers:
            raise UnsupportedModel(
                f"{type(self._model).__name__} does not show the layers that EAGLE reads from"
            )
        self._feature_layers = tuple(layers)
        for layer in layers:
            blocks[layer].register_forward_pre_hook(partial(self._note_feature, layer), with_kwargs=True)

    def _note_feature(
        self, layer: int, module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        hidden: torch.Tensor = arguments[0] if arguments else named["hidden_states"]
        self._noted[layer] = hidden.flatten(0, -2)

    @torch.inference_mode()
    def features(self, rows: Int32) -> torch.Tensor:
        """See `FeatureRunner`."""
        rows = rows if self._feature_rows is None else self._feature_rows[rows]
        return self._features.index_select(0, index_on(rows, self._device))

    @torch.inference_mode()
    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `FeatureRunner`."""
        embedded: torch.Tensor = self._model.get_input_embeddings()(tokens[None])
        return embedded[0]

    @property
    def key_tokens(self) -> KeyTokens:
        """See `ModelRunner`."""
        return self._key_tokens

    @property
    def model(self) -> PreTrainedModel:
        """The Transformers model."""
        return self._model

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """While entered, the model computes its own attention, as if it had never been wrapped."""
        self._model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """See `ModelRunner`.

        Raises:
            UnsupportedModel: if an attention layer of the model bypasses the attention interface.
        """
        tokens = np.concatenate([segment.tokens for segment in segments])
        return self._forward(segments, index_on(tokens, self._device), self._attention.plan(segments), keep)

    @property
    def takes_trees(self) -> bool:
        """See `DeviceRowsRunner`."""
        return self._attention.takes_device_masks and (self._attention.scores_by_layer or not self._windows)

    @torch.inference_mode()
    def forward_rows(
        self, segments: Sequence[Segment], rows: DeviceRows, keep: Int32 | None = None
    ) -> torch.Tensor:
        """See `DeviceRowsRunner`."""
        plan = self._attention.plan_rows(segments, rows)
        return self._forward(segments, tokens_of(segments, rows), plan, keep)

    def _forward(
        self, segments: Sequence[Segment], tokens: torch.Tensor, plan: PaddedPlan, keep: Int32 | None
    ) -> torch.Tensor:
        check_trees(segments, self._windows)
        positions = np.concatenate([segment.positions for segment in segments])
        selected = None if keep is None else index_on(keep, self._device)
        adapters = adapters_on(segments, self._device)
        at = index_on(positions, self._device)
        computed = self.compute(tokens, at, plan, selected, adapters, segments)
        self._key_tokens = plan.key_tokens
        self._final, self._features, self._feature_rows = computed.final, computed.features, None
        return computed.logits.float()

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: PaddedPlan,
        selected: torch.Tensor | None,
        adapters: torch.Tensor | None = None,
        segments: Sequence[Segment] | None = None,
    ) -> Computed:
        """See `CapturableRunner`; whether nothing waits for the host is up to the model.

        Layers with windows plan for themselves what is in `segments`, unless attention has one plan for all.

        Raises:
            UnsupportedModel: if an attention layer of the model bypasses the attention interface.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        selects = selected is not None and self._keeps_logits
        if selects:
            arguments["logits_to_keep"] = selected
        if self._windows and isinstance(plan, TritonPlan):
            plan = replace(plan, positions=positions.int())
        running = Pass(self._attention, plan, self._max_tokens, segments)
        previous = current.running
        current.running = running
        if self._adapters is not None:
            self._adapters.begin(adapters)
        try:
            output = self._model(
                input_ids=tokens.long()[None], position_ids=positions.long()[None], **arguments
            )
        finally:
            current.running = previous
            if self._adapters is not None:
                self._adapters.begin(None)  # else whoever calls the model itself would be given them
        if running.calls != self._num_layers:
            raise UnsupportedModel(
                f"{running.calls} of {self._num_layers} layers of {type(self._model).__name__} went through "
                "Transformers' attention interface"
            )
        logits, final = output.logits[0], self._final
        if selected is not None and not selects:
            logits, final = logits.index_select(0, selected), final.index_select(0, selected)
        features = logits.new_empty(len(tokens), 0)
        if self._feature_layers:
            features = torch.cat([self._noted[layer] for layer in self._feature_layers], 1)
        return Computed(logits, final, features)

    def note(
        self, final: torch.Tensor, features: torch.Tensor, feature_rows: Int32, key_tokens: KeyTokens
    ) -> None:
        """See `CapturableRunner`."""
        self._final, self._key_tokens = final, key_tokens
        self._features, self._feature_rows = features, feature_rows

    @property
    def attention(self) -> PaddedAttention:
        """See `CapturableRunner`."""
        return self._attention

    @property
    def heads(self) -> int:
        """See `CapturableRunner`."""
        return 0

    @property
    def scale(self) -> float:
        """See `CapturableRunner`."""
        return 0.0

    @property
    def is_sharded(self) -> bool:
        """See `CapturableRunner`."""
        return getattr(self._model, "tp_size", None) not in (None, 1)

    @property
    def no_final(self) -> torch.Tensor:
        """See `CapturableRunner`."""
        return self._final[:0]

    @property
    def no_features(self) -> torch.Tensor:
        """See `CapturableRunner`."""
        width = int(self._model.config.get_text_config().hidden_size)
        return self._final.new_zeros(0, len(self._feature_layers) * width)


def _largest_head(config: Any) -> int:
    """Dimensions of an attention head, of the largest where they differ from layer to layer (Gemma 4)."""
    # Asked for one of its attributes that differ, such a configuration fails.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max(
        int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
    )


def _longest_with_fixed_rotations(config: Any) -> int | None:
    """The longest sequence up to which rotary embeddings depend on the position alone; None for any.

    LongRoPE (arXiv 2402.13753) has two sets of frequencies, and Transformers gives all rows of a forward the
    set of its longest sequence. "dynamic" ones change beyond `max_position_embeddings`, which none of theirs
    exceeds (`engine.context_length`).
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or by the kind of layer.
    parts = [part for part in (parameters, *parameters.values()) if isinstance(part, dict)]
    lengths = [
        int(part["original_max_position_embeddings"]) for part in parts if part.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)
