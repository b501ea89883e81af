"""The mixed requests of `flotilla bench kills` and `flotilla bench soak`, in every way a client may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lossless import GREEDY, PENALISED, SAMPLED, SCHEMA
from benchmarks.prompts import Prompt, zoo_prompts
from benchmarks.workload import mix_prompts

#: Ways of asking: what is sampled how, and what else the body has. Each is asked as a stream and whole.
_MODES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "sampled": (SAMPLED, {}),
    "penalties": (PENALISED, {}),
    "stop string": (SAMPLED, {"stop": ["\n\n", ". "]}),
    "two choices": (SAMPLED, {"n": 2}),
    "JSON schema": ({**SAMPLED, "structured_outputs": {"json": SCHEMA}}, {}),
    "expression": ({**GREEDY, "structured_outputs": {"regex": "[a-z]{4,12}( [a-z]{2,9}){8,16}\\."}}, {}),
}


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request whose answer is always the same.

    Attributes:
        index: its place among the distinct requests; also its seed, from that of the run on.
        domain: class it is reported under.
        mode: how it is asked, for people.
        prompt: what is asked.
        sampling: fields that decide what the tokens are, as in `SamplingParams`.
        fields: the other fields of its body.
        seed: of its first choice; choice `i` has `seed + i`.
        max_tokens: of every choice.
        is_stream: whether it is streamed.
    """

    index: int
    domain: str
    mode: str
    prompt: Prompt
    sampling: Mapping[str, Any]
    fields: Mapping[str, Any]
    seed: int
    max_tokens: int
    is_stream: bool

    @property
    def path(self) -> str:
        """The endpoint."""
        return "/v1/completions" if self.prompt.messages is None else "/v1/chat/completions"

    def body(self, model: str, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The JSON body; `slo` are objectives in milliseconds, by field."""
        asked: dict[str, Any] = {"prompt": self.prompt.text}
        if self.prompt.messages is not None:
            asked = {"messages": list(self.prompt.messages)}
        body = {
            "model": model,
            **asked,
            **self.sampling,
            **self.fields,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "return_token_ids": True,
            "stream": self.is_stream,
        }
        if self.is_stream:
            body["stream_options"] = {"include_usage": True}
        if slo:
            body["slo"] = dict(slo)
        return body


def mixed_requests(count: int, seed: int, max_tokens: int) -> list[LiveRequest]:
    """Distinct requests over the three classes, all modes, streamed and whole, the same for a seed.

    Args:
        count: how many.
        seed: of the choice of prompts, and of sampling.
        max_tokens: bound on every answer.
    """
    prompts = zoo_prompts()
    domains = sorted({prompt.domain for prompt in prompts})
    rng = np.random.default_rng(seed)
    shares = {domain: 1.0 / len(domains) for domain in domains}
    chosen = mix_prompts(prompts, count, shares, rng)
    modes = list(_MODES)
    requests = []
    for index, prompt in enumerate(chosen):
        mode = modes[index % len(modes)]
        sampling, fields = _MODES[mode]
        requests.append(
            LiveRequest(
                index=index,
                domain=prompt.domain,
                mode=mode,
                prompt=prompt,
                sampling=sampling,
                fields=fields,
                # Apart by more than the choices of one request.
                seed=seed + 8 * index,
                max_tokens=min(max_tokens, prompt.max_tokens or max_tokens),
                # In each round of modes the other way, so that every mode comes both ways.
                is_stream=(index % len(modes) + index // len(modes)) % 2 == 0,
            )
        )
    return requests
