"""The corpus: extraction from source text, the three domains, the held-out split."""

from __future__ import annotations

import ast

from zoo.corpus import Example, build, code_prompt, examples_of
from zoo.extract import clean_prose, first_sentence, functions, is_prose, prose_paragraphs
from zoo.sources import HELD_OUT_PERCENT, is_held_out

SOURCE = '''
class Store:
    """Keep values under names for as long as the process lives.

    A store may be shared between threads, since every access takes its lock; nothing is ever written to disk.
    """

    def lookup(self, name: str, default: int = 0) -> int:
        """Return the value kept under :attr:`name`, or the default.

        The value is read from the cache first. Only when it is missing there the slower table is asked, and
        what it answers is kept in the cache for the next time.

        Args:
            name: what to look for.
        """
        # A comment that is dropped.
        if name in self._cache:
            return self._cache[name]
        return self._table.get(name, default)

    def undocumented(self):
        return 1


def broken(x):
    """no sentence"""
    return x
'''


def test_functions_of_a_module() -> None:
    found = {f.name: f for f in functions(SOURCE, "demo.store")}
    assert set(found) == {"Store", "Store.lookup"}
    lookup = found["Store.lookup"]
    assert lookup.signature == "def lookup(self, name: str, default: int = 0) -> int:"
    assert lookup.call == "lookup(name, default)"
    assert lookup.paragraphs[0] == "Return the value kept under `name`, or the default."
    assert len(lookup.paragraphs) == 2
    assert lookup.body.startswith("    if name in self._cache:")
    assert "comment" not in lookup.body
    ast.parse(f"{lookup.signature}\n{lookup.body}")


def test_source_that_does_not_parse_gives_nothing() -> None:
    assert list(functions("def f(:\n", "demo")) == []


def test_every_domain_is_built() -> None:
    by_domain: dict[str, list[Example]] = {}
    for example in examples_of(functions(SOURCE, "demo.store")):
        by_domain.setdefault(example.domain, []).append(example)
    assert set(by_domain) == {"code", "chat", "summary"}
    code = by_domain["code"][0]
    assert "return self._table.get(name, default)" in code.response
    text = code.prompt or code.messages[-1][1]
    assert '"""Return the value kept under `name`, or the default."""' in text
    summary = by_domain["summary"][1]
    assert summary.response == "Return the value kept under `name`, or the default."
    assert summary.response not in summary.messages[-1][1]
    assert all("`" in example.messages[-1][1] for example in by_domain["chat"])


def test_examples_are_the_same_every_time() -> None:
    assert list(examples_of(functions(SOURCE, "m"))) == list(examples_of(functions(SOURCE, "m")))


def test_code_prompt_ends_with_the_docstring() -> None:
    prompt = code_prompt("def f(x):", "Return x.")
    assert prompt == 'def f(x):\n    """Return x."""'


def test_held_out_split_is_stable() -> None:
    names = [f"package.module_{i}" for i in range(2000)]
    held = [name for name in names if is_held_out(name)]
    assert 0.5 * HELD_OUT_PERCENT < 100 * len(held) / len(names) < 2 * HELD_OUT_PERCENT
    # Fixed values: the split must not move between versions, or shipped prompts would leak into training.
    assert held[:4] == ["package.module_4", "package.module_13", "package.module_53", "package.module_55"]
    assert not any(
        map(is_held_out, ("json.decoder", "asyncio.queues", "numpy.linalg", "torch.nn.functional"))
    )


def test_splits_share_no_module_and_no_response() -> None:
    found = []
    for i in range(300):
        found += functions(SOURCE.replace("the slower table", f"table {chr(97 + i % 26)}"), f"demo.m{i}")
    corpus = build(found)
    assert not {e.module for e in corpus.train} & {e.module for e in corpus.held_out}
    assert all(is_held_out(e.module) for e in corpus.held_out)
    train = {(e.domain, e.response.strip()) for e in corpus.train}
    assert not train & {(e.domain, e.response.strip()) for e in corpus.held_out}
    most = max(sum(e.domain == d and e.response == r for e in corpus.train) for d, r in list(train)[:10])
    assert most <= 2


def test_prose() -> None:
    assert clean_prose("Use :func:`~a.b.run` on ``x``,\n  twice.") == "Use `a.b.run` on `x`, twice."
    assert first_sentence("Return x, e.g. one. Then stop.") == "Return x, e.g. one."
    assert first_sentence("Parse v. 1.2 of it. Next.") == "Parse v. 1.2 of it."
    assert not is_prose("x = {1: 2} | y")
    assert prose_paragraphs("Do all of it now, please.\n\nParameters\n----------\nx : int") == (
        "Do all of it now, please.",
    )
