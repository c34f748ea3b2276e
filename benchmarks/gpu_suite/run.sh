#!/usr/bin/env bash
# Everything on a machine with a GPU and without a network: builds the extension, runs the GPU tests, the races and all
# rows. Each call ends within nine minutes; the next one, with the same OUT, goes on. Ends with 0 once all is done.
#
#   benchmarks/gpu_suite/run.sh OUT [WHEELS] [more options of python -m benchmarks.gpu_suite]
#
# WHEELS: a folder of wheels to install for this run only (README.md says which); left out: what is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"where to put the results: benchmarks/gpu_suite/run.sh OUT [WHEELS] [OPTIONS]"}
python=${PYTHON:-python3}
shift
began=$SECONDS
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    wheels=$1
    shift
    site=${TMPDIR:-/tmp}/superoffload-suite-site
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
exec "$python" -m benchmarks.gpu_suite --everything --out "$out" --time-limit $((540 - (SECONDS - began))) "$@"
