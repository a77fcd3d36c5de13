# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# What is here, and what follows from it: the target, the toolkit, the Python, the launcher. Reads, never writes.

# matrix ARGUMENT...: the matrix of targets, by a Python that needs nothing installed.
matrix() { (cd "$ROOT" && "$BOOT_PYTHON" -m flexops.targets "$@"); }

# read_facts NAME < LINES: "key value" becomes the variable NAME_key; a key that comes again adds a line to it.
read_facts() {
  local key value variable
  while read -r key value; do
    variable=$1_$key
    printf -v "$variable" '%s' "${!variable:+${!variable}$'\n'}$value"
  done
}

# Someone who has sourced .flexops/env.sh gets the same answers as someone who has not.
leave_own_environment() {
  local entry entries kept=() name
  IFS=: read -r -a entries <<<"$PATH"
  for entry in "${entries[@]}"; do
    [[ $entry == "$STATE"/* || $entry == "$PREFIX"/* ]] || kept+=("$entry")
  done
  PATH=$(IFS=: && printf '%s' "${kept[*]}")
  [[ -n ${FLEXOPS_ENV_FILE:-} ]] || return 0
  for name in "${ENV_NAMES[@]}"; do
    if [[ $name != PATH && -n ${!name:-} ]] && grep -qxF -e "_flexops_set $name $(quoted "${!name}")" -e "_flexops_default $name $(quoted "${!name}")" \
      "$FLEXOPS_ENV_FILE" 2>/dev/null; then
      unset "$name"
    fi
  done
  unset FLEXOPS_ENV_FILE
}

choose_target() {
  local facts detected before version=''
  STEP='pick the target' MEND='bash scripts/setup_cuda_dev_environment.sh --list-targets'
  before=$(marker_value kind)
  if [[ -n $TARGET ]]; then
    TARGET_REASON='as --target says' TARGET_NOTES=''
  elif [[ -n $before ]]; then
    TARGET=${before%%,*} TARGET_REASON="what $PREFIX was made for; --target makes another" TARGET_NOTES=''
  else
    # A target whose torch has wheels for the Python at hand; conda brings whichever is needed.
    if [[ -z $USE_CONDA ]]; then version=$(python_version "${ASKED_PYTHON:-$BOOT_PYTHON}"); fi
    detected=$(matrix detect --python "$version")
    { read -r TARGET && read -r TARGET_REASON; } <<<"$detected"
    TARGET_NOTES=$(tail -n +3 <<<"$detected")
  fi
  facts=$(matrix show "$TARGET" 2>&1) || die "$facts" "$MEND"
  read_facts target <<<"$facts"
  read -r -a PINS <<<"$target_requirements"
  read -r PYTHON_LEAST PYTHON_NEWEST <<<"$target_python_range"
  TOOLKIT_MINOR=${target_toolkit%.*}
}

look_for_tools() {
  local facts arguments=(--torch "$target_torch")
  STEP='look for compilers and toolkits' MEND='the message above says what was not understood'
  case $target_accelerator in
    cuda) arguments+=(--cuda "$TOOLKIT_MINOR") ;;
    rocm) arguments+=(--hip "$TOOLKIT_MINOR") ;;
  esac
  tool_gpu='' tool_driver='' tool_host='' tool_host_version='' tool_cuda_root='' tool_cuda_version='' tool_rocm_root='' tool_rocm_version=''
  tool_launcher='' tool_rejected='' tool_note='' tool_cpus='' tool_memory_bytes=''
  facts=$(cd "$ROOT" && "$BOOT_PYTHON" -m flexops.toolchain "${arguments[@]}")
  read_facts tool <<<"$facts"
  COMPILER_FIX=''
  [[ -z $tool_host && -z $USE_CONDA ]] || return 0
  COMPILER_FIX="apt-get install g++ (or: dnf install gcc-c++)$(compiler_versions); or --conda, which brings its own"
  [[ -n ${DRY_RUN:-} ]] || # which shows the whole plan, with this step in it
    die "no C++ compiler that this target can use was found${tool_rejected:+: $tool_rejected}" "$COMPILER_FIX"
}

# compiler_versions: ", at least 11.3 and at most 15", as far as the target bounds them.
compiler_versions() {
  local least newest
  read -r least newest <<<"${target_host_compiler:-}"
  printf '%s' "${least:+, at least $least}${newest:+ and at most $newest}"
}

# Sets TOOLKIT_PLAN: none | found | index | conda | nvrtc | missing. For CUDA a toolkit is for people's own .cu sources: flexops' kernels are compiled by
# the NVRTC that torch brings.
choose_toolkit() {
  local pin='' rest=() one
  for one in "${PINS[@]}"; do
    if [[ $one == cuda-toolkit* ]]; then pin=$one; else rest+=("$one"); fi
  done
  TOOLKIT_PLAN=none TOOLKIT_ROOT='' TOOLKIT_VERSION=''
  case $target_accelerator in
    cuda) TOOLKIT_ROOT=$tool_cuda_root TOOLKIT_VERSION=$tool_cuda_version ;;
    rocm) TOOLKIT_ROOT=$tool_rocm_root TOOLKIT_VERSION=$tool_rocm_version ;;
    *) PINS=("${rest[@]}") && return 0 ;;
  esac
  if [[ -n $USE_CONDA && $target_accelerator == cuda ]]; then
    TOOLKIT_PLAN=conda TOOLKIT_ROOT=''
  elif [[ $TOOLKIT == auto && -n $pin && -x $(wheel_toolkit)/bin/nvcc ]]; then # an earlier run was told to install it
    TOOLKIT_PLAN=index TOOLKIT_ROOT=$STATE/cuda
  elif [[ $TOOLKIT != index && -n $TOOLKIT_ROOT && ($TOOLKIT_VERSION == "$TOOLKIT_MINOR" || -z $pin || $TOOLKIT == system) ]]; then
    TOOLKIT_PLAN=found
  elif [[ $TOOLKIT != system && -n $pin ]]; then
    TOOLKIT_PLAN=index TOOLKIT_ROOT=$STATE/cuda
  elif [[ $target_accelerator == cuda ]]; then
    TOOLKIT_PLAN=nvrtc TOOLKIT_ROOT=''
  else
    TOOLKIT_PLAN=missing TOOLKIT_ROOT=''
  fi
  [[ $TOOLKIT_PLAN == index ]] || PINS=("${rest[@]}")
}

# where_to_get_toolkit: for a toolkit that neither the machine nor the package index has.
where_to_get_toolkit() {
  if [[ $target_accelerator == rocm ]]; then
    printf 'ROCm %s comes with its own installer, or work in the image %s' "$TOOLKIT_MINOR" "$target_build_base"
  else
    printf 'an nvcc %s comes from conda: run this with --conda, or: conda install -c conda-forge cuda-nvcc=%s' "$TOOLKIT_MINOR" "$TOOLKIT_MINOR"
  fi
}

choose_python() {
  local version
  STEP='find a Python' MEND=''
  if [[ -n $USE_CONDA ]]; then
    PYTHON='' PYTHON_VERSION=$target_python
    return 0
  fi
  local wanted="Python $PYTHON_LEAST to $PYTHON_NEWEST, which torch $target_torch has wheels for"
  if [[ -n $ASKED_PYTHON ]]; then
    PYTHON=$(command -v "$ASKED_PYTHON") || die "$ASKED_PYTHON is not a program" '--python PATH'
    PYTHON_VERSION=$(python_version "$PYTHON")
    within "${PYTHON_VERSION:-0.0}" "$PYTHON_LEAST" "$PYTHON_NEWEST" ||
      die "$ASKED_PYTHON is ${PYTHON_VERSION:+Python }${PYTHON_VERSION:-no working Python}; required: $wanted" 'leave --python away, or name another'
    can_make_venv "$PYTHON" || die "$PYTHON cannot make environments: its venv or ensurepip is missing" "apt-get install python$PYTHON_VERSION-venv"
  elif environment_is_whole && version=$(python_version "$PREFIX/bin/python") && [[ $(marker_value kind) == "$TARGET, Python $version" ]]; then
    PYTHON=$PREFIX/bin/python PYTHON_VERSION=$version
  elif ! find_python "$PYTHON_LEAST" "$PYTHON_NEWEST"; then
    [[ -z $PYTHON_LACKING ]] ||
      die "Python $PYTHON_LACKING is here, but cannot make environments: its venv or ensurepip is missing" "apt-get install python$PYTHON_LACKING-venv"
    die "found no $wanted" "apt-get install python$target_python python$target_python-venv; or: uv python install $target_python; or --conda"
  fi
}

# Sets LAUNCHER_PLAN: found | root (can be had with root rights) | none
choose_launcher() {
  LAUNCHER=$tool_launcher LAUNCHER_PLAN=none
  if [[ ${FLEXOPS_COMPILER_LAUNCHER:-} == none ]]; then
    return 0
  elif [[ -n $LAUNCHER ]]; then
    LAUNCHER_PLAN=found
  elif [[ -n $USE_CONDA ]]; then
    LAUNCHER_PLAN=found LAUNCHER=$(conda_root)/bin/ccache
  elif [[ -z $NO_ROOT && -n $(package_manager) ]] && { [[ $(id -u) -eq 0 ]] || command -v sudo >/dev/null; }; then
    LAUNCHER_PLAN=root
  fi
}

package_manager() {
  local name
  for name in apt-get dnf zypper pacman; do
    if command -v "$name" >/dev/null; then
      printf '%s' "$name"
      return
    fi
  done
}

# A compile that includes torch's headers takes 2 to 3 GiB. What env.sh says already is kept: free memory differs from run to run.
choose_jobs() {
  local by_memory=$((tool_memory_bytes / (3 * 1024 * 1024 * 1024))) before
  before=$(sed -n 's/^_flexops_default MAX_JOBS \([0-9]*\)$/\1/p' "$STATE/env.posix.sh" 2>/dev/null || true)
  JOBS=$((by_memory < tool_cpus ? by_memory : tool_cpus))
  JOBS=$((JOBS > 0 ? JOBS : 1))
  if [[ -n $before ]] && ((before <= tool_cpus)); then JOBS=$before; fi
  JOBS=${ASKED_JOBS:-$JOBS}
}

describe_machine() {
  local system
  system=$(. /etc/os-release 2>/dev/null && printf '%s' "${PRETTY_NAME:-}") || true
  say "${BOLD}This machine$PLAIN"
  fact system "${system:-$(uname -s)}, $(uname -m), $tool_cpus processors, $((tool_memory_bytes / 1024 / 1024 / 1024)) GiB of memory free"
  fact GPU "${tool_gpu//$'\n'/, }${tool_driver:+, driver $tool_driver}" 'none found'
  fact 'C++ compiler' "$tool_host${tool_host:+ ($tool_host_version)}" 'none that fits; conda brings one'
  if [[ $target_accelerator != cpu ]]; then
    fact toolkit "${tool_cuda_root:-$tool_rocm_root}${tool_cuda_version:+ (CUDA $tool_cuda_version)}${tool_rocm_version:+ (ROCm $tool_rocm_version)}" \
      'none that matches the target'
  fi
  fact 'compiler cache' "$tool_launcher" none
  fact Python "${PYTHON:-from conda} ($PYTHON_VERSION)"
  [[ -z $tool_rejected ]] || while read -r line; do note "not taken: $line"; done <<<"$tool_rejected"
  [[ -z $tool_note ]] || while read -r line; do note "$line"; done <<<"$tool_note"
}

fact() { printf '  %-15s %s\n' "$1" "${2:-${3:-}}"; }
