#!/bin/sh
# Downloads every wheel that the image needs into /opt/wheelhouse, and writes there runtime.lock: name, version and hash of each one that runs.
#
# The committed lock (envs/requirements/<toolkit>.lock) decides where there is one: nothing else is accepted. Otherwise the pins in <toolkit>.in are
# resolved here, and what came is locked, so that at least every later stage, and who audits the image, has the same files.
#   INDEX_URL    instead of the default package index
#   FTP_PROXY    user:password for it, which must not be kept: see the Dockerfile's head
#   EXTRA_INDEX  another index that has better wheels for this row; EXTRA_INDEX_REQUIRED=1 if only it has them
set -eu

wheelhouse=/opt/wheelhouse
requirements=/opt/docker/requirements
download="/opt/flexops/bin/python -m pip download --quiet --progress-bar off --only-binary :all:"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_DEFAULT_TIMEOUT=60

certificates=/tmp/certificates.pem
for file in /etc/ssl/certs/ca-certificates.crt /opt/docker/ca-certificates/*.crt; do
  [ ! -e "$file" ] || cat "$file" >>"$certificates"
done
if ls /opt/docker/ca-certificates/*.crt >/dev/null 2>&1; then
  export PIP_CERT="$certificates" SSL_CERT_FILE="$certificates"
fi
if [ -n "${INDEX_URL:-}" ]; then
  export PIP_INDEX_URL="${INDEX_URL%%://*}://${FTP_PROXY:+$FTP_PROXY@}${INDEX_URL#*://}"
fi
unset FTP_PROXY

# The part of a requirements file before or after its line "# build".
runtime_part() { sed '/^# build$/,$d' "$1"; }
build_part() { sed '1,/^# build$/d' "$1"; }

lock=$(find "$requirements" -name '*.lock')
wishes=$(find "$requirements" -name '*.in')
mkdir -p "$wheelhouse"
# What the image's Python comes with is as old as the base: the pip that it keeps is this one.
/opt/flexops/bin/python -m pip install --quiet --progress-bar off --require-hashes --requirement /opt/docker/pip.lock
$download --dest "$wheelhouse/sbom" --require-hashes --requirement /opt/docker/sbom.lock
build_part "$wishes" >"$wheelhouse/build.txt"

if [ -n "$lock" ]; then
  runtime_part "$lock" >"$wheelhouse/runtime.lock"
  $download --dest "$wheelhouse" --require-hashes --requirement "$lock"
  exit 0
fi

answers() {
  /opt/flexops/bin/python - "$1" <<'PYTHON'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=10).close()
except Exception as error:
    sys.exit(f"note: {sys.argv[1]} does not answer ({error})")
PYTHON
}
extra=""
if [ -n "${EXTRA_INDEX:-}" ]; then
  if answers "$EXTRA_INDEX"; then
    extra="--extra-index-url $EXTRA_INDEX"
  elif [ -n "${EXTRA_INDEX_REQUIRED:-}" ]; then
    echo "flexops: $EXTRA_INDEX does not answer, and only it has torch for this row" >&2
    echo "  fix: --network host, --ca-bundle FILE; or --index-url with a mirror of it" >&2
    [ -n "${INDEX_URL:-}" ] || exit 1
  else
    echo "note: going on with the default index, whose torch is larger" >&2
  fi
fi
runtime_part "$wishes" >/tmp/runtime.txt
# shellcheck disable=SC2086  # options are words
$download --dest "$wheelhouse" $extra --requirement /tmp/runtime.txt
/opt/flexops/bin/python /opt/docker/lock_wheels.py "$wheelhouse" >"$wheelhouse/runtime.lock"
sed 's/ --hash=.*//' "$wheelhouse/runtime.lock" >/tmp/constraints.txt
# shellcheck disable=SC2086
$download --dest "$wheelhouse" $extra --find-links "$wheelhouse" --constraint /tmp/constraints.txt --requirement "$wheelhouse/build.txt"
