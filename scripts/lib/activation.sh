# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# .flexops/env.sh: for any POSIX shell, zsh included; sourcing it twice is sourcing it once, flexops_env_undo restores everything. What it does is in
# env.posix.sh beside it, so that a shell that cannot read that (fish) can read env.sh, which then says what to do.

ENV_NAMES=(
  PATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CUDA_HOME ROCM_HOME CXX CC TORCH_CUDA_ARCH_LIST PYTORCH_ROCM_ARCH MAX_JOBS PYTORCH_NVCC
  FLEXOPS_CACHE_DIR TORCH_EXTENSIONS_DIR CCACHE_DIR SCCACHE_DIR FLEXOPS_COMPILER_LAUNCHER
  CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER FLEXOPS_ENV_FILE
)

write_env() {
  [[ $TOOLKIT_PLAN != index ]] || link_toolkit
  write_compiler_link
  replace_file "$STATE/env.posix.sh" "$(env_text)"
  replace_file "$STATE/env.sh" "$(env_stub)"
  note "source $STATE/env.sh"
}

# replace_file PATH TEXT: atomically, and not at all when it holds that text already.
replace_file() {
  if [[ -e $1 && $(<"$1") == "$2" ]]; then return 0; fi
  mkdir -p "$(dirname "$1")"
  printf '%s\n' "$2" >"$1.new"
  mv -f "$1.new" "$1"
}

# The index's toolkit has lib/ and libcudart.so.13 where torch's cpp_extension looks for lib64/libcudart.so: links give it that shape.
link_toolkit() {
  local wheel library name
  wheel=$(wheel_toolkit)
  [[ -n $wheel ]] || die "the package index's toolkit is not in $(environment_root)" "rm -rf $PREFIX, then run the same command again"
  mkdir -p "$STATE/cuda/lib64"
  for name in bin include nvvm; do
    ln -sfn "$wheel/$name" "$STATE/cuda/$name"
  done
  for library in "$wheel"/lib/*; do
    name=${library##*/}
    ln -sfn "$library" "$STATE/cuda/lib64/$name"
    [[ $name != lib*.so.* ]] || ln -sfn "$library" "$STATE/cuda/lib64/${name%%.so.*}.so"
  done
}

# torch from 2.13 puts ccache before the compilers itself. For older ones a c++ on PATH does: they call the compiler by that name.
torch_wraps_compilers() {
  local minor=${target_torch#*.}
  [[ ${target_torch%%.*} -gt 2 || ${minor%%.*} -ge 13 ]]
}

needs_compiler_link() { [[ -n $LAUNCHER && -z $USE_CONDA ]] && ! torch_wraps_compilers; }

write_compiler_link() {
  if needs_compiler_link; then
    replace_file "$STATE/bin/c++" "#!/bin/sh
exec $(quoted "$LAUNCHER") $(quoted "$tool_host") \"\$@\""
    chmod +x "$STATE/bin/c++"
  else
    rm -f "$STATE/bin/c++"
  fi
}

# within_environment SHELL: the command that runs a shell which cannot source env.sh, with what env.sh sets.
within_environment() { printf 'bash -c "source %s; exec %s"' "$(quoted "$STATE/env.sh")" "$1"; }

# env_stub: valid in POSIX shells and in fish, which reads a file as a whole before it does any of it. In fish alone, '\\' is one character.
env_stub() {
  cat <<EOF_STUB
# Made by scripts/setup_cuda_dev_environment.sh for the target $TARGET. Source it; flexops_env_undo takes everything back.
test '\\\\' = "\\\\" && echo $(quoted "flexops: fish cannot read what POSIX shells read; a fish with this environment: $(within_environment fish)")
test '\\\\' = "\\\\" || . $(quoted "$STATE/env.posix.sh")
EOF_STUB
}

# env_text: what POSIX shells read. A value that starts with "_flexops_default" gives way to what the user has set.
env_text() {
  env_head
  env_paths
  env_target
  env_caches
  env_launcher
  printf '_flexops_set FLEXOPS_ENV_FILE %s\n' "$(quoted "$STATE/env.posix.sh")"
  [[ -z $USE_CONDA ]] || env_conda_scripts activate
  printf 'hash -r 2>/dev/null || true\n'
}

env_head() {
  cat <<EOF_HEAD
# Made by scripts/setup_cuda_dev_environment.sh for the target $TARGET; env.sh sources it.
# shellcheck shell=sh disable=SC2034,SC2154
if command -v flexops_env_undo >/dev/null 2>&1; then flexops_env_undo; fi

_flexops_remember() {
  eval "_flexops_had_\$1=\\\${\$1+yes} _flexops_was_\$1=\\\${\$1-}"
}
_flexops_set() {
  _flexops_remember "\$1"
  export "\$1=\$2"
}
_flexops_unset() {
  _flexops_remember "\$1"
  unset "\$1"
}
_flexops_default() {
  if eval "[ -z \"\\\${\$1-}\" ]"; then _flexops_set "\$1" "\$2"; fi
}
flexops_env_undo() {
$([[ -z $USE_CONDA ]] || env_conda_scripts deactivate | sed 's/^/  /')
  for _flexops_name in ${ENV_NAMES[*]}; do
    eval "_flexops_had=\\\${_flexops_had_\$_flexops_name-untouched}"
    case \$_flexops_had in
      untouched) ;;
      yes) eval "export \$_flexops_name=\"\\\$_flexops_was_\$_flexops_name\"" ;;
      *) unset "\$_flexops_name" ;;
    esac
    unset "_flexops_had_\$_flexops_name" "_flexops_was_\$_flexops_name"
  done
  unset _flexops_name _flexops_had
  unset -f flexops_env_undo _flexops_remember _flexops_set _flexops_unset _flexops_default
  hash -r 2>/dev/null || true
}

