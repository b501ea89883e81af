"""Spelling one tokenizer's tokens in another's: nothing is lost, and what is drafted is what was said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.retokenize_vocabulary import Vocabulary, have_same_tokens
from drafters.retokenized_text import Pair, RetokenizedText, drafted_tokens
from tests.drafters.tokenizers_of_all_kinds import TEXTS, byte_fallback, byte_level, spaces_added, word_piece
from tests.examples import examples

KINDS = ("byte-level", "digits", "nfc", "fallback", "spaces-added")


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    root = tmp_path_factory.mktemp("tokenizers")
    directories = {
        "byte-level": byte_level(root / "a", 420),
        "digits": byte_level(root / "b", 300, digits=True),
        "nfc": byte_level(root / "c", 350, nfc=True),
        "fallback": byte_fallback(root / "d"),
        "spaces-added": spaces_added(root / "e"),
    }
    return {kind: Vocabulary(directory) for kind, directory in directories.items()}


def joined(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.piece(token) or b"" for token in tokens)


PIECES = st.lists(
    st.sampled_from([*" \n\té漢🎈▁'", "</w>", "<s>", "ret", "urn", "  ", "12", "aaa", "initial"]), max_size=12
)


@pytest.mark.parametrize("kind", KINDS)
@examples(40)
@given(
    text=st.one_of(
        st.binary(max_size=12), PIECES.map(lambda p: "".join(p).encode()), st.text().map(str.encode)
    )
)
def test_any_bytes_are_spelled_exactly(vocabularies: dict[str, Vocabulary], kind: str, text: bytes) -> None:
    tokens = vocabularies[kind].spell(text)
    assert tokens is not None
    assert joined(vocabularies[kind], tokens) == text


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("target", KINDS)
@examples(15)
@given(data=st.data())
def test_a_sequence_is_followed_token_by_token(
    vocabularies: dict[str, Vocabulary], target: str, drafter: str, data: st.DataObject
) -> None:
    pair = Pair.of(vocabularies[target], vocabularies[drafter])
    number = st.integers(0, 299)
    pieces = data.draw(st.lists(st.one_of(number, st.sampled_from(TEXTS)), max_size=8))
    tokens: list[int] = []
    for piece in pieces:
        tokens += [piece] if isinstance(piece, int) else pair.target.spell(piece.encode()) or []
    expected = b"".join(
        b"" if t in pair.to_drafter else pair.target.piece(t) or (pair.target.special_name(t) or "").encode()
        for t in tokens
    )
    text, told = RetokenizedText(pair), []
    while tokens:
        size = data.draw(st.integers(1, 40))
        assert text.append(tokens[:size])
        tokens = tokens[size:]
        start, ids = text.report()
        told[start:] = ids  # what a drafter knows that is told only what changed
        assert told == text.ids
    assert joined(pair.drafter, text.ids) == expected


def test_appending_gives_what_the_tokenizer_makes_of_the_whole(vocabularies: dict[str, Vocabulary]) -> None:
    for target in KINDS:
        for drafter in KINDS:
            pair = Pair.of(vocabularies[target], vocabularies[drafter])
            whole = "".join(TEXTS).encode()
            text = RetokenizedText(pair)
            for token in pair.target.spell(whole) or []:
                assert text.append([token])
            assert text.ids == pair.drafter.spell(whole)


def test_spaces_in_added_tokens_are_spaces(vocabularies: dict[str, Vocabulary]) -> None:
    """Gemma's tokens of several spaces are added ones, by the name that its vocabulary has for them."""
    gemma = vocabularies["spaces-added"]
    tokens = gemma.spell(b"values    \n\nreturn") or []
    assert [gemma.piece(token) for token in tokens[-3:]] == [b"    ", b"\n\n", b"return"]
    text = RetokenizedText(Pair.of(gemma, vocabularies["byte-level"]))
    assert text.append(tokens)
    assert joined(vocabularies["byte-level"], text.ids) == b"values    \n\nreturn"


@pytest.mark.parametrize("odd", ["\u2581", " </w> "])
def test_only_what_cannot_be_spelled_is_spelled_byte_by_byte(
    vocabularies: dict[str, Vocabulary], odd: str
) -> None:
    """The mark of a space as such, and an added token that takes the spaces around it."""
    vocabulary = vocabularies["spaces-added" if "w" in odd else "fallback"]
    around = vocabulary.spell(b"return the initial values of") or []
    tokens = vocabulary.spell(f"return the initial values of{odd}return the initial values of".encode()) or []
    assert tokens[: len(around)] == around
    assert len(tokens) < 2 * len(around) + 8


