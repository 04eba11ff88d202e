#!/usr/bin/env bash
# One prepared run on a machine with a GPU, under five minutes: the oracle tests on the device, then time to the first
# token under the policies on random weights of Mistral-7B's geometry. Needs torch, transformers and pytest alone.
#   scripts/gpu_check.sh [FOLDER FOR THE JSON]
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-bench-output}"
mkdir -p "$out"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" - <<'CHECK'
import sys, torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device: run this on a machine with a GPU")
print(torch.__version__, torch.cuda.get_device_name(0))
CHECK
# Not the project's own pytest settings, which ask for plugins that need not be here.
"$python" -m pytest -c /dev/null --rootdir="$PWD" --import-mode=importlib -p no:cacheprovider -q tests/gpu
"$python" -m benchmarks.gpu --json "$out/gpu.json"
if "$python" -c 'import flash_attn' 2>/dev/null; then
    "$python" -m benchmarks.gpu --attention sdpa --json "$out/gpu-sdpa.json"
fi
