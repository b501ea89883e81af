#!/bin/sh
# Make the branch on which a call of a GPU session travels (docs/gpu.md): without what the call does not need, so
# that it fits with what is carried. Go back by `git switch -`.
#   scripts/gpu_branch.sh check|measure|serve|serve-8b|pair [TEST ...]
# TESTs are files of tests/gpu that `serve-8b` runs, as eagle for test_eagle_on_gpu.py; they stay with all they need.
set -eu
call=${1:?check, measure, serve, serve-8b or pair}
shift
most_mib=${MOST_MIB:-64} # that may travel
cd "$(dirname "$0")/.."
[ -z "$(git status --porcelain)" ] || { echo "there are changes that are not committed" >&2 && exit 1; }

weights=zoo/weights
served="docs helm simulator image Dockerfile deployments/dashboards README.md CONTRIBUTING.md SECURITY.md zoo/README.md"
served="$served $weights/drafter-chat-2x128 $weights/drafter-summary-1x128 $weights/drafter-vocab1024-2x128"
served="$served $weights/lora-terse-8x384"
case $call in
check | measure) unneeded="docs/images docs/results docs/reproduction" carried=.gpu ;;
serve) unneeded="$served $weights/eagle-1x384" carried=.gpu-ray ;;
serve-8b) unneeded="$served $weights/drafter-code-2x128 $weights/heads-3x384" carried=.gpu-ray ;;
pair) unneeded="docs helm simulator/reproduction $weights/drafter-* $weights/eagle-1x384 $weights/heads-3x384 $weights/lora-terse-8x384" carried=".gpu-ray .gpu-pair" ;;
*) echo "scripts/gpu_branch.sh: no call named '$call'" >&2 && exit 2 ;;
esac
git switch -q -C "gpu-$call-call"
# shellcheck disable=SC2086
git rm -rq $unneeded
case $call in
serve | serve-8b)
    kept='^tests/(conftest|examples|__init__|(emulated|quick|eagle|own|plain|random|masked)_[a-z_]*|gpu/(conftest|waiting|eagle_on_device|__init__)'
    for test in "$@"; do kept="$kept|gpu/test_${test}_on_gpu"; done
    # What tests of GPUs share with others.
    kept="$kept|(drafters|engine|verifier)/((__init__|[a-su-z][a-z0-9_]*|t[a-df-z][a-z0-9_]*)|test_(adapters|runners|attention|static_forwards)))\\.py\$"
    [ $# -gt 0 ] || kept='^$'
    git ls-files tests | grep -vE "$kept" | xargs git rm -q
    ;;
esac
# A test that lacks something is better found here than there.
if [ $# -gt 0 ] && [ -x .venv/bin/python ]; then
    paths=
    for test in "$@"; do paths="$paths tests/gpu/test_${test}_on_gpu.py"; done
    # shellcheck disable=SC2086
    .venv/bin/python -m pytest -q --collect-only $paths >/dev/null ||
        { echo "tests that are to travel lack something; back by: git reset -q --hard && git switch -" >&2; exit 1; }
fi
git commit -qm "What a GPU session's call '$call' needs"
# As an archive has it: a header of 512 bytes each, and whole blocks of as many.
# shellcheck disable=SC2086
{ git ls-files -z && find $carried .gpu-caches -type f -print0 2>/dev/null; } |
    xargs -0 stat -c %s | awk -v most="$most_mib" '
        { sum += (512 + int(($1 + 511) / 512) * 512) / 1048576 }
        END {
            printf "with what is carried: %.1f MiB, of %d that may travel\n", sum, most
            if (sum > most) { print "too much" > "/dev/stderr"; exit 1 }
        }'
