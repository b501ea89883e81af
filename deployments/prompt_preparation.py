"""The tokens of a request's prompts, from text, token ids or a conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from deployments import sampling_mapping as mapping
from deployments.chat_messages import ChatMessage, for_template
from deployments.errors import bad_request
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    template_variables,
)
from deployments.sampling_mapping import CellInfo
from deployments.text_codec import TextCodec
from deployments.tools import ToolUse

#: Longer texts are tokenized in a thread, and more tokens decoded.
INLINE_CHARS = 8192
# Texts longer than this are tokenized one at a time: while it is, a megabyte takes some 200 MB of memory.
MOST_BESIDE_CHARS = 1 << 20
_one_by_one = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
#: Longer bodies are checked in a thread: a megabyte of ids, or of short parts, takes tenths of a second.
INLINE_BYTES = 1 << 15
# Log-probabilities of a prompt come as one message; so many are some 16 MiB.
MOST_PROMPT_LOGPROBS = 1_000_000
MOST_ALLOWED_IDS = 1 << 17
# A template may write a variable with every message, as most do `eos_token`: so many characters in all.
MOST_VARIABLE_CHARS = 1 << 22
# Answers that one body may ask for.
MOST_CHOICES = 128
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text where that is shown in front of the answer."""

    tokens: list[int]
    echo: str = ""


async def prompts_of(
    request: GenerationRequest, codec: TextCodec, info: CellInfo, use: ToolUse, parser: str
) -> tuple[list[Prompt], str]:
    """The prompts of a request, and the field they came in.

    Args:
        request: what is asked.
        codec: the target's tokenizer.
        info: what token ids there are, and how many fit.
        use: the tools of a chat. parser: how the model writes calls.
    """
    if isinstance(request, ChatRequest):
        tokens = await chat_tokens(
            codec,
            request.messages,
            use,
            parser,
            add_generation_prompt=opens_turn(
                request.add_generation_prompt, continues=request.continue_final_message
            ),
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            documents=request.documents,
            variables=template_variables(request.reasoning_effort, request.chat_template_kwargs),
        )
        last = request.messages[-1]
        echo = last.content if request.echo and last.role == "assistant" else ""
        chat = [Prompt(_truncated(tokens, request, info), echo)]
        _check_amounts(request, chat, info)
        return chat, "messages"
    assert isinstance(request, CompletionRequest)
    found = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            ids = await text_tokens(codec, prompt, add_special_tokens=request.add_special_tokens is not False)
            text, around = prompt, codec.tokens_around if request.add_special_tokens is not False else (0, 0)
        else:
            mapping.check_token_ids("prompt", prompt, info)
            ids, text, around = prompt, "", (0, 0)
        kept = _truncated(ids, request, info, around)
        if request.echo and (len(kept) < len(ids) or ids is prompt):
            text = await in_thread_if(len(kept) > INLINE_CHARS, partial(codec.decode, kept))
        found.append(Prompt(kept, text if request.echo else ""))
    _check_amounts(request, found, info)
    return found, "prompt"


def _check_amounts(request: GenerationRequest, prompts: Sequence[Prompt], info: CellInfo) -> None:
    """Refuse what a small body would multiply: each prompt's answer has its own of what is asked for."""
    best_of = getattr(request, "best_of", None) or 1
    name = "best_of" if best_of > (request.n or 1) else "n"
    num_choices = len(prompts) * max(request.n or 1, best_of)
    if num_choices > MOST_CHOICES:
        raise bad_request(f"Prompts times `{name}` may be at most {MOST_CHOICES}.", name)
    # The queue would refuse one of them however often its client comes back.
    if info.max_requests is not None and num_choices > info.max_requests:
        raise bad_request(
            f"Prompts times `{name}` are {num_choices}, and no more than {info.max_requests} requests can "
            "run and wait here at once. Ask for fewer at a time.",
            name,
        )
    most = mapping.num_prompt_logprobs(request)
    longest = max(len(prompt.tokens) for prompt in prompts)
    if most is not None and longest * (most + 1) > MOST_PROMPT_LOGPROBS:
        raise bad_request(
            f"Log-probabilities of {longest:,} prompt tokens, {most + 1} for each, are more than "
            f"{MOST_PROMPT_LOGPROBS:,}. Ask for fewer, or send a shorter prompt.",
            "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs",
        )
    if num_choices * len(request.allowed_token_ids or ()) > MOST_ALLOWED_IDS:
        raise bad_request(
            f"`allowed_token_ids` times the choices may be at most {MOST_ALLOWED_IDS:,}.", "allowed_token_ids"
        )


