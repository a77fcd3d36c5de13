# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# The plan, and the steps that carry it out. Each step looks first whether there is anything to do.

MARKER=.flexops-setup # in the environment's directory: made by this script, with what

# The environment's bin/ and, for pixi, where in the workspace the environment is.
environment_root() { if [[ -n $USE_CONDA ]]; then conda_root; else printf '%s' "$PREFIX"; fi; }
environment_python() { printf '%s/bin/python' "$(environment_root)"; }

# judge_environment: sets ENVIRONMENT_PLAN (make | remake | keep) with its reason, and UP_TO_DATE.
judge_environment() {
  local digest before
  CONDA_TOOL=''
  [[ -z $USE_CONDA ]] || choose_conda
  choose_lock
  DIGEST=$(wanted_digest)
  PIP="$(environment_python) -m pip"
  ENVIRONMENT_PLAN=make ENVIRONMENT_REASON='' UP_TO_DATE=''
  [[ -e $PREFIX ]] || return 0
  if is_unfinished; then
    ENVIRONMENT_PLAN=remake ENVIRONMENT_REASON='an earlier run did not get to finish making it'
  elif [[ ! -e $PREFIX/$MARKER ]]; then
    [[ -z $(ls -A "$PREFIX" 2>/dev/null) ]] || die "$PREFIX exists and was not made by this script, so it is left alone" '--prefix DIR, or remove it yourself'
  elif [[ $(marker_value kind) != "$(environment_kind)" ]]; then
    before=$(marker_value kind)
    ENVIRONMENT_PLAN=remake ENVIRONMENT_REASON="it is of another kind (${before:-not known})"
  elif ! environment_is_whole; then
    ENVIRONMENT_PLAN=remake ENVIRONMENT_REASON='its Python does not run, or has no pip'
  else
    ENVIRONMENT_PLAN=keep
    digest=$(marker_value digest)
    if [[ $digest == "$DIGEST" ]] && environment_holds; then UP_TO_DATE=yes; fi
  fi
}

# Sets LOCK, what pip installs by hash (nothing: it installs PINS by version), and LOCK_REASON.
choose_lock() {
  local toolkit=()
  LOCK='' LOCK_REASON=''
  [[ $TOOLKIT_PLAN != index ]] || toolkit=(--toolkit)
  if [[ -n $USE_CONDA ]]; then
    LOCK_REASON="by version, not by hash: conda resolves envs/$TARGET.yml"
  elif [[ -n $NO_LOCK ]]; then
    LOCK_REASON='by version, not by hash: --no-lock'
  elif LOCK=$(matrix locked "$TARGET" ${toolkit[@]+"${toolkit[@]}"} 2>&1); then
    LOCK_REASON='every package by its locked hash; nothing else is taken'
  else
    LOCK_REASON="by version, not by hash: ${LOCK#flexops: }" LOCK=''
  fi
}

# What an environment must match to be kept: another target or Python means a new one, so that nothing of the old lingers in it.
environment_kind() { printf '%s, Python %s%s' "$TARGET" "$PYTHON_VERSION" "${USE_CONDA:+, conda}"; }

marker_value() { sed -n "s/^$1=//p" "$PREFIX/$MARKER" 2>/dev/null || true; }

wanted_digest() {
  { printf '%s\n' 1 "$TARGET" "$PYTHON_VERSION" "$USE_CONDA" "$ROOT" "${PINS[@]}" "$LOCK" && cat pyproject.toml setup.py "envs/$TARGET.yml"; } | sha256sum | cut -d' ' -f1
}

# environment_holds: asks the environment itself whether the pins and this checkout are installed in it.
environment_holds() {
  local pins=("${PINS[@]}")
  [[ -z $USE_CONDA ]] || pins=("${pins[@]/ninja==*/}") # conda's ninja is no Python package
  [[ -x $(environment_root)/bin/flexops ]] || return 1
  [[ $TOOLKIT_PLAN != index || -x $(wheel_toolkit)/bin/nvcc ]] || return 1
  "$(environment_python)" "$ROOT/scripts/lib/installed.py" "$ROOT" "${pins[@]}" 2>/dev/null
}

