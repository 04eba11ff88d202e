#!/usr/bin/env bash
# Installs the build of torch that fits this machine: install_torch.sh PYTHON [REQUIREMENT...]
#
# PyPI's torch for Linux carries gigabytes of CUDA libraries, which a machine without a GPU does not need. So there we
# ask for the CPU build: first wherever pip is configured to look, then on PyTorch's own index, and if neither has it we
# take PyPI's. A requirement given by hand (`make setup TORCH="torch==2.9.1"`) goes to pip as it is.
set -euo pipefail

python=$1
shift
cpu_version=2.13.0

install() { "$python" -m pip install --progress-bar "${PIP_PROGRESS_BAR:-on}" "$@"; }

if "$python" -c "import torch" >/dev/null 2>&1 && [ $# -eq 0 ]; then
    echo "torch is there already: $("$python" -c 'import torch; print(torch.__version__)')"
elif [ $# -gt 0 ]; then
    install "$@"
elif nvidia-smi >/dev/null 2>&1; then
    echo "A GPU was found: installing torch with CUDA (some gigabytes)."
    install torch
elif [ "$(uname -s)" != Linux ]; then
    install torch
else
    echo "No GPU was found: installing torch's CPU build (about 200 MB)."
    install "torch==$cpu_version+cpu" 2>/dev/null ||
        install "torch==$cpu_version" --index-url https://download.pytorch.org/whl/cpu ||
        { echo "The CPU build was not found: installing PyPI's torch (some gigabytes)." && install torch; }
fi
