"""How many integers of few bits lie in words of 32: known from shapes, without importing torch."""

from __future__ import annotations

_WORD_BITS = 32


def num_words(numbers: int, bits: int) -> int:
    """How many words hold so many numbers of so many bits."""
    return -(-numbers * bits // _WORD_BITS)


def bits_of(words: int, numbers: int) -> int:
    """How many bits each of `numbers` in `words` has.

    Raises:
        ValueError: if that is another number than is read.
    """
    bits = words * _WORD_BITS // numbers
    if bits not in (4, 8) or words != num_words(numbers, bits):
        raise ValueError(
            f"{numbers} numbers in {words} words: those of four and of eight bits are read, not of "
            f"{words * _WORD_BITS / numbers:.3g}"
        )
    return bits


def leaves_gaps(words: int, numbers: int) -> bool:
    """Whether `numbers` do not fill so many words with any number of bits."""
    return words * _WORD_BITS % numbers != 0
