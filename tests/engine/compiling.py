"""Triton's compiler without a GPU: code for one from the project's kernels."""

from __future__ import annotations

import atexit
import functools
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
import importlib, json, os, re, subprocess, sys
import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

dump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def compiled(name, types, constants, options):
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
    with open("code.cubin", "wb") as file:
        file.write(binary.asm["cubin"])
    used = subprocess.check_output([dump, "--dump-resource-usage", "code.cubin"], text=True)
    number = {what: int(n) for what, n in re.findall(r"(REG|STACK|LOCAL):([0-9]+)", used)}
    asm, metadata = binary.asm, binary.metadata
    sizes = [metadata.shared, number["REG"], number["STACK"] + number["LOCAL"], metadata.num_warps]
    return [*sizes, asm["ptx"], asm["ttgir"]]


for line in sys.stdin:
    print(json.dumps([compiled(*kernel) for kernel in json.loads(line)]), flush=True)
"""


class Compiled(NamedTuple):
    """What a kernel takes of a processor, and its code in two of the compiler's languages.

    Attributes:
        shared: bytes of shared memory.
        registers: of each thread.
        spilled: bytes of each thread in memory, for want of registers.
        warps: of a program.
        ptx, ttgir: code.
    """

    shared: int
    registers: int
    spilled: int
    warps: int
    ptx: str
    ttgir: str

    def fitting(self, shared_bytes: int) -> int:
        """Programs that fit on a processor with 65,536 registers and so many bytes of shared memory.

        Registers are given out in eights to a thread; a program takes 1 KB beside its own.
        """
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min(65_536 // registers, shared_bytes // (self.shared + 1024))


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """A process without the interpreter, for all tests of this one: what it imports takes it two seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT],
        env=environment
        | {
            "TRITON_CACHE_DIR": cache.name,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        },
        cwd=cache.name,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        process.communicate()
        cache.cleanup()

    atexit.register(end)
    return process


def compiled(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Compile kernels as a launch with aligned tensors would.

    `arch` among a kernel's options is 80 for Ampere, 90 (the default) for Hopper.
    """
    process = _compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(kernels) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        _compiler.cache_clear()  # the next test has one of its own
        raise RuntimeError("the process that compiles has ended; why stands in what was captured of stderr")
    return [Compiled(*one) for one in json.loads(answer)]
