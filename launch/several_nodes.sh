#!/usr/bin/env bash
# One of several machines whose processes share the experts: run this on each of them, with its own number.
set -euo pipefail

usage="usage: $0 NODES NODE HOST[:PORT] PROCESSES [KEY=VALUE ...]
  NODES      how many machines
  NODE       which of them this is, 0 to NODES - 1
  HOST:PORT  address of machine 0, the same on all; the port must be free there (left out: 29500)
  PROCESSES  on this machine, or gpu: one for each GPU that is visible
  KEY=VALUE  as \`python -m launch.generate\` takes them, the same on all machines but for the places of files
  PYTHON     in the environment: the interpreter; else python
  TIMEOUT_S  in the environment: seconds in which all machines must have come; else 600
example, on the second of two machines:
  $0 2 1 10.0.0.1 gpu model=FOLDER input=prompts.jsonl output=answers.jsonl"

if [[ $# -lt 4 || ! $1 =~ ^[1-9][0-9]*$ || ! $2 =~ ^[0-9]+$ || ! $4 =~ ^([1-9][0-9]*|gpu)$ ]] || (($2 >= $1)); then
    echo "$usage" >&2
    exit 2
fi
nodes=$1 node=$2 host=${3%:*} port=29500 processes=$4
if [[ $3 == *:* ]]; then
    port=${3##*:}
fi
shift 4

if [[ $processes == gpu ]] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && [[ ! -e /dev/dxg ]]; then
    echo "error: there is no GPU here; give a number of processes, and engine.device=cpu." >&2
    exit 2
fi
if ! getent ahosts "$host" >/dev/null; then
    echo "error: $host is no machine that this one knows; give the name or address of machine 0." >&2
    exit 2
fi
if [[ $node == 0 ]] && (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; then
    echo "error: port $port of $host is in use; give all machines another: $host:PORT." >&2
    exit 2
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
echo "machine $node of $nodes: meets the others at $host:$port, for at most ${TIMEOUT_S:-600} s (TIMEOUT_S)" >&2
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node" \
    --rdzv-conf="timeout=${TIMEOUT_S:-600}" --master-addr="$host" --master-port="$port" --nproc-per-node="$processes" -m launch.generate "$@"
