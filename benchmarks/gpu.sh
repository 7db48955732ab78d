#!/usr/bin/env bash
# Everything that is to be measured on a GPU, on a machine with torch and Triton and no network:
#
#     benchmarks/gpu.sh [OUT_DIR] [--smoke]
#
# Writes GPU.md to OUT_DIR, by default the folder of this script. PYTHON names the interpreter, by default python3.
# Exit codes: 0 all parts went through, 1 one failed or was left out, 2 there is no GPU or no torch.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3}

if ! command -v -- "$python" >/dev/null; then
    echo "gpu.sh: there is no $python: set PYTHON to the interpreter that has torch" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "gpu.sh: $("$python" --version) is too old: batchkv needs 3.11, set PYTHON" >&2
    exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m benchmarks.gpu "$@"