# wheel_toolkit: where the index's toolkit lies in the environment.
wheel_toolkit() {
  local major=${TOOLKIT_MINOR%%.*} directory
  for directory in "$(environment_root)"/lib/python3.*/site-packages/nvidia/cu"$major"; do
    [[ ! -d $directory ]] || printf '%s' "$directory"
  done
}

print_plan() {
  local text
  describe_machine
  say "${BOLD}Target$PLAIN"
  fact "$TARGET" "$TARGET_REASON"
  [[ -z $TARGET_NOTES ]] || while read -r text; do note "$text"; done <<<"$TARGET_NOTES"
  say "${BOLD}What will be done$PLAIN"
  [[ -z $COMPILER_FIX ]] || fact 'C++ compiler' "missing; install one first: $COMPILER_FIX"
  if [[ -n $UP_TO_DATE ]]; then
    fact environment "$PREFIX is as it should be: kept"
  else
    plan_environment
  fi
  plan_launcher
  fact settings "write $STATE/env.sh, to source; caches in $STATE/cache"
  fact operators "compile $(operators_text) into flexops/_aot"
  fact check "flexops doctor, then a demonstration, unless nothing has changed since the last time"
}

plan_environment() {
  local verb=make
  case $ENVIRONMENT_PLAN in
    remake) verb='make anew' ;;
    keep) verb='bring up to date' ;;
  esac
  fact environment "$verb $PREFIX (${USE_CONDA:+$CONDA_TOOL, envs/$TARGET.yml, }Python $PYTHON_VERSION)${ENVIRONMENT_REASON:+: $ENVIRONMENT_REASON}"
  fact install "${PINS[*]}, flexops (editable) and what it needs${INDEX_URL:+, from $INDEX_URL}"
  fact '' "$LOCK_REASON"
  case $TOOLKIT_PLAN in
    found) fact toolkit "use $TOOLKIT_ROOT ($TOOLKIT_VERSION)" ;;
    index) fact toolkit "install nvcc $TOOLKIT_MINOR from the package index, into the environment" ;;
    conda) fact toolkit "install nvcc $TOOLKIT_MINOR into the environment" ;;
    nvrtc) fact toolkit "none needed: torch's NVRTC compiles the kernels (for .cu sources of your own, $(where_to_get_toolkit))" ;;
    missing) fact toolkit "none: $(where_to_get_toolkit)" ;;
  esac
}

plan_launcher() {
  case $LAUNCHER_PLAN in
    found) fact 'compiler cache' "use $LAUNCHER" ;;
    root) fact 'compiler cache' "install ccache with $(package_manager), which needs root rights$([[ -n $YES ]] || printf ' (you are asked first)')" ;;
    none) fact 'compiler cache' 'none; everything works without, only recompiling takes longer' ;;
  esac
}

operators_text() {
  if [[ $TOOLKIT_PLAN == missing ]]; then
    printf 'the CPU operators only (no toolkit for the GPU ones)'
  elif [[ $target_accelerator == cpu ]]; then
    printf 'the CPU operators'
  else
    printf 'the CPU operators and those for %s' "$target_arch_list"
  fi
}

# Two runs at once would install into each other's environment. The lock dies with the process.
lock_state() {
  command -v flock >/dev/null || return 0
  exec 9>>"$STATE/lock"
  flock -n 9 || die 'another run of this script is at work in this checkout' 'wait for it to end'
}

# made PATH: remember that this script made it, for --uninstall.
made() { grep -qxF -- "$1" "$STATE/made" 2>/dev/null || printf '%s\n' "$1" >>"$STATE/made"; }

write_marker() { replace_file "$PREFIX/$MARKER" "$(printf 'kind=%s\ndigest=%s' "$(environment_kind)" "$1")"; }

