#!/bin/bash
# Makes .venv-gpu/ beside what this machine's Python has (torch and cupy, where they are there) and runs the check in it.
# With a folder .gpu-wheels/ (`make gpu-wheels`) nothing is fetched: for machines that reach no package index.
set -euo pipefail
cd "$(dirname "$0")/../.."
env=.venv-gpu
if [ ! -x "$env/bin/python" ]; then
	"${PYTHON:-python3}" -m venv --system-site-packages "$env"
fi
install=("$env/bin/python" -m pip --disable-pip-version-check install -q)
if [ -d .gpu-wheels ]; then
	install+=(--no-index --find-links .gpu-wheels)
	ours=kvstored
else
	ours=.
fi
"${install[@]}" -r bench/gpu/requirements.txt
# For its programs and its number; the code is that of this checkout, which comes first on the path.
"${install[@]}" --no-deps --force-reinstall "$ours"
if compgen -G '/dev/nvidia*' >/dev/null && ! "$env/bin/python" -c 'import cupy' 2>/dev/null; then
	"${install[@]}" 'cupy-cuda13x>=13.6'
fi
export PYTHONPATH="$PWD:$PWD/client:$PWD/protos:$PWD/cuda" PYTHONDONTWRITEBYTECODE=1
exec "$env/bin/python" -m bench.gpu "$@"
