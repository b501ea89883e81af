"""Grammars over tokens: which tokens may follow in an answer that a `Constraint` describes.

llguidance (a lexer of regular-expression derivatives under an Earley parser, over the trie of the
vocabulary) computes the masks. This module compiles and caches grammars, and follows one answer each.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock, stack_size

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from engine.constraint import Constraint
from engine.end_tokens import end_tokens
from engine.exact_schema import Number, why_not_exact
from engine.grammar_source import source_of, unforced
from engine.ignored_keywords import why_ignored
from engine.intersections import why_intersects_too_many, why_matches_too_many
from engine.mask_bits import TokenMask, only_token, tokens_in
from engine.schema_cost import MOST_OPTIONAL, why_too_dear
from engine.schema_parts import schemas_of

#: Compiled grammars kept by one process.
MAX_COMPILED = 128
# Bytes of address space, of which only what is used is taken.
_COMPILER_STACK = 256 << 20

#: Nothing can follow.
NO_TOKEN = "no token of the vocabulary can continue the answer"
# What may come next in llguidance's parser: four for each property that may be left out, of two objects.
MOST_ITEMS = 8 * MOST_OPTIONAL
# Of llguidance's message on `oneOf`, which names an option that nobody has here; and ours.
_NOT_ONE_OF = "oneOf constraints are not supported"
_ONE_OF = (
    "`oneOf` is followed only where it is plain that no value keeps to two of its schemas, as with other "
    "types or another `const` of a required property: give `anyOf` if a value may keep to several"
)
# How llguidance says that a lexer is full: of states, or of expressions.
_USED_UP = "lexer error: too many"
# How it says that a step takes more work than it may.
_LIMITS = ("lexer error: ", "parser error: ")


class GrammarError(ValueError):
    """A constraint that cannot be compiled or followed; the message is for whoever wrote it."""


class TooMuchWork(GrammarError):
    """A step takes more work than the limits allow."""


class UsedUp(TooMuchWork):
    """A lexer has as many states as it may have, of all answers that were followed with it."""


def _limits(max_states: int | None) -> LLParserLimits:
    # Work per step is llguidance's default: with ten times as much, a mask of `(a|b)x{400000}` took seconds,
    # for which all requests of a target wait.
    return LLParserLimits(
        max_items_in_row=MOST_ITEMS,
        max_lexer_states=max_states,
        verbose_errors=False,
    )


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a model directory as llguidance needs it, its end tokens included.

    Args:
        directory: with `tokenizer.json`, and the files that name end tokens (`engine.end_tokens`).
        vocab_size: of the model; it may be above the tokenizer's.

    Raises:
        GrammarError: if there is no such file, or no token that ends an answer.
    """
    path = directory / "tokenizer.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    return make_tokenizer(text, end_tokens(directory), vocab_size)


def make_tokenizer(text: str | None, ends: list[int], vocab_size: int) -> LLTokenizer:
    """The tokenizer whose `tokenizer.json` is `text`.

    Args:
        text: None if there is no such file.
        ends: tokens that end an answer.
        vocab_size: of the model; it may be above the tokenizer's.

    Raises:
        GrammarError: if llguidance cannot use it.
    """
    if text is None:
        raise GrammarError("this model has no tokenizer.json, which structured outputs need")
    if not ends:
        raise GrammarError("this model has no end-of-sequence token, which structured outputs need")
    # No model writes others, as -1 or one beyond its vocabulary; for them llguidance takes no tokenizer.
    ends = [end for end in ends if 0 <= end < vocab_size] or ends
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError:  # more tokens than the model has, which `Grammars.mask` leaves out
        try:
            return LLTokenizer(text, eos_token=ends)
        except ValueError as error:
            raise GrammarError(
                f"this model's tokenizer cannot be used for structured outputs: {error}"
            ) from None