async def chat_tokens(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    use: ToolUse,
    parser: str,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    documents: list[dict[str, object]] | None = None,
    variables: dict[str, object] | None = None,
) -> list[int]:
    """Token ids of a conversation; arguments and errors as of `TextCodec.encode_chat`."""
    knows_tools = codec.knows_tools
    num_variable_chars = _num_variable_chars(variables, messages)
    num_chars = sum(message.num_chars for message in messages) + num_variable_chars
    return await _tokenized(
        num_chars,
        # How long tools and documents are is not known before the template has written them; few are short.
        is_long=use.parses or bool(documents),
        work=lambda: codec.encode_chat(
            for_template(
                messages,
                use,
                knows_tools=knows_tools,
                parser=parser,
                goes_on=continue_final_message,
                shows_calls=codec.shows_calls,
                shows_results=codec.shows_results,
            ),
            tools=use.tools if knows_tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            documents=documents,
            variables=variables,
        ),
    )


def _num_variable_chars(variables: dict[str, object] | None, messages: Sequence[ChatMessage]) -> int:
    """How much a template may write of its variables; raises `ApiError` (400) if that is far too much."""
    if not variables:
        return 0
    # Calls count too: where a template takes one call a message, each becomes a message of its own.
    times = sum(1 + len(message.tool_calls or ()) for message in messages)
    size = len(json.dumps(variables, ensure_ascii=False))
    if times > 1 and size * times > MOST_VARIABLE_CHARS:
        raise bad_request(
            f"`chat_template_kwargs` has {size:,} characters, which the model's template may write with each "
            f"of {times:,} messages and calls; together they may be {MOST_VARIABLE_CHARS:,}. Say less in it, "
            "or send fewer messages.",
            "chat_template_kwargs",
        )
    return size * times


async def text_tokens(codec: TextCodec, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a plain prompt."""
    return await _tokenized(len(text), partial(codec.encode, text, add_special_tokens=add_special_tokens))


async def _tokenized(num_chars: int, work: Callable[[], list[int]], *, is_long: bool = False) -> list[int]:
    """Token ids of a text that has at least so many characters."""
    if num_chars > MOST_BESIDE_CHARS:
        return await asyncio.get_running_loop().run_in_executor(_one_by_one, work)
    return await in_thread_if(is_long or num_chars > INLINE_CHARS, work)


def opens_turn(asked: bool | None, *, continues: bool | None) -> bool:
    """Whether an assistant turn is opened at the end: if not told otherwise, unless the last one goes on."""
    return not continues if asked is None else asked


def _truncated(
    tokens: list[int], request: GenerationRequest, info: CellInfo, around: tuple[int, int] = (0, 0)
) -> list[int]:
    """As many tokens as `truncate_prompt_tokens` says, from the end or the beginning.

    Args:
        tokens: of the prompt. request: how many, and which. info: what fits.
        around: how many the tokenizer has put in front and behind; they stay, as vLLM has it.
    """
    most = request.truncate_prompt_tokens
    if most is None:
        return tokens
    if most == -1:
        most = max(1, info.max_tokens - mapping.reserved_tokens(request, info))
    if len(tokens) <= most:
        return tokens
    front, behind = around if sum(around) < most else (0, 0)
    end = len(tokens) - behind
    left = most - front - behind
    text = tokens[front : front + left] if request.truncation_side == "right" else tokens[end - left : end]
    return [*tokens[:front], *text, *tokens[end:]]


async def in_thread_if(is_long: bool, work: Callable[[], _Made]) -> _Made:
    """What `work` makes: here, or in a thread where that takes long, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if is_long else work()
