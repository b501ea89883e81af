"""What a directory of an EAGLE-3 drafter says of itself: its shape and what it reads. Imports no torch.

Two layouts are read: that of the EAGLE repository, which SGLang and vLLM share (one flat Llama
configuration), and that of the speculators library, with the layer's in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.heads_config import UnsuitableHeads, weights_digest

CONFIG = "config.json"


class UnsuitableEagle(UnsuitableHeads):
    """The EAGLE drafter cannot be used, or not with this target."""


class EagleDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The `config.json` of an EAGLE-3 directory.

    Attributes:
        layer: configuration of its decoder layer, a Llama model's of one layer.
        target_hidden_size: width of the target's hidden states.
        vocab_size: of the target.
        draft_vocab_size: of the tokens it drafts.
        feature_layers: layers of the target whose inputs it reads; none for the usual ones.
        norm_before_residual: whether what is added to is the normalised hidden state.
        norm_before_fc: whether the target's hidden states are normalised together before they are combined.
        norm_output: whether the next layer reads the normalised output, as the output projection does.
        target, target_sha256: name and digest (`weights_digest`) of the target it was trained for; empty
            where the directory does not say.
    """

    layer: dict[str, Any]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    target: str = ""
    target_sha256: str = ""

    @property
    def hidden_size(self) -> int:
        """Width of its own layer."""
        return int(self.layer["hidden_size"])


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers of a target of so many whose inputs EAGLE-3 reads unless it names them: low, middle, high."""
    return min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)


def is_eagle(directory: Path) -> bool:
    """Whether `config.json` is that of an EAGLE-3 drafter, usable or not."""
    try:
        return _is_eagle(msgspec.json.decode((directory / CONFIG).read_bytes()))
    except (OSError, msgspec.DecodeError):
        return False


def read_eagle_config(directory: Path) -> EagleDescription:
    """Read `config.json`.

    Raises:
        UnsuitableEagle: if there is none, it describes something else, or a variant that is not implemented.
    """
    try:
        found = msgspec.json.decode((directory / CONFIG).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UnsuitableEagle(f"no EAGLE-3 drafter in {directory}: {error}") from error
    if not _is_eagle(found):
        raise UnsuitableEagle(
            f"no EAGLE-3 drafter in {directory}: its {CONFIG} names neither an Eagle3 architecture nor the "
            "speculators type `eagle3`, nor a Llama with a `draft_vocab_size` (EAGLE-1 and EAGLE-2 are not "
            "supported)"
        )
    layer = found.get("transformer_layer_config", found)
    try:
        described = _described(found, layer)
        obstacle = _obstacle(found, layer, described)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsuitableEagle(f"cannot read {directory / CONFIG}: {error!r}") from error
    if obstacle is not None:
        raise UnsuitableEagle(f"the EAGLE-3 drafter in {directory} is of a kind not implemented: {obstacle}")
    return described


def check_eagle_target(described: EagleDescription, target: Path) -> None:
    """Refuse a drafter that was trained for another target than the one in the directory `target`.

    Raises:
        UnsuitableEagle: naming what differs.
    """
    config = msgspec.json.decode((target / CONFIG).read_bytes())
    config = config.get("text_config", config)
    for name, mine in (("hidden_size", described.target_hidden_size), ("vocab_size", described.vocab_size)):
        theirs = config.get(name)
        if theirs is not None and theirs != mine:
            raise UnsuitableEagle(
                f"the EAGLE-3 drafter was made for a target with {name} {mine}; that of {target} is {theirs}"
            )
    if described.target_sha256 and (digest := weights_digest(target)) != described.target_sha256:
        raise UnsuitableEagle(
            f"the EAGLE-3 drafter was trained for {described.target} (weights "
            f"{described.target_sha256[:12]}), but the target in {target} has other weights ({digest[:12]}); "
            "it reads one model's hidden states and drafts nothing sensible on another's: train one for it "
            "(`flotilla zoo eagle`), or leave the `eagle` drafter out"
        )


def _is_eagle(found: object) -> bool:
    if not isinstance(found, Mapping):
        return False
    if found.get("speculators_model_type") is not None:
        return bool(found["speculators_model_type"] == "eagle3")
    return _names_eagle(found) or (
        # The EAGLE repository's own checkpoints keep the target's architecture.
        found.get("draft_vocab_size") is not None
        and "LlamaForCausalLM" in map(str, found.get("architectures") or ())
    )


def _names_eagle(found: Mapping[str, Any]) -> bool:
    return "eagle3" in "".join(map(str, found.get("architectures") or ())).lower()


def _described(found: Mapping[str, Any], layer: Mapping[str, Any]) -> EagleDescription:
    nested = dict(found.get("eagle_config") or {})
    named = found.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(map(int, named or ()))
    if layers[:1] == (1,):
        # Two conventions are published: layers whose inputs are read, from 2, and layers whose outputs are,
        # from 1 (SpecForge's and ModelOpt's). They are told apart by the first.
        layers = tuple(layer + 1 for layer in layers)
    vocab_size, hidden_size = int(layer["vocab_size"]), int(layer["hidden_size"])
    return EagleDescription(
        layer=dict(layer),
        target_hidden_size=int(found.get("target_hidden_size") or hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=int(found.get("draft_vocab_size") or vocab_size),
        feature_layers=layers,
        # The speculators library has it on where it is not named, the EAGLE repository knows nothing of it.
        norm_before_residual=bool(found.get("norm_before_residual", "transformer_layer_config" in found)),
        # NVIDIA's checkpoints have it inside.
        norm_before_fc=bool(nested.get("norm_before_fc", found.get("norm_before_fc"))),
        norm_output=bool(found.get("norm_output")),
        target=str(found.get("target") or ""),
        target_sha256=str(found.get("target_sha256") or ""),
    )


def _obstacle(found: Mapping[str, Any], layer: Mapping[str, Any], described: EagleDescription) -> str | None:
    is_named = "transformer_layer_config" in found or _names_eagle(found)
    # Else it is the target's number: the EAGLE repository has one layer, whatever its configuration says.
    if is_named and int(layer.get("num_hidden_layers", 1)) != 1:
        return f"{layer['num_hidden_layers']} layers"
    if layer.get("model_type", "llama") != "llama":
        return f"a layer of type {layer['model_type']}"
    if layer.get("hidden_act", "silu") != "silu":
        return f"activation {layer['hidden_act']}"
    # SpecForge's have the target's window there, and say that it is not used.
    if layer.get("sliding_window") is not None and layer.get("use_sliding_window", True):
        return "a sliding window"
    for name in ("fc_norm", "quantization", "quantization_config"):
        if found.get(name):
            return f"`{name}`"
    if (found.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        return "it reads the target's last hidden state only (`use_aux_hidden_state` is false)"
    if described.feature_layers and len(described.feature_layers) != 3:
        return f"{len(described.feature_layers)} hidden states of the target instead of 3"
    return None
