#!/bin/sh
# Gather in .gpu/ what a GPU machine without a network needs beside its own torch: a few wheels, and
# FlashInfer with the modules that a session runs, built here. Carry .gpu/; scripts/gpu_session.sh unpacks it.
#   scripts/gpu_wheels.sh [PYTHON_VERSION]
# nvcc is that of CUDA_HOME, of the major version that torch was built with there; without one FlashInfer's
# sources are carried instead, for its kernels to be built there.
set -eu
python_version=${1:-3.12}
cuda=${CUDA_HOME:-/usr/local/cuda}
most_mib=${MOST_MIB:-64} # that may travel: the working tree and what is carried
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
out=$root/.gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out"/*.whl "$out"/flashinfer.tar.xz
cd "$out"
for package in msgspec 'llguidance>=1.9,<2' pydantic==2.12.5 pydantic-core==2.41.5 annotated-types \
    typing-inspection pytest-asyncio 'apache-tvm-ffi<0.2'; do
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$python_version" \
        --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d . "$package"
done
cd "$work"
"$python" -m pip download -q --no-deps --only-binary=:all: -d . flashinfer-python==0.7.2
"$python" -m zipfile -e flashinfer_python-*.whl site
data=site/flashinfer/data
find "$data/csrc" -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
if [ -x "$cuda/bin/nvcc" ]; then
    "$python" -m pip install -q --target deps ninja 'apache-tvm-ffi<0.2' einops nvidia-ml-py packaging requests \
        tabulate tqdm click
    # The driver's library is linked by name only, and need not be here.
    mkdir stubs
    gcc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o stubs/libcuda.so
    echo "building FlashInfer's modules: some five minutes of a processor"
    PATH=$work/deps/bin:$PATH PYTHONPATH=$work/deps CUDA_HOME=$cuda FLASHINFER_WORKSPACE_BASE=$work \
        FLASHINFER_CUDA_ARCH_LIST=${FLASHINFER_CUDA_ARCH_LIST:-9.0a} \
        FLASHINFER_EXTRA_LDFLAGS=-L$work/stubs \
        "$python" "$root/scripts/flashinfer_modules.py" site
    # Templates of sources are read even where what they describe is built.
    find "$data/csrc" -type f ! -name 'batch_prefill*' -delete
    rm -rf "$data/include" "$data/cutlass" "$data/cccl" "$data/spdlog"
else
    echo "no $cuda/bin/nvcc (set CUDA_HOME): sources are carried, for kernels to be built there" >&2
    rm -rf "$data/cutlass/examples" "$data/cutlass/python" "$data/cutlass/test" "$data/cutlass/media" \
        "$data/cccl/c" "$data/cccl/cudax"
fi
# Sources of other operations' kernels; modules in Python that are imported stay.
rm -rf site/flashinfer/moe_ep/kernel_src site/flashinfer/attention/prims_ts/kernels
for kernels in b12x cake_vsa_sm90_cute sm110_xqa cake_mla_varq_dcp_decode; do
    rm -rf "site/flashinfer/experimental/$kernels"
done
find site/flashinfer -path "$data" -prune -o -type f ! -name '*.py' ! -name '*.json' -exec rm {} +
tar --exclude=__pycache__ -C site -cf - . | xz -9e > "$out/flashinfer.tar.xz"

cd "$root"
du -sh "$out"
{ git ls-files -z --cached --others --exclude-standard; find .gpu -type f -print0; } |
    xargs -0 stat -c %s 2>/dev/null | awk -v most="$most_mib" '
        { sum += $1 / 1048576 }
        END {
            printf "the working tree with .gpu: %.1f MiB, of %d that may travel\n", sum, most
            if (sum > most) { print "too much: docs/gpu.md says what to leave out" > "/dev/stderr"; exit 1 }
        }'
