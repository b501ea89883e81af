"""Following one answer through its grammar, and the drafts of what may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher

from engine.constraint import Constraint
from engine.grammar import NO_TOKEN, GrammarError, Grammars, TooMuchWork, UsedUp, error_of
from engine.mask_bits import TokenMask


class Matcher:
    """Which tokens may come next in one answer, after what was generated and along paths of a tree.

    The grammar is compiled and the output read when they are first needed.

    Paths are followed in copies, and llguidance's own `rollback` is not used: it keeps the last mask by the
    state of its lexer and by how many lexemes the parser has read (llguidance#279), and takes it for that of
    another path with the same numbers (1.5 to 1.9 at least).

    Attributes:
        end_tokens: those allowed where the answer may end.
    """

    def __init__(self, grammars: Grammars, constraint: Constraint, output: Sequence[int] = ()) -> None:
        self._grammars = grammars
        self._constraint = constraint
        self._compiling = grammars.prepare(constraint)
        self._output = list(output)
        self._num_read = 0
        # After the committed tokens, and after those of the path.
        self._state: LLMatcher | None = None
        self._walk: LLMatcher | None = None
        self._path: list[int] = []
        self._spells = False  # whether a grammar was needed that leaves open how text is spelled
        self._ended = False
        self.end_tokens: frozenset[int] = frozenset()

    def advance(self, tokens: Iterable[int]) -> None:
        """Append committed tokens; no path may be open."""
        self._output.extend(tokens)

    def allowed(self) -> TokenMask:
        """One bit per token, int32 [ceil(vocab / 32)], lowest bit first: set for those that may come next.

        Once the answer has ended, end tokens only.

        Raises:
            GrammarError: if the grammar does not compile, the output is not in it, or it takes more work
                than the limits allow.
        """
        try:
            return self._allowed()
        except UsedUp:
            self._begin_anew()
            return self._allowed()

    def _allowed(self) -> TokenMask:
        state = self._read()
        if self._ended:
            return self.ends()
        state = self._walk or state
        mask = self._grammars.mask(state)
        if state.is_error():
            raise error_of(state)
        if self._grammars.spells_special(state, mask):
            mask = self._unforced_mask()
        if not mask.any():
            raise GrammarError(NO_TOKEN)
        return mask

    def _unforced_mask(self) -> TokenMask:
        """The mask here where nothing says how text is spelled: what came before decides it as ever."""
        self._spells = True
        state = self._grammars.prepare(self._constraint, forced=False).result().deep_copy()
        if not state.consume_tokens([*self._output, *self._path]):
            raise error_of(state)
        mask = self._grammars.mask(state)
        if state.is_error():
            raise error_of(state)
        return mask

    def ends(self) -> TokenMask:
        """The mask of the end tokens."""
        mask = np.zeros((self._grammars.tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        words = mask.view(np.uint32)
        for token in self.end_tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def enter(self, token: int, depth: int) -> None:
        """Take the path's first `depth - 1` tokens and then `token`, an allowed one that ends nothing.

        Raises:
            GrammarError: if it was not allowed.
        """
        try:
            self._enter(token, depth)
        except UsedUp:
            self._begin_anew()
            self._enter(token, depth)

    def _enter(self, token: int, depth: int) -> None:
        state = self._read()
        if self._walk is None or len(self._path) >= depth:
            self._path = self._path[: depth - 1]
            self._walk = state.deep_copy()
            if not self._walk.consume_tokens(self._path):
                raise error_of(self._walk)
        if not self._walk.consume_token(token):
            raise error_of(self._walk)
        self._path.append(token)

    def _begin_anew(self) -> None:
        """Go on with a grammar that no answer was followed with.

        The states of a lexer count for all answers of a constraint together, and for drafts: else it would be
        a matter of those whether this one can be followed.
        """
        path, self._path = self._path, []
        if self._spells:
            self._grammars.prepare(self._constraint, forced=False, anew=True)
        self._compiling = self._grammars.prepare(self._constraint, anew=True)
        self._reset()
        for depth, token in enumerate(path, 1):
            self._enter(token, depth)

    def leave(self) -> None:
        """Back to the committed tokens."""
        self._walk, self._path = None, []

    def recover(self) -> None:
        """As `leave`, after an error on a path: all is read again."""
        self._reset()

    def _reset(self) -> None:
        self._state, self._walk, self._num_read, self._path, self._ended = None, None, 0, [], False

    def _read(self) -> LLMatcher:
        if self._state is None:
            self._state = self._compiling.result().deep_copy()
            self.end_tokens = frozenset(self._grammars.tokenizer.eos_tokens)
        state, unread = self._state, self._output[self._num_read :]
        if unread and not self._path:
            self._num_read += len(unread)
            for token in unread:
                if token in self.end_tokens:
                    self._ended = True
                elif self._ended or not state.consume_token(token):
                    if state.is_error() and isinstance(error := error_of(state), TooMuchWork):
                        raise error
                    raise GrammarError(f"the output does not fit the grammar at token {token}")
        return state
