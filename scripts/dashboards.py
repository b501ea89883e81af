"""Write the dashboards and rules that the chart ships, so that they cannot drift from the code."""

from __future__ import annotations

from pathlib import Path

from deployments.dashboards.command import generated, write
from deployments.dashboards.rule_files import CHART_JOB

CHART = Path(__file__).parents[1] / "helm" / "flotilla"

if __name__ == "__main__":
    for path in write(CHART, generated(job=CHART_JOB)):
        print(f"wrote {path}")
