# Sourced by the scripts beside it: in_new_environment PACKAGE... runs the Python program on its standard input in a
# virtual environment of its own, which holds these packages and is deleted afterwards.
set -euo pipefail

in_new_environment() {
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  python3 -m venv "$scratch/venv"
  if (($#)); then
    "$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "$@"
    echo "versions: $*"
  fi
  cd "$scratch" && cat > program.py && venv/bin/python program.py
}
