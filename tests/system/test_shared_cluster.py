"""A Ray cluster on which others have applications, and on which somebody tries to serve a second time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from deployments.serving import running
from tests.system.conftest import small_demo, with_profile

pytestmark = [pytest.mark.system]

_ROOT = Path(__file__).resolve().parents[2]
_OTHER = "somebody else's"


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    """Somebody else's application, on the same Ray Serve."""

    def __call__(self) -> str:
        return _OTHER


def _other_answers() -> bool:
    return bool(serve.get_app_handle("other").remote().result(timeout_s=20) == _OTHER)


def _serve_once_more() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", "0"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_system_is_refused_and_others_stay_when_the_first_ends(
    shared_ray: None, tmp_path: Path
) -> None:
    """The second took the place of the first; its end, also for want of a model, was the end of all."""
    config = with_profile(small_demo(()), tmp_path / "costs.json")
    ray.init(logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
    try:
        serve.run(Other.bind(), name="other", route_prefix="/other")
        with running(config) as url:
            second = _serve_once_more()
            assert second.returncode == 2
            assert "a Flotilla serves on this Ray cluster already" in second.stderr
            assert "Traceback" not in second.stderr
            assert httpx.get(f"{url}/ready", timeout=10).status_code == 200
        ray.init(logging_level="ERROR", log_to_driver=False)
        assert set(serve.status().applications) == {"other"}
        assert _other_answers()
    finally:
        serve.shutdown()


def test_who_is_in_its_way_is_told(shared_ray: None) -> None:
    if not ray.is_initialized():
        ray.init(logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, proxy_location="Disabled")
    try:
        serve.run(Other.bind(), name="other", route_prefix="/")
        second = _serve_once_more()
        assert second.returncode == 2
        assert 'Prefix / is being used by application "other"' in second.stderr
        assert "Traceback" not in second.stderr
        assert _other_answers()
    finally:
        serve.shutdown()
