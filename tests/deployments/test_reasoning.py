"""Thoughts told apart from answers, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.reasoning import ReasoningParser, kind_for_template


def parts(*texts: str, kind: str = "think", is_open: bool = False) -> tuple[str, str]:
    """What is thought and what is said."""
    parser = ReasoningParser(kind, is_open=is_open)
    told = [*(parser.feed(text) for text in texts), parser.finish()]
    return "".join(thought for thought, _ in told), "".join(said for _, said in told)


@pytest.mark.parametrize(
    ("text", "is_open", "told"),
    [
        ("<think>\nhm </think>\n\nYes.", False, ("hm ", "Yes.")),
        ("\n<think>hm</think>Yes. </think>", False, ("hm", "Yes. </think>")),
        ("hm\n</think>\n\nYes.", True, ("hm\n", "Yes.")),
        ("<think>\nhm</think>Yes.", True, ("hm", "Yes.")),
        ("<think></think>Yes.", False, ("", "Yes.")),
        ("</think>\nYes.", True, ("", "Yes.")),
        (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
        ("Yes", False, ("", "Yes")),
        ("", False, ("", "")),
        ("  ", True, ("", "")),
        ("  ", False, ("", "  ")),
        ("<thin", False, ("", "<thin")),
        ("<thin", True, ("<thin", "")),
        ("<think>cut o", False, ("cut o", "")),
        ("<think>cut</th", False, ("cut</th", "")),
        ("<think><think>a</think>b", False, ("<think>a", "b")),
        ("cut off", True, ("cut off", "")),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, is_open: bool, told: tuple[str, str]) -> None:
    assert parts(text, is_open=is_open) == told
    assert parts(*text, is_open=is_open) == told


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "b"]), max_size=9),
    st.booleans(),
    st.data(),
)
def test_the_cut_makes_no_difference(pieces: list[str], is_open: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    cut = [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *cuts}))]
    assert parts(*cut, is_open=is_open) == parts(text, is_open=is_open)


def test_a_form_may_begin_with_a_space() -> None:
    parser = ReasoningParser("think", is_open=True, is_form=True)
    assert [parser.feed(text) for text in ("hm</thi", "nk>", " ", "yes")] == [
        ("hm", ""),
        ("", ""),
        ("", " "),
        ("", "yes"),
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mistral", "[THINK]hm[/THINK]Yes."),
        ("gemma4", "<|channel>thought\nhm<channel|>Yes."),
        ("seed_oss", "<seed:think>hm</seed:think>\nYes."),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|>Yes."),
    ],
)
def test_marks_of_others(kind: str, text: str) -> None:
    assert parts(text, kind=kind) == parts(*text, kind=kind) == ("hm", "Yes.")


def test_tokens_that_marks_begin_with_are_seen() -> None:
    """Detokenizers leave out special tokens that nobody asks for."""
    assert ReasoningParser("gemma4", is_open=False).markers == ("<|channel>", "<channel|>")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% set content = content.split('</think>')[-1] %}", "think"),
        ("[THINK]{{ part['thinking'] }}[/THINK]", "mistral"),
        ("{{- '<|channel>thought\n<channel|>' -}}", "gemma4"),
        ("{%- set think_end_token        = '</seed:think>'            -%}", "seed_oss"),
        ("{%- if not enable_thinking -%}<|START_THINKING|><|END_THINKING|>{%- endif -%}", "cohere"),
        ("{{ messages[0]['content'] }} I think", "none"),
        ("", "none"),
    ],
)
def test_the_chat_template_shows_how(template: str, kind: str) -> None:
    assert kind_for_template(template) == kind


@pytest.mark.parametrize(
    ("text", "is_open", "num"),
    [
        ("<think>hm</think>Yes.", False, 4),
        ("hm</think>Yes.", True, 3),
        ("<think>hm", False, 3),
        ("hm", True, 2),
        ("Yes.", False, 0),
        ("", True, 0),
    ],
)
@pytest.mark.parametrize("close_token", [None, 9])
@pytest.mark.parametrize("per_step", [1, 2, 100])
def test_tokens_of_a_thought_are_counted(
    text: str, is_open: bool, num: int, close_token: int | None, per_step: int
) -> None:
    """Of a tokenizer that has the marks, and each letter as a token."""
    names = {"<think>": 8, "</think>": 9}
    tokens, rest = [], text
    while rest:
        name = next((name for name in names if rest.startswith(name)), rest[0])
        tokens.append((name, names.get(name, 1)))
        rest = rest[len(name) :]
    parser = ReasoningParser("think", is_open=is_open, close_token=close_token)
    for first in range(0, len(tokens), per_step):
        step = tokens[first : first + per_step]
        parser.feed("".join(name for name, _ in step), [token for _, token in step])
    parser.finish()
    if close_token is not None or per_step == 1 or "</think>" not in text:
        assert parser.num_tokens == num
    else:
        assert 0 < parser.num_tokens <= len(tokens)
