#!/usr/bin/env bash
# A container engine for the tests of images, and mmdebstrap, with which they make a base image
# where no registry can be reached.
#   sudo bash scripts/lib/engine.sh     installs (Debian, Ubuntu) and starts what is missing; does
#                                       nothing where an engine answers
# For a script that sources this: `why_no_engine`, `start_engine [LOG]`, `stop_engine`.

ENGINE_PID='' # of the engine that this script started

engine_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# why_no_engine: what keeps this machine from running an engine, whatever is installed on it; says
# nothing, and returns 1, if nothing does.
why_no_engine() {
  engine_answers && return 1
  if [[ $(id -u) -ne 0 ]]; then
    printf 'none answers, and only root can start one'
  elif ! unshare --mount --net --pid --fork --mount-proc true 2>/dev/null; then
    printf 'this container may not make namespaces, which an engine needs (docker run --privileged)'
  elif ! _mounts_work; then
    printf 'this container may not mount file systems, which an engine needs'
    printf ' (docker run --privileged)'
  elif ! grep -q cgroup /proc/mounts; then
    printf 'no cgroups are mounted here, which an engine needs (docker run --privileged)'
  elif ! _get_packages --download-only >&2; then
    printf 'the packages that it takes (docker.io, mmdebstrap) cannot be downloaded from here'
  else
    return 1
  fi
}

_mounts_work() { # what the engine's own file system does, in a mount namespace that goes away
  # shellcheck disable=SC2016 # for the inner shell
  unshare --mount sh -c 'd=$(mktemp -d) && mount -t tmpfs none "$d" \
    && mkdir "$d/l" "$d/u" "$d/w" "$d/m" \
    && mount -t overlay none -o "lowerdir=$d/l,upperdir=$d/u,workdir=$d/w" "$d/m"
    s=$?; umount -l "$d"; rmdir "$d"; exit $s' >/dev/null 2>&1
}

# _get_packages [OPTION]: install, or with --download-only fetch, what is missing.
_get_packages() {
  local -a missing=()
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  command -v dockerd >/dev/null || engine_answers || missing+=(docker.io)
  [[ ${#missing[@]} -gt 0 ]] || return 0
  command -v apt-get >/dev/null || return 1
  apt-get update -q || return 1
  # Newer Debian has the client in a package of its own.
  command -v docker >/dev/null || ! apt-cache show docker-cli >/dev/null 2>&1 ||
    missing+=(docker-cli)
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" "${missing[@]}"
}

# start_engine [LOG]: returns 1, having said why, if there is no engine and none could be started.
start_engine() {
  local log=${1:-/tmp/flexops-dockerd.log}
  [[ $(id -u) -ne 0 ]] || _get_packages || return 1
  engine_answers && return 0
  mkdir -p "$(dirname "$log")"
  # Without iptables or bridges (in a container, a small VM) the engine starts all the same; the
  # tests' containers use the host's network.
  _dockerd "$log" || _dockerd "$log" --iptables=false --bridge=none || {
    printf 'the container engine does not start; the end of its log, %s:\n' "$log" >&2
    tail -n 5 "$log" >&2
    return 1
  }
}

_dockerd() {
  local log=$1
  setsid dockerd "${@:2}" </dev/null >"$log" 2>&1 &
  ENGINE_PID=$!
  for _ in {1..600}; do
    engine_answers && return 0
    kill -0 "$ENGINE_PID" 2>/dev/null || break
    sleep 0.5
  done
  stop_engine
  return 1
}

# stop_engine: the one that was started here, if any.
stop_engine() {
  [[ -n $ENGINE_PID ]] || return 0
  kill "$ENGINE_PID" 2>/dev/null || true
  wait "$ENGINE_PID" 2>/dev/null || true
  ENGINE_PID=''
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  if why=$(why_no_engine); then
    printf 'no container engine: %s\n' "$why" >&2
    exit 1
  fi
  start_engine "$@"
  docker version --format 'container engine {{.Server.Version}} answers'
fi
