"""Files that commands write when they have measured for minutes or hours: whether they can be made."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(path: Path, *, is_plot: bool = False) -> None:
    """See that a file can be written, as far as that can be told before.

    Raises:
        ValueError: without its directory, for one itself, without the right to write there, or for a plot of
            a format that is not drawn.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {parent}")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")
    if is_plot:
        from matplotlib.backend_bases import FigureCanvasBase

        endings = FigureCanvasBase.get_supported_filetypes()
        if path.suffix.lower().removeprefix(".") not in endings:
            raise ValueError(f"cannot draw {path}: its name must end in .png, .svg, .pdf or another of plots")
