#!/usr/bin/env bash
# All measurements of 8-bit gradients that need GPUs. See usage below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -ne 1 ] || [ "$1" = -h ]; then
    cat <<'TEXT'
usage: run_gradients.sh FOLDER

Writes gradient_memory.json and all_reduce_*.json into FOLDER (benchmarks/results for those of the
docs). Needs root, and four GPUs of one machine, or two that emulated nodes share. About two minutes.
TEXT
    [ "${1:-}" = -h ] && exit 0 || exit 2
fi
out=$1
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
"$python" benchmarks/gradient_memory.py --json "$out/gradient_memory.json"
for rate in 10gbit none; do
    name=${rate/none/unlimited}
    NCCL_NVLS_ENABLE=0 benchmarks/nodes.sh -r "$rate" -n 2 -g 2 -p "$python" \
        benchmarks/all_reduce.py --node-size 2 --seconds 0.5 --json "$out/all_reduce_$name.json"
done
