"""The command that fetches models, as rendered, run against a small server that answers as the Hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helm.rendered_chart import worker

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
