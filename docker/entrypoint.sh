#!/bin/sh
# Prepares what any user ID needs, and becomes the command. `doctor [OPTION...]` is short for
# `flexops doctor --target <this image's>`.
set -eu

# A cache for each user ID, because a cache belongs to one: in the volume /cache, else under the
# home, else in /tmp.
if [ -z "${XDG_CACHE_HOME:-}" ]; then
  user=$(id -u)
  for base in /cache "$HOME/.cache" /tmp/cache; do
    if mkdir -p "$base/$user" 2>/dev/null && [ -w "$base/$user" ]; then
      export XDG_CACHE_HOME="$base/$user" TRITON_HOME="$base/$user"
      export CCACHE_DIR="${CCACHE_DIR:-$base/$user/ccache}"
      break
    fi
  done
fi
# With a read-only root there may be no place for temporary files but the cache.
if [ -z "${TMPDIR:-}" ] && [ ! -w /tmp ] && [ -n "${XDG_CACHE_HOME:-}" ]; then
  export TMPDIR="$XDG_CACHE_HOME/tmp"
  mkdir -p "$TMPDIR"
fi

# Doctor writes temporary files. Other commands may do without.
if [ -z "${TMPDIR:-}" ] && [ ! -w /tmp ]; then
  case "${1:-} ${2:-}" in
    'doctor '* | 'flexops doctor')
      echo "flexops: no directory of this container is writable" >&2
      echo "  found: /cache, $HOME/.cache and /tmp are read-only" >&2
      echo "  required: a writable /cache" >&2
      echo "  fix: docker run --read-only --tmpfs /cache:exec,mode=1777 ..." \
        "  # or -v flexops-cache:/cache" >&2
      exit 1
      ;;
  esac
fi

# A directory of the host belongs to its user there, who is rarely this container's.
if [ ! -w . ]; then
  while read -r _ _ _ _ place options _; do
    case "$place $options" in
      "$PWD rw"*)
        echo "flexops: $PWD belongs to user $(stat -c %u:%g "$PWD"), and this container runs as" \
          "$(id -u):$(id -g): it cannot write there" >&2
        echo "  fix: docker run --user \"\$(id -u):\$(id -g)\" ..." >&2
        ;;
    esac
  done </proc/self/mountinfo
fi

if [ "${1:-}" = doctor ]; then # it judges the driver itself, with everything else
  shift
  set -- flexops doctor --target "$FLEXOPS_IMAGE_TARGET" "$@"
  exec "$@"
fi

# A driver that is too old is said here, in one sentence; torch would say it later and less clearly.
# Only where a GPU was passed.
driver_file=${NVIDIA_DRIVER_FILE:-/proc/driver/nvidia/version}
if [ -n "${FLEXOPS_IMAGE_DRIVER:-}" ] && [ -e "${NVIDIA_DEVICE:-/dev/nvidiactl}" ] &&
  [ -r "$driver_file" ]; then
  found=$(sed -n 's/^NVRM version:.*[^0-9.]\([0-9][0-9]*\.[0-9][0-9.]*\).*$/\1/p' "$driver_file")
  if [ -n "$found" ] && [ "${found%%.*}" -lt "${FLEXOPS_IMAGE_DRIVER%%.*}" ]; then
    echo "flexops: this machine's NVIDIA driver is $found, and" \
      "flexops:$FLEXOPS_IMAGE_TARGET needs $FLEXOPS_IMAGE_DRIVER or newer: update the driver," \
      "or take an image for an older CUDA (flexops target list)" >&2
    exit 1
  fi
fi
exec "$@"
