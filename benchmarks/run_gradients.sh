#!/usr/bin/env bash
# All measurements of 8-bit gradients that need GPUs: four of one machine, or two that are shared, as
# two emulated nodes of two, and one alone. Takes about two minutes.
# Usage: benchmarks/run_gradients.sh OUTPUT_FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: benchmarks/run_gradients.sh OUTPUT_FOLDER}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
"$python" benchmarks/gradient_memory.py --json "$out/gradient_memory.json"
for rate in 10gbit none; do
    name=${rate/none/unlimited}
    NCCL_NVLS_ENABLE=0 benchmarks/nodes.sh -r "$rate" -n 2 -g 2 -p "$python" \
        benchmarks/all_reduce.py --node-size 2 --seconds 0.5 --json "$out/all_reduce_$name.json"
done
