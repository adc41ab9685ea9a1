#!/usr/bin/env bash
# On a machine with an NVIDIA GPU and mlx_mittens installed under mlx[cuda13]: every case against its float64 reference,
# the times beside mx, small models, and the kernels under compute-sanitizer. Usage: bench/gpu.sh FOLDER, which receives
# the results.
set -uo pipefail
folder=${1:?usage: bench/gpu.sh FOLDER}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd /
status=0
step() {
  echo "== $1"
  timeout "$2" "${@:3}" > "$folder/$1.txt" 2>&1 || { status=$?; echo "   exit status $status"; }
  tail -n "${lines:-12}" "$folder/$1.txt"
}
step doctor 200 python3 -m mlx_mittens doctor --json "$folder/doctor.json"
lines=200 step bench 400 python3 -m mlx_mittens bench --device gpu --peer metal --json "$folder/bench.json"
lines=24 step models 200 python3 "$here/small_models.py"
for tool in memcheck racecheck; do
  # MLX tries to update a CUDA graph before it builds another: an API error that it expects, not one of the kernels.
  lines=6 step $tool 300 compute-sanitizer --tool $tool $([ $tool = memcheck ] && echo --report-api-errors no) --error-exitcode 1 python3 "$here/cases_on_gpu.py"
done
exit $status
