"""Triton's compiler without a GPU: code for one from the project's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
#: Name of a kernel, types of its tensors and numbers, its constants, and options of the compiler.
Kernel = tuple[str, dict[str, str], dict[str, Any], dict[str, int]]

_SCRIPT = """
import importlib, json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = []
for name, types, constants, options in json.load(sys.stdin):
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(module), function)
    assert [p.name for p in kernel.params] == [*types, *constants], name
    aligned = {}
    for number, parameter in enumerate(kernel.params[: len(types)]):
        if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            aligned[number,] = [["tt.divisibility", 16]] if types[parameter.name] != "fp32" else []
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", options.pop("arch", 90), 32)
    binary = compile(source, target=target, options=options)
    found.append([binary.metadata.shared, binary.asm["ptx"], len(binary.asm["cubin"])])
json.dump(found, sys.stdout)
"""


class Compiled(NamedTuple):
    """Bytes of shared memory, the code as text, and bytes of machine code."""

    shared: int
    ptx: str
    size: int


def compiled(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Compile kernels as a launch with aligned tensors would, in a process without the interpreter.

    `arch` among a kernel's options is 80 for Ampere, 90 (the default) for Hopper.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _SCRIPT],
            input=json.dumps(kernels),
            env=environment
            | {
                "TRITON_CACHE_DIR": cache,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [Compiled(*found) for found in json.loads(done.stdout)]
