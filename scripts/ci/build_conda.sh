#!/usr/bin/env bash
# The conda channel in a folder.
#   build_conda.sh build DIR [OPTION...]   every variant for this machine; options go to
#                                          `flexops channel build`
#   build_conda.sh collect DIR             of the packages of all releases on GitHub, indexed (with
#                                          gh, logged in)
# Needs Python; what else it takes comes from the package index, into .flexops/conda-tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tools=.flexops/conda-tools
flexops() { "$tools/bin/python" -m flexops "$@"; }

install_tools() {
  [[ -x $tools/bin/python ]] || "${PYTHON:-python3}" -m venv "$tools"
  local install=("$tools/bin/python" -m pip install --quiet --disable-pip-version-check)
  "$tools/bin/python" - <<'PYTHON' | xargs -d '\n' "${install[@]}"
import sys
sys.path.insert(0, ".")
from flexops import _toml
from pathlib import Path
project = _toml.load(Path("pyproject.toml"))["project"]
extras = _toml.load(Path("tools/pyproject.toml"))["project"]["optional-dependencies"]
required = [one for one in project["dependencies"] if not one.startswith("torch")]
print("\n".join(required + extras["conda"]))
PYTHON
  "${install[@]}" --no-deps --editable ./tools
}

collect() {
  local directory=$1 tag package
  mkdir -p "$directory"
  for tag in $(gh release list --exclude-drafts --limit 1000 --json tagName --jq '.[].tagName'); do
    gh release download "$tag" --pattern '*.conda' --dir .flexops/packages --skip-existing ||
      printf '%s has no conda packages\n' "$tag"
  done
  for package in .flexops/packages/*.conda; do
    [[ -e $package ]] || continue
    place "$package" "$directory"
  done
  flexops channel index --channel "$directory"
}

# place PACKAGE DIR: into the folder of its platform, which a release's files have in front of their
# names.
place() {
  local name=${1##*/}
  mkdir -p "$2/${name%%--*}"
  mv "$1" "$2/${name%%--*}/${name#*--}"
}

case "${1:-} $#" in
  'build '[2-9]*) install_tools && flexops channel build --channel "$2" "${@:3}" ;;
  'collect 2') install_tools && collect "$2" ;;
  *) printf 'build_conda.sh: build DIR [OPTION...], or collect DIR\n' >&2 && exit 2 ;;
esac
