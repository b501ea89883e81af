#!/bin/sh
# Gather in .gpu/ what a GPU machine without a network needs beside its own torch: a few wheels, and FlashInfer
# without sources of kernels that are not ours, which is most of it.
#   scripts/gpu_wheels.sh [PYTHON_VERSION]        then carry .gpu/ there; scripts/gpu_session.sh unpacks it
set -eu
python_version=${1:-3.12}
most_mib=${MOST_MIB:-64} # that may travel: the working tree and what is carried
root=$(cd "$(dirname "$0")/.." && pwd)
out=$root/.gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out"/*.whl "$out"/flashinfer.tar.xz
cd "$out"
for package in msgspec 'llguidance>=1.9,<2' pydantic==2.12.5 pydantic-core==2.41.5 annotated-types typing-inspection \
    pytest-asyncio apache-tvm-ffi; do
    "$root/.venv/bin/python" -m pip download -q --no-deps --only-binary=:all: --python-version "$python_version" \
        --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d . "$package"
done
cd "$work"
"$root/.venv/bin/python" -m pip download -q --no-deps --only-binary=:all: -d . flashinfer-python==0.7.2
"$root/.venv/bin/python" -m zipfile -e flashinfer_python-*.whl site
cd site
find flashinfer/data/csrc -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
rm -rf flashinfer/data/cutlass/examples flashinfer/data/cutlass/python flashinfer/data/cutlass/test \
    flashinfer/data/cutlass/media flashinfer/data/cccl/c flashinfer/data/cccl/cudax flashinfer/moe_ep/kernel_src \
    flashinfer/attention/prims_ts/kernels
for kernels in b12x cake_vsa_sm90_cute sm110_xqa cake_mla_varq_dcp_decode; do
    rm -rf "flashinfer/experimental/$kernels"
done
# Tables of engines that nobody here runs; the modules beside them are imported.
find flashinfer/fused_moe/backends/cudnn_frost -type f ! -name '*.py' -delete
tar -cf - flashinfer flashinfer_python-*.dist-info | xz -6 > "$out/flashinfer.tar.xz"
cd "$root"
du -sh "$out"
{ git ls-files -z --cached --others --exclude-standard; find .gpu -type f -print0; } |
    xargs -0 stat -c %s 2>/dev/null | awk -v most="$most_mib" '
        { sum += $1 / 1048576 }
        END {
            printf "the working tree with .gpu: %.1f MiB, of %d that may travel\n", sum, most
            if (sum > most) { print "too much: docs/gpu.md says what to leave out" > "/dev/stderr"; exit 1 }
        }'
