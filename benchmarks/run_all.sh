#!/usr/bin/env bash
# Measure what docs show, part by part. See usage below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: run_all.sh [-o FOLDER] [PART...] [-- OPTIONS]

  -o FOLDER  for the JSON reports, and FOLDER/traces
             (default: benchmarks/results, and outputs/traces)
  PART       four GPUs:  nvlink, rates, slow, compile, memory, gradients, kernels (the default);
             pipelines (of 4, and of 2 with replicas)
             two GPUs, with tensor parallelism:  memory (saved activations, states, sums), recipes,
             layouts, trainer, reductions (two emulated nodes, whose ranks share the GPUs: start
             CUDA's MPS before), errors (on the CPU); with TINY=1 all at a tiny size on the CPU
             plans (short runs beside their plans; needs no MPS)
             one GPU of 141 GB:  table, long, coat (saved activations; libraries to compare with:
             liger-kernel, torchao), offload (8B models at 32k and 64k tokens; bitsandbytes)
             emulated hosts:  stages2, stages4 (pipelines; where stages share GPUs, CUDA's MPS lets
             them compute side by side), split (split learning, on CPUs)
  OPTIONS    more for slow_network.py: `-- --preset cpu` where there are no GPUs

`rates`, `slow`, `compile`, `gradients`, `layouts`, `trainer`, `reductions`, `plans` and emulated hosts use benchmarks/nodes.sh, which needs root,
ip and tc (package iproute2). `slow` compares with DDP, PowerSGD among its hooks, and with local
steps; the model has to fit on every GPU. PYTHON names the interpreter (default: python3). A part that fails or takes
longer than its limit is named at the end; the others still run, and the exit status is 1.
Afterwards, on any machine:

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
parts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        nvlink | rates | slow | compile | memory | gradients | kernels | pipelines) parts+=("$1") ;;
        table | long | coat | offload | stages2 | stages4 | split) parts+=("$1") ;;
        recipes | layouts | trainer | reductions | errors | plans) parts+=("$1") ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done
[ $# -eq 0 ] || shift
options=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(nvlink rates slow compile memory gradients kernels)

export PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # multicast is not to be had on every machine
# Caches of compiled graphs and kernels: a second run takes half the time.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/outputs/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/outputs/triton}
mkdir -p "$results"
variants=fsdp2,fsdp2-bf16-reduce,quantized,quantized-node
on_one_node=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4)
on_two_gpus=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2)
on_two_nodes=(benchmarks/nodes.sh -n 2 -g 2)

