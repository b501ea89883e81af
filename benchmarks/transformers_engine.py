"""Hugging Face Transformers as engine under test, and as reference for losslessness."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.engine_under_test import RunResult, Task, until_end
from benchmarks.prompts import Prompt
from deployments.tokenizer_loading import load_tokenizer
from engine.adapter_files import merge, read_adapter
from engine.checkpoint import Checkpoint
from engine.devices import resolve_device
from engine.grammar import Grammars
from engine.quantization import Quantization, route_of
from engine.quantized_checkpoint import load, without_quantization
from engine.rounding import round_linears
from engine.stored_linear import widen_linears

# How long continuous batching may give nothing.
_BATCH_SILENCE_S = 60


class Reference:
    """A target model in plain Transformers, with its tokenizer.

    Args:
        path: Hugging Face directory.
        dtype: weights and arithmetic; losslessness is judged in `float32`.
        quantization: what the target's configuration says; the rounded numbers are multiplied as floats.
        adapter: directory of a LoRA adapter that is merged into its weights.
    """

    def __init__(
        self,
        path: str,
        dtype: str = "float32",
        quantization: Quantization | None = None,
        adapter: Path | None = None,
    ) -> None:
        self.path, self.dtype, self.quantization = path, dtype, quantization
        self.tokenizer: Any = load_tokenizer(Path(path))
        self.model: Any = load_model(path, dtype, quantization)
        if adapter is not None:
            merge(self.model, read_adapter(adapter.name, adapter))
        self.device: torch.device = self.model.device
        end = self.model.generation_config.eos_token_id
        self.end_tokens: tuple[int, ...] = tuple(end) if isinstance(end, list) else (end,)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over its tokenizer."""
        return Grammars.of_model(Path(self.path), self.model.config.vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, as a server would make them."""
        if prompt.messages is None:
            tokens: list[int] = self.tokenizer(prompt.text)["input_ids"]
            return tokens
        encoded: list[int] = self.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, without special ones."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def greedy(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The model's own continuation, by `generate`."""
        return generate(self.model, [list(tokens)], max_tokens, self.end_tokens)[0]

    @torch.inference_mode()
    def top2(self, tokens: Sequence[int], prompt_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of the two best tokens at every output position of `tokens` and after it."""
        inputs = torch.tensor([list(tokens)], device=self.model.device)
        values, ids = self.model(input_ids=inputs).logits[0, prompt_len - 1 :].float().topk(2, dim=-1)
        return ids.cpu(), values.cpu()


def load_model(path: str, dtype: str, quantization: Quantization | None = None) -> Any:
    """A model for inference, on a GPU if there is one: where a target of the default `device` runs.

    Quantized weights, of the checkpoint or by `quantization`, are widened: none of our kernels is asked.
    """
    kind = getattr(torch, dtype)
    config = AutoConfig.from_pretrained(path)
    where = resolve_device("auto")
    route = route_of(Path(path), config, where)
    if route == "quantized":
        model = load(Checkpoint(Path(path)), config, kind, "sdpa")
        widen_linears(model, kind)
    else:
        plain = without_quantization(config) if route == "plain" else config
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, config=plain)
    if quantization is not None:
        round_linears(model, quantization, keep=model.get_output_embeddings())
        widen_linears(model, kind)
    model.eval().to(where)
    return model


def greedy_config(model: Any, **fields: Any) -> GenerationConfig:
    """Plain greedy decoding, whatever sampling defaults the checkpoint has."""
    own = model.generation_config
    return GenerationConfig(
        do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, **fields
    )


def generate(
    model: Any, prompts: Sequence[list[int]], max_tokens: int, end_tokens: Sequence[int], **options: Any
) -> list[list[int]]:
    """`generate` over one batch, padded on the left; outputs end with their end token."""
    width = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    padded = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask = (torch.tensor(rows, device=model.device) for rows in (padded, seen))
    lookup = options.pop("prompt_lookup_num_tokens", None)
    fields = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=greedy_config(model, max_new_tokens=max_tokens, **fields),
            **options,
        )
    return [until_end(row, max_tokens, end_tokens) for row in out[:, width:].tolist()]


class GenerateEngine:
    """`generate`: static batches, plain or with its own speculation (one prompt at a time then)."""

    def __init__(
        self,
        reference: Reference,
        *,
        threads: int,
        assistant: str | None = None,
        prompt_lookup: int | None = None,
    ) -> None:
        self._reference, self._threads = reference, threads
        self._options: dict[str, Any] = {}
        self.max_concurrency: int | None = 1 if assistant or prompt_lookup else None
        self.name = "HF generate"
        if assistant:
            self._options["assistant_model"] = load_model(assistant, reference.dtype)
            self.name = f"HF assisted ({os.path.basename(assistant)})"
        if prompt_lookup:
            self._options["prompt_lookup_num_tokens"] = prompt_lookup
            self.name = "HF prompt lookup"

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Waves of `concurrency` prompts; a wave lasts as long as its longest answer."""
        torch.set_num_threads(self._threads)
        reference, outputs = self._reference, []
        start = time.perf_counter()
        for first in range(0, len(tasks), concurrency):
            wave = tasks[first : first + concurrency]
            most = max(task.max_tokens for task in wave)
            batch = [task.tokens for task in wave]
            outputs += generate(reference.model, batch, most, reference.end_tokens, **self._options)
        seconds = time.perf_counter() - start
        kept = [
            until_end(output, task.max_tokens, reference.end_tokens)
            for task, output in zip(tasks, outputs, strict=True)
        ]
        return RunResult(seconds, kept)

    def close(self) -> None:
        """Nothing runs between calls."""


class GenerateBatchEngine:
    """`generate_batch`: continuous batching; its manager stays up, so that no run pays its start."""

    name = "HF generate_batch"
    max_concurrency: int | None = None

    def __init__(self, reference: Reference, *, threads: int) -> None:
        self._reference, self._threads = reference, threads
        # Its own copy: continuous batching switches the model's attention implementation.
        self._model = load_model(reference.path, reference.dtype, reference.quantization)
        torch.set_num_threads(threads)
        self._manager: Any = self._model.init_continuous_batching(
            generation_config=greedy_config(self._model, max_new_tokens=128)
        )
        self._manager.start()
        self._runs = 0

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Keep `concurrency` prompts in the manager until all are done."""
        torch.set_num_threads(self._threads)
        self._runs += 1
        names = [f"run{self._runs}-{place}" for place in range(len(tasks))]
        waiting = list(zip(names, tasks, strict=True))[::-1]
        found: dict[str, list[int]] = {}
        running = 0
        start = time.perf_counter()
        while len(found) < len(tasks):
            while waiting and running < concurrency:
                name, task = waiting.pop()
                self._manager.add_request(
                    task.tokens,
                    request_id=name,
                    max_new_tokens=task.max_tokens,
                    eos_token_id=list(self._reference.end_tokens),
                )
                running += 1
            result = self._manager.get_result(timeout=_BATCH_SILENCE_S)
            if result is None:
                raise RuntimeError(
                    f"{self.name} gave no token for {_BATCH_SILENCE_S} s: leave Transformers out with "
                    "--no-peers, or measure on a machine with less else to do"
                )
            if result.error is not None:
                raise RuntimeError(f"{self.name} failed: {result.error}")
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
                running -= 1
        seconds = time.perf_counter() - start
        outputs = [
            until_end(found[name], task.max_tokens, self._reference.end_tokens)
            for name, task in zip(names, tasks, strict=True)
        ]
        return RunResult(seconds, outputs)

    def close(self) -> None:
        """Stop the manager's thread."""
        self._manager.stop(block=True, timeout=10)
