# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# Finding a Python, and making a virtual environment with it.
# Loops read from <<<"$(...)": <(...) needs /dev/fd, which some containers and chroots lack.

# python_version PATH: "3.11", or nothing if it does not run (a pyenv shim without its Python, say).
python_version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# within VERSION LEAST NEWEST: whether LEAST <= VERSION <= NEWEST, for 3.N versions.
within() {
  [[ ${1%%.*} == 3 ]] || return 1
  ((${1#*.} >= ${2#*.} && ${1#*.} <= ${3#*.}))
}

# python_candidates LEAST NEWEST: paths to look at, best first: what people call python3, then the newest.
python_candidates() {
  local minor directory
  for name in python3 python; do command -v "$name" || true; done
  for ((minor = ${2#*.}; minor >= ${1#*.}; minor--)); do
    command -v "python3.$minor" || true
    for directory in /usr/bin /usr/local/bin "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin "$HOME/.local/share/uv/python/cpython-3.$minor".*/bin; do
      [[ ! -x $directory/python3.$minor ]] || printf '%s\n' "$directory/python3.$minor"
    done
  done
}

# can_make_venv PYTHON: Debian and Ubuntu ship Pythons without ensurepip.
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# find_python LEAST NEWEST: sets PYTHON and PYTHON_VERSION to the first that fits and can make an environment; 1 if there is none.
# PYTHON_LACKING tells what those that fit but cannot make one are lacking.
find_python() {
  local path version
  PYTHON='' PYTHON_VERSION='' PYTHON_LACKING=''
  while read -r path; do
    version=$(python_version "$path")
    if [[ -n $version ]] && within "$version" "$1" "$2"; then
      if can_make_venv "$path"; then
        PYTHON=$path PYTHON_VERSION=$version
        return 0
      fi
      PYTHON_LACKING=${PYTHON_LACKING:-$version}
    fi
  done <<<"$(python_candidates "$1" "$2")"
  return 1
}

# any_python: sets BOOT_PYTHON to a Python that can read the matrix (3.10 or newer).
any_python() {
  local path version
  BOOT_PYTHON=''
  while read -r path; do
    version=$(python_version "$path")
    if [[ -n $version ]] && within "$version" 3.10 3.99 && "$path" -c 'import tomllib' 2>/dev/null; then
      BOOT_PYTHON=$path
      return 0
    fi
    if [[ $version == 3.10 && -z $BOOT_PYTHON ]] && "$path" -c 'import pip._vendor.tomli' 2>/dev/null; then
      BOOT_PYTHON=$path # its pip carries a TOML reader; a newer Python is still better
    fi
  done <<<"$(python_candidates 3.10 3.15)"
  [[ -n $BOOT_PYTHON ]]
}