nvlink() {
    timeout 120 "${on_one_node[@]}" benchmarks/step_time.py --variants $variants --steps 8 \
        --trace "$traces/nvlink" --json "$results/step_time_nvlink.json"
}
rates() {
    timeout 300 "${on_two_nodes[@]}" benchmarks/step_time.py --node-size 2 \
        --variants $variants --rates none,25gbit,10gbit --steps 6 --warmup 2 --budget 6 \
        --trace "$traces" --json "$results/step_time_{rate}.json"
}
slow() {
    timeout 900 benchmarks/nodes.sh -b auto -n 2 -g 1 benchmarks/step_time.py --node-size 1 \
        --micro-batch 4 --variants fsdp2,ddp-bf16,ddp-8-bit,quantized,ddp-powersgd-32,local-32 \
        --rates none,10gbit,1gbit --steps 32 --warmup 3 --budget 20 \
        --json "$results/step_time_slow_{rate}.json"
}
compile() {
    local status=0 compiled=(benchmarks/step_time.py --variants fsdp2,quantized --compile --steps 8)
    timeout 150 "${on_one_node[@]}" "${compiled[@]}" \
        --json "$results/step_time_nvlink_compile.json" || status=1
    timeout 150 "${on_two_nodes[@]}" "${compiled[@]}" --node-size 2 \
        --json "$results/step_time_unlimited_compile.json" || status=1
    return $status
}
tensor=(--tensor-parallel 2)
sized() {  # sizes, or tiny ones
    if [ -n "${TINY:-}" ]; then size=(--tiny --cpu); else size=("$@"); fi
}
memory() {  # AGoQ's table 8: a quarter of the layers and of the GPUs
    sized --layers 10 --hidden 5120 --heads 40 --seq 12288 --vocab 32000
    timeout 240 "${on_two_gpus[@]}" benchmarks/lightning_step.py "${tensor[@]}" "${size[@]}" --llama \
        --accumulate 2 --steps 2 --warmup 1 --variants fsdp2,O,O+G,A+O+G \
        --json "$results/memory_tensor_parallel.json"
}
recipes() {
    sized --layers 8 --micro-batch 4 --compile
    timeout 240 "${on_two_gpus[@]}" benchmarks/lightning_step.py "${tensor[@]}" "${size[@]}" \
        --steps 6 --variants fsdp2,A,coat,A+O+G --json "$results/recipes_tensor_parallel.json"
}
layouts() {  # SDP4Bit's table 2 and figure 8
    sized --layers 32 --hidden 2560 --heads 32 --micro-batch 2
    timeout 300 "${on_two_nodes[@]}" benchmarks/step_time.py --node-size 2 "${tensor[@]}" \
        "${size[@]}" --rates none,25gbit,10gbit --steps 4 --warmup 2 --budget 8 \
        --variants fsdp2,quantized,weights-only,gradients-only,no-communication \
        --json "$results/step_time_tensor_parallel_{rate}.json"
}
pipelines() {
    local status=0 stages
    sized --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 32000 --seq 4096
    for stages in 4 2; do
        timeout 240 "${on_one_node[@]}" benchmarks/lightning_step.py --llama --pipeline $stages \
            "${size[@]}" ${TINY:+--layers 4} --steps 3 --warmup 2 \
            --variants 1f1b,1f1b-checkpoint,1f1b-A,zero-bubble \
            --json "$results/pipeline_$stages.json" || status=1
    done
    return $status
}
trainer() {
    sized --layers 8 --micro-batch 2
    timeout 150 "${on_two_nodes[@]}" benchmarks/lightning_step.py --node-size 2 "${tensor[@]}" \
        "${size[@]}" --steps 4 --variants fsdp2,quantized,all \
        --json "$results/trainer_tensor_parallel.json"
}
reductions() {  # AGoQ's table 4 and SDP4Bit's
    local sizes=(--sizes 32K,1M,32M,1G --scatter 32M,192M)
    [ -z "${TINY:-}" ] || sizes=(--sizes 32K --scatter 1M --cpu)
    timeout 180 "${on_two_nodes[@]}" benchmarks/all_reduce.py --node-size 2 "${sizes[@]}" \
        --seconds 0.4 --rates none,10gbit --json "$results/reductions.json"
}
errors() {  # SDP4Bit's table 3, COAT's table 1
    local steps=150
    [ -z "${TINY:-}" ] || steps=2
    timeout 500 "$PYTHON" benchmarks/code_errors.py --steps $steps ${TINY:+--tiny} \
        --json "$results/code_errors.json"
}
plans() {  # what is planned later, elsewhere, too: `--only-plan` goes on with the report
    local only=(--only-measure)
    [ -z "${TINY:-}" ] || only=(--tiny --steps 3 --only "GPT-125M;pipeline, 2 nodes, 10gbit")
    timeout 580 "$PYTHON" benchmarks/plan_accuracy.py "${only[@]}" --json "$results/plan_accuracy.json"
}
gradients() {
    local status=0 rate
    for rate in 10gbit none; do
        benchmarks/nodes.sh -r "$rate" -n 2 -g 2 benchmarks/all_reduce.py --node-size 2 \
            --seconds 0.5 --json "$results/all_reduce_${rate/none/unlimited}.json" || status=1
    done
    return $status
}
kernels() {
    timeout 300 "$PYTHON" benchmarks/kernels.py --out "$results/kernels_h200.json"
}
layers() {  # preset, seconds, rounds
    timeout "$2" "$PYTHON" benchmarks/activations.py --preset "$1" --jobs 6 --seconds "$(($2 - 30))" \
        --rounds "$3" --json "$results/activations_$1.json"
}
table() { layers table 270 15; }
long() { layers long 200 5; }
coat() { layers coat 180 8; }
offload() {
    local status=0 variant seq
    for seq in ${TINY:+1024} $([ -n "${TINY:-}" ] || echo 32768 65536); do
        for variant in offload ours bitsandbytes selective save_on_cpu; do
            timeout 300 "$PYTHON" benchmarks/long_context.py "$variant" --seq "$seq" ${TINY:+--tiny} \
                --json "$results/offload.json" || status=1
        done
    done
    return $status
}
stages() {  # The slowest steps take 9 s with two stages and 17 s with four, in fp32 at 100 Mb/s.
    benchmarks/nodes.sh -b 128kb -n "$1" -g 1 benchmarks/slow_network.py \
        --rates 1gbit,500mbit,300mbit,100mbit --microbatches 16 --steps 2 \
        --json "$results/slow_network_$1.json" ${options[@]+"${options[@]}"}
}
stages2() { stages 2; }
stages4() { stages 4; }
split() {
    benchmarks/nodes.sh -n 2 -g 1 benchmarks/split_link.py --rates 10mbit,100mbit \
        --json "$results/split_link.json"
}

failed=()
for part in "${parts[@]}"; do
    echo "== $part" >&2
    start=$SECONDS
    ("$part") || failed+=("$part")
    echo "== $part took $((SECONDS - start)) s" >&2
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
