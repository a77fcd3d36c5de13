#!/usr/bin/env bash
# Makes room on a hosted runner, whose own tools fill most of its disk: a CUDA image takes about
# 20 GB while it is built. Removes nothing on any other machine.
set -euo pipefail

[[ ${RUNNER_ENVIRONMENT:-} == github-hosted ]] || {
  printf 'this is no hosted runner: nothing is removed\n'
  exit 0
}
root=${FREE_DISK_ROOT:-}
df -h "${root:-/}"
rm -rf -- "$root"/usr/local/lib/android "$root"/usr/share/dotnet "$root"/opt/ghc \
  "$root"/usr/local/.ghcup "$root"/opt/hostedtoolcache/CodeQL "$root"/usr/share/swift \
  "$root"/usr/local/share/powershell "$root"/usr/local/share/boost
df -h "${root:-/}"
