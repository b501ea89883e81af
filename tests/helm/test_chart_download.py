"""What fetches models: where, with what, and its command against a server that answers as the Hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helm.list_map_keys import repeated
from tests.helm.rendered_chart import cluster, group, merged, templates, worker

COMMIT = "1" * 40
FILES = {name: f"content of {name}".encode() for name in ("config.json", "a.safetensors", "a.bin", "run.py")}
VALUES = {
    "models": {
        "source": "download",
        "download": [{"repository": "a/b", "revision": COMMIT, "directory": "target"}],
    }
}


class Hub(BaseHTTPRequestHandler):
    """One repository, at one commit."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path == f"/api/models/a/b/revision/{COMMIT}":
            siblings = [{"rfilename": file, "size": len(body)} for file, body in FILES.items()]
            body = json.dumps({"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/api/models/a/b/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": file, "size": len(body), "oid": file} for file, body in FILES.items()
            ]
            body = json.dumps(tree).encode()
        elif path == f"/a/b/resolve/{COMMIT}/{name}" and name in FILES:
            body = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for header, value in {
            "ETag": f'"{name}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": len(body),
        }.items():
            self.send_header(header, str(value))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_only_trusted_formats_of_the_commit_are_fetched(hub: str, tmp_path: Path) -> None:
    (download,) = worker(VALUES)["initContainers"]
    command = [part.replace("/models/", f"{tmp_path}/") for part in download["command"]]
    given = {variable["name"]: variable["value"] for variable in download["env"]} | {"HOME": str(tmp_path)}
    given |= {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        env={"PATH": os.environ["PATH"], **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fetched = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir() if path.is_file()}
    assert fetched == {name: FILES[name] for name in ("config.json", "a.safetensors")}


def groups(*runs: list[str] | None) -> dict[str, Any]:
    found = []
    for index, run in enumerate(runs):
        values = {**group()["workerGroups"][0], "name": f"group-{index}"}
        found.append(values if run is None else {**values, "runs": run})
    return {"workerGroups": found}


def downloads(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Containers that download, by group."""
    return {name: template["spec"].get("initContainers", []) for name, template in templates(cluster(values))}


def included(download: dict[str, Any]) -> set[str]:
    return {part.removeprefix("--include=") for part in download["command"] if part.startswith("--include=")}


def test_the_head_fetches_nothing_and_front_ends_no_weights() -> None:
    values = merged(VALUES, groups(["cells"], ["front-ends"], [], None))
    found = downloads(values)
    assert found["head"] == []
    tokenizers = included(found["group-1"][0])
    assert "tokenizer.json" in {f"tokenizer{pattern[1:]}" for pattern in tokenizers}
    for name in ("group-0", "group-2", "group-3"):
        assert included(found[name][0]) == tokenizers | {"*.safetensors"}
    volumes = {
        name: {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for name, template in templates(cluster(values))
    }
    assert "models" not in volumes["head"]
    assert volumes["group-0"]["models"]["emptyDir"]["sizeLimit"] == "100Gi"
    assert volumes["group-1"]["models"]["emptyDir"]["sizeLimit"] == "1Gi"


def test_a_node_must_have_room_for_what_is_fetched() -> None:
    values = merged(VALUES, groups(["cells"], ["front-ends"]), {"models": {"downloadSizeLimit": "20Gi"}})
    found = downloads(values)
    assert found["group-0"][0]["resources"]["requests"]["ephemeral-storage"] == "20Gi"
    assert found["group-1"][0]["resources"]["requests"]["ephemeral-storage"] == "1Gi"


def test_resources_of_the_download_may_be_others() -> None:
    resources = {"requests": {"cpu": "1", "ephemeral-storage": "5Gi"}, "limits": {"memory": "8Gi"}}
    (download,) = worker(merged(VALUES, {"models": {"downloadResources": resources}}))["initContainers"]
    assert download["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "5Gi"},
        "limits": {"cpu": "2", "memory": "8Gi"},
    }


def test_the_download_has_the_environment_and_mounts_of_pods() -> None:
    """A proxy, a mirror of the Hub and a certificate of one's own are of use to nobody else."""
    certificate = {"name": "ca", "mountPath": "/etc/ca"}
    values = merged(
        VALUES,
        group(env=[{"name": "HF_ENDPOINT", "value": "https://group"}]),
        {
            "pods": {
                "env": [
                    {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                    {"name": "HF_ENDPOINT", "value": "https://pods"},
                    {"name": "HF_HUB_OFFLINE", "value": "1"},
                ],
                "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
                "volumeMounts": [certificate],
            }
        },
    )
    (download,) = worker(values)["initContainers"]
    found = {variable["name"]: variable["value"] for variable in download["env"]}
    assert (found["HTTPS_PROXY"], found["HF_ENDPOINT"]) == ("http://proxy:3128", "https://group")
    assert found["HF_HUB_OFFLINE"] == "0"
    assert certificate in download["volumeMounts"]
    assert list(repeated(cluster(values))) == []
