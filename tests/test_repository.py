"""The repository keeps its own promises: layout, import rules, commands and links in the documentation."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
NOT_OURS = {".venv", ".git", "build", "dist", "weights", "node_modules"}

# The selector, the scheduler core and the messages it exchanges run without Ray and torch.
PURE_MODULES = (
    "cluster.config",
    "cluster.core",
    "cluster.cost_model",
    "cluster.events",
    "cluster.recorded_core",
    "cluster.replay_report",
    "cluster.requests",
    "cluster.stream_messages",
    "drafters.messages",
    "drafters.protocol",
    "engine.sampling_params",
    "engine.tree",
    "engine.wire",
    "verifier.messages",
)
PURE_PACKAGES = ("cluster/batching", "cluster/policies", "selector")


def own_files(pattern: str) -> list[Path]:
    """All but what is hidden or installed, which is not even walked: there are fifty thousand files of it."""
    found: list[Path] = []
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in NOT_OURS and not name.startswith(".")]
        found += [Path(folder, name) for name in fnmatch.filter(files, pattern) if not name.startswith(".")]
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PYTHON_FILES = [path for path in own_files("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
DOCUMENTS = own_files("*.md")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- layout ------------------------------------------------------------------------------------------


def test_every_package_is_shipped() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {module_name(path) for path in own_files("__init__.py")}
    in_tree = {name for name in found if name.split(".")[0] != "tests"}
    assert in_tree == set(pyproject["tool"]["setuptools"]["packages"])


def test_every_top_level_package_is_under_import_contracts_and_types() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    top_level = {name for name in tool["setuptools"]["packages"] if "." not in name}
    assert top_level == set(tool["importlinter"]["root_packages"])
    assert top_level <= set(tool["mypy"]["files"])


def test_a_file_fits_in_one_head() -> None:
    num_lines = {relative(path): len(path.read_text().splitlines()) for path in PYTHON_FILES}
    assert num_lines
    too_long = {name: count for name, count in num_lines.items() if count > MAX_FILE_LINES}
    assert not too_long, "split them by concept"


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Tests are in no packages: of two, pytest collects one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# -- imports -----------------------------------------------------------------------------------------


def test_the_core_imports_without_ray_and_torch() -> None:
    modules = [*PURE_MODULES]
    for package in PURE_PACKAGES:
        modules += [module_name(path) for path in sorted((ROOT / package).rglob("*.py"))]
    script = (
        "import importlib, sys\n"
        "sys.modules.update(ray=None, torch=None, transformers=None)\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- documentation -----------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def code_of(text: str) -> str:
    """Fenced blocks and inline code: prose may say "make sure"."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


def test_commands_in_the_documentation_exist() -> None:
    targets = make_targets()
    for document in DOCUMENTS:
        named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code_of(document.read_text())))
        assert named <= targets, relative(document)


def test_readme_names_the_two_commands() -> None:
    assert {"make serve", "make test"} <= set(
        re.findall(r"make [a-z]+", code_of((ROOT / "README.md").read_text()))
    )


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def anchors(document: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documentation_resolve() -> None:
    assert not [broken for document in DOCUMENTS for broken in broken_links(document)]


def broken_links(document: Path) -> Iterator[str]:
    """What each link of a document that leads nowhere lacks."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = (document.parent / name).resolve() if name else document
        if not linked.exists():
            yield f"{relative(document)}: {target} does not exist"
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            yield f"{relative(document)}: {linked.name} has no heading for #{anchor}"


def test_decisions_follow_the_template() -> None:
    for document in DECISIONS:
        text = document.read_text()
        headings = re.findall(r"^(#+ .+)$", text, flags=re.MULTILINE)
        assert headings[0].startswith(f"# {document.name[:4]} "), "the title carries the file's number"
        assert headings[1:] == ["## Context", "## Decision", "## Consequences"], document.name
        assert len(text.split()) <= 500, f"{document.name}: a decision is one page"


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
