"""A real Prometheus for as long as it is needed, in a temporary directory."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from benchmarks.server_process import ServerProcess, free_port

_QUERY_TIMEOUT_S = 30.0


class QueryFailed(RuntimeError):
    """Prometheus refused a query; the message is its own."""


class Prometheus:
    """A Prometheus that scrapes and computes rules every `interval_s`; use as a context manager.

    Args:
        targets: `host:port` of what is scraped, by job.
        rules: rule files' contents by name; the intervals of their groups are replaced.
        interval_s: between scrapes, and between evaluations.
        data: an existing database to serve; a fresh one if None.

    Attributes:
        url: where it answers.

    Raises:
        RuntimeError: if Prometheus is not installed, or does not start.
    """

    def __init__(
        self,
        targets: Mapping[str, Sequence[str]],
        rules: Mapping[str, str],
        interval_s: int = 1,
        data: Path | None = None,
    ) -> None:
        executable = shutil.which("prometheus")
        if executable is None:
            raise RuntimeError("`prometheus` is not on the PATH: install it (Debian: apt install prometheus)")
        self._directory = tempfile.TemporaryDirectory(prefix="flotilla-prometheus-")
        root = Path(self._directory.name)
        for name, text in rules.items():
            (root / name).write_text(_evaluated_every(text, interval_s))
        config = {
            "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
            "rule_files": [str(root / name) for name in rules],
            "scrape_configs": [
                {
                    "job_name": job,
                    "scrape_timeout": f"{interval_s}s",
                    "static_configs": [{"targets": list(those)}],
                }
                for job, those in targets.items()
            ],
        }
        (root / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            executable,
            f"--config.file={root / 'prometheus.yml'}",
            f"--storage.tsdb.path={data or root / 'data'}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._process = ServerProcess("prometheus", command, port, "/-/ready", log=root / "prometheus.log")
        self.url = self._process.url

    def __enter__(self) -> Self:
        try:
            self._process.wait_until_ready(60.0)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Series of an expression between two Unix times; raises `QueryFailed`."""
        return query_range(self.url, expr, start, end, step_s)

    def _close(self) -> None:
        self._process.stop()
        self._directory.cleanup()


def query_range(url: str, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
    """Series of an expression between two Unix times, from the Prometheus at `url`; raises `QueryFailed`."""
    asked = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"}
    body = urllib.parse.urlencode(asked).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range", body, timeout=_QUERY_TIMEOUT_S) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise QueryFailed(json.load(error).get("error", str(error))) from None
    except (OSError, KeyError, ValueError) as error:
        raise QueryFailed(f"{url} does not answer: {error}") from None
    return result


def _evaluated_every(text: str, interval_s: int) -> str:
    rules: dict[str, Any] = yaml.safe_load(text)
    for group in rules["groups"]:
        group["interval"] = f"{interval_s}s"
    return yaml.safe_dump(rules, sort_keys=False)
