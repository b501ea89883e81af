"""Write the dashboards and rules that the chart ships, so that they cannot drift from the code."""

from __future__ import annotations

from pathlib import Path

from deployments.dashboards.command import generated, write

CHART = Path(__file__).parents[1] / "helm" / "flotilla"

if __name__ == "__main__":
    for path in write(CHART, generated()):
        print(f"wrote {path}")
