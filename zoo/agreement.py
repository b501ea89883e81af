"""How far each drafter follows the target on held-out prompts, from one teacher-forced pass.

A greedy chain is accepted up to its first token that differs from the target's, and until then the drafter
has read exactly the target's text. So the flags "the drafter's most probable token is the target's" along the
target's greedy continuation determine every chain's accepted length: nothing needs to be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from zoo.registry import Prompt

Flags = npt.NDArray[np.bool_]
_BATCH = 32


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    """The token ids a server makes of the prompt."""
    if prompt.kind == "completion":
        return list(tokenizer(prompt.prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def greedy_continuations(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], most: Sequence[int]
) -> list[list[int]]:
    """The target's greedy answers in float32, end token included; prompts of about one length share a
    batch.
    """
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    assert isinstance(end, int)
    assert isinstance(pad, int)
    answers: list[list[int]] = [[] for _ in prompts]
    by_size = sorted(range(len(prompts)), key=lambda i: (most[i], len(prompts[i])))
    for begin in range(0, len(by_size), _BATCH):
        members = by_size[begin : begin + _BATCH]
        longest = max(len(prompts[i]) for i in members)
        ids = torch.full((len(members), longest), pad)
        for row, i in enumerate(members):
            ids[row, longest - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
        bound = max(most[i] for i in members)
        written = model.generate(
            ids, attention_mask=(ids != pad).long(), do_sample=False, max_new_tokens=bound
        )
        for i, row in zip(members, written[:, longest:].tolist(), strict=True):
            answer = row[: most[i]]
            answers[i] = answer[: answer.index(end) + 1] if end in answer else answer
    return answers


@torch.inference_mode()
def drafter_flags(model: LlamaForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> Flags:
    """For each answer token, whether it is the drafter's most probable one after all before it."""
    ids = torch.tensor([[*prompt, *answer]])
    hidden = model.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    same: Flags = (model.lm_head(hidden).argmax(-1) == torch.tensor(list(answer))).numpy()
    return same


def accepted_by_chain(flags: Flags, length: int) -> list[int]:
    """Accepted draft tokens in each verify step when chains of ``length`` are drafted from the first token
    on.

    The step at position ``t`` accepts the run of agreements from ``t`` (at most ``length``) and adds the
    target's own token. Chains at the end of the answer cannot be accepted past its end.
    """
    accepted: list[int] = []
    at = 0
    while at < len(flags):
        run = 0
        while run < length and at + run < len(flags) and flags[at + run]:
            run += 1
        accepted.append(run)
        at += run + 1
    return accepted


def lookup_steps(prompt: Sequence[int], answer: Sequence[int], length: int, longest: int = 3) -> list[int]:
    """Accepted draft tokens in each step of prompt lookup: continue the latest earlier match of the last
    n-gram.

    n-grams of ``longest`` tokens are tried first, single tokens last.
    """
    text = [*prompt, *answer]
    accepted: list[int] = []
    at = len(prompt)
    while at < len(text):
        proposal: list[int] = []
        for n in range(longest, 0, -1):
            tail = text[at - n : at]
            starts = (s for s in range(at - n - 1, -1, -1) if text[s : s + n] == tail)
            found = next(starts, None)
            if found is not None:
                proposal = text[found + n : min(found + n + length, at)]
                break
        run = 0
        while run < len(proposal) and at + run < len(text) and proposal[run] == text[at + run]:
            run += 1
        accepted.append(run)
        at += run + 1
    return accepted
