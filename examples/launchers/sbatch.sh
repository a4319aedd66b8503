#!/usr/bin/env bash
# Submits a SLURM batch job that starts torchrun on each of its nodes:
#
#   tula tune job.toml --stop-command 'scancel --name=tula-{launch_id}' -- \
#       bash sbatch.sh {num_nodes} {ranks_per_node} {launch_id} train.py --batch-size={local_batch_size}
#
# SBATCH_PARTITION, SBATCH_TIMELIMIT and sbatch's other variables set all other options. The working folder must be on a
# file system that all nodes share. The job's output is printed when the job ends.
set -euo pipefail

nodes=$1 ranks=$2 id=$3
shift 3
output=$PWD/tula-$id.out
command=$(printf '%q ' "$@")
status=0
sbatch --wait --quiet --job-name="tula-$id" --nodes="$nodes" --ntasks-per-node=1 --export=ALL --output="$output" \
    --wrap "first=\$(scontrol show hostnames \"\$SLURM_JOB_NODELIST\" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes=$nodes --nproc-per-node=$ranks --rdzv-backend=c10d \
--rdzv-id=\$SLURM_JOB_ID --rdzv-endpoint=\$first:\$((20000 + SLURM_JOB_ID % 20000)) $command" || status=$?
cat "$output" && rm "$output"
exit "$status"
