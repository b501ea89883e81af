#!/bin/sh
# Gather in .gpu-ray/ what `scripts/gpu_session.sh serve` needs on a GPU machine without a network beside its
# own torch: Ray without what a server of ours never imports, and the wheels around it. Carry .gpu-ray/.
#   scripts/gpu_ray.sh [PYTHON_VERSION]
# With all of the working tree it is too much; on a branch, and `git switch -` afterwards:
#   git switch -c gpu-serve-call
#   git rm -rq tests docs helm simulator/reproduction zoo/weights/drafter-chat-2x128 \
#       zoo/weights/drafter-summary-1x128 zoo/weights/drafter-vocab1024-2x128 zoo/weights/eagle-1x384
# (for `serve-8b` keep zoo/weights/eagle-1x384, and leave out zoo/weights/drafter-code-2x128 and
# zoo/weights/heads-3x384 instead)
#   git commit -qm "GPU session: what serves"
set -eu
python_version=${1:-3.12}
most_mib=${MOST_MIB:-64} # that may travel: the working tree and what is carried
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=$root/.gpu-ray
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out"/site.tar.xz
# Of Serve, FastAPI and our own; what else they ask for is on the machine beside torch; of grpcio and
# protobuf perhaps a version for which our generated code is too new.
"$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version "$python_version" \
    --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --target "$work/site" \
    ray==2.60.0 fastapi starlette uvicorn httptools opentelemetry-api jsonschema jsonschema-specifications \
    referencing rpds-py grpcio==1.85.1 grpcio-health-checking==1.85.1 grpcio-reflection==1.85.1 'protobuf>=7.35.1' \
    msgspec 'llguidance>=1.9,<2' pydantic==2.12.5 pydantic-core==2.41.5 annotated-types typing-inspection
cd "$work/site"
# Java, the dashboard's pages, and libraries beside Serve.
rm -rf bin ray/jars ray/cpp ray/dashboard/client ray/rllib ray/tune ray/train ray/data ray/llm
find . -type f \( -name '*.so' -o -name gcs_server -o -name raylet \) -exec strip --strip-unneeded {} +
echo "packing: two minutes of a processor"
tar -cf - . | xz --x86 --lzma2=preset=9e,dict=128MiB >"$out/site.tar.xz"

cd "$root"
du -sh "$out"
{ git ls-files -z --cached --others --exclude-standard; find .gpu-ray -type f -print0; } |
    xargs -0 stat -c %s 2>/dev/null | awk -v most="$most_mib" '
        { sum += $1 / 1048576 }
        END {
            printf "the working tree with .gpu-ray: %.1f MiB, of %d that may travel\n", sum, most
            if (sum > most) { print "too much: leave out what this script names" > "/dev/stderr"; exit 1 }
        }'
