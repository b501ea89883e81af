"""Deploy the serve config that the chart renders on a local Ray, the way the KubeRay operator does.

The operator sends `serveConfigV2` to the dashboard of Ray's head (`PUT /api/serve/applications/`). So does
this script, to a Ray that it starts and stops itself, and then runs the program of `helm test` as soon as
Serve calls the application running: the moment at which the operator moves traffic. Needs the extra
`dev-kubernetes`, and ports 8000 and 8265.

    python scripts/deploy_rendered.py helm/flotilla/ci/cpu-demo-values.yaml --json FILE
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "flotilla"
_DASHBOARD = "http://127.0.0.1:8265/api/serve/applications/"
_URL = "http://127.0.0.1:8000"
# As the operator gives the cluster one, with `authOptions.mode: token`.
_TOKEN = secrets.token_hex(16)


def rendered(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """`serveConfigV2` of the RayService, and the custom resources of a pod of each group together."""
    import helm_python

    texts = helm_python.Chart.load(CHART).render(values, name="demo", namespace="default")
    spec = yaml.safe_load(texts["flotilla/templates/rayservice.yaml"])["spec"]
    resources: dict[str, float] = {}
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        # JSON within single quotes, as for a shell.
        of_group = json.loads(group["rayStartParams"].get("resources", "{}").strip("'"))
        resources = {name: resources.get(name, 0) + of_group.get(name, 0) for name in resources | of_group}
    return yaml.safe_load(spec["serveConfigV2"]), resources


def call(method: str, body: Any = None) -> Any:
    """One call of the dashboard's REST interface for Serve."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "x-ray-authorization": f"Bearer {_TOKEN}"}
    request = urllib.request.Request(_DASHBOARD, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text.strip() else None


def await_running(within_s: float) -> float:
    """Seconds until Serve calls the application running."""
    start = time.monotonic()
    while True:
        application = call("GET")["applications"].get("flotilla", {"status": "none"})
        status, waited = application["status"], time.monotonic() - start
        if status == "RUNNING":
            return waited
        if status in ("DEPLOY_FAILED", "UNHEALTHY") or waited > within_s:
            raise SystemExit(
                f"the application is {status} after {waited:.0f} s: {application.get('message', '')}"
            )
        time.sleep(0.2)


def main(
    values: Annotated[Path, typer.Argument(help="Values for the chart.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the record goes.")] = None,
    within_s: Annotated[float, typer.Option(help="How long the application may take to run.")] = 180.0,
) -> None:
    """Deploy, ask for tokens, stop."""
    serve_config, resources = rendered(yaml.safe_load(values.read_text()) or {})
    os.environ.update(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)
    import ray  # noqa: TID251 - it stands for the operator

    ray.init(
        num_cpus=8, resources=resources, include_dashboard=True, dashboard_port=8265, log_to_driver=False
    )
    try:
        call("PUT", serve_config)
        seconds = await_running(within_s)
        first = subprocess.run(
            [sys.executable, str(CHART / "files" / "first_token.py")],
            env={**os.environ, "URL": _URL, "TIMEOUT_S": "60"},
            capture_output=True,
            text=True,
            check=False,
        )
        with urllib.request.urlopen(f"{_URL}/metrics", timeout=30) as answer:
            families = sum(line.startswith(b"# TYPE flotilla_") for line in answer)
        record = {
            "values": values.name,
            "running_after_s": round(seconds, 1),
            "waits_for_ready": first.stdout.count("not ready yet"),
            "first_token": first.stdout.strip().splitlines()[-1:] if first.returncode == 0 else None,
            "error": first.stderr.strip() or None,
            "metric_families": families,
        }
    finally:
        from ray import serve  # noqa: TID251 - as above

        serve.shutdown()
        ray.shutdown()
    print(json.dumps(record, indent=2))
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    raise SystemExit(first.returncode)


if __name__ == "__main__":
    typer.run(main)
