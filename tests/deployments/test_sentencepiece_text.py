"""Text of tokenizers like Llama 2's, whose decoders drop the space at the beginning of a text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from deployments.api_service import ApiService
from deployments.choice_state import ChoiceState
from deployments.openai_api import create_app
from deployments.openai_responses import CompletionFormat, Envelope
from deployments.text_codec import TextCodec
from deployments.text_offsets import TextOffsets
from tests.drafters.tokenizers_of_all_kinds import byte_fallback
from tests.fakes.cell_stand_in import CellStandIn
from verifier.messages import TokenLogprobs

PROMPT, REST = "The quick", " brown fox \u2603 jumps"


@cache
def tokenizer() -> Any:
    with TemporaryDirectory() as directory:
        core = Tokenizer.from_file(str(byte_fallback(Path(directory)) / "tokenizer.json"))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


@cache
def codec() -> TextCodec:
    return TextCodec(tokenizer())


def prompt_and_rest() -> tuple[list[int], list[int]]:
    prompt, both = (codec().encode(text) for text in (PROMPT, PROMPT + REST))
    assert both[: len(prompt)] == prompt
    return prompt, both[len(prompt) :]


def test_tokens_are_told_with_their_spaces_and_bytes() -> None:
    rest = prompt_and_rest()[1]
    assert codec().token_text(rest[0]) == " brown"
    assert b"".join(map(codec().token_bytes, rest)).decode() == REST
    special = [codec().token_text(token) for token in tokenizer().all_special_ids]
    assert special == tokenizer().all_special_tokens
    assert codec().token_text(10_000) == ""


def test_a_marker_that_is_no_token_shows_no_token() -> None:
    unknown = tokenizer().unk_token_id
    detokenizer = codec().detokenizer(keep=("<tool_call>", "</s>"))
    assert "".join(map(detokenizer.feed, [unknown, *tokenizer().convert_tokens_to_ids(["</s>"])])) == "</s>"


def test_of_tokens_with_the_same_text_the_likelier_is_told() -> None:
    byte, letter = tokenizer().convert_tokens_to_ids(["<0x61>", "a"])
    assert codec().token_text(byte) == codec().token_text(letter) == "a"
    state = ChoiceState([1], offsets=TextOffsets(codec().detokenizer()))
    state.tokens = [letter]
    state.logprobs = [TokenLogprobs(-0.5, [letter, byte], [-0.5, -2.0], 1)]
    shown = CompletionFormat(Envelope("id", "model", codec(), num_logprobs=2)).whole([state])
    assert shown["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize(
    "prompt", ["The quick \u2603\u2603\u2603", "quick \u2603\u2603\u2603\u2603\u2603\u2603"]
)
def test_a_context_begins_before_characters_that_are_spelled_in_bytes(prompt: str) -> None:
    """Else it began within one, was thrown away, and the rest lost its space."""
    tokens, both = codec().encode(prompt), codec().encode(prompt + REST)
    assert both[: len(tokens)] == tokens
    detokenizer = codec().detokenizer(after=tokens)
    assert "".join(map(detokenizer.feed, both[len(tokens) :])) + detokenizer.finish() == REST


def test_a_context_within_a_character_is_not_looked_at() -> None:
    tokens = codec().encode("x \u2603 y")
    cut = next(at for at, token in enumerate(tokens) if codec().token_bytes(token) == b"\x98")
    detokenizer = codec().detokenizer(after=tokens[:cut])
    text = "".join(map(detokenizer.feed, tokens[cut:])) + detokenizer.finish()
    assert text == "\ufffd\ufffd y"


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        ("completions", {"prompt": PROMPT}, REST),
        ("completions", {"prompt": PROMPT, "echo": True}, PROMPT + REST),
        ("completions", {"prompt": "", "add_special_tokens": True}, REST.strip()),
        ("chat/completions", {"continue_final_message": True}, REST),
        ("chat/completions", {}, REST.strip()),  # a message by itself
        ("chat/completions", {"guided_choice": [REST]}, REST),  # what it must look like says so
    ],
)
async def test_an_answer_begins_with_its_space_where_it_goes_on_with_a_text(
    route: str, fields: dict[str, Any], expected: str
) -> None:
    cell = CellStandIn(lambda submit: [*prompt_and_rest()[1], *codec().eos_ids])
    service = ApiService(cell, codec(), give_up_after_s=0.5)
    body = {"max_tokens": 100, "messages": [{"role": "user", "content": PROMPT}]} | fields
    if "prompt" in fields:
        body = {"logprobs": 0, **body}
        del body["messages"]
        body["prompt"] = fields["prompt"] or [1]
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        response = await http.post(f"/v1/{route}", json=body)
    await service.close()
    await cell.close()
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert (choice["text"] if "prompt" in fields else choice["message"]["content"]) == expected
    if "prompt" in fields:
        tokens, offsets = (choice["logprobs"][name] for name in ("tokens", "text_offset"))
        second = tokens.index(" brown") + 1
        assert expected.startswith(tokens[second], offsets[second])
