"""Sampling parameters of one request, free of torch so that the scheduler can hold them."""

from __future__ import annotations

from itertools import chain

import msgspec

from engine.constraint import Constraint

#: Temperatures and repetition penalties below are taken for this one. It decides no less than they, and what
#: logits are divided by has to stay a number above 0 in float32.
LEAST_DIVISOR = 1e-30


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Field names and meanings follow vLLM and OpenAI.

    Attributes:
        temperature: 0 is greedy, whatever else is asked; otherwise logits are divided by it.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches `top_p`; 0 is greedy,
            too: the most probable token alone, and of several the one that `temperature` 0 takes.
        min_p: drop tokens less probable than `min_p` times the most probable one.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens.
        repetition_penalty: CTRL's (arXiv 1909.05858), over prompt and generated tokens; 1 is off.
        logit_bias: added to the logits of the given token ids.
        allowed_token_ids: no other token is possible; all are if empty.
        bad_words: sequences of output tokens that must not come about; the last token of one is impossible
            where the ones before it have been generated.
        constraint: what the text must look like; None for anything.
        seed: key of the noise; with the output position it fixes the token (design, idea 2).
        logprobs: number of alternatives whose log-probabilities are returned; None for none at all,
            0 for the chosen token only.
        prompt_logprobs: the same for the tokens of the prompt.
        max_tokens: most tokens to generate.
        min_tokens: stop tokens are impossible before this many tokens.
        stop_token_ids: generation ends after any of these (the end-of-sequence token is among them
            unless the request ignores it); the stop token itself is the last committed token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the plain argmax of the processed logits."""
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def largest_token(self) -> int:
        """The largest token id that is named, -1 if none is."""
        named = (*self.logit_bias, *self.allowed_token_ids, *self.stop_token_ids, *chain(*self.bad_words))
        return max(named, default=-1)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far, and so on the path within a tree."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def ranks_by_logits(self) -> bool:
        """Whether the model's own logits order the tokens, as far as drafts need know of it."""
        return self.is_greedy and not self.adjusts_logits

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything is done to logits before the temperature, as far as drafts need know of it."""
        return bool(
            self.needs_history
            or self.logit_bias
            or self.allowed_token_ids
            or (self.min_tokens and self.stop_token_ids)
        )

    @property
    def needs_history(self) -> bool:
        """Whether what is decided depends on the tokens before in any way but through the model."""
        return self.has_penalties or bool(self.bad_words)


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything a worker must know to open a request, or to reopen it after it was released.

    Attributes:
        request_id: unique within the cell.
        tokens: prompt and the output committed so far.
        prompt_len: how many of `tokens` are the prompt; output position t is `tokens[prompt_len + t]`.
        sampling: how tokens are chosen.
        adapter: name of the LoRA adapter that the target computes it with; empty for none. Drafters have
            none: what they propose only has to be likely.
        cache_salt: keys and values are shared only among requests of the same salt.
    """

    request_id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    adapter: str = ""
    cache_salt: str = ""

    @property
    def namespace(self) -> bytes:
        """What the target's keys and values depend on, or are kept apart by, besides the tokens."""
        return namespace_of(self.cache_salt, self.adapter)


def namespace_of(cache_salt: str, adapter: str = "") -> bytes:
    """Of prefixes that may be shared: that of requests without either is empty."""
    return f"{adapter}\0{cache_salt}".encode() if adapter or cache_salt else b""
