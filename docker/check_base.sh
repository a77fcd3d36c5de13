#!/bin/sh
# Refuses a base without the compiler that only it can have, before anything is downloaded:
# check_base.sh [hipcc]
set -eu
[ -n "${1:-}" ] || exit 0
for place in "$(command -v "$1" || true)" "/usr/local/cuda/bin/$1" "/opt/rocm/bin/$1"; do
  [ ! -x "$place" ] || exit 0
done
echo "flexops: this base image has no $1, and the package index has none for this row" >&2
echo "  fix: --build-base REF   # an image that has it; without the option it is the row's own" >&2
exit 1
