"""The address of a server, as people give it to commands that ask one."""

from __future__ import annotations


def server_root(url: str) -> str:
    """What paths are appended to: without `/v1`, which OpenAI's clients are given too; HTTP if unsaid."""
    root = url.rstrip("/").removesuffix("/v1").rstrip("/")
    return root if "://" in root else f"http://{root}"