@pytest.mark.parametrize("character", ["🎈", "漢", "é", "\u2581"])
def test_a_long_text_is_not_spelled_again_with_every_token(
    vocabularies: dict[str, Vocabulary], character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where characters have several tokens: the last tokens may begin within one."""
    pair = Pair.of(vocabularies["fallback"], vocabularies["byte-level"])
    text = RetokenizedText(pair)
    longest, spell = 0, pair.drafter.spell

    def counted(rest: bytes) -> list[int] | None:
        nonlocal longest
        longest = max(longest, len(rest))
        return spell(rest)

    monkeypatch.setattr(pair.drafter, "spell", counted)
    for token in pair.target.spell((character * 500).encode()) or []:
        assert text.append([token])
    assert longest < 100


def test_special_tokens_go_by_name_then_by_role(vocabularies: dict[str, Vocabulary]) -> None:
    pair = Pair.of(vocabularies["byte-level"], vocabularies["digits"])
    assert pair.to_drafter == {0: 0, 1: 1, 2: 2}
    text = RetokenizedText(pair)
    assert text.append([0, *(pair.target.spell(b"<|end|> is text") or []), 1])
    assert (text.ids[0], text.ids[-1]) == (0, 1)
    assert 1 not in text.ids[1:-1]
    # No counterpart: the name is spelled out.
    lonely = RetokenizedText(Pair.of(vocabularies["byte-level"], vocabularies["fallback"]))
    assert lonely.append([2])
    assert joined(vocabularies["fallback"], lonely.ids) == b"<|both|>"


def test_starting_over_reports_from_where_it_differs(vocabularies: dict[str, Vocabulary]) -> None:
    pair = Pair.of(vocabularies["byte-level"], vocabularies["digits"])
    text = RetokenizedText(pair)
    text.append(pair.target.spell(b"return the values of a fox") or [])
    before = list(text.ids)
    text.report()
    text.start_over(pair.target.spell(b"return the values") or [])
    start, ids = text.report()
    assert before[:start] + ids == text.ids
    assert start > 0


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_what_is_drafted_is_a_prefix_of_the_text_and_of_its_tokens(
    vocabularies: dict[str, Vocabulary], target: str, drafter: str
) -> None:
    pair = Pair.of(vocabularies[target], vocabularies[drafter])
    for whole in TEXTS[:4]:
        path = pair.drafter.spell(whole.encode()) or []
        wanted = pair.target.spell(whole.encode()) or []
        for size in range(1, len(path) + 1):
            values = [-float(i) for i in range(1, size + 1)]
            drafted = drafted_tokens(pair, path[:size], values)
            spelled = joined(pair.drafter, path[:size])
            assert spelled.startswith(joined(pair.target, drafted.tokens))
            assert drafted.num_settled <= len(drafted.tokens) <= drafted.num_settled + 1
            assert drafted.logps == sorted(drafted.logps, reverse=True)
            for tokens in (
                pair.target.spell(spelled),
                pair.target.spell(joined(pair.drafter, path[: size - 1])),
            ):
                assert tokens is not None
                assert tokens[: drafted.num_settled] == drafted.tokens[: drafted.num_settled]
        drafted = drafted_tokens(pair, path, [0.0] * len(path))
        assert drafted.tokens == wanted[: len(drafted.tokens)]
        end = pair.target.counterparts(pair.drafter)[1] if 1 in pair.to_drafter else None
        if end is not None:
            assert drafted_tokens(pair, [*path, end], [0.0] * (len(path) + 1)).tokens == [*wanted, 1]


def test_log_probabilities_are_those_of_the_shortest_spelling(vocabularies: dict[str, Vocabulary]) -> None:
    pair = Pair.of(vocabularies["byte-level"], vocabularies["digits"])
    path = [t for piece in (b"12", b"3", b"4", b" the", b" fox") for t in pair.drafter.spell(piece) or []]
    values = [-1.0 * (i + 1) for i in range(len(path))]
    drafted, logps, settled = drafted_tokens(pair, path, values)
    for n, logp in enumerate(logps[:settled], 1):
        spelled = len(joined(pair.target, drafted[:n]))
        needed = next(i for i in range(len(path)) if len(joined(pair.drafter, path[: i + 1])) >= spelled)
        assert logp == values[needed]


def test_tokenizers_are_compared_and_refused(tmp_path: Path) -> None:
    a, b = byte_level(tmp_path / "a", 300), byte_level(tmp_path / "b", 310)
    assert have_same_tokens(a, a) is True
    assert have_same_tokens(a, b) is False
    assert have_same_tokens(a, tmp_path) is None
    with pytest.raises(ValueError, match="byte fallback"):
        Vocabulary(word_piece(tmp_path / "c"))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Vocabulary(tmp_path)
