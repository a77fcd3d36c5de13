#!/usr/bin/env bash
# Tests a row's own torch, on any machine, without a GPU: creates an environment with that torch (up
# to 10 GB for CUDA), compiles, links and opens every library in it, verifies each operator on the
# CPU against its reference, runs the tests, writes the result into tests/golden/tested-with.json
# and the table "tested with", and removes the environment. Fails if anything is wrong; tests that
# fail are recorded, too.
#   bash scripts/prove_target.sh ID [SUITE...]   a suite is arguments of pytest, such as
#                                                "tests/ops -k rope"; default: SUITES below
#   FLEXOPS_PROVE_KEEP=1                         keep the environment, .flexops/prove-<toolkit>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SUITES=(
  tests/ops
  'tests/patching tests/generation tests/int4'
  'tests/build/describe tests/build/plan tests/cli tests/doctor tests/targets tests/toolchain'
  'tests/build/load tests/test_builder.py tests/test_kernels.py tests/csrc/common/test_torch_abi.py'
)

if [[ $# -eq 0 || $1 == -* ]]; then
  sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
id=$1
shift
[[ $# -eq 0 ]] || SUITES=("$@")
environment=$PWD/.flexops/prove-${id%%-*}

FLEXOPS_TEST_TARGET=$id FLEXOPS_TEST_ENV=$environment bash scripts/run_tests.sh --prepare
arguments=()
for suite in "${SUITES[@]}"; do arguments+=(--tests "$suite"); done
status=0
PATH="$environment/bin:$PATH" PYTHONUTF8=1 \
  flexops target prove "$id" --torch --update "${arguments[@]}" || status=$?
"$environment/bin/flexops" target render
[[ -n ${FLEXOPS_PROVE_KEEP:-} ]] || rm -rf -- "$environment"
exit "$status"
