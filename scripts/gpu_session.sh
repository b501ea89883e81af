#!/bin/sh
# One call of a session on a GPU machine without a network (docs/gpu.md): run from the repository's root there.
#   scripts/gpu_session.sh check|measure|serve|serve-8b|pair [OUT]
# Beside the repository it needs .gpu/ (scripts/gpu_wheels.sh), those that serve .gpu-ray/ (scripts/gpu_ray.sh) in
# its place, the last .gpu-pair/ (scripts/gpu_pair.sh), too, and with SESSION_DEVICE=cpu those need no GPU.
# Results are OUT/CALL.tar.gz, made anew after each part: few files come back from such a machine, those of a
# call that was ended among them.
set -u
call=${1:?check, measure, serve, serve-8b or pair}
out=${2:-${OUT:-/tmp/gpu-session}}
most_s=570 site=/tmp/site # a call is ended after 600 s
case $call in
serve) most_s=170 site=/tmp/site-ray ;;
serve-8b) most_s=330 site=/tmp/site-ray ;;
pair) most_s=545 site=/tmp/site-ray ;;
esac
deadline=$(($(date +%s) + ${SESSION_SECONDS:-$most_s}))
found=/tmp/gpu-session-$call profile=/tmp/profile.json
rm -rf "$found"
mkdir -p "$out" "$found"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer TRITON_CACHE_DIR=/tmp/triton
export TORCH_BLAS_PREFER_CUBLASLT="${TORCH_BLAS_PREFER_CUBLASLT:-1}" # as workers on GPUs have it
export TRITON_INTERPRET=0 # tests set 1 where they find no nvidia-smi, which may be off the PATH

# Compiled kernels of an earlier session, if they are carried; OUT has this one's at the end.
[ ! -s .gpu-caches/triton.tar.xz ] || [ -d "$TRITON_CACHE_DIR" ] ||
    python3 -m tarfile -e .gpu-caches/triton.tar.xz "$TRITON_CACHE_DIR"
keep_compiled() {
    [ -d "$TRITON_CACHE_DIR" ] || return 0
    # What a kernel was compiled from must be there, and is not read.
    find "$TRITON_CACHE_DIR" -type f \( -name '*.*ir' -o -name '*.ptx' -o -name '*.source' \) -exec truncate -s 0 {} +
    (cd "$TRITON_CACHE_DIR" && python3 -m tarfile -c "$out/triton.tar.xz" .)
}
trap keep_compiled EXIT
if [ "$site" = /tmp/site-ray ]; then
    [ -d "$site/ray" ] || python3 -m tarfile -e .gpu-ray/site.tar.xz "$site" || exit 1
    # Before minutes are spent on what comes first and needs none of these.
    PYTHONPATH="$site" python3 -c 'import fastapi, grpc, httptools, llguidance, msgspec, ray.serve, uvicorn' || exit 1
