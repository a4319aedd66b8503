#!/usr/bin/env bash
# Starts torchrun on each of N nodes over ssh; the processes connect through torchrun's rendezvous:
#
#   HOSTS="node1 node2" tula tune job.toml -- \
#       bash ssh.sh {num_nodes} {ranks_per_node} train.py --batch-size={local_batch_size}
#
# Every host must have this folder and the same programs at the same paths, and must accept ssh without a password. The
# variables are sent over standard input, so no command line contains a token. A torchrun ends when its connection ends.
set -euo pipefail

nodes=$1 ranks=$2
shift 2
read -ra hosts <<<"${HOSTS:?set HOSTS to the names of the hosts; the ranks meet at the first host}"
if ((${#hosts[@]} < nodes)); then
    echo "HOSTS names ${#hosts[@]} hosts, but this run needs $nodes: add hosts to HOSTS, or lower cluster.max_nodes" >&2
    exit 2
fi
endpoint=${hosts[0]}:$((20000 + RANDOM % 20000))
pipes=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null || true; rm -rf "$pipes"' EXIT

for host in "${hosts[@]:0:nodes}"; do
    mkfifo "$pipes/$host"
    ssh -o BatchMode=yes "$host" bash -s <"$pipes/$host" &
    started+=($!)
    exec {pipe}>"$pipes/$host" # open until this script ends; closing it ends the torchrun on the host
    {
        export -p | grep -E '^declare -x (TULA_|PATH=|PYTHON|OMP_)'
        printf 'cd %q\n{ ' "$PWD" # one command, which is read completely before `cat` reads the same input
        printf '%q ' torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --rdzv-backend=c10d \
            --rdzv-endpoint="$endpoint" --rdzv-id="${TULA_RUN_ID:-tula}" "$@"
        printf '& torchrun=$!; exec 3<&0; (cat <&3; kill $torchrun) >/dev/null 2>&1 & wait $torchrun; exit; }\n'
    } >&"$pipe"
done
for _ in "${started[@]}"; do
    wait -n
done
