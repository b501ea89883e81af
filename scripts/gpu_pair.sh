#!/bin/sh
# Gather in .gpu-pair/ what `scripts/gpu_session.sh pair` needs beside .gpu-ray/ (scripts/gpu_ray.sh): the
# corpus of this environment as tokens (some 4 MiB), without what shipped prompts ask for, and the plugin that
# tests are collected with. Carry both.
#   scripts/gpu_pair.sh
# With all of the working tree it is too much; on a branch, and `git switch -` afterwards:
#   git switch -c gpu-pair-call
#   git rm -rq docs helm simulator/reproduction zoo/weights/drafter-* zoo/weights/eagle-1x384 zoo/weights/heads-3x384
#   git commit -qm "GPU session: what a pair needs"
set -eu
most_mib=${MOST_MIB:-64} # that may travel: the working tree and what is carried
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
{ git ls-files -z --cached --others --exclude-standard; find .gpu-ray/ .gpu-pair/ -type f -print0; } |
    xargs -0 stat -c %s 2>/dev/null | awk -v most="$most_mib" '
        { sum += $1 / 1048576 }
        END {
            printf "the working tree with .gpu-ray and .gpu-pair: %.1f MiB, of %d that may travel\n", sum, most
            if (sum > most) { print "too much: leave out what this script names" > "/dev/stderr"; exit 1 }
        }'
