"""One constructor of every drafter from plain arguments, for Ray actors and the local engine alike."""

from __future__ import annotations

from typing import Literal

from drafters.prompt_lookup import PromptLookupDrafter
from drafters.protocol import Drafter
from drafters.suffix_drafter import SuffixAutomatonDrafter


def build_drafter(
    kind: Literal["model", "prompt_lookup", "suffix_automaton"],
    *,
    path: str | None = None,
    dtype: str = "float32",
    num_slots: int | Literal["auto"] = 32768,
    runner: Literal["auto", "hf", "lean"] = "auto",
    attention: Literal["padded", "decomposed", "flashinfer", "triton", "auto"] | None = None,
    device: str = "cpu",
    memory_fraction: float = 0.9,
    device_share: float = 1.0,
    graphs: bool = True,
    quantization: Literal["fp8", "int4"] | None = None,
    on_device: bool | None = None,
    layer_graphs: bool = True,
    prefix_sharing: bool = True,
    max_ngram: int = 4,
    min_ngram: int = 2,
    max_match: int = 24,
    min_match: int = 2,
    scope: Literal["request", "cell"] = "cell",
    capacity: int = 65536,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    max_depth: int = 16,
    max_width: int = 16,
) -> Drafter:
    """Build a drafter. Prompt lookup and the suffix automaton import no torch.

    Args:
        kind: "model", "prompt_lookup" or "suffix_automaton".
        path: model: its Hugging Face directory.
        dtype, num_slots, runner, attention, device, memory_fraction, device_share, graphs, quantization: for
            a model, as for `engine.loading.load_runner`.
        on_device, layer_graphs: model: whether trees grow where the model runs, and by captured layers; see
            `ModelDrafter`.
        prefix_sharing: model: whether requests share KV of equal prefixes.
        max_ngram, min_ngram: prompt lookup: lengths of the suffixes looked up.
        max_match, min_match, scope, capacity: suffix automaton: see `SuffixAutomatonDrafter`.
        vocab_size: drafters without a model: vocabulary of the target.
        max_tokens: longest sequence: of the target for those, of a model as for `load_runner`.
        max_depth, max_width: bounds of every plan.

    Raises:
        ValueError: if `kind` is unknown, or an argument it needs is missing.
    """
    if kind == "model":
        if path is None:
            raise ValueError("a model drafter needs the path of its model")
        from drafters.model_drafter import ModelDrafter
        from engine.loading import load_runner
        from engine.model_size import count_parameters
        from engine.numpy_llama import in_numpy

        model = load_runner(
            path,
            dtype=dtype,
            num_slots=num_slots,
            max_tokens=max_tokens,
            runner=runner,
            attention=attention,
            device=device,
            memory_fraction=memory_fraction,
            device_share=device_share,
            graphs=graphs,
            quantization=quantization,
        )
        return ModelDrafter(
            in_numpy(model) if runner == "auto" else model,
            max_depth=max_depth,
            max_width=max_width,
            prefix_sharing=prefix_sharing,
            num_parameters=count_parameters(path),
            on_device=on_device,
            layer_graphs=layer_graphs,
        )
    if kind == "prompt_lookup":
        if vocab_size is None or max_tokens is None:
            raise ValueError("prompt lookup needs the target's vocab_size and max_tokens")
        return PromptLookupDrafter(
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            max_ngram=max_ngram,
            min_ngram=min_ngram,
            max_depth=max_depth,
            max_width=max_width,
        )
    if kind == "suffix_automaton":
        if vocab_size is None or max_tokens is None:
            raise ValueError("a suffix automaton needs the target's vocab_size and max_tokens")
        return SuffixAutomatonDrafter(
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            min_match=min_match,
            max_match=max_match,
            scope=scope,
            capacity=capacity,
            max_depth=max_depth,
            max_width=max_width,
        )
    raise ValueError(f"unknown kind of drafter {kind!r}: model, prompt_lookup or suffix_automaton")
