#!/bin/sh
# From a fresh machine to compiled, checked operators. This finds a Python; scripts/setup does the
# work, and `--help` prints its options.
set -eu
[ -z "${ZSH_VERSION:-}" ] || emulate sh
ROOT=$(cd "$(dirname "$0")/.." && pwd -P)
# shellcheck source=scripts/lib/python.sh
. "$ROOT/scripts/lib/python.sh"
setup "$@"
