"""Whether files have changed since they were read."""

from __future__ import annotations

from pathlib import Path


def file_stamp(path: Path | None) -> tuple[int, int, int, int] | None:
    """Changes with the file, also where a link to it is what changes, as in Kubernetes' secrets.

    It changes with the file's owner and mode too: one that could not be read may be readable then. None
    where there is no such file.
    """
    try:
        stat = None if path is None else path.stat()
    except OSError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
