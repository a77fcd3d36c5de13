#!/usr/bin/env bash
# Runs the test suite, and sets up what it needs itself: .test-env with the pinned torch (CPU; on a machine with a GPU that GPU's), an nvcc from the
# package index, and tests/requirements.txt.
#   bash scripts/run_tests.sh               every operator and every path once, in minutes
#   bash scripts/run_tests.sh --all         also the tests marked extra: more versions, architectures, dtypes
#   bash scripts/run_tests.sh --rest        only the tests that the first command leaves out of --all
#   bash scripts/run_tests.sh tests/unit -k cache    these tests: other arguments go to pytest
#   bash scripts/run_tests.sh --prepare     no test: only the environment
#   FLEXOPS_TEST_ENV=DIR       where the environment is, default .test-env
#   FLEXOPS_TEST_TARGET=ID     the target whose torch is installed, default: what fits this machine
#   FLEXOPS_TEST_IMAGES=1      as root, install and start a container engine for the tests of images (the default where CI=true; 0: never)
#   FLEXOPS_TEST_WORKERS=N     processes that share the tests (pytest-xdist); default: two for the first
#                              three commands, with two processors, 8 GiB of free memory and no GPU
#   FLEXOPS_TEST_REQUIRE=1     what is missing on this machine fails instead of being skipped (the default where CI=true)
if [ -z "${BASH_VERSION:-}" ] || [ -o posix ]; then # `sh scripts/...`
  command -v bash >/dev/null 2>&1 || { echo "this script needs bash: apt-get install bash" >&2; exit 2; }
  exec bash "$0" "$@"
fi
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
STATE=$ROOT/.flexops
# shellcheck source=scripts/lib/ui.sh
source "$ROOT/scripts/lib/ui.sh"
# shellcheck source=scripts/lib/python.sh
source "$ROOT/scripts/lib/python.sh"
# shellcheck source=scripts/lib/machine.sh
source "$ROOT/scripts/lib/machine.sh"
# shellcheck source=scripts/lib/environment.sh
source "$ROOT/scripts/lib/environment.sh"
# shellcheck source=scripts/lib/engine.sh
source "$ROOT/scripts/lib/engine.sh"
# shellcheck source=scripts/lib/activation.sh
source "$ROOT/scripts/lib/activation.sh"

TARGET=${FLEXOPS_TEST_TARGET:-} PREFIX=${FLEXOPS_TEST_ENV:-$ROOT/.test-env}
USE_CONDA='' ASKED_PYTHON='' INDEX_URL='' TOOLKIT=index YES=yes NO_ROOT='' NO_LOCK=''

made() { :; } # the setup script's --uninstall is not for what this one makes

prepare() {
  local again='then run the same command again'
  leave_own_environment
  any_python || die 'no Python 3.10 or newer was found' 'apt-get install python3 python3-venv'
  choose_target
  look_for_tools
  choose_toolkit
  [[ $target_accelerator != cpu ]] || PINS+=("$(any_nvcc)")
  choose_python
  choose_launcher
  judge_environment
  STEP=''
  if [[ -n $UP_TO_DATE ]] && has_test_requirements; then
    say "test environment: $PREFIX, $TARGET, up to date"
    return
  fi
  step "make the test environment $PREFIX" "see the message above; $again" make_environment
  step "install the pinned packages" "check the network and \`$PIP config list\`; $again" install_pins
  step "install what the tests need" "check the network; $again" install_test_requirements
  step "install flexops" "see pip's message above; $again" install_flexops
  test_requirements >"$PREFIX/tests-requirements.txt"
}

# A torch without CUDA compiles CUDA operators with any nvcc; the package index has this one.
any_nvcc() { matrix show cu130-sm90 --field requirements | tr ' ' '\n' | grep '^cuda-toolkit'; }

test_requirements() { cat tests/requirements.txt docs/requirements.txt; }
has_test_requirements() { test_requirements | cmp -s - "$PREFIX/tests-requirements.txt"; }

# What a CUDA torch has brought of NVIDIA's stays: another NVRTC under the same name would no longer be that torch's own.
install_test_requirements() {
  local brought=''
  mkdir -p "$STATE"
  [[ $target_accelerator != cuda ]] || brought=$("$(environment_python)" -m pip list --disable-pip-version-check --format freeze | sed -n 's/^\(nvidia-[^=]*\)==.*/\1/p' | paste -sd '|')
  grep -vE "^(${brought:-none})==" tests/requirements.txt >"$STATE/tests-requirements.txt" # which names docs/requirements.txt as its neighbour, as from tests/
  pip_install -r "$STATE/tests-requirements.txt"
}

