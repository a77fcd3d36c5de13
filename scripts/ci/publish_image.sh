#!/usr/bin/env bash
# Images on a registry: of a row for one machine, checked before it is pushed, and of a row for all
# of its machines under one name.
#   publish_image.sh login              reads REGISTRY_PASSWORD
#   publish_image.sh build ROW MACHINE  builds, checks, pushes; DIGESTS/ROW-MACHINE gets the digest
#   publish_image.sh join ROW           names the digests of ROW's machines IMAGE:ROW, and for a tag
#                                       IMAGE:ROW-VERSION
# IMAGE is the repository, such as ghcr.io/flexops/flexops; registries want it in lower case, which
# it is made here. DIGESTS is a folder (default: .flexops/digests). DRY_RUN=1 prints the commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

refuse() {
  printf '%s\n  fix: see the head of scripts/ci/publish_image.sh\n' "$1" >&2
  exit 2
}

run() {
  if [[ -n ${DRY_RUN:-} ]]; then printf '%s\n' "$*"; else "$@"; fi
}

# machines ROW: what the matrix has for it.
machines() { python3 scripts/ci/matrix.py "$1" machines; }

login() {
  printf '%s' "${REGISTRY_PASSWORD:?}" |
    run docker login "${IMAGE%%/*}" --username "${GITHUB_ACTOR:-flexops}" --password-stdin
}

# check ROW NAME: doctor in every circumstance, pins, labels, contents; fails if one of them does.
check() {
  local tools=.flexops/check-tools
  run python3 -m venv "$tools"
  run "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
    'docker>=7' 'typer>=0.12' 'rich>=13'
  run "$tools/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-deps --editable ./tools
  run "$tools/bin/python" -m flexops image check "$1" --tag "$2"
}

build() {
  local row=$1 machine=$2 platform local_name metadata=.flexops/publish.json
  [[ " $(machines "$row") " == *" $machine "* ]] || refuse "$row is not for $machine"
  case $machine in
    x86_64) platform=linux/amd64 ;;
    aarch64) platform=linux/arm64 ;;
  esac
  VERSION=$(python3 tools/flexops_tools/release.py version)
  REVISION=$(git rev-parse HEAD)
  CREATED=$(git show --no-patch --format=%cI HEAD)
  SOURCE=${GITHUB_SERVER_URL:-https://github.com}/${GITHUB_REPOSITORY:-flexops/flexops}
  export VERSION REVISION CREATED SOURCE REPOSITORY=$IMAGE
  mkdir -p .flexops "$DIGESTS"
  local bake=(docker buildx bake -f docker/docker-bake.hcl "$row" --set "$row.platform=$platform")
  run docker buildx create --use --driver docker-container
  # First into the engine, to be run there; then, from the same cache, to the registry, by digest.
  local_name=flexops:$row-$machine
  run "${bake[@]}" --load --set "$row.tags=$local_name"
  check "$row" "$local_name"
  run docker image rm "$local_name"
  local pushed=type=image,push-by-digest=true,name-canonical=true,push=true
  run "${bake[@]}" --metadata-file "$metadata" \
    --set "$row.tags=$IMAGE" --set "$row.output=$pushed" \
    --set "$row.attest=type=provenance,mode=max" --set "$row.attest=type=sbom"
  [[ -n ${DRY_RUN:-} ]] || digest "$metadata" "$row" >"$DIGESTS/$row-$machine"
}

# digest FILE ROW: what the registry calls the image that bake's metadata is of.
digest() {
  python3 - "$@" <<'PYTHON'
import json, sys
print(json.load(open(sys.argv[1]))[sys.argv[2]]["containerimage.digest"])
PYTHON
}

join() {
  local row=$1 machine file parts=() names=(--tag "$IMAGE:$1")
  [[ ${GITHUB_REF:-} != refs/tags/v* ]] || names+=(--tag "$IMAGE:$row-${GITHUB_REF#refs/tags/v}")
  for machine in $(machines "$row"); do
    file=$DIGESTS/$row-$machine
    [[ -s $file ]] || refuse "$row has no digest for $machine: $file is missing or empty"
    parts+=("$IMAGE@$(cat "$file")")
  done
  run docker buildx imagetools create "${names[@]}" "${parts[@]}"
}

: "${IMAGE:?the repository, such as ghcr.io/flexops/flexops}"
IMAGE=${IMAGE,,}
DIGESTS=${DIGESTS:-.flexops/digests}
case "${1:-} $#" in
  'login 1') login ;;
  'build 3') build "$2" "$3" ;;
  'join 2') join "$2" ;;
  *) refuse "publish_image.sh ${*:-} is not understood" ;;
esac
