#!/usr/bin/env bash
# Run one torchrun job as several emulated nodes on one machine, with a real rate-limited network
# between them. See usage below.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: nodes.sh [-r RATE] [-n NODES] [-g RANKS] [-p PYTHON] SCRIPT [ARGS...]

  -r RATE    network rate of each node, in tc's units (10gbit, 25gbit, 500mbit), or none
             (default: none, which is the speed of the virtual network itself)
  -b BURST   bytes that a node may send at once after a pause, in tc's units (default: 4mb, which is
             half a second at 64 Mb/s: give 128kb up to 1 Gb/s); with auto, a script that sets rates
             chooses by each, and RATE has to be none
  -n NODES   number of emulated nodes (default: 2)
  -g RANKS   ranks, and so GPUs if there are any, per node (default: 2)
  -p PYTHON  interpreter (default: $PYTHON, else python3)

Each node is a network namespace behind one bridge. Traffic between nodes goes through its own
interface, limited by a token bucket on the sending side; ranks of one node talk over NVLink or
shared memory. NCCL_HOSTID makes NCCL see different hosts. Variables such as NCCL_NVLS_ENABLE=0 or
NCCL_DEBUG pass through from the caller. NCCL opens 16 sockets per connection, which fast links need,
but one with -b, as is its own default on most machines: 16 leave a link of 100 Mb/s half idle.
NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD say otherwise.

CUDA_VISIBLE_DEVICES=1 leaves the other GPUs to other jobs. Where there are fewer GPUs than ranks,
nodes share them; ranks of one node do not. Losses and bytes are the same then, but computation is
slower, and much slower without CUDA's MPS (nvidia-cuda-mps-control -d), which lets processes compute
side by side. Each then gets 16 hardware queues unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise:
with the few that MPS gives, streams wait for each other.

Give the script the node size too, e.g.:

  nodes.sh -r 10gbit -n 2 -g 2 benchmarks/step_time.py --node-size 2 --json out.json

Needs root, ip and tc (package iproute2). All namespaces, interfaces and processes are removed at
the end, also after a failure or Ctrl-C. The exit status is that of the first node that failed.
TEXT
}

rate=none burst=4mb sockets=4 nodes=2 ranks=2 python=${PYTHON:-python3}
while getopts "r:b:n:g:p:h" option; do
    case $option in
        r) rate=$OPTARG ;;
        b) burst=$OPTARG sockets=1 ;;
        n) nodes=$OPTARG ;;
        g) ranks=$OPTARG ;;
        p) python=$OPTARG ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))

fail() { echo "nodes.sh: $*" >&2; exit 2; }
[ $# -gt 0 ] || { usage >&2; exit 2; }
[[ $nodes =~ ^[1-9][0-9]?$ && $ranks =~ ^[1-9][0-9]?$ ]] || fail "-n and -g take numbers from 1 to 99"
[ "$burst" != auto ] || [ "$rate" = none ] || fail "-b auto takes -r none: give a burst for $rate"
[ "$(id -u)" = 0 ] || fail "network namespaces need root"
for tool in ip tc; do
    command -v "$tool" >/dev/null || fail "$tool not found: install iproute2"
done

gpus=0 visible=()
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus | grep -c '^GPU ') || fail "nvidia-smi lists no GPU"
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((gpus - 1)))}"
    gpus=${#visible[@]}
fi
[ "$gpus" = 0 ] || [ "$ranks" -le "$gpus" ] ||
    fail "-g $ranks: the ranks of one node need a GPU each, and there are $gpus"
if [ "$gpus" -gt 0 ] && [ $((nodes * ranks)) -gt "$gpus" ]; then
    echo "nodes.sh: $((nodes * ranks)) ranks share $gpus GPUs" >&2
    export LQ_RANKS_PER_GPU=$(((nodes * ranks + gpus - 1) / gpus))  # for the reports
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-16}
fi

id=$((BASHPID % 10000))  # interface names have at most 15 characters
bridge=lqb$id
subnet=10.$((64 + BASHPID % 64)).$((BASHPID / 64 % 256))
port=$((20000 + RANDOM % 20000))  # fresh for every call
pids=()

cleanup() {
    trap - EXIT INT TERM
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill -TERM -- "-$pid" 2>/dev/null || true
        disown "$pid" 2>/dev/null || true  # so that the shell does not announce its end
    done
    for node in $(seq 0 $((nodes - 1))); do
        for pid in $(ip netns pids "lq$id-$node" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
        ip link del "lqp$id-$node" 2>/dev/null || true
        ip netns del "lq$id-$node" 2>/dev/null || true
    done
    ip link del "$bridge" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

make_node() {
    local node=$1 name=lq$id-$1 inner=v$1 outer=lqp$id-$1
    ip netns add "$name"
    ip -n "$name" link set lo up
    ip link add "$outer" type veth peer name "$inner" netns "$name"
    ip link set "$outer" master "$bridge" mtu 9000 up
    ip -n "$name" addr add "$subnet.$((node + 1))/24" dev "$inner"
    ip -n "$name" link set "$inner" mtu 9000 up
    if [ "$rate" != none ]; then
        tc -n "$name" qdisc add dev "$inner" root tbf rate "$rate" burst "$burst" latency 100ms ||
            fail "tc refused -r $rate -b $burst"
    fi
}

start_node() {
    local node=$1 inner=v$1 devices=() list=() rank
    if [ "$gpus" -gt 0 ]; then
        for rank in $(seq 0 $((ranks - 1))); do list+=("${visible[(node * ranks + rank) % gpus]}"); done
        devices=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${list[*]}")")
    fi
    # setsid: a process group of its own, so that cleaning up reaches every rank.
    setsid ip netns exec "lq$id-$node" env ${devices[@]+"${devices[@]}"} \
        NCCL_HOSTID="lq$id-$node" NCCL_SOCKET_IFNAME="$inner" GLOO_SOCKET_IFNAME="$inner" \
        NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-$sockets}" \
        NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-$sockets}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" \
        LQ_EMULATED_RATE="$rate" LQ_NODE_BURST="$burst" LQ_NODE_INTERFACE="$inner" \
        "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" \
        --nproc-per-node "$ranks" --master-addr "$subnet.1" --master-port "$port" \
        "${arguments[@]}" &
    pids+=($!)
}

arguments=("$@")
ip link add "$bridge" type bridge
ip link set "$bridge" mtu 9000 up
for node in $(seq 0 $((nodes - 1))); do make_node "$node"; done
for node in $(seq 0 $((nodes - 1))); do start_node "$node"; done

status=0 running=("${pids[@]}")
while [ ${#running[@]} -gt 0 ] && [ "$status" = 0 ]; do  # one that fails ends the others
    sleep 0.2
    left=()
    for pid in "${running[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then left+=("$pid"); else wait "$pid" || status=$?; fi
    done
    running=(${left[@]+"${left[@]}"})
done
for node in $(seq 0 $((nodes - 1))); do
    sent=$(ip netns exec "lq$id-$node" cat "/sys/class/net/v$node/statistics/tx_bytes")
    # Each timeout is a pause of 200 ms or more: with many of them the rate is not what limits.
    tcp=$(ip netns exec "lq$id-$node" cat /proc/net/snmp /proc/net/netstat | awk '
        $1 in names { split(names[$1], name); for (i = 2; i <= NF; i++) found[name[i]] = $i }
        { names[$1] = $0 }
        END { print found["RetransSegs"] " segments again, " found["TCPTimeouts"] " timeouts" }')
    echo "node $node sent $sent bytes in all, $tcp" >&2
done
exit "$status"
