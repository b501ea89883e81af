"""Whether the chat templates of a model directory can be read, known without loading its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.model_files import BrokenFiles, check_no_pointer, read_json


class _Generation(Extension):
    """Transformers' own tag around what the assistant says, which only training needs."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_chat_templates(directory: Path) -> None:
    """Refuse chat templates that are no Jinja: every chat would be.

    Raises:
        BrokenFiles: naming the file, the line and what is wrong there.
    """
    # As Transformers has it: other settings would take other templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    for where, template in _templates(directory):
        try:
            environment.compile(template)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f" (line {line} of it)"
            raise BrokenFiles(f"the chat template in {where} is no Jinja: {error.message}{place}") from None


def _templates(directory: Path) -> Iterator[tuple[Path, str]]:
    files = [directory / "chat_template.jinja", *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    for file in files:
        if file.is_file():
            check_no_pointer(file)
            yield file, file.read_text(encoding="utf-8", errors="replace")
    # A chat_template.json is of processors alone: tokenizers do not read it.
    file = directory / "tokenizer_config.json"
    if file.is_file():
        for template in _named(read_json(file).get("chat_template")):
            yield file, template


def _named(described: Any) -> Iterator[str]:
    """One template, or several by name."""
    if isinstance(described, str):
        yield described
    elif isinstance(described, dict):
        yield from (template for template in described.values() if isinstance(template, str))
    elif isinstance(described, list):
        for one in described:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                yield one["template"]
