"""Detokenisation and stop strings: the pieces in which text arrives must not matter."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from deployments.detokenizer import WindowDetokenizer
from deployments.generation import TextAssembler
from deployments.stop_strings import StopStrings
from deployments.text_codec import TextCodec
from tests.examples import examples
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

TOKENS = st.lists(st.integers(0, len(tokenizer()) - 1), max_size=60)


@given(TOKENS, st.booleans())
def test_pieces_are_the_whole(tokens: list[int], skip: bool) -> None:
    detokenizer = codec().detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.feed(token) for token in tokens] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer().decode(tokens, skip_special_tokens=skip)


@given(st.text(max_size=60))
def test_no_piece_is_broken(text: str) -> None:
    detokenizer = codec().detokenizer()
    pieces = [detokenizer.feed(token) for token in ids(text)]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(st.text(max_size=40))
def test_other_tokenizers_are_decoded_in_a_window(text: str) -> None:
    detokenizer = WindowDetokenizer(lambda window: str(tokenizer().decode(window)))
    pieces = [detokenizer.feed(token) for token in ids(text)] + [detokenizer.finish()]
    assert "".join(pieces) == text


@given(st.text("�日a🙂", max_size=40))
def test_characters_after_many_that_are_none_are_whole(text: str) -> None:
    detokenizer = WindowDetokenizer(lambda window: bytes(window).decode(errors="replace"))
    pieces = [detokenizer.feed(byte) for byte in text.encode()] + [detokenizer.finish()]
    assert "".join(pieces) == text


def test_the_window_stays_short_whatever_a_model_writes() -> None:
    """With bytes that begin no character it grew with each, and an answer of them took minutes to decode."""
    windows: list[int] = []

    def decode(window: list[int]) -> str:
        windows.append(len(window))
        return bytes(window).decode(errors="replace")

    detokenizer = WindowDetokenizer(decode)
    pieces = [detokenizer.feed(0x80) for _ in range(1000)]
    assert len("".join(pieces)) > 980, "and a stream tells them as they come"
    assert max(windows) < 50
    last = [detokenizer.feed(byte) for byte in "日".encode()]
    assert "".join([*pieces, *last, detokenizer.finish()]) == "�" * 1000 + "日"


def test_window_keeps_the_space_a_decoder_drops_at_the_beginning() -> None:
    words = {0: "▁the", 1: "▁dog", 2: "s", 3: "▁run"}

    def decode(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    detokenizer = WindowDetokenizer(decode, skipped={9})
    assert [detokenizer.feed(token) for token in (0, 9, 1, 2, 3)] == ["the", "", " dog", "s", " run"]
    assert detokenizer.finish() == ""


def test_incomplete_character_at_the_end_is_replaced() -> None:
    detokenizer = codec().detokenizer()
    tokens = [token for token in range(400) if codec().token_bytes(token) == b"\xf0"]
    assert [detokenizer.feed(tokens[0]), detokenizer.finish()] == ["", "�"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert codec().decode([10_000, *ids("a")]) == "a"


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Begin and end of the first stop string to be completed, found by trying every end."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


@examples(300)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple),
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
    st.booleans(),
)
def test_text_is_cut_at_the_first_stop(
    text: str, stops: tuple[str, ...], sizes: list[int], include: bool
) -> None:
    checker, shown, position = StopStrings(stops, include=include), "", 0
    for size in sizes * len(text):
        shown += checker.feed(text[position : position + size])
        position += size
        # Never more than will be in the answer.
        assert text.startswith(shown)
    shown += checker.finish()
    found = first_stop(text, stops)
    if found is None:
        assert checker.matched is None
        assert shown == text
    else:
        begin, end = found
        assert checker.matched == text[begin:end]
        assert shown == text[: end if include else begin]


def test_nothing_is_held_back_without_need() -> None:
    checker = StopStrings(("abc",))
    assert [checker.feed(piece) for piece in ("xa", "b", "x", "ab", "c")] == ["x", "", "abx", "", ""]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("",))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=40), st.booleans())
def test_step_sizes_do_not_change_text_or_count(sizes: list[int], show_stop: bool) -> None:
    def run(sizes: list[int]) -> tuple[str, int, str | int | None]:
        stops = StopStrings((" over", "lazy"), include=show_stop)
        assembler = TextAssembler(codec().detokenizer(), stops, codec().eos_ids, show_stop=show_stop)
        tokens, text, count, position = ids("the brown fox jumps over the lazy dog"), "", 0, 0
        for size in sizes:
            piece, used = assembler.feed(tokens[position : position + size])
            text, count, position = text + piece, count + used, position + size
            if assembler.finish_reason is not None:
                break
        return text + assembler.finish(), count, assembler.stop_reason

    assert run([*sizes, 99]) == run([1] * 99)


@examples(300)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.integers(0, 22),
    st.booleans(),
)
def test_stop_strings_within_the_first_tokens_end_nothing(
    text: str, stops: tuple[str, ...], min_tokens: int, include: bool
) -> None:
    assembler = TextAssembler(
        codec().detokenizer(),
        StopStrings(stops, include=include),
        frozenset(),
        show_stop=include,
        min_tokens=min_tokens,
    )
    shown = ""
    for character in text:
        shown += assembler.feed(ids(character))[0]
        assert text.startswith(shown)
        if assembler.finish_reason is not None:
            break
    shown += assembler.finish()
    ends = (end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(stops))
    end = next(ends, None)
    if end is None:
        assert (shown, assembler.stop_reason) == (text, None)
        return
    stop = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert assembler.stop_reason == stop
    assert shown == text[: end if include else end - len(stop)]


def test_special_tokens_without_a_name_are_skipped() -> None:
    """Llama 3 has many: no role in its configuration names them, only the vocabulary marks them."""
    made = copy.deepcopy(tokenizer())
    made.add_tokens([AddedToken("<|header|>", special=True), AddedToken("<mark>", special=False)])
    tokens = made.encode("the <|header|>dog<mark>", add_special_tokens=False)
    assert "<|header|>" not in made.all_special_tokens
    assert TextCodec(made).decode(tokens) == made.decode(tokens, skip_special_tokens=True) == "the dog<mark>"
    assert TextCodec(made).decode(tokens, skip_special_tokens=False) == "the <|header|>dog<mark>"
