#!/bin/sh
# Gather in .gpu-pair/ what `scripts/gpu_session.sh pair` needs beside .gpu-ray/ (scripts/gpu_ray.sh): the
# corpus of this environment as tokens (some 4 MiB), without what shipped prompts ask for, and the plugin that
# tests are collected with. Carry both.
#   scripts/gpu_pair.sh
# With all of the working tree it is too much: scripts/gpu_branch.sh leaves out what a call does not need.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=$root/.gpu-pair
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out"/*
cd "$root"
PYTHONPATH=$root "$python" -c 'from zoo.cli import app; app()' prepare --out "$work/data"
"$python" - "$work/data" "$out/data.tar.xz" <<'END'
import sys, tarfile
with tarfile.open(sys.argv[2], "w:xz", preset=9) as packed:
    packed.add(sys.argv[1], ".")
END
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$out" pytest-asyncio==1.5.0

du -sh "$out"
