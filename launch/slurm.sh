#!/usr/bin/env bash
#SBATCH --job-name=sortyard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# One job on several nodes of a Slurm cluster, one torchrun on each. Options of sbatch say how many nodes and GPUs:
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh model=FOLDER input=prompts.jsonl output=answers.jsonl
# Submit from the checkout, or from anywhere if the package is installed. PYTHON in the environment: the interpreter;
# TIMEOUT_S: seconds in which all nodes must have come, else 600. Nodes are taken whole: one task for each starts all its
# processes, which share its cores and its memory.
set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "usage: sbatch [--nodes=N] [--gpus-per-node=G] $0 [KEY=VALUE ...]   (keys of \`python -m launch.generate\`)" >&2
    exit 2
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node have different ones
export MASTER_ADDR MASTER_PORT PYTHONPATH="$SLURM_SUBMIT_DIR${PYTHONPATH:+:$PYTHONPATH}"

# Expanded on each node, where SLURM_NODEID is its number. One node that fails ends the others.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="${SLURM_GPUS_ON_NODE:-gpu}" \
    --rdzv-conf="timeout=${TIMEOUT_S:-600}" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" -m launch.generate "$@"' launch "$@"
