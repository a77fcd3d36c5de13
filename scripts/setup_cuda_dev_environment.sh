#!/usr/bin/env bash
# From a fresh machine to compiled, checked operators: finds what is here, picks a target of flexops/targets/matrix.toml, makes an environment
# with its pins, compiles the operators ahead of time, checks them and shows them at work. `--help` says the rest.
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
# shellcheck source=scripts/lib/activation.sh
source "$ROOT/scripts/lib/activation.sh"
# shellcheck source=scripts/lib/removal.sh
source "$ROOT/scripts/lib/removal.sh"

usage() {
  cat <<'HELP'
usage: bash scripts/setup_cuda_dev_environment.sh [OPTION]...

Makes a development environment for one target, compiles the operators for it, checks them, and writes .flexops/env.sh to source.
It says what it will do before it does it, and asks on a terminal. Running it again changes nothing and is quick.

  --target ID        a row of the matrix (see --list-targets); default: the best one for this machine. It need not be this machine's GPU.
  --prefix DIR       where the environment is made; default .venv
  --conda            make it from envs/<target>.yml with mamba, conda, micromamba or pixi, whichever is there
  --python PATH      the Python to make it with; default: one that the target's torch has wheels for
  --toolkit WHERE    auto (default: the machine's nvcc if it matches, else the package index's), index or system
  --index-url URL    the package index for pip; default: what pip is configured to use
  --no-lock          install by version, not by the hashes in envs/requirements/<toolkit>.lock (for a mirror whose wheels are its own)
  --jobs N           MAX_JOBS; default: from processors and memory
  --yes              ask nothing, agree to everything, installing ccache with root rights too
  --no-root          never use root rights
  --dry-run          say what would be done, and do nothing
  --print-env        print what .flexops/env.sh holds, for eval; do nothing
  --list-targets     print the targets
  --uninstall        remove what this script made, and only that
  --help             print this

What it makes: the environment; .flexops/ (env.sh, caches, links); flexops/_aot/ (the compiled operators); flexops_torch.egg-info/, tools/flexops_tools.egg-info/.
HELP
}

TARGET='' PREFIX='' USE_CONDA='' ASKED_PYTHON='' TOOLKIT=auto INDEX_URL='' ASKED_JOBS=''
YES='' NO_ROOT='' NO_LOCK='' DRY_RUN='' ACTION=setup

parse_options() {
  while [[ $# -gt 0 ]]; do
    if [[ $1 == --*=* ]]; then
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
    fi
    case $1 in
      --target) take "$@" && TARGET=$VALUE && shift ;;
      --prefix) take "$@" && PREFIX=$VALUE && shift ;;
      --python) take "$@" && ASKED_PYTHON=$VALUE && shift ;;
      --toolkit) take "$@" && TOOLKIT=$VALUE && shift ;;
      --index-url) take "$@" && INDEX_URL=$VALUE && shift ;;
      --jobs) take "$@" && ASKED_JOBS=$VALUE && shift ;;
      --conda) USE_CONDA=yes ;;
      --yes | -y) YES=yes ;;
      --no-root) NO_ROOT=yes ;;
      --no-lock) NO_LOCK=yes ;;
      --dry-run) DRY_RUN=yes ;;
      --print-env) ACTION=print_env ;;
      --list-targets) ACTION=list_targets ;;
      --uninstall) ACTION=uninstall ;;
      --help | -h) ACTION=usage ;;
      *) refuse "there is no option $1" ;;
    esac
    shift
  done
  [[ $TOOLKIT =~ ^(auto|index|system)$ ]] || refuse "--toolkit is auto, index or system, not $TOOLKIT"
  [[ -z $ASKED_JOBS || $ASKED_JOBS =~ ^[1-9][0-9]*$ ]] || refuse "--jobs takes a whole number, not $ASKED_JOBS"
  PREFIX=$(absolute "${PREFIX:-$ROOT/.venv}")
}

take() {
  [[ $# -ge 2 && $2 != --* ]] || refuse "$1 needs a value"
  VALUE=$2
}

refuse() {
  FAILURE_TOLD=yes
  printf '%s\n  mend: bash scripts/setup_cuda_dev_environment.sh --help\n' "$1" >&2
  exit 2
}

absolute() {
  case $1 in
    /*) printf '%s' "$1" ;;
    *) printf '%s/%s' "$PWD" "$1" ;;
  esac
}

setup() {
  local started=$SECONDS
  look_around
  print_plan
  if [[ -n $DRY_RUN ]]; then
    say $'\n--dry-run: nothing was done'
    return
  fi
  if [[ -z $YES && -z $UP_TO_DATE ]] && on_terminal && ! ask $'\nGo ahead?' y; then
    say 'nothing was done'
    return
  fi
  do_everything
  print_summary $((SECONDS - started))
}

# look_around: everything that decides what will be done; changes nothing.
look_around() {
  leave_own_environment
  STEP='look at this machine' MEND='install Python 3.10 or newer (apt-get install python3 python3-venv) and run again'
  any_python || die 'no Python 3.10 or newer was found' "$MEND"
  choose_target
  look_for_tools
  choose_toolkit
  choose_python
  choose_launcher
  choose_jobs
  judge_environment
  STEP=''
}

do_everything() {
  local again='then run the same command again'
  mkdir -p "$STATE"
  lock_state
  step "make the environment" "see the message above; $again" make_environment
  step "install the pinned packages" \
    "check the network and \`$PIP config list\`; behind a mirror: --index-url URL (and --no-lock if hashes do not match); out of space: TMPDIR=<a roomy directory>; $again" install_pins
  step "install flexops" "see pip's message above; $again" install_flexops
  step "compiler cache" "--no-root goes on without it" install_launcher
  step "write .flexops/env.sh" "make $STATE writable; $again" write_env
  step "compile the operators ahead of time" "the message above names the cause; FLEXOPS_LOG=debug shows every command; $again" build_operators
  if is_checked; then
    printf '\n'
    note "checked on $(<"$STATE/checked.date"), and nothing has changed since; to check again: source .flexops/env.sh && flexops doctor"
    return
  fi
  step "check (flexops doctor)" "each finding marked fail names its fix; source .flexops/env.sh && flexops doctor" run_doctor
  step "demonstration" "source .flexops/env.sh && python -m flexops.demo" run_demo
  remember_check
}

main() {
  watch_failures
  parse_options "$@"
  cd "$ROOT"
  case $ACTION in
    usage) usage ;;
    list_targets) any_python && matrix list ;;
    print_env) look_around && env_text ;;
    uninstall) uninstall ;;
    setup) setup ;;
  esac
}

main "$@"