# Some tests need programs of the system's. Only root installs them unasked, in a container as a rule; elsewhere those tests are skipped, and the end of
# the run says what for. hipcc has other names where there is no apt-get.
install_test_tools() {
  local program programs=(strace zsh fish) missing=()
  [[ $(id -u) -eq 0 && -n $(package_manager) ]] || return 0
  [[ $LAUNCHER_PLAN != root ]] || programs+=(ccache)
  for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  command -v ssh-keygen >/dev/null || missing+=("$(ssh_package)")
  [[ ${#missing[@]} -eq 0 ]] || step 'install what the tests need of the system' '' install_or_warn "${missing[@]}"
  [[ $(package_manager) != apt-get ]] || command -v hipcc >/dev/null || step 'install hipcc' '' install_or_warn hipcc libamdhip64-dev rocm-device-libs
}

# ssh_package: what ssh-keygen is in, which signs and checks entries of the cache.
ssh_package() {
  case $(package_manager) in
    apt-get) printf 'openssh-client\n' ;;
    pacman) printf 'openssh\n' ;;
    *) printf 'openssh-clients\n' ;;
  esac
}

install_or_warn() { install_packages "$@" || warn "could not be installed: $*"; }

# The tests of images need an engine. One that answers is used; CI gets one if its machine can run any, a person's machine if it is asked for.
# Where none can run, whatever is installed, those tests are skipped, and the end of the run says why; where one could and does not, that is a failure.
start_test_engine() {
  local why='' wanted=${FLEXOPS_TEST_IMAGES:-}
  [[ -n $wanted || ${CI:-} != true ]] || wanted=1
  if [[ $wanted == 0 ]]; then
    why=FLEXOPS_TEST_IMAGES=0
  elif why=$(why_no_engine); then
    note "no container engine: $why"
  elif [[ $wanted == 1 ]]; then
    step 'start a container engine' '' start_engine_or_warn
  fi
  [[ -z $why ]] || export FLEXOPS_TEST_NO_ENGINE=$why
}

start_engine_or_warn() { start_engine "$STATE/dockerd.log" || warn 'there is no container engine: the tests of images will fail'; }

# run_part EXPRESSION [ARGUMENT...]: the tests with these markers, by two processes where there is room
# for them. Some tests fill a GPU's memory, so there one process runs them all.
run_part() {
  if [[ -z $tool_gpu ]] && ((tool_cpus >= 2 && tool_memory_bytes >= 8 * 1024 ** 3)); then
    FLEXOPS_TEST_WORKERS=${FLEXOPS_TEST_WORKERS-2}
  fi
  run_pytest -m "$@"
}

run_pytest() {
  local status=0 log workers=${FLEXOPS_TEST_WORKERS:-}
  log=$(mktemp)
  [[ ${CI:-} != true ]] || export FLEXOPS_TEST_REQUIRE=${FLEXOPS_TEST_REQUIRE:-1}
  export VIRTUAL_ENV=$PREFIX PATH="$PREFIX/bin:$PATH" PYTHONUTF8=1 # in whatever locale this runs, ours included
  "$PREFIX/bin/python" -m pytest ${workers:+-n "$workers"} "$@" 2>&1 | tee "$log" || status=$?
  printf '\npytest: %s\n' "$(tail -n 1 "$log" | sed 's/^=* *//; s/ *=*$//')"
  rm -f "$log"
  FAILURE_TOLD=yes # by pytest
  return "$status"
}

main() {
  watch_failures
  trap 'status=$?; stop_engine; tell_failure "$status"' EXIT
  cd "$ROOT"
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^if /{/^if /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    return
  fi
  prepare
  [[ ${1:-} != --prepare ]] || return 0
  install_test_tools
  start_test_engine
  case ${1:-} in
    '') run_part 'not slow and not extra' ;;
    --all) run_part 'not slow' "${@:2}" ;;
    --rest) run_part 'extra and not slow' "${@:2}" ;;
    *) run_pytest "$@" ;;
  esac
}

main "$@"
