# shellcheck shell=sh
# setup ARGUMENT...: becomes scripts/setup, by a Python that can read the matrix of targets: 3.11 or
# newer, or a 3.10 whose pip carries a TOML reader; by uv's where there is no other. Requires ROOT.
setup() {
  for _python in python3 python python3.15 python3.14 python3.13 python3.12 python3.11 python3.10 \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python3 \
    "${HOME:-}"/.local/share/uv/python/*/bin/python3; do
    if "$_python" -c 'import sys
assert sys.version_info >= (3, 10)
try: import tomllib
except ImportError: import pip._vendor.tomli' 2>/dev/null; then
      exec "$_python" "$ROOT/scripts/setup" "$@"
    fi
  done
  if command -v uv >/dev/null; then
    exec uv run --no-project --python '>=3.11' "$ROOT/scripts/setup" "$@"
  fi
  {
    echo 'FAILED: no Python 3.10 or newer was found'
    echo '  fix: apt-get install python3 python3-venv, then run the same command again'
  } >&2
  exit 1
}
