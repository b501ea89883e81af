#!/bin/sh
# Gather in .gpu-ray/ what `scripts/gpu_session.sh serve` needs on a GPU machine without a network beside its
# own torch: Ray without what a server of ours never imports, and the wheels around it. Carry .gpu-ray/.
#   scripts/gpu_ray.sh [PYTHON_VERSION]
# With all of the working tree it is too much: scripts/gpu_branch.sh leaves out what a call does not need.
set -eu
python_version=${1:-3.12}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=$root/.gpu-ray
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
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
tar -cf - . | xz --x86 --lzma2=preset=9e,dict=128MiB >"$work/site.tar.xz"
mv "$work/site.tar.xz" "$out/site.tar.xz" # whole, whoever else makes one
# What tests on that machine are collected with.
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$out" pytest-asyncio==1.5.0

du -sh "$out"
