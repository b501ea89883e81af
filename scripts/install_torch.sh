#!/usr/bin/env bash
# Put a build of torch that suits this machine into an environment (ADR 0003).
# Usage: scripts/install_torch.sh PYTHON
#
# The plain wheel on PyPI brings several GB of CUDA libraries on Linux. So without an NVIDIA GPU the CPU
# build is looked for where pip is configured to look, then on PyTorch's index; the plain wheel comes last.
# TORCH='torch==2.12.0' installs exactly that instead. A torch already there and in range is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
cpu_build="torch==2.13.0+cpu"
cpu_index="https://download.pytorch.org/whl/cpu"

# Errors only: pip also warns of every package that one of several indexes does not hold.
pip_install() {
    "$python" -m pip --disable-pip-version-check install -qq "$@"
}

has_nvidia_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

requirement=$("$python" scripts/torch_requirement.py)

if [ -n "${TORCH:-}" ]; then
    echo "Installing $TORCH"
    pip_install "$TORCH"
elif "$python" scripts/torch_requirement.py --is-installed; then
    :
elif [ "$(uname -s)" != "Linux" ]; then
    echo "Installing torch"
    pip_install "$requirement"
elif has_nvidia_gpu; then
    echo "Installing torch with CUDA (several GB): an NVIDIA GPU is present"
    pip_install "$requirement"
else
    echo "Installing the CPU build of torch"
    # Without dependencies: the project's own installation brings those, from the usual index.
    pip_install --no-deps --retries 0 --timeout 20 "$cpu_build" 2>/dev/null ||
        pip_install --no-deps --retries 0 --timeout 20 --index-url "$cpu_index" "$requirement" 2>/dev/null ||
        {
            echo "warning: found no CPU build of torch; taking the plain one, which may bring CUDA (several GB)" >&2
            pip_install "$requirement"
        }
fi
