#!/usr/bin/env bash
# check_wheel.sh DIR: has auditwheel say whether the tags of the wheels in DIR are true; installs
# this machine's into a fresh environment without a compiler on PATH, and has every CPU library used
# from it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

directory=$(cd "${1:?check_wheel.sh DIR}" && pwd)
wheels=("$directory"/flexops_torch-*-manylinux_*_"$(uname -m)".whl)
if [[ ${#wheels[@]} -ne 1 || ! -e ${wheels[0]} ]]; then
  printf '%s has not one wheel for %s: %s\n' "$directory" "$(uname -m)" "${wheels[*]}" >&2
  exit 1
fi

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/audit"
auditwheel=$(grep '^auditwheel==' "$root/tests/requirements.txt")
"$place/audit/bin/python" -m pip --quiet --disable-pip-version-check install "$auditwheel"
"$place/audit/bin/python" "$root/scripts/ci/audit_wheel.py" \
  "$directory"/flexops_torch-*-manylinux_*.whl

"${PYTHON:-python3}" -m venv "$place/env"
pip() { "$place/env/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
if [[ -n ${FLEXOPS_CHECK_SITE:-} ]]; then # a directory with torch, which is not installed again
  packages=$("$place/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$FLEXOPS_CHECK_SITE" >"$packages/torch.pth"
  pip install --no-deps "${wheels[0]}"
else
  cd "$root"
  torch=$(python3 scripts/ci/matrix.py cpu torch)
  index=$(python3 scripts/ci/matrix.py cpu index)
  pip install "torch==$torch" numpy --index-url "$index" || pip install "torch==$torch" numpy
  pip install "${wheels[0]}"
fi
cd "$place"
PATH=$place/env/bin "$place/env/bin/python" -I "$root/recipe/check_ops.py"
