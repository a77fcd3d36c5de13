#!/usr/bin/env bash
# build_site.sh [DIR]: the documentation site (default: site/), in an environment of its own: torch
# for the CPU, flexops and docs/requirements.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

environment=${FLEXOPS_DOCS_ENV:-.flexops/docs-env}
pip() { "$environment/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
if [[ ! -x $environment/bin/sphinx-build ]]; then
  "${PYTHON:-python3}" -m venv "$environment"
  torch=$(python3 scripts/ci/matrix.py cpu torch)
  index=$(python3 scripts/ci/matrix.py cpu index)
  # where that index is not reached, the default one's runs on a CPU, too
  pip install "torch==$torch" --index-url "$index" || pip install "torch==$torch"
  pip install numpy typer rich ninja -r docs/requirements.txt
  pip install --no-deps --editable ./tools
fi
"$environment/bin/python" -m flexops_tools.docs --out "${1:-site}"
