"""`flotilla dashboards`: writes the dashboards and the rule files, for targets of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deployments.dashboards.recording import SloTargets
from deployments.dashboards.rule_files import CHART_JOB, RUNBOOKS, rule_files


class DashboardsFailed(Exception):
    """The files cannot be written; the message says why and what to do."""


def parse_targets(default: float, tiers: Sequence[str]) -> SloTargets:
    """The targets of the command line; raises `DashboardsFailed` if one is wrong.

    Args:
        default: of tiers that are not named.
        tiers: others, each such as "interactive=0.99".
    """
    named = {}
    for text in tiers:
        tier, separator, share = text.partition("=")
        try:
            named[tier] = float(share)
        except ValueError:
            separator = ""
        if not (separator and tier.replace("-", "").replace("_", "").isalnum()):
            raise DashboardsFailed(
                f"--tier-target {text}: expected a tier and a share, as in interactive=0.99"
            )
    try:
        return SloTargets(default, named)
    except ValueError as error:
        raise DashboardsFailed(str(error)) from None


def generated(targets: SloTargets | None = None, runbooks: str = RUNBOOKS, job: str = "") -> dict[str, str]:
    """Every file's contents by its path, `dashboards/*.json` and `rules/*.yaml`.

    Raises:
        DashboardsFailed: if what they are made with is not installed.
    """
    try:
        from deployments.dashboards.grafana import dashboard_files
    except ModuleNotFoundError as error:
        raise DashboardsFailed(
            f"{error.name} is not installed: install the extra `dashboards` "
            "(`pip install -e '.[dashboards]'` in the repository); the dashboards and rules with the usual "
            f"targets lie in helm/flotilla, where rules have {CHART_JOB} for the job that you scrape"
        ) from None
    targets = targets or SloTargets()
    files = {f"dashboards/{name}": text for name, text in dashboard_files(targets.default).items()}
    rules = rule_files(targets, runbooks, job)
    return files | {f"rules/{name}": text for name, text in rules.items()}


def write(out: Path, files: dict[str, str]) -> list[Path]:
    """Write the files below `out`; returns where. Raises `DashboardsFailed` if that is not possible."""
    written = []
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written.append(path)
    except OSError as error:
        raise DashboardsFailed(f"cannot write {error.filename}: {error.strerror}") from None
    return written
