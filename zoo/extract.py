"""From Python source text to documented functions, and from docstrings to clean prose."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """A function with its documentation: ``name`` is dotted below its module, ``signature`` is ``def
    ...:``.
    """

    module: str
    name: str
    signature: str
    call: str
    paragraphs: tuple[str, ...]
    body: str


_ROLE = re.compile(r":[a-zA-Z:+]+:`[~!.]?([^`<]+?)(?:\s*<[^`>]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}")
_DIRECTIVE = re.compile(r"^\s*\.\. ")
_SECTION = re.compile(
    r"^\s*(args|arguments|parameters|params|returns?|raises?|yields?|examples?|notes?|see also|references|"
    r"attributes|warnings?|other parameters|keyword arguments|inputs?|outputs?|usage|todo|shape|methods|"
    r"static graph.*)\s*:?\s*$",
    re.IGNORECASE,
)
_UNDERLINE = re.compile(r"^\s*[-=~^*]{3,}\s*$")
_FIELD = re.compile(
    r"^\s*[:@](param|return|rtype|type|raises?|arg|keyword|yields?|meta|var|ivar)\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<=[a-z0-9`)\]'\"])\.(?=\s+[A-Z`(]|$)")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|resp|approx|Eq|Fig|Ref)|\b[A-Z])$")


def clean_prose(text: str) -> str:
    """One docstring paragraph as a plain line: reStructuredText roles and doubled backticks gone, spaces
    single.
    """
    text = _ROLE.sub(r"`\1`", text)
    text = _LINK.sub(r"\1", text)
    text = text.replace("``", "`").replace("::", ":")
    text = re.sub(
        r"\*\*([^*\s][^*]*)\*\*|(?<!\w)\*([A-Za-z_][^*\s]*)\*(?!\w)", lambda m: f"`{m[1] or m[2]}`", text
    )
    return re.sub(r"\s+", " ", text).strip()


def prose_paragraphs(docstring: str) -> tuple[str, ...]:
    """The docstring's leading prose: paragraphs up to the first section, field list, example or list."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(docstring)):
        lines = [line for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        if _SECTION.match(lines[0]) or _FIELD.match(lines[0]):
            break
        if _DIRECTIVE.match(lines[0]):
            continue
        if any(_UNDERLINE.match(line) for line in lines):
            break
        kept: list[str] = []
        for line in lines:
            if _SECTION.match(line) or _FIELD.match(line):
                break
            kept.append(line)
        text = clean_prose(" ".join(kept))
        if not is_prose(text):
            if found:
                break
            return ()
        found.append(text)
        if len(kept) < len(lines):
            break
    return tuple(found)


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as an English sentence: letters dominate, starts as one, ends as one."""
    if not 20 <= len(text) <= 700 or not text.isascii():
        return False
    if not (text[0].isupper() or text[0] == "`") or text[-1] not in ".:":
        return False
    if any(
        mark in text
        for mark in (">>>", "http", "{", "\\", "|", "TODO", "FIXME", "XXX", "@", "__", "..", "-->")
    ):
        return False
    letters = sum(c.isalpha() or c == " " for c in text)
    words = text.split()
    return letters >= 0.85 * len(text) and len(words) >= 4 and max(map(len, words)) <= 45


def first_sentence(text: str) -> str:
    """The first sentence of a paragraph, with its full stop (the whole paragraph where no end is found)."""
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[: match.start()]):
            return text[: match.end()]
    return text


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """How the function is called: its name with bare argument names, ``self`` and ``cls`` left out."""
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg not in ("self", "cls")]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    names += [a.arg for a in args.kwonlyargs]
    if args.kwarg:
        names.append(f"**{args.kwarg.arg}")
    return f"{node.name}({', '.join(names)})"


def _parts(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str] | None:
    """Signature and body (without docstring) as written, the definition moved to column 0."""
    first, rest = node.body[0], node.body[1:]
    if not rest or first.end_lineno is None or node.end_lineno is None:
        return None
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : first.lineno - 1])).rstrip()
    raw = [line for line in lines[first.end_lineno : node.end_lineno] if not line.lstrip().startswith("#")]
    body = "\n".join(line.rstrip() for line in raw if line.strip())
    indent = min((len(line) - len(line.lstrip()) for line in body.splitlines()), default=0)
    if not body or not signature.endswith(":") or ("\n" in signature and len(signature) > 400):
        return None
    return signature, textwrap.indent("\n".join(line[indent:] for line in body.splitlines()), "    ")


def _class(node: ast.ClassDef, module: str, prefix: str) -> Iterator[Function]:
    """A documented class as a callable without source text: it serves the prose domains only."""
    docstring = ast.get_docstring(node)
    paragraphs = prose_paragraphs(docstring) if docstring else ()
    if not paragraphs:
        return
    call = f"{node.name}()"
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            call = node.name + _call(child).removeprefix("__init__")
    yield Function(module, prefix + node.name, "", call, paragraphs, "")


def functions(source: str, module: str) -> Iterator[Function]:
    """All documented functions, methods and classes of one module's source; nothing where it does not
    parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()

    def visit(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from _class(child, module, prefix)
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(child)
                if not docstring:
                    continue
                paragraphs = prose_paragraphs(docstring)
                if not paragraphs:
                    continue
                parts = _parts(lines, child)
                signature, body = parts if parts else ("", "")
                yield Function(module, prefix + child.name, signature, _call(child), paragraphs, body)

    yield from visit(tree, "")
