"""Very long texts are tokenized one at a time, and hold up no others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from deployments.prompt_preparation import MOST_BESIDE_CHARS, text_tokens
from deployments.text_codec import TextCodec


class Waiting:
    """A tokenizer that is not done with a long text before it is told."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= MOST_BESIDE_CHARS:
            return [1]
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.may_end.wait(30)
        with self._lock:
            self.at_once -= 1
        return [len(text)]


async def test_long_texts_take_turns_and_others_pass_them() -> None:
    """Twelve of 4 MB at once took a front end from 1.3 to 3.1 GB."""
    codec = Waiting()

    def tokens(num_chars: int) -> Any:
        return text_tokens(cast(TextCodec, codec), "a" * num_chars, add_special_tokens=False)

    long = [asyncio.create_task(tokens(MOST_BESIDE_CHARS + n)) for n in range(1, 7)]
    while not codec.at_once:
        await asyncio.sleep(0.001)
    # Neither one that is tokenized right here nor one of a thread waits for them.
    assert [await tokens(10), await tokens(MOST_BESIDE_CHARS)] == [[1], [1]]
    codec.may_end.set()
    assert await asyncio.gather(*long) == [[MOST_BESIDE_CHARS + n] for n in range(1, 7)]
    assert codec.most_at_once == 1
