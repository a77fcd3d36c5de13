#!/bin/sh
# Installs those Debian or Ubuntu packages that are missing, and leaves no package lists
# behind. A base that has everything is not asked for a network.
#   install_packages.sh PACKAGE...
set -eu

missing=""
for package in "$@"; do
  state=$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "flexops: this base image has no apt-get, and lacks:$missing" >&2
  echo "  fix: choose a Debian or Ubuntu base, or one that has these (--build-base," \
    "--runtime-base)" >&2
  exit 1
fi
# The vendors' own package sources have nothing that is needed here, and may be out of reach.
mkdir -p /tmp/vendor-sources
sources=/etc/apt/sources.list.d
for list in "$sources"/cuda* "$sources"/nvidia* "$sources"/rocm* "$sources"/amdgpu*; do
  [ ! -e "$list" ] || mv "$list" /tmp/vendor-sources/
done
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # one word a package
if ! { apt-get update -q && apt-get install -q --yes --no-install-recommends $missing; }; then
  echo "flexops: the system packages could not be installed:$missing" >&2
  echo "  fix: --network host; or a base that has them (--build-base, --runtime-base)" >&2
  exit 1
fi
for list in /tmp/vendor-sources/*; do
  [ ! -e "$list" ] || mv "$list" /etc/apt/sources.list.d/
done
rm -rf /tmp/vendor-sources /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old \
  /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
