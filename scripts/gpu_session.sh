#!/bin/sh
# One call of a session on a GPU machine without a network (docs/gpu.md): run from the repository's root there.
#   scripts/gpu_session.sh check|floors|speed|profile [OUT]
# Beside the repository it needs .gpu/ (scripts/gpu_wheels.sh); results go to OUT, one file per figure.
set -u
call=${1:?check, floors, speed or profile}
out=${2:-${OUT:-/tmp/gpu-session}}
site=/tmp/site
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer TRITON_CACHE_DIR=/tmp/triton

if [ ! -d "$site/flashinfer" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .gpu/*.whl || exit 1
    tar -xJf .gpu/flashinfer.tar.xz -C "$site" || exit 1
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"

# Each part has its own time limit, so that one that hangs leaves time for the others.
part() {
    name=$1 limit=$2
    shift 2
    echo "== $name (at most $limit s): $*"
    start=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    echo "   exit $? after $(($(date +%s) - start)) s"
    tail -n 25 "$out/$name.log"
}
flotilla_bench() { name=$1 limit=$2; shift 2; part "$name" "$limit" python3 -c 'from benchmarks.cli import app; app()' "$@"; }

case $call in
check)
    part machine 60 sh -c 'nvidia-smi; python3 -c "import torch, transformers; print(torch.__version__, transformers.__version__)"'
    # FlashInfer builds its kernels at first use: the longest part of the call, and needed by the next ones.
    part tests 420 python3 -m pytest tests/gpu -q -rs -x --no-header -p no:cacheprovider -o timeout=400 -k "not flashinfer"
    part flashinfer 420 python3 -m pytest tests/gpu -q -rs --no-header -p no:cacheprovider -o timeout=400 -k flashinfer
    ;;
floors)
    for shape in 8b 1b; do
        flotilla_bench "forward-$shape-fp8" 70 forward --device cuda --shape $shape --attention triton \
            --quantization fp8 --json "$out/forward-$shape-fp8.json"
        for attention in triton flashinfer padded; do
            flotilla_bench "forward-$shape-$attention" 70 forward --device cuda --shape $shape --attention $attention \
                --json "$out/forward-$shape-$attention.json"
        done
    done
    ;;
speed)
    for trees in device host; do
        part "draft-$trees" 60 python3 -m benchmarks.draft_cost --device cuda --path zoo/weights/drafter-general-2x192 \
            --depth 4 8 --width 1 4 --requests 1 8 --trees $trees --json "$out/draft-$trees.json"
    done
    flotilla_bench engine 400 engine --no-processes --batch 1 --batch 32 --rounds 3 --json "$out/engine.json"
    ;;
profile)
    part profile 200 python3 -c 'from deployments.cli import app; app()' profile --json "$out/h200.json"
    flotilla_bench forward-70b-fp8 180 forward --device cuda --shape 70b --quantization fp8 --attention triton \
        --json "$out/forward-70b-fp8.json"
    flotilla_bench forward-32b 180 forward --device cuda --shape 32b --json "$out/forward-32b.json"
    ;;
*)
    echo "scripts/gpu_session.sh: no call named '$call': check, floors, speed or profile" >&2
    exit 2
    ;;
esac