EOF_HEAD
}

env_paths() {
  local root path=''
  root=$(environment_root)
  needs_compiler_link && path=$(quoted "$STATE/bin"):
  path+=$(quoted "$root/bin"):
  [[ -z $TOOLKIT_ROOT ]] || path+=$(quoted "$TOOLKIT_ROOT/bin"):
  # shellcheck disable=SC2016 # for the shell that sources it
  printf '_flexops_set PATH %s"$PATH"\n' "$path"
  printf '_flexops_unset PYTHONHOME\n'
  if [[ -n $USE_CONDA ]]; then
    printf '_flexops_set CONDA_PREFIX %s\n_flexops_set CONDA_DEFAULT_ENV %s\n' "$(quoted "$root")" "$(quoted "$root")"
  else
    printf '_flexops_set VIRTUAL_ENV %s\n' "$(quoted "$root")"
  fi
}

env_target() {
  case $target_accelerator in
    cuda)
      [[ -z $TOOLKIT_ROOT ]] || printf '_flexops_set CUDA_HOME %s\n' "$(quoted "$TOOLKIT_ROOT")"
      [[ $TOOLKIT_PLAN != conda ]] || printf '_flexops_set CUDA_HOME %s\n' "$(quoted "$(environment_root)")"
      printf '_flexops_set TORCH_CUDA_ARCH_LIST %s\n' "$(quoted "$target_arch_list")"
      ;;
    rocm)
      [[ -z $TOOLKIT_ROOT ]] || printf '_flexops_set ROCM_HOME %s\n' "$(quoted "$TOOLKIT_ROOT")"
      printf '_flexops_set PYTORCH_ROCM_ARCH %s\n' "$(quoted "$target_arch_list")"
      ;;
  esac
  env_compilers
  printf '_flexops_default MAX_JOBS %s\n' "$JOBS"
}

# Only where the compiler called c++ is one that the target's nvcc or torch refuses; conda's own scripts set theirs.
env_compilers() {
  local usual cc
  [[ -z $USE_CONDA && -n $tool_host ]] || return 0
  usual=$(command -v c++ || true)
  [[ -z $usual || $(readlink -f "$usual") != $(readlink -f "$tool_host") ]] || return 0
  cc=${tool_host/%g++*/gcc${tool_host##*g++}}
  printf '_flexops_set CXX %s\n' "$(quoted "$tool_host")"
  [[ ! -x $cc ]] || printf '_flexops_set CC %s\n' "$(quoted "$cc")"
}

env_caches() {
  printf '_flexops_default FLEXOPS_CACHE_DIR %s\n' "$(quoted "$STATE/cache/flexops")"
  printf '_flexops_default TORCH_EXTENSIONS_DIR %s\n' "$(quoted "$STATE/cache/torch_extensions")"
  case ${LAUNCHER##*/} in
    ccache) printf '_flexops_default CCACHE_DIR %s\n' "$(quoted "$STATE/cache/ccache")" ;;
    sccache) printf '_flexops_default SCCACHE_DIR %s\n' "$(quoted "$STATE/cache/sccache")" ;;
  esac
}

env_launcher() {
  local name root=$TOOLKIT_ROOT
  [[ -n $LAUNCHER ]] || return 0
  printf '_flexops_set FLEXOPS_COMPILER_LAUNCHER %s\n' "$(quoted "$LAUNCHER")"
  for name in C CXX CUDA; do
    printf '_flexops_default CMAKE_%s_COMPILER_LAUNCHER %s\n' "$name" "$(quoted "$LAUNCHER")"
  done
  [[ $TOOLKIT_PLAN != conda ]] || root=$(environment_root)
  if [[ $target_accelerator == cuda && -n $root ]] && ! torch_wraps_compilers; then
    printf '_flexops_default PYTORCH_NVCC %s\n' "$(quoted "$LAUNCHER $root/bin/nvcc")"
  fi
}

# env_conda_scripts activate|deactivate: conda's packages (compilers above all) set variables of their own.
env_conda_scripts() {
  # shellcheck disable=SC2016 # for the shell that sources it
  printf 'for _flexops_script in %s/etc/conda/%s.d/*.sh; do\n  if [ -r "$_flexops_script" ]; then . "$_flexops_script"; fi\ndone\nunset _flexops_script\n' \
    "$(quoted "$(environment_root)")" "$1"
}