# An environment is listed in .flexops/unfinished while it is being made or removed: a run that is killed meanwhile leaves something that looks whole.
is_unfinished() { grep -qxF -- "$PREFIX" "$STATE/unfinished" 2>/dev/null; }

finished() {
  local others
  others=$(grep -vxF -- "$PREFIX" "$STATE/unfinished" || true)
  if [[ -n $others ]]; then replace_file "$STATE/unfinished" "$others"; else rm -f "$STATE/unfinished"; fi
}

environment_is_whole() { ! is_unfinished && "$(environment_python)" -c 'import pip' 2>/dev/null; }

make_environment() {
  if [[ $ENVIRONMENT_PLAN == keep ]]; then
    note "kept: $PREFIX"
    return
  fi
  mkdir -p "$STATE"
  is_unfinished || printf '%s\n' "$PREFIX" >>"$STATE/unfinished"
  if [[ $ENVIRONMENT_PLAN == remake ]]; then
    rm -rf -- "$PREFIX"
  fi
  made "$PREFIX"
  if [[ -n $USE_CONDA ]]; then
    make_conda_environment
  else
    "$PYTHON" -m venv "$PREFIX"
  fi
  write_marker unfinished
  finished
}

install_pins() {
  if [[ -n $UP_TO_DATE ]]; then
    note "there: ${PINS[*]}"
    return
  fi
  warn_if_space_is_short
  drop_half_installed
  pass_over_silent_indexes
  note "$LOCK_REASON"
  if [[ -n $LOCK ]]; then
    replace_file "$STATE/requirements.lock" "$LOCK"
    pip_install --require-hashes --only-binary :all: --requirement "$STATE/requirements.lock"
    return
  fi
  local index=()
  if [[ -n $target_index ]]; then
    if [[ -z $(silent_indexes "$target_index") ]]; then
      index=(--extra-index-url "$target_index")
    elif [[ $target_index_required == true ]]; then
      die "$target_index does not answer, and only it has the wheels of $TARGET" 'check the network or the proxy settings, then run the same command again'
    else
      note "$target_index does not answer; going on with the default index"
    fi
  fi
  # torch works without numpy, but warns; setuptools builds flexops.
  pip_install "${PINS[@]}" numpy 'setuptools>=77' ${index[@]+"${index[@]}" --retries 1} || {
    [[ ${#index[@]} -gt 0 && $target_index_required != true ]] || return 1
    note "that did not work with $target_index; trying without it"
    pip_install "${PINS[@]}" numpy 'setuptools>=77'
  }
}

silent_indexes() { "$BOOT_PYTHON" "$ROOT/scripts/lib/silent_indexes.py" "$@"; }

# pass_over_silent_indexes: the extra indexes of pip's own settings, less those that do not answer. Behind a proxy of pip's own, only pip can ask them.
pass_over_silent_indexes() {
  local settings urls url silent kept=()
  settings=$("$(environment_python)" -m pip config list 2>/dev/null || true)
  [[ $settings != *.proxy=* ]] || return 0
  urls=${PIP_EXTRA_INDEX_URL:-$(sed -n "s/^.*\.extra-index-url='\(.*\)'$/\1/p" <<<"$settings" | sed 's/\\n/ /g')}
  [[ -n $urls ]] || return 0
  # shellcheck disable=SC2086 # a list of words
  silent=$(silent_indexes $urls)
  [[ -n $silent ]] || return 0
  for url in $urls; do
    if grep -qxF -- "$url" <<<"$silent"; then note "passed over, for it does not answer: $(without_credentials "$url")"; else kept+=("$url"); fi
  done
  # pip takes an empty variable for none, and goes by its file: then the main index stands in, a second time
  [[ ${#kept[@]} -gt 0 ]] || kept=("${INDEX_URL:-${PIP_INDEX_URL:-$(sed -n "s/^.*\.index-url='\(.*\)'$/\1/p" <<<"$settings" | tail -n 1)}}")
  export PIP_EXTRA_INDEX_URL=${kept[*]:-https://pypi.org/simple}
}

without_credentials() {
  if [[ $1 =~ ^([a-z]+://)[^/@]*@(.*)$ ]]; then printf '%s%s' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"; else printf '%s' "$1"; fi
}

# drop_half_installed: what an interrupted pip left, which the next would take for installed.
drop_half_installed() {
  local path
  [[ -z $USE_CONDA ]] || return 0
  while read -r path; do
    [[ -n $path ]] || continue
    note "half installed, so it is installed again: ${path##*/}"
    rm -rf -- "$path"
  done <<<"$("$(environment_python)" "$ROOT/scripts/lib/installed.py" "$ROOT" --half-installed)"
}

pip_install() {
  local arguments=(--disable-pip-version-check --no-input)
  on_terminal || arguments+=(--quiet --progress-bar off)
  [[ -z $INDEX_URL ]] || arguments+=(--index-url "$INDEX_URL")
  note "pip install $*"
  "$(environment_python)" -m pip install "${arguments[@]}" "$@"
}

warn_if_space_is_short() {
  local needed=3 free
  [[ $target_accelerator == cpu ]] || needed=10
  free=$(($(df -Pk "$PREFIX" | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  ((free >= needed)) || warn "$free GiB are free at $PREFIX; this target takes up to $needed GiB"
}

install_flexops() {
  if [[ -n $UP_TO_DATE ]]; then
    note "there: $ROOT, editable"
    return
  fi
  remove_namesake
  local information
  for information in "$ROOT/flexops_torch.egg-info" "$ROOT/tools/flexops_tools.egg-info"; do
    [[ -e $information ]] || made "$information"
  done
  local locked=()
  [[ -z $LOCK ]] || locked=(--no-deps) # they are there, by hash
  FLEXOPS_AOT='' pip_install --no-build-isolation ${locked[@]+"${locked[@]}"} --editable "$ROOT" --editable "$ROOT/tools"
  environment_holds || die 'pip ended well, but the environment does not hold what was asked for' "rm -rf $PREFIX, then run the same command again"
  write_marker "$DIGEST"
}

# remove_namesake: this checkout's own install under its former name goes; another project's with our import name is the user's to decide about.
remove_namesake() {
  local found
  found=$("$(environment_python)" "$ROOT/scripts/lib/installed.py" "$ROOT" --namesake)
  case $found in
    ours)
      note 'pip uninstall flexops   # this checkout, from before it was called flexops-torch'
      "$(environment_python)" -m pip uninstall --quiet --yes flexops
      rm -rf -- "$ROOT/flexops.egg-info"
      ;;
    other*) die "$PREFIX holds another project's flexops (${found#other }), which has the same import name" "$PIP uninstall flexops, or --prefix DIR for another environment" ;;
  esac
}

install_launcher() {
  if [[ $LAUNCHER_PLAN == found ]]; then
    note "there: $LAUNCHER"
  elif [[ $LAUNCHER_PLAN == root ]] && may_use_root; then
    { install_packages ccache && printf 'ccache\n' >>"$STATE/packages"; } || warn 'ccache could not be installed; going on without it'
    LAUNCHER=$(command -v ccache || true)
  else
    note "none; with one, recompiling is quicker: ${NO_ROOT:+(--no-root) }install ccache, then run this again"
  fi
}

may_use_root() {
  if [[ -n $YES ]]; then return 0; fi
  on_terminal && ask "  Install ccache with $(package_manager), using root rights?" n
}

# install_packages NAME...: with the system's package manager.
install_packages() {
  mkdir -p "$STATE"
  case $(package_manager) in
    apt-get) with_root apt-get install -y -q "$@" || { with_root apt-get update -q && with_root apt-get install -y -q "$@"; } ;;
    dnf) with_root dnf install -y "$@" ;;
    zypper) with_root zypper --non-interactive install "$@" ;;
    pacman) with_root pacman -S --noconfirm "$@" ;;
  esac >/dev/null
}

with_root() {
  local sudo=()
  if [[ $(id -u) -ne 0 ]]; then
    sudo=(sudo)
    on_terminal || sudo=(sudo -n) # nobody is there to type a password
  fi
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive "$@"
}

# in_environment COMMAND...: as someone who has sourced .flexops/env.sh.
in_environment() {
  (
    set +eu
    # shellcheck source=/dev/null
    source "$STATE/env.sh"
    set -eu
    "$@"
  )
}

build_operators() {
  local what=(--target "$TARGET")
  if [[ $TOOLKIT_PLAN == missing ]]; then
    warn "no GPU operators for $TARGET: $(where_to_get_toolkit)"
    what=(--device cpu)
  fi
  [[ -e $ROOT/flexops/_aot ]] || made "$ROOT/flexops/_aot"
  in_environment flexops build "${what[@]}" --out "$ROOT/flexops/_aot"
}

run_doctor() {
  if [[ $TOOLKIT_PLAN == missing ]]; then
    in_environment flexops doctor
  else
    in_environment flexops doctor --target "$TARGET"
  fi
}

# checked_digest: of all that a check depends on: the environment, this machine, the sources, the compiled operators.
checked_digest() {
  {
    printf '%s\n' "$DIGEST" "$TOOLKIT_PLAN" "$tool_gpu" "$tool_driver" "$tool_host_version"
    cat "$STATE/env.posix.sh"
    find flexops csrc -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

is_checked() { [[ -e $STATE/checked && $(<"$STATE/checked") == "$(checked_digest)" ]]; }

remember_check() {
  replace_file "$STATE/checked" "$(checked_digest)"
  replace_file "$STATE/checked.date" "$(date '+%Y-%m-%d %H:%M')"
}

run_demo() { in_environment python -m flexops.demo; }

print_summary() {
  printf '\n%sDone%s in %d s: %s in %s\n' "$BOLD" "$PLAIN" "$1" "$TARGET" "$PREFIX"
  [[ $TOOLKIT_PLAN != missing ]] || warn "GPU operators run as plain PyTorch until there is a toolkit: $(where_to_get_toolkit)"
  case ${SHELL##*/} in
    fish | csh | tcsh | nu | xonsh | elvish) printf '  %s\n      use it from %s, which cannot source .flexops/env.sh; exit takes it back\n' "$(within_environment "${SHELL##*/}")" "${SHELL##*/}" ;;
    *) printf '  source .flexops/env.sh      use it, in this and every new shell; flexops_env_undo takes it back\n' ;;
  esac
  cat <<'TEXT'
  flexops doctor              check again at any time
  bash scripts/run_tests.sh   the tests
TEXT
}

choose_conda() {
  local name
  for name in mamba conda micromamba pixi; do
    if command -v "$name" >/dev/null; then
      CONDA_TOOL=$name
      return
    fi
  done
  die 'none of mamba, conda, micromamba and pixi was found' 'install one (https://github.com/conda-forge/miniforge), or leave --conda away'
}

conda_root() {
  if [[ $CONDA_TOOL == pixi ]]; then printf '%s/.pixi/envs/default' "$PREFIX"; else printf '%s' "$PREFIX"; fi
}

make_conda_environment() {
  local file=$ROOT/envs/$TARGET.yml
  export CONDA_ALWAYS_YES=true MAMBA_ALWAYS_YES=true
  case $CONDA_TOOL in
    micromamba) micromamba create -p "$PREFIX" -f "$file" ;;
    pixi)
      pixi init --import "$file" "$PREFIX"
      pixi install --manifest-path "$PREFIX/pixi.toml"
      ;;
    *) "$CONDA_TOOL" env create -p "$PREFIX" -f "$file" ;;
  esac
}
