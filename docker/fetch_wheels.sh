#!/bin/sh
# Downloads every wheel that the image needs into /opt/wheelhouse, and writes there runtime.lock:
# name, version and hash of each one that runs.
#
# The committed lock (envs/requirements/<toolkit>.lock) decides where there is one: nothing else is
# accepted. Otherwise the pins in <toolkit>.in are resolved here, and what came is locked, so that
# at least every later stage, and who audits the image, has the same files.
#   INDEX_URL    instead of the default package index
#   EXTRA_INDEX  another index that has better wheels for this row; EXTRA_INDEX_REQUIRED=1
#                if only it has them
#   TORCH_FOR    what the row's torch is built for: cpu, cuda13.0, rocm7.2
#   ACCEPT_TORCH if not empty, a row for the CPU takes a torch that is built for a GPU
# /run/secrets/index_credentials, if there is such a file, is user:password for INDEX_URL.
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
  secret=/run/secrets/index_credentials
  credentials=$([ ! -r "$secret" ] || cat "$secret")
  export PIP_INDEX_URL="${INDEX_URL%%://*}://${credentials:+$credentials@}${INDEX_URL#*://}"
fi

# The part of a requirements file before or after its line "# build".
runtime_part() { sed '/^# build$/,$d' "$1"; }
build_part() { sed '1,/^# build$/d' "$1"; }

lock=$(find "$requirements" -name '*.lock')
wishes=$(find "$requirements" -name '*.in')
mkdir -p "$wheelhouse"
# What the image's Python comes with is as old as the base: the pip that it keeps is this one.
/opt/flexops/bin/python -m pip install --quiet --progress-bar off --require-hashes \
  --requirement /opt/docker/pip.lock
$download --dest "$wheelhouse/sbom" --require-hashes --requirement /opt/docker/sbom.lock
build_part "$wishes" >"$wheelhouse/build.txt"

if [ -n "$lock" ]; then
  runtime_part "$lock" >"$wheelhouse/runtime.lock"
  $download --dest "$wheelhouse" --require-hashes --requirement "$lock"
  /opt/flexops/bin/python /opt/docker/check_torch.py "$wheelhouse" "$TORCH_FOR"
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
  elif [ -n "${INDEX_URL:-}" ]; then
    echo "note: going on with $INDEX_URL alone, whose torch is checked" >&2
  elif [ -n "${EXTRA_INDEX_REQUIRED:-}" ]; then
    echo "flexops: $EXTRA_INDEX does not answer, and only it has torch for this row" >&2
    echo "  fix: --network host, --ca-bundle FILE; or --index-url with a mirror of it" >&2
    exit 1
  elif [ -z "${ACCEPT_TORCH:-}" ]; then
    echo "flexops: $EXTRA_INDEX does not answer, and the default index's torch may be for CUDA" >&2
    echo "  fix: --network host, --ca-bundle FILE; --index-url with a mirror of it;" \
      "or --accept-other-torch (5 GB)" >&2
    exit 1
  else
    echo "note: going on with the default index, whose torch is larger" >&2
  fi
fi
runtime_part "$wishes" >/tmp/runtime.txt
# shellcheck disable=SC2086  # options are words
$download --dest "$wheelhouse" $extra --requirement /tmp/runtime.txt
/opt/flexops/bin/python /opt/docker/check_torch.py "$wheelhouse" "$TORCH_FOR" "${ACCEPT_TORCH:-}"
/opt/flexops/bin/python /opt/docker/lock_wheels.py "$wheelhouse" >"$wheelhouse/runtime.lock"
sed 's/ --hash=.*//' "$wheelhouse/runtime.lock" >/tmp/constraints.txt
# shellcheck disable=SC2086
$download --dest "$wheelhouse" $extra --find-links "$wheelhouse" \
  --constraint /tmp/constraints.txt --requirement "$wheelhouse/build.txt"