elif [ ! -d "$site/flashinfer" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        .gpu/*.whl || exit 1
    python3 -m tarfile -e .gpu/flashinfer.tar.xz "$site" || exit 1 # tar would need a program, xz
fi
# Where modules were built beforehand, one that is missing is named at once and not built for minutes.
[ -d "$site/flashinfer/data/cutlass" ] || export FLASHINFER_DISABLE_JIT=1
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"

keep() {
    tar -czf "$out/$call.new" -C "$found" --exclude decisions.jsonl . && mv "$out/$call.new" "$out/$call.tar.gz"
}
# Each part has its own time limit, so that one that hangs leaves time for the others; none outlasts the call.
part() {
    name=$1 limit=$2 start=$(date +%s)
    shift 2
    left=$((deadline - start))
    [ "$left" -ge "$limit" ] || limit=$left
    if [ "$limit" -lt 15 ]; then
        echo "== $name: left out, for $left s are left"
        status=0
        return
    fi
    echo "== $name (at most $limit s): $*"
    # By an interrupt, at which pytest still says what has failed.
    timeout -s INT -k 10 "$limit" "$@" >"$found/$name.log" 2>&1
    status=$?
    echo "   exit $status after $(($(date +%s) - start)) s"
    tail -n 25 "$found/$name.log"
    keep
}
# What is not timed runs beside the rest of its kind, with two threads each, and heeds interrupts as in the foreground.
beside() {
    name=$1 limit=$2
    shift 2
    {
        start=$(date +%s)
        env --default-signal=INT OMP_NUM_THREADS=2 timeout -s INT -k 10 "$limit" "$@" >"$found/$name.log" 2>&1
        echo "exit $? after $(($(date +%s) - start)) s" >>"$found/$name.log"
    } &
    names="${names-} $name"
}
together() {
    wait
    for name in $names; do
        echo "== $name: $(tail -n 1 "$found/$name.log")"
        tail -n 9 "$found/$name.log" | head -n 8 | cut -c1-220
    done
    names=
    keep
}
# Tests are named before they run, and of one that waits for the device for good the log has the stack.
pytest="python3 -m pytest -v -rfEs --tb=short --maxfail=20 --no-header --thorough -p no:cacheprovider -o timeout=120"
pytest="$pytest -o faulthandler_timeout=50"
cli='from deployments.cli import app; app()' benches='from benchmarks.cli import app; app()'
bench() {
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 -c "$benches" "$@" --json "$found/$name.json"
}
forward() { # NAME LIMIT SHAPE ATTENTION ...
    name=$1 limit=$2 shape=$3 attention=$4
    shift 4
    bench "$name" "$limit" forward --device cuda --shape "$shape" --attention "$attention" "$@"
}
# Of `serve`. Why Ray or the server did not start is in files that do not outlive the machine.
parts="python3 -m benchmarks.gpu_serve" device=${SESSION_DEVICE:-cuda} port=${SESSION_PORT:-18431} server=
url=http://127.0.0.1:$port
logs() {
    for pattern in raylet.err raylet.out gcs_server.err gcs_server.out dashboard_agent.log runtime_env_agent.log \
        'serve/replica_*Cell*.log' 'worker-*.err' 'flotilla/*.log'; do
        for file in /tmp/ray/session_latest/logs/$pattern; do
            [ ! -s "$file" ] || { echo "-- $file" && tail -n 8 "$file" | cut -c1-400; }
        done
    done
}
keep_logs() { # NAME
    tar -czf "$found/ray-$1.tar.gz" -C /tmp/ray/session_latest logs 2>/dev/null
    keep
    keep_compiled
}
# Whether so many seconds are left; whether a part is among those asked for, all of them if none is named.
within() {
    [ $((deadline - $(date +%s))) -ge "$1" ]
}
wanted() {
    case " ${SESSION_PARTS:-$1} " in *" $1 "*) ;; *) return 1 ;; esac
}
begin() { # NAME OPTION ...
    log=$found/server-$1.log
    # In a session of its own, so that the signals of a part that is ended are not for it.
    config=$found/$1.yaml
    [ -s "$config" ] || config=$found/serve.yaml
    setsid python3 -c "$cli" serve --config "$config" --port "$port" $2 >"$log" 2>&1 &
    server=$!
    part "ready-$1" 150 $parts ready "$url" "$server"
    if [ "$status" -eq 0 ]; then
        grep '✓' "$log" # what the start consists of
        nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader
        return 0
    fi
    tail -n 30 "$log"
    logs
    kill "$server"
    keep_logs "$1"
    return 1
}
end() { # NAME
    # Whatever time is left: a server that nobody ended would keep the GPU.
    least=$(($(date +%s) + 30))
    [ "$deadline" -ge "$least" ] || deadline=$least
    { # Their own lines begin with the time.
        cat /tmp/ray/session_latest/logs/worker-*.err
        cut -d' ' -f2- /tmp/ray/session_latest/logs/flotilla/*worker*.log
    } | grep -i 'warning\|error\|multi-process' | cut -c1-200 |
        sort | uniq -c | sort -rn | head -n 12
    part "stop-$1" 45 $parts stop "$url" "$server" --metrics "$found/metrics-$1.txt"
    [ "$status" -eq 0 ] || logs
    keep_logs "$1"
}

# Both calls that serve begin and end with the service by which processes compute side by side
# (docs/decisions/0047), and with a look at Ray.
share() {
    nvidia-smi
    mps=
    if command -v nvidia-cuda-mps-control >/dev/null; then
        nvidia-cuda-mps-control -d && mps=1
        echo "nvidia-cuda-mps-control -d: exit $?"
    fi
    if wanted ray; then part ray 40 $parts ray; else status=0; fi
    if [ "$status" -ne 0 ] && [ "$status" -ne 3 ] && [ -n "$mps" ]; then
        unshare
        mps=
        part ray-without-mps 40 $parts ray
    fi
    [ "$status" -eq 0 ] || logs
    keep_logs ray
    # Of a GPU that Ray does not find it is told; a rehearsal on a CPU shares one out that is not there.
    [ "$status" -ne 3 ] || export RAY_OVERRIDE_RESOURCES='{"GPU": 1}'
}
unshare() {
    [ -z "$mps" ] || echo quit | timeout 5 nvidia-cuda-mps-control
}

case $call in
check)
    # On Hopper cuDNN would plan the attention that others are compared with anew for every shape, for seconds in all.
    export TORCH_CUDNN_SDPA_DEPRIORITIZED=1
    limit=${BESIDE_SECONDS:-150}
    # Each file in a process of its own: what an illegal address leaves is an error in all that comes after it.
    for path in tests/gpu/test_*_on_gpu.py; do
        file=${path#tests/gpu/test_}
        beside "tests-${file%_on_gpu.py}" "$limit" $pytest "$path" -k 'not flashinfer'
    done
    # Without float16, for which no module is built beforehand.
    beside flashinfer "$limit" $pytest tests/gpu -k flashinfer --deselect \
        'tests/gpu/test_runners_on_gpu.py::test_kernels_equal_padded_attention[flashinfer-dtype6-64]'
    # Addresses outside of what was allocated. For heads of 96 (dtype2) torch's own flash attention, with which
    # ours is compared, writes behind its memory, and that is the end of the process.
    beside memcheck "$limit" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 $pytest \
        tests/gpu/test_runners_on_gpu.py tests/gpu/test_quantized_on_gpu.py tests/gpu/test_verify_on_gpu.py \
        tests/gpu/test_captured_layers_on_gpu.py \
        -k '(triton-dtype and padded_attention and not dtype2) or quantized_weights and dtype1 or decisions or padded_to_a_larger'
    # What the other call measures, to see that it runs: beside all this no time counts.
    beside try-profile "$limit" python3 -c "$cli" profile --json "$found/try-profile.json"
    beside try-engine "$limit" python3 -c "$benches" engine --no-processes --batch 1 --batch 4 --rounds 1 \
        --per-domain 1 --max-tokens 24 --json "$found/try-engine.json"
    beside try-eagle "$limit" python3 -m benchmarks.eagle_cost --shape 8b --dtype bfloat16 --device cuda --requests 1
    beside try-draft "$limit" python3 -m benchmarks.draft_cost --device cuda --depth 4 --width 1 4 --calls 6 \
        --path zoo/weights/drafter-general-2x192 --requests 1 --trees device
    beside try-flashinfer "$limit" python3 -c "$benches" forward --device cuda --shape 8b --attention flashinfer \
        --repeats 3
    beside try-fp8 "$limit" python3 -c "$benches" forward --device cuda --shape 1b --attention triton \
        --quantization fp8 --repeats 3
    nvidia-smi
    python3 -c "import torch, transformers as t, triton; print(torch.__version__, t.__version__, triton.__version__)"
    together
    ;;
measure)
    forward forward-8b 45 8b triton --kernels
    forward forward-8b-prompt 40 8b triton --prompt 64
    forward forward-1b 45 1b triton --kernels
    for trees in device laid-out host; do
        part "draft-$trees" 25 python3 -m benchmarks.draft_cost --device cuda --depth 4 8 --width 1 4 \
            --path zoo/weights/drafter-general-2x192 --requests 1 8 --trees $trees --json "$found/draft-$trees.json"
        part "ended-$trees" 20 python3 -m benchmarks.draft_cost --device cuda --depth 8 --width 1 --used 2 \
            --path zoo/weights/drafter-general-2x192 --requests 1 --trees $trees --json "$found/ended-$trees.json"
    done
    for graphs in graphs no-graphs; do
        part "eagle-8b-$graphs" 30 python3 -m benchmarks.eagle_cost --shape 8b --dtype bfloat16 --device cuda \
            --requests 1 8 32 --$graphs --json "$found/eagle-8b-$graphs.json"
    done
    # First what steps cost here: by the built-in costs, 8 ms a step, the policy would judge another machine.
    part profile 60 python3 -c "$cli" profile --json "$profile"
    cp "$profile" "$found/" && given="--profile $profile"
    bench engine 200 engine --no-processes --batch 1 --batch 32 --rounds 3 --per-domain 2 --max-tokens 96 ${given-}
    # Without a first round there is no record: what a peer breaks is not to take our own figures with it.
    [ -s "$found/engine.json" ] ||
        bench engine-alone 90 engine --no-processes --no-peers --batch 1 --batch 32 --rounds 3 --per-domain 2 \
            --max-tokens 96 ${given-}
    # What a mixture's forwards take, ours, in eight bits, and Transformers', whether those can be captured,
    # and whether their cost is what the model of it says.
    part mixture 75 python3 -m benchmarks.mixture_cost --shape qwen3-30b --device cuda --repeats 5 \
        --json "$found/mixture.json"
    part mixture-fp8 75 python3 -m benchmarks.mixture_cost --shape qwen3-30b --device cuda --repeats 5 \
        --quantization fp8 --json "$found/mixture-fp8.json"
    part mixture-hf 75 python3 -m benchmarks.mixture_cost --shape qwen3-30b --device cuda --repeats 5 \
        --runner hf --json "$found/mixture-hf.json"
    part decisions 40 python3 -m benchmarks.decision_cost --device cuda --json "$found/decisions.json"
    forward forward-1b-hf 45 1b triton --runner hf
    part bfloat16-ties 90 python3 -m benchmarks.bfloat16_ties --device cuda --json "$found/bfloat16-ties.json"
    forward forward-70b-fp8 90 70b triton --quantization fp8
    forward forward-32b 60 32b triton
    forward forward-8b-int4 30 8b triton --quantization int4
    forward forward-8b-fp8 30 8b triton --quantization fp8
    forward forward-8b-padded 30 8b padded
    forward forward-1b-fp8 30 1b triton --quantization fp8
    part attention-tiles 75 python3 -m benchmarks.attention_tiles --json "$found/attention-tiles.json"
    part fp8-tiles 75 python3 -m benchmarks.product_tiles --json "$found/fp8-tiles.json"
    part int4-tiles 75 python3 -m benchmarks.product_tiles --quantization int4 --json "$found/int4-tiles.json"
    ;;
serve)
    share
    $parts config --device "$device" --num-gpus 0.5 >"$found/serve.yaml" || exit 1
    # A policy that drafts whatever it costs: by what pays, such small models would hardly be drafted for.
    if begin float32 "--policy fixed"; then
        part ask 30 $parts ask "$url" "$server"
        part load-fixed 35 $parts load "$url" "$server" --way fixed --drafters general,code \
            --json "$found/load-fixed.json"
        bench lossless 75 lossless --url "$url" --num-prompts 24 --drafters general --max-tokens 32
        part kill 60 $parts kill "$url" "$server"
        [ "$status" -eq 0 ] || logs
        end float32
    fi
    if within 50 && begin bfloat16 "--dtype bfloat16"; then
        part load-flotilla 35 $parts load "$url" "$server" --way flotilla --json "$found/load-flotilla.json"
        end bfloat16
    fi
    unshare
    ;;
serve-8b)
    share
    # The demo family in the shapes of larger models: a step's times are theirs, and drafts are right as often as its.
    target=${SESSION_TARGET:-8b} drafter=${SESSION_DRAFTER:-1b}
    for grown in "target-8x384 $target" "drafter-general-2x192 $drafter"; do
        shape=${grown#* }
        beside "grow-$shape" 90 python3 -m benchmarks.grown_checkpoint --model "zoo/weights/${grown% *}" \
            --shape "$shape" "/tmp/grown-$shape-${grown%%-*}"
    done
    beside grow-eagle 90 python3 -m benchmarks.grown_eagle --eagle zoo/weights/eagle-1x384 \
        --target zoo/weights/target-8x384 --shape "$target" /tmp/grown-eagle
    # Meanwhile nothing is timed. What tests need is in the tree only if the branch leaves it there.
    if [ -d tests/gpu ] && wanted tests; then
        python3 -m zipfile -e .gpu-ray/pytest_asyncio-*.whl /tmp/site-tests
        for file in ${SESSION_TESTS:-adapters captured_layers capturing decoding_attention drafts eagle eagle_growing eagle_reading \
            hf_runner lossless mixtures nccl overlapped overlapped_eagle planned_trees quantized runners verify windows}; do
            beside "tests-$file" "${BESIDE_SECONDS:-80}" env TORCH_CUDNN_SDPA_DEPRIORITIZED=1 \
                PYTHONPATH="$PYTHONPATH:/tmp/site-tests" $pytest "tests/gpu/test_${file}_on_gpu.py" \
                -k "${SESSION_TESTS_KEYWORDS:-not flashinfer}"
        done
    fi
    together
    # A drafter in a larger shape, and the same one in its own: alike in what they say, and not in what they cost.
    pair="--target /tmp/grown-$target-target --drafter /tmp/grown-$drafter-drafter --eagle /tmp/grown-eagle"
    pair="$pair --drafter general=zoo:drafter-general-2x192"
    # shellcheck disable=SC2086
    $parts config --device "$device" --num-gpus 0.7 $pair >"$found/serve.yaml" || exit 1
    if wanted grown && begin grown ""; then
        part load-grown 130 $parts load "$url" "$server" --way flotilla --learn "${LEARN_SECONDS:-10}" --seconds 4 \
            --concurrency 1 16 64 --max-tokens 256 --json "$found/load-grown.json"
        wanted differ &&
            part differ 40 $parts differ "$url" "$server" --count 24 --json "$found/differ.json"
        end grown
    fi
    # The same where who expects a message sleeps until it comes.
    sed 's/"busy_polling": *"auto"/"busy_polling":false/' "$found/serve.yaml" >"$found/asleep.yaml"
    if wanted asleep && within 75 && begin asleep ""; then
        part load-asleep 60 $parts load "$url" "$server" --way flotilla --learn 5 --seconds 4 --concurrency 1 16 \
            --max-tokens 256 --json "$found/load-asleep.json"
        end asleep
    fi
    # Drafts in every step: what such a step takes beside its calls; then without calls that are sent ahead.
    if wanted fixed && within 75 && begin fixed "--policy fixed"; then
        part load-fixed 60 $parts load "$url" "$server" --way fixed --drafters small --concurrency 1 16 64 \
            --max-tokens 256 --json "$found/load-fixed.json"
        part load-eagle 30 $parts load "$url" "$server" --way fixed --drafters eagle --concurrency 1 16 \
            --max-tokens 256 --json "$found/load-eagle.json"
        end fixed
    fi
    sed 's/"async_scheduling": *true/"async_scheduling":false/' "$found/serve.yaml" >"$found/in-turn.yaml"
    if wanted in-turn && within 60 && begin in-turn "--policy fixed"; then
        part load-in-turn 45 $parts load "$url" "$server" --way off --concurrency 1 16 64 --max-tokens 256 \
            --json "$found/load-in-turn.json"
        end in-turn
    fi
    # Policies in turns on one cell, with arrivals and objectives.
    if wanted compare && within 100; then
        policies=
        for policy in ${SESSION_POLICIES:-flotilla autoregressive smartspec adaserve specserve}; do
            policies="$policies --policy $policy"
        done
        for rate in ${SESSION_RATE:-8}; do policies="$policies --rate $rate"; done
        # A record of what was decided takes the scheduler as long again as deciding.
        recorded=null
        [ -z "${SESSION_DECISIONS-}" ] || recorded="\"$found/decisions.jsonl\""
        sed "s|\"decisions_file\": *null|\"decisions_file\":$recorded|" "$found/serve.yaml" >"$found/compare.yaml"
        # shellcheck disable=SC2086
        bench compare "${COMPARE_SECONDS:-240}" compare --config "$found/compare.yaml" $policies \
            --seeds 1 --duration "${SESSION_DURATION:-8}" --max-tokens 256 --temperature "${SESSION_TEMPERATURE:-0}"
        # In pieces that are small enough to come back.
        [ ! -s "$found/decisions.jsonl" ] ||
            gzip -c "$found/decisions.jsonl" | split -b 15m - "$out/decisions.jsonl.gz."
    fi
    unshare
    # In one process, beside Transformers, which runs the same two models.
    # shellcheck disable=SC2086
    $parts config --device auto --num-gpus 0 --keep-nothing --num-slots "${SESSION_SLOTS:-131072}" $pair \
        >"$found/engine.yaml" || exit 1
    if wanted engine; then
        bench engine 150 engine --config "$found/engine.yaml" --no-processes --policy fixed --batch 1 --batch 32 \
            --assistant "/tmp/grown-$drafter-drafter" --rounds 1 --per-domain 1 --max-tokens 64
    fi
    if wanted forwards; then
        forward forward-8b 45 8b triton
        forward forward-8b-prompt 40 8b triton --prompt 64
        forward forward-8b-long-prompt 40 8b triton --prompt 512
    fi
    ;;
pair)
    target=${SESSION_TARGET:-target-32x1024} drafter=${SESSION_DRAFTER:-drafter-general-2x384} pair=/tmp/pair
    # Minutes of the target's training, of its writing and reading, and of the drafter's.
    # shellcheck disable=SC2086
    set -- ${SESSION_MINUTES:-2.2 0.7 0.2 0.6}
    nvidia-smi -L
    # A second call on a machine that is still there finds the pair of the first.
    if [ ! -s "$pair/$drafter/model.safetensors" ]; then
        python3 -m tarfile -e .gpu-pair/data.tar.xz /tmp/pair-data || exit 1
        python3 -m zipfile -e .gpu-pair/pytest_asyncio-*.whl /tmp/site-tests
        for file in runners decoding_attention overlapped verify; do
            beside "tests-$file" "${BESIDE_SECONDS:-260}" env PYTHONPATH="$PYTHONPATH:/tmp/site-tests" $pytest \
                "tests/gpu/test_${file}_on_gpu.py" -k 'not flashinfer'
        done
        part train 330 python3 -c "$cli" zoo pair --data /tmp/pair-data --out "$pair" --target "$target" \
            --drafter "$drafter" --minutes "$1" --teach-minutes "$2" --score-minutes "$3" --drafter-minutes "$4"
        cp -r "$pair/pair.json" "$pair/logs" "$found/"
        together
    fi
    [ -s "$pair/$drafter/model.safetensors" ] || exit 1
    cat "$pair/pair.json"
    # In one process nothing is shared out. No request finds another's prompt read, here or when it is served.
    config="$parts config --target $pair/$target --drafter $pair/$drafter --num-slots ${SESSION_SLOTS:-131072}"
    $config --keep-nothing --device auto --num-gpus 0 >"$found/engine.yaml" || exit 1
    $config --keep-nothing --device "$device" --num-gpus 0.75 >"$found/serve.yaml" || exit 1
    share
    if begin pair ""; then
        part load-pair 90 $parts load "$url" "$server" --way flotilla --learn "${LEARN_SECONDS:-14}" --seconds 8 \
            --concurrency 1 16 --json "$found/load-pair.json"
        part differ 40 $parts differ "$url" "$server" --json "$found/differ.json"
        end pair
    fi
    unshare
    # Last, for it has a record after each round, and the time that is left.
    part profile 60 python3 -c "$cli" profile --config "$found/engine.yaml" --json "$profile"
    cp "$profile" "$found/" && given="--profile $profile"
    bench engine 200 engine --config "$found/engine.yaml" --no-processes --policy fixed \
        --assistant "$pair/$drafter" --batch 1 --batch 32 --rounds 3 --per-domain 2 --max-tokens 96 ${given-}
    ;;
*)
    echo "scripts/gpu_session.sh: no call named '$call': check, measure, serve, serve-8b or pair" >&2
    exit 2
    ;;
esac
