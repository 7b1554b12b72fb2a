#!/usr/bin/env bash
# Measure what docs/performance.md says about saved activations, on one GPU of 141 GB. See usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    cat <<'TEXT'
usage: run_activations.sh FOLDER [PART...]

Writes activations_PART.json and long_context.json into FOLDER (benchmarks/results for those of the
docs). PART is of: table, long, coat, training (default: all, in this order; about 4, 3, 3 and 8
minutes). Libraries to compare
with: liger-kernel, torchao, bitsandbytes; the rows of those that are missing say so. A part that
fails is named at the end. PYTHON names the interpreter (default: python3).
TEXT
}
if [ $# -lt 1 ] || [ "$1" = -h ]; then
    usage
    [ "${1:-}" = -h ] && exit 0 || exit 2
fi
out=$1
shift
[ $# -gt 0 ] || set -- table long coat training
for part; do
    case $part in
        table | long | coat | training) ;;
        *) usage >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# caches of compiled graphs and kernels, so that a second run takes half the time
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/outputs/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/outputs/triton}
python=${PYTHON:-python3}
failed=
layers() {
    timeout "$2" "$python" benchmarks/activations.py --preset "$1" --jobs 6 --seconds "$(($2 - 30))" \
        --rounds "$3" --json "$out/activations_$1.json"
}
for part; do
    case $part in
        table) layers table 270 15 ;;
        long) layers long 200 5 ;;
        coat) layers coat 180 8 ;;
        training)
            "$python" benchmarks/long_context.py --json "$out/long_context.json" --variants \
                'plain;bitsandbytes;bitsandbytes, compiled;ours;ours fp8-4bit' ;;
    esac || failed="$failed $part"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
