#!/usr/bin/env bash
# Several processes on this machine share the experts, one for each GPU. They meet at a free port.
set -euo pipefail

usage="usage: $0 PROCESSES [KEY=VALUE ...]
  PROCESSES  how many, or gpu: one for each GPU that is visible
  KEY=VALUE  as \`python -m launch.generate\` takes them; without any, the demo
  PYTHON     in the environment: the interpreter; else python
example: $0 gpu model=FOLDER input=prompts.jsonl output=answers.jsonl"

if [[ $# -eq 0 || ! $1 =~ ^([1-9][0-9]*|gpu)$ ]]; then
    echo "$usage" >&2
    exit 2
fi
processes=$1
shift

if [[ $processes == gpu ]] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && [[ ! -e /dev/dxg ]]; then
    echo "error: there is no GPU here; give a number of processes, and engine.device=cpu." >&2
    exit 2
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="$processes" \
    -m launch.generate "$@"
