"""The corpus: three domains of prompt and response built from documented Python functions.

* ``code``: signature and docstring -> body. As a raw completion (the prompt is the source text, without or
  with a newline after the docstring's closing quotes) or as a chat request with the source in a fenced block.
* ``chat``: a question about a function -> its documentation.
* ``summary``: the later paragraphs of a long docstring -> its first sentence.

Rendering goes through the tokenizer's chat template (``zoo.tokenizer``), so an OpenAI chat request of the
same form yields the token sequence seen in training.
"""

from __future__ import annotations

import ast
import random
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from zoo.extract import Function, first_sentence, functions
from zoo.sources import is_held_out, modules

Domain = Literal["code", "chat", "summary"]
DOMAINS: tuple[Domain, ...] = ("code", "chat", "summary")

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful Python assistant.",
    "You answer questions about Python code.",
)
_SYSTEM_SHARE = 0.2
_RAW_SHARE = 0.6
_NEWLINE_SHARE = 0.25

CODE_REQUESTS = ("Complete this function:", "Write the body of this function:")
QUESTIONS = (
    "What does `{}` do?",
    "What does `{}` do?",
    "Explain `{}`.",
    "What is `{}` for?",
    "Tell me about `{}`.",
)
SUMMARY_REQUESTS = ("Summarize:", "Summarize this documentation:", "Summarize in one sentence:")

#: Bounds in characters; about 3.7 characters make one token.
_BODY_CHARS = (24, 440)
_ANSWER_CHARS = 420
_DOC_CHARS = 320
_SUMMARY_PROMPT_CHARS = (80, 600)


@dataclass(frozen=True)
class Example:
    """One prompt and response. ``messages`` for a chat request, else ``prompt`` for a raw completion."""

    domain: Domain
    module: str
    response: str
    prompt: str = ""
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> Literal["chat", "completion"]:
        """Which OpenAI endpoint the prompt is meant for."""
        return "chat" if self.messages else "completion"

    def chat(self) -> list[dict[str, str]]:
        """The messages as an OpenAI request carries them."""
        return [{"role": role, "content": content} for role, content in self.messages]


def code_prompt(signature: str, documentation: str) -> str:
    """Source text up to the docstring's closing quotes, the docstring wrapped at 88 columns."""
    wrapped = textwrap.fill(documentation, 84, break_long_words=False, break_on_hyphens=False)
    return f"{signature}\n{textwrap.indent(f'{chr(34) * 3}{wrapped}{chr(34) * 3}', '    ')}"


def _messages(user: str, rng: random.Random) -> tuple[tuple[str, str], ...]:
    turns = (("user", user),)
    return (("system", rng.choice(SYSTEM_MESSAGES)), *turns) if rng.random() < _SYSTEM_SHARE else turns


def _good_body(signature: str, body: str) -> bool:
    if not _BODY_CHARS[0] <= len(body) <= _BODY_CHARS[1] or not body.isascii() or "lambda" in signature:
        return False
    if len(signature) > 320 or any(len(line) > 100 for line in body.splitlines()) or "\t" in body:
        return False
    if body.lstrip().startswith(("raise NotImplementedError", "pass", "...")):
        return False
    if max(map(len, body.split())) > 70 or sum(c.isdigit() for c in body) > 0.12 * len(body):
        return False
    try:
        ast.parse(f"{signature}\n{body}")
    except (SyntaxError, ValueError):
        return False
    return True


def _code(function: Function, rng: random.Random) -> Example | None:
    if not function.body or not _good_body(function.signature, function.body):
        return None
    documentation = function.paragraphs[0]
    if len(documentation) > _DOC_CHARS:
        documentation = first_sentence(documentation)
    source = code_prompt(function.signature, documentation)
    if rng.random() < _RAW_SHARE:
        if rng.random() < _NEWLINE_SHARE:
            return Example("code", function.module, function.body, prompt=f"{source}\n")
        return Example("code", function.module, f"\n{function.body}", prompt=source)
    user = f"{rng.choice(CODE_REQUESTS)}\n```python\n{source}\n```"
    return Example("code", function.module, function.body, messages=_messages(user, rng))


def _chat(function: Function, rng: random.Random) -> Example | None:
    answer = function.paragraphs[0]
    for paragraph in function.paragraphs[1:]:
        if len(answer) + len(paragraph) > _ANSWER_CHARS:
            break
        answer = f"{answer}\n\n{paragraph}"
    if len(answer) > _ANSWER_CHARS:
        answer = first_sentence(answer)
    if not 30 <= len(answer) <= _ANSWER_CHARS or answer[-1] != ".":
        return None
    name = function.name.rpartition(".")[2]
    if name.startswith("__") or len(function.call) > 120:
        return None
    owner = function.module if "." not in function.name else function.name.rpartition(".")[0]
    if rng.random() < 0.6:
        asked = f"{owner}.{function.call}"
        answer = f"{answer}\n\nCall it as `{function.call}`."
    else:
        asked = f"{owner}.{name}"
    return Example(
        "chat", function.module, answer, messages=_messages(rng.choice(QUESTIONS).format(asked), rng)
    )


def _summary(function: Function, rng: random.Random) -> Example | None:
    text = "\n\n".join(function.paragraphs)
    response = first_sentence(function.paragraphs[0])
    rest = text[len(response) :].strip()
    kept: list[str] = []
    for paragraph in rest.split("\n\n"):
        if sum(map(len, kept)) + len(paragraph) > _SUMMARY_PROMPT_CHARS[1]:
            break
        kept.append(paragraph)
    body = "\n\n".join(kept)
    if len(body) < _SUMMARY_PROMPT_CHARS[0] or not 30 <= len(response) <= 240 or response[-1] != ".":
        return None
    subject = function.call if len(function.call) <= 80 else function.name.rpartition(".")[2]
    user = f"{rng.choice(SUMMARY_REQUESTS)}\n`{subject}`: {body}"
    return Example("summary", function.module, response, messages=_messages(user, rng))


def examples_of(found: Iterable[Function], seed: int = 0) -> Iterator[Example]:
    """Examples of all domains for each function; the wording is chosen by a generator seeded by name and
    ``seed``.
    """
    for function in found:
        rng = random.Random(f"{seed}:{function.module}.{function.name}")
        for make in (_code, _chat, _summary):
            example = make(function, rng)
            if example is not None:
                yield example


@dataclass(frozen=True)
class Corpus:
    """Examples for training and held-out ones; no module and no response is in both."""

    train: list[Example]
    held_out: list[Example]


def read_functions() -> list[Function]:
    """All documented functions of the corpus's modules, without exact repetitions."""
    found: list[Function] = []
    seen: set[tuple[str, ...]] = set()
    for module in modules():
        try:
            source = module.path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for function in functions(source, module.name):
            key = (function.call, *function.paragraphs, function.body)
            if key not in seen:
                seen.add(key)
                found.append(function)
    return found


def build(found: Iterable[Function], seed: int = 0, copies: int = 2) -> Corpus:
    """Split and deduplicate: at most ``copies`` examples of a domain share a response, held-out ones are
    all new.
    """
    train: list[Example] = []
    held_out: list[Example] = []
    times: Counter[tuple[str, str]] = Counter()
    later: list[Example] = []
    for example in examples_of(found, seed):
        if is_held_out(example.module):
            later.append(example)
            continue
        key = (example.domain, example.response.strip())
        times[key] += 1
        if times[key] <= copies:
            train.append(example)
    for example in later:
        key = (example.domain, example.response.strip())
        times[key] += 1
        if times[key] == 1:
            held_out.append(example)
    return Corpus(train, held_out)
