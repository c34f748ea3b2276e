#!/usr/bin/env bash
# One call of a slot on a machine with a GPU, bare and without a network; README.md beside this has the commands.
#
#   benchmarks/gpu_suite/run.sh OUT [--slot second] [more options of python -m benchmarks.gpu_suite]
#
# PYTHON: another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"where to put the results: benchmarks/gpu_suite/run.sh OUT [OPTIONS]"}
shift
exec "${PYTHON:-python3}" -u -m benchmarks.gpu_suite --out "$out" "$@"
