"""The report: for each figure its plot, `claim | paper | here | why different`, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.compare_statistics import Interval
from simulator.reproduction.claims import Results, verdict
from simulator.reproduction.plot import draw
from simulator.reproduction.runner import Scope
from simulator.reproduction.spec import Claim

REPORT = "README.md"
_MARKS = {True: "yes", False: "**no**", None: "not run"}
_NOT_SIMULATED = """## What is not here

- AdaServe figure 15 (share of time of selection): measured on the real scheduler, `flotilla bench selection`.
- SmartSpec figures 7 and 13: profiles say their own errors (`flotilla simulate --list`); fidelity needs the
  running system. Figures 12, 15 and 16: prompt lookup and decoding heads are not simulated.
- SPIN figure 12: simulated verification pads nothing; on the real engine `flotilla bench decomposition`
  ([measured](../decomposition.md#measured)).
- SpecServe's L40 and AdaServe's second pair in figures 8 to 11: `flotilla simulate --profile qwen-32b-a100`.
"""


def write(results: Mapping[str, Results], scope: Scope, command: str, folder: Path) -> Path:
    """Write the page and its plots.

    Args:
        results: by figure.
        scope: what was run.
        command: that was.
        folder: where to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_head(results, scope, command)]
    for name, held in results.items():
        if not held.runs:
            parts.append(f"## {held.figure.title}\n\nNot run: `flotilla reproduce {name}`.\n")
            continue
        draw(held, folder / f"{name}.png")
        parts.append(_section(held))
    parts.append(_NOT_SIMULATED)
    path = folder / REPORT
    path.write_text("\n".join(parts))
    return path


def claims_table(results: Results) -> str:
    """Markdown: one row per claim."""
    rows = ["| claim | paper | holds | here | why different |", "|---|---|---|---|---|"]
    for claim in results.figure.claims:
        found = verdict(results, claim)
        why = claim.why if found.holds is False else ""
        rows.append(f"| {claim.text} | {claim.paper} | {_MARKS[found.holds]} | {found.here} | {why} |")
    return "\n".join(rows)


def numbers_table(results: Results, metric: str) -> str:
    """Markdown: one row per series; means, with the distance to the farther end of the interval."""
    values = results.values
    rows = [
        f"| {metric} | " + " | ".join(str(value) for value in values) + " |",
        "|---|" + "--:|" * len(values),
    ]
    for label in results.figure.series:
        cells = [_cell(results.interval(metric, label, value)) for value in values]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _head(results: Mapping[str, Results], scope: Scope, command: str) -> str:
    claims = [(claim, verdict(one, claim).holds) for one in results.values() for claim in one.figure.claims]
    kind = "**Quick run: short arrivals, wide intervals.** " if scope.quick else ""
    data = "AdaServe's files" if scope.data is not None else "built-in statistics, no recorded data"
    seeds = ", ".join(map(str, scope.seeds))
    alike = (
        "Where one of AdaServe's files is run whole, all seeds have its arrivals and lengths, and differ in\n"
        "texts and drafts alone: intervals leave out what another workload would change.\n"
    )
    return (
        "# The papers' figures, simulated\n\n"
        f"    {command}\n\n"
        f"{kind}Seeds {seeds}; workloads from {data}. {_held(claims)}\n\n"
        "Figures are means over seeds, ± the farther end of a 95 % bootstrap interval; with two or\n"
        "three seeds that is the range of what was measured. What is assumed: [simulator](../simulator.md).\n"
        f"{alike if scope.data is not None else ''}"
        'Claims of "ours" are asked of this system and not made by the paper. The `oracle` drafts exactly\n'
        "the chains that will be accepted: what better lengths could come to.\n"
    )


def _held(claims: Sequence[tuple[Claim, bool | None]]) -> str:
    """How many claims hold; the papers' are not to gain by those that are asked of this system besides."""

    def count(*, is_ours: bool) -> str:
        told = [holds for claim, holds in claims if claim.is_ours == is_ours and holds is not None]
        return f"{told.count(True)} of {len(told)}"

    papers, ours = count(is_ours=False), count(is_ours=True)
    return f"Of the papers' claims {papers} hold, of those asked of this system {ours}."


def _section(results: Results) -> str:
    figure = results.figure
    parts = [f"## {figure.title}\n"]
    if figure.note:
        parts.append(figure.note + "\n")
    if len(results.values) < len(figure.points):
        parts.append(f"Run at {len(results.values)} of {len(figure.points)} values of the axis.\n")
    parts += [f"![{figure.title}]({figure.name}.png)\n", claims_table(results) + "\n"]
    for metric in (*figure.metrics, *figure.also):
        parts.append(numbers_table(results, metric) + "\n")
    return "\n".join(parts)


def _cell(interval: Interval) -> str:
    if interval.mean is None:
        return "-"
    mean = interval.mean
    digits = 0 if abs(mean) >= 300 else 1 if abs(mean) >= 10 else 2
    text = f"{mean:,.{digits}f}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} ± {max(mean - interval.low, interval.high - mean):.{digits}f}"
