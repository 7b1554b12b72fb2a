#!/usr/bin/env bash
# Measure everything that docs/performance.md shows, on one machine with four GPUs. See usage below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: run_all.sh [-o FOLDER] [PART...]

  -o FOLDER  for the JSON reports, and FOLDER/traces
             (default: benchmarks/results, and outputs/traces)
  PART       nvlink, rates, slow, compile, memory, kernels (default: all, in this order)

`slow` compares with DDP, PowerSGD among its hooks, on a small model that fits on every GPU. `rates`,
`slow` and `compile` emulate two nodes with benchmarks/nodes.sh, which needs root. PYTHON names the
interpreter (default: python3). A part that fails or takes longer than its limit is named at the
end; the others still run, and the exit status is 1. Afterwards, on any machine:

  python benchmarks/picture.py docs/images/step_time.svg
  python benchmarks/table.py benchmarks/results/step_time_*gbit.json
TEXT
}

results=benchmarks/results traces=outputs/traces
while getopts "o:h" option; do
    case $option in
        o) results=$OPTARG traces=$OPTARG/traces ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- nvlink rates slow compile memory kernels
for part; do
    case $part in
        nvlink | rates | slow | compile | memory | kernels) ;;
        *) usage >&2; exit 2 ;;
    esac
done

export PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # multicast is not to be had on every machine
mkdir -p "$results"
variants=fsdp2,fsdp2-bf16-reduce,quantized,quantized-node
on_one_node=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4)
on_two_nodes=(benchmarks/nodes.sh -n 2 -g 2)

nvlink() {
    timeout 120 "${on_one_node[@]}" benchmarks/step_time.py --variants $variants --steps 8 \
        --trace "$traces/nvlink" --json "$results/step_time_nvlink.json"
}
rates() {
    timeout 330 "${on_two_nodes[@]}" benchmarks/step_time.py --node-size 2 \
        --variants $variants,quantized-vocabulary-8,quantized-2-bits \
        --rates none,100gbit,25gbit,10gbit --steps 6 --warmup 2 --budget 6 \
        --trace "$traces" --json "$results/step_time_{rate}.json"
}
slow() {
    timeout 1800 benchmarks/nodes.sh -b auto -n 2 -g 1 benchmarks/alternatives.py \
        --json "$results/alternatives.json"
}
compile() {
    local status=0 compiled=(benchmarks/step_time.py --variants fsdp2,quantized --compile --steps 8)
    timeout 150 "${on_one_node[@]}" "${compiled[@]}" \
        --json "$results/step_time_nvlink_compile.json" || status=1
    timeout 150 "${on_two_nodes[@]}" "${compiled[@]}" --node-size 2 \
        --json "$results/step_time_unlimited_compile.json" || status=1
    return $status
}
memory() {
    timeout 150 "${on_one_node[@]}" benchmarks/memory.py --node-size 2 \
        --json "$results/memory.json"
}
kernels() {
    timeout 120 "$PYTHON" benchmarks/kernels.py --out "$results/kernels_h200.json"
}

failed=()
for part; do
    echo "== $part" >&2
    start=$SECONDS
    ("$part") || failed+=("$part")
    echo "== $part took $((SECONDS - start)) s" >&2
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