class Grammars:
    """Compiled grammars of one tokenizer, the most recently used ones kept.

    Loading and compiling happen in a thread: large schemas take tens of milliseconds, during which a step of
    the target need not wait.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        *,
        vocab_size: int | None = None,
        max_compiled: int = MAX_COMPILED,
        max_states: int | None = None,
    ) -> None:
        """Begin to `load` the tokenizer, whose tokens from `vocab_size` on the model does not have.

        A compiled grammar has at most `max_states` of its lexer, by default llguidance's 250,000.
        """
        self._vocab_size = vocab_size
        self._max_states = max_states
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # llguidance's compiler is recursive: a chain of a thousand definitions would overflow a usual stack.
        before = stack_size(_COMPILER_STACK)
        self._tokenizer = self._thread.submit(load)
        stack_size(before)
        self._max_compiled = max_compiled
        self._compiled: OrderedDict[tuple[Constraint, bool], Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()  # front ends ask from several threads

    @classmethod
    def of_model(cls, directory: Path, vocab_size: int) -> Grammars:
        """Over the tokenizer of the model in `directory`."""
        return cls(partial(load_tokenizer, directory, vocab_size), vocab_size=vocab_size)

    @property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer, once loaded; raises GrammarError if the model has none that serves."""
        return self._tokenizer.result()

    def prepare(
        self, constraint: Constraint, *, forced: bool = True, anew: bool = False
    ) -> Future[LLMatcher]:
        """Begin to compile, unless it is done already; the result is shared and must be copied.

        Where there is no choice what the text is, the tokenizer says how it is spelled, if `forced`. If
        `anew`, it is compiled in any case, and the next ones share that.
        """
        key = constraint, forced
        with self._lock:
            found = None if anew else self._compiled.get(key)
            if found is None:
                compiles = self._compile if forced else self._compile_unforced
                found = self._compiled[key] = self._thread.submit(compiles, constraint)
            self._compiled.move_to_end(key)
            if len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
            return found

    def check(self, constraint: Constraint) -> None:
        """Compile and wait.

        Raises:
            GrammarError: with llguidance's message, if it cannot be compiled, or nothing satisfies it.
        """
        self.prepare(constraint).result()

    def any_token(self) -> TokenMask:
        """All of the model's tokens that the tokenizer knows."""
        size = self.tokenizer.vocab_size
        bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
        bits[: size if self._vocab_size is None else min(size, self._vocab_size)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self, state: LLMatcher) -> TokenMask:
        """The model's tokens that may come next."""
        size = self.tokenizer.vocab_size
        mask: TokenMask = np.zeros((size + 31) // 32, dtype=np.int32)
        fill_next_token_bitmask(state, mask[None])
        if self._vocab_size is not None and self._vocab_size < size:
            last, rest = divmod(self._vocab_size, 32)
            words = mask.view(np.uint32)
            words[last] &= np.uint32((1 << rest) - 1)
            words[last + 1 :] = 0
        return mask

    def spells_special(self, state: LLMatcher, mask: TokenMask) -> bool:
        """Whether a mask is that of a special token that stands for text which the answer has to contain.

        llguidance has the tokenizer spell text that is forced, and that takes `<|end|>` for the token which
        ends an answer.
        """
        token = only_token(mask)
        if token is None or not self.tokenizer.is_special_token(token):
            return False
        return token not in self.tokenizer.eos_tokens or not state.is_accepting()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            source = source_of(constraint)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        reason = why_intersects_too_many(source) if constraint.kind == "grammar" else None
        if reason is not None:
            raise GrammarError(reason)
        for schema in schemas_of(constraint):
            reason = why_ignored(schema, takes_options=constraint.kind == "grammar")
            reason = reason or why_too_dear(schema) or why_matches_too_many(schema)
            reason = reason or why_not_exact(schema, self._keeps)
            if reason is not None:
                raise GrammarError(reason)
        compiled = self._matcher(source)
        mask = self.mask(compiled)  # which takes up to a second, and its copies have it then
        start = compiled.deep_copy()
        if not start.is_error() and self.spells_special(start, mask):
            start = self._matcher(unforced(source))
            mask = self.mask(start)
        if start.is_error():
            raise GrammarError(_message(start))
        ends = set(self.tokenizer.eos_tokens)
        going_on = [token for token in tokens_in(mask) if token not in ends]
        if not start.is_accepting() and not going_on:
            raise GrammarError("nothing can satisfy this")
        # Expressions that are too large fail with the first token they read.
        if going_on and not start.consume_token(going_on[0]) and start.is_error():
            raise GrammarError(_message(start))
        return compiled

    def _compile_unforced(self, constraint: Constraint) -> LLMatcher:
        return self._matcher(unforced(source_of(constraint)))

    def _matcher(self, source: str) -> LLMatcher:
        limits = _limits(self._max_states)
        compiled = LLMatcher(self._tokenizer.result(), source, log_level=0, limits=limits)
        if compiled.is_error():
            raise GrammarError(_message(compiled))
        return compiled

    def _keeps(self, number: Number) -> bool:
        """Whether llguidance writes a number as what it is."""
        source = LLMatcher.grammar_from_json_schema(json.dumps({"const": number}))
        written = self._matcher(source).compute_ff_bytes()
        return bool(written) and json.loads(written) == number


def error_of(state: LLMatcher) -> GrammarError:
    """What went wrong with it."""
    message = _message(state)
    if message.startswith(_USED_UP):
        return UsedUp(message)
    return (TooMuchWork if message.startswith(_LIMITS) else GrammarError)(message)


def _message(state: LLMatcher) -> str:
    """What went wrong, without llguidance's account of its own state."""
    text: str = state.get_error()
    for end in ("<state>", "<backtrace>", "<non-verbose/>"):
        text = text.partition(end)[0]
    text = text.strip()
    if text.startswith(_NOT_ONE_OF):
        return _ONE_OF
    return NO_TOKEN if text.startswith("NoExtension") else text
