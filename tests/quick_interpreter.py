"""Triton's interpreter without what takes it a third of its time and changes no result."""

from __future__ import annotations

import functools
import sys
from typing import Any


def make_quick() -> None:
    """Patch Triton's language once a launch, where anybody has imported Triton.

    Triton 3.9 does so again in every call of a device function, `tl.sum` and the like, and goes through all
    of its modules for it: nothing in them is as it was before the launch until that has ended.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    language, patch = interpreter.tl, interpreter._patch_lang
    patched: set[int] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[int]:
        seen = map(id, function.__globals__.values())
        return frozenset(seen) & {id(language), id(language.core)}

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()  # of a device function: nothing to restore
        scope = patch(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_once
