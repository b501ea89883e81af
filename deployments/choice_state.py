"""A choice of an answer as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.generation import Update
from deployments.reasoning import ThoughtParser
from deployments.text_offsets import TextOffsets
from deployments.tool_calls import Parsed, ToolParser
from verifier.messages import TokenLogprobs


@dataclass
class ChoiceState:
    """A choice as it grows.

    Attributes:
        prompt: its prompt's tokens.
        echo: what is shown in front of the answer, if asked for: the prompt's text, or of a chat the message
            of the assistant that it ends with.
        tokens, logprobs, finish_reason, stop_reason: what arrived so far; a stream keeps only what
            the next chunk depends on.
        offsets: of the answer's tokens in its text, for completions' log-probabilities.
        parser: finds calls of tools in the text; None if there are none to be found.
        reasoning: parts what the model thinks from what it says; None if that is not known, or not asked for.
        prompt_logprobs: of the prompt from its second token on, if asked for.
        echoes_logprobs: whether those are still to be told in front of the answer's.
        fed: text and tokens as they came, for a whole response.
    """

    prompt: list[int]
    echo: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    started: bool = False
    offsets: TextOffsets | None = None
    parser: ToolParser | None = None
    reasoning: ThoughtParser | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    echoes_logprobs: bool = False
    fed: list[tuple[str, list[int]]] = field(default_factory=list)

    def add(self, update: Update) -> None:
        """Append an update, for a whole response."""
        self.prompt_logprobs += update.prompt_logprobs
        self.fed.append((update.text, update.tokens))
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    def parse(self, text: str, tokens: Sequence[int], *, ends: bool) -> Parsed:
        """What new text, of these tokens, turns out to be, and at its end what was held back."""
        thought = ""
        if self.reasoning is not None:
            thought, text = self.reasoning.feed(text, tokens)
            if ends:
                thought_last, text_last = self.reasoning.finish()
                thought, text = thought + thought_last, text + text_last
        if self.parser is None:
            return Parsed(text, thought)
        parsed = self.parser.feed(text)
        parsed.reasoning = thought
        for part in self.parser.finish().parts if ends else ():
            parsed.add(part)
        return parsed

    def parse_whole(self) -> Parsed:
        """What all that was added turns out to be: piece by piece, for a thought's tokens are counted so."""
        whole = Parsed()
        for number, (text, tokens) in enumerate(self.fed, 1):
            part = self.parse(text, tokens, ends=number == len(self.fed))
            whole.reasoning += part.reasoning
            for one in part.parts:
                whole.add(one)
        return whole

    @property
    def text(self) -> str:
        """All that was added, calls and thoughts included."""
        return "".join(text for text, _ in self.fed)

    @property
    def holds_back(self) -> bool:
        """Whether text may come later than its tokens, until it is certain what it is."""
        return self.parser is not None or self.reasoning is not None

    def shown_finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason, which tells of calls the model chose to make."""
        parser = self.parser
        chose = parser is not None and parser.num_calls > 0 and not parser.is_forced
        return "tool_calls" if reason == "stop" and chose else reason

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far; minus infinity without any."""
        values = [entry.logprob for entry in self.logprobs]
        return sum(values) / len(values) if values else float("-inf")
