#!/usr/bin/env bash
# Measure what the docs say about pipelines on slow networks and in a cluster. See usage below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    cat <<'TEXT'
usage: run_slow_network.sh FOLDER [PART...] [-- OPTIONS]

Writes slow_network_PART.json and split_link.json into FOLDER (benchmarks/results for those of the
docs). PART is of: 2, 4 (stages on so many emulated hosts, 100, 300, 500 Mb/s and 1 Gb/s), split (a
client and a server at 10 and 100 Mb/s, on CPUs); default: all, in this order. OPTIONS go to every
slow_network.py, after those of the part: `-- --preset cpu` where there are no GPUs. Emulated hosts
need root, ip and tc (package iproute2). Where four stages share two GPUs, CUDA's MPS lets them
compute side by side. A part that fails is named at the end. PYTHON names the interpreter (default:
python3).
TEXT
}
if [ $# -lt 1 ] || [ "$1" = -h ]; then
    usage
    [ "${1:-}" = -h ] && exit 0 || exit 2
fi
out=$1 parts=()
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        2 | 4 | split) parts+=("$1") ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done
[ $# -eq 0 ] || shift
[ ${#parts[@]} -gt 0 ] || parts=(2 4 split)
mkdir -p "$out"
export PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # multicast is not to be had on every machine
options=("$@") failed=
hosts() {
    local number=$1
    shift
    benchmarks/nodes.sh -b 128kb -n "$number" -g 1 benchmarks/slow_network.py "$@" \
        ${options[@]+"${options[@]}"}
}
for part in "${parts[@]}"; do
    start=$SECONDS
    case $part in
        2 | 4)
            # The slowest steps take 9 s with two stages and 17 s with four, in fp32 at 100 Mb/s.
            hosts "$part" --rates 1gbit,500mbit,300mbit,100mbit --microbatches 16 --steps 2 \
                --json "$out/slow_network_$part.json" ;;
        split)
            benchmarks/nodes.sh -n 2 -g 1 benchmarks/split_link.py --rates 10mbit,100mbit \
                --json "$out/split_link.json" ;;
    esac || failed="$failed $part"
    echo "== $part took $((SECONDS - start)) s" >&2
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
