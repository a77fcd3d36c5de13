#!/usr/bin/env bash
# A container engine for the tests of images, and mmdebstrap, with which they make a base image where no registry can be reached.
#   sudo bash scripts/lib/engine.sh     installs (Debian, Ubuntu) and starts what is missing; does nothing where an engine answers
# `start_engine` is the same for a script that sources this.

engine_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# start_engine [LOG]: returns 1, having said why, if there is no engine and none could be started.
start_engine() {
  local log=${1:-/tmp/flexops-dockerd.log}
  local -a missing=()
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  if engine_answers && [[ ${#missing[@]} -eq 0 ]]; then
    return 0
  fi
  if [[ $(id -u) -ne 0 ]]; then
    printf 'no container engine answers, and only root can start one: sudo bash scripts/lib/engine.sh\n' >&2
    return 1
  fi
  command -v dockerd >/dev/null || missing+=(docker.io)
  if [[ ${#missing[@]} -gt 0 ]]; then
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" || return 1
  fi
  engine_answers && return 0
  # Without iptables or bridges (in a container, a small VM) the engine starts all the same; the tests' containers use the host's network.
  _dockerd "$log" || _dockerd "$log" --iptables=false --bridge=none || {
    printf 'the container engine does not start; its log: %s\n' "$log" >&2
    tail -n 5 "$log" >&2
    return 1
  }
}

_dockerd() {
  local log=$1 pid
  setsid dockerd "${@:2}" </dev/null >"$log" 2>&1 &
  pid=$!
  for _ in {1..60}; do
    engine_answers && return 0
    kill -0 "$pid" 2>/dev/null || return 1
    sleep 0.5
  done
  kill "$pid" 2>/dev/null
  return 1
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  start_engine "$@"
  docker version --format 'container engine {{.Server.Version}} answers'
fi
