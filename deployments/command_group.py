"""The commands of `flotilla`, on terminals that cannot show all there is to say."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Commands that show `?` where the terminal's encoding lacks a character, and go on.

    Answers of models, frames of tables and cut columns hold what Latin-1 and ASCII do not. Where there is
    no space for what they print, they say so, and end with status 2.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """See click."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="replace")
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            print(f"flotilla: cannot write: {error.strerror}", file=sys.stderr)
            sys.exit(2)
