#!/usr/bin/env bash
# Makes dist/flexops_torch-*-py3-none-manylinux_2_28_*.whl: every operator's host code, for any
# torch from 2.11 on, any Python and any CUDA. It needs Python and a package index; the compiler
# (zig) comes from there.
set -euo pipefail

usage="usage: bash scripts/build_wheel.sh [--arch x86_64|aarch64]... [--out DIR] [--sdist]
(default: both, into dist/; --sdist adds the sources)"
machines=() out=dist sdist=''
while [ $# -gt 0 ]; do
  case $1 in
    --arch) machines+=("${2:?$usage}") && shift 2 ;;
    --out) out=${2:?$usage} && shift 2 ;;
    --sdist) sdist=yes && shift ;;
    -h | --help) echo "$usage" && exit 0 ;;
    *) echo "build_wheel.sh: $1 is not understood; $usage" >&2 && exit 2 ;;
  esac
done
[ ${#machines[@]} -gt 0 ] || machines=(x86_64 aarch64)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
for machine in "${machines[@]}"; do
  work=$(mktemp -d)
  # setuptools keeps what an earlier build put into build/: nothing of another machine's may get
  # into this wheel.
  for name in flexops csrc setup.py pyproject.toml README.md LICENSE; do
    cp -R "$root/$name" "$work"
  done
  cp "$root/THIRD_PARTY_NOTICES.txt" "$work"
  rm -rf "$work/flexops/_aot"
  FLEXOPS_WHEEL=$machine "$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" "$work" ||
    { rm -rf "$work" && exit 1; }
  rm -rf "$work"
done
if [ -n "$sdist" ]; then
  work=$(mktemp -d)
  "$python" -m venv "$work/env"
  "$work/env/bin/python" -m pip install --quiet --disable-pip-version-check build
  "$work/env/bin/python" -m build --sdist --outdir "$out" "$root" >"$work/log" ||
    { cat "$work/log" && rm -rf "$work" && exit 1; }
  rm -rf "$work"
fi
ls -l "$out"/flexops_torch-*-manylinux_2_28_*.whl
