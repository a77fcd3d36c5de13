#!/usr/bin/env bash
# Runs the test suite, and sets up what it requires: .test-env with the pinned torch (CPU; on a
# machine with a GPU that GPU's), an nvcc from the package index, and tests/requirements.txt.
#   bash scripts/run_tests.sh               every operator and every path once, in minutes
#   bash scripts/run_tests.sh --all         also the tests marked extra: more versions, dtypes, ...
#   bash scripts/run_tests.sh --rest        only the tests that the first command leaves out
#   bash scripts/run_tests.sh tests/build -k cache   these tests: other arguments go to pytest
#   bash scripts/run_tests.sh --prepare     no test: only the environment
#   FLEXOPS_TEST_ENV=DIR       where the environment is, default .test-env
#   FLEXOPS_TEST_TARGET=ID     the target whose torch is installed, default: what fits this machine
#   FLEXOPS_TEST_IMAGES=1      as root, install and start a container engine for the tests of images
#                              (the default where CI=true; 0: never)
#   FLEXOPS_TEST_WORKERS=N     processes that share the tests (pytest-xdist); default: two for the
#                              first three commands, with two processors, 8 GiB of free memory and
#                              no GPU
#   FLEXOPS_TEST_REQUIRE=1     what is missing on this machine fails instead of being skipped (the
#                              default where CI=true)
if [ -z "${BASH_VERSION:-}" ] || [ -o posix ]; then # `sh scripts/...`
  command -v bash >/dev/null 2>&1 ||
    { echo "this script needs bash: apt-get install bash" >&2; exit 2; }
  exec bash "$0" "$@"
fi
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib/python.sh
source "$ROOT/scripts/lib/python.sh"
# shellcheck source=scripts/lib/engine.sh
source "$ROOT/scripts/lib/engine.sh"
PREFIX=${FLEXOPS_TEST_ENV:-$ROOT/.test-env}

# The tests of images need an engine. One that answers is used; CI gets one if its machine can run
# any, a person's machine if it is asked for. Where none can run, those tests are skipped, and the
# end of the run prints why; where one could and does not, that is a failure.
start_test_engine() {
  local why='' wanted=${FLEXOPS_TEST_IMAGES:-}
  [[ -n $wanted || ${CI:-} != true ]] || wanted=1
  if [[ $wanted == 0 ]]; then
    why=FLEXOPS_TEST_IMAGES=0
  elif why=$(why_no_engine); then
    printf '  no container engine: %s\n' "$why"
  elif [[ $wanted == 1 ]]; then
    start_engine "$ROOT/.flexops/dockerd.log" ||
      printf 'warning: there is no container engine: the tests of images will fail\n' >&2
  fi
  [[ -z $why ]] || export FLEXOPS_TEST_NO_ENGINE=$why
}

# run_part EXPRESSION [ARGUMENT...]: the tests with these markers, by two processes where there is
# room for them. Some tests fill a GPU's memory, so there one process runs them all.
run_part() {
  if [[ -z ${FLEXOPS_TEST_WORKERS+set} ]] && "$PREFIX/bin/python" -c '
from flexops.toolchain import gpus, resources
here = resources.detect()
gpu = gpus.machine().gpus or gpus.local_gfx_targets()
exit(bool(gpu) or here.cpus < 2 or here.memory_bytes < 8 << 30)'; then
    FLEXOPS_TEST_WORKERS=2
  fi
  run_pytest -m "$@"
}

run_pytest() {
  local status=0 log workers=${FLEXOPS_TEST_WORKERS:-}
  log=$(mktemp)
  [[ ${CI:-} != true ]] || export FLEXOPS_TEST_REQUIRE=${FLEXOPS_TEST_REQUIRE:-1}
  export VIRTUAL_ENV=$PREFIX PATH="$PREFIX/bin:$PATH" PYTHONUTF8=1 # in whatever locale this runs
  "$PREFIX/bin/python" -m pytest ${workers:+-n "$workers"} "$@" 2>&1 | tee "$log" || status=$?
  printf '\npytest: %s\n' "$(tail -n 1 "$log" | sed 's/^=* *//; s/ *=*$//')"
  rm -f "$log"
  return "$status"
}

main() {
  cd "$ROOT"
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^if /{/^if /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    return
  fi
  local options=(--tests --yes --toolkit index --prefix "$PREFIX")
  [[ -z ${FLEXOPS_TEST_TARGET:-} ]] || options+=(--target "$FLEXOPS_TEST_TARGET")
  [[ ${1:-} == --prepare ]] || options+=(--system-tools)
  # hundreds of processes import torch, flexops and the tests; each would compile them again
  unset PYTHONDONTWRITEBYTECODE
  (UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1} setup "${options[@]}")
  [[ ${1:-} != --prepare ]] || return 0
  trap stop_engine EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  start_test_engine
  case ${1:-} in
    '') run_part 'not slow and not extra' ;;
    --all) run_part 'not slow' "${@:2}" ;;
    --rest) run_part 'extra and not slow' "${@:2}" ;;
    *) run_pytest "$@" ;;
  esac
}

main "$@"
