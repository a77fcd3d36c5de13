#!/usr/bin/env bash
# Images on a registry: of a row for one machine, with SBOM and provenance, and of a row for all of its machines under one name.
#   publish_image.sh login              reads REGISTRY_PASSWORD
#   publish_image.sh build ROW MACHINE  pushes $IMAGE:ROW-MACHINE
#   publish_image.sh join ROW           makes $IMAGE:ROW, and $IMAGE:ROW-VERSION for a tag, of those of its machines
# IMAGE is the repository, such as ghcr.io/flexops/flexops. DRY_RUN=1 prints the commands and runs none.
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
machines() { python3 -m flexops.targets show "$1" --field machines; }

login() {
  printf '%s' "${REGISTRY_PASSWORD:?}" | run docker login "${IMAGE%%/*}" --username "${GITHUB_ACTOR:-flexops}" --password-stdin
}

build() {
  local row=$1 machine=$2 platform
  [[ " $(machines "$row") " == *" $machine "* ]] || refuse "$row is not for $machine"
  case $machine in
    x86_64) platform=linux/amd64 ;;
    aarch64) platform=linux/arm64 ;;
  esac
  VERSION=$(python3 scripts/release.py version)
  REVISION=$(git rev-parse HEAD)
  CREATED=$(git show --no-patch --format=%cI HEAD)
  SOURCE=${GITHUB_SERVER_URL:-https://github.com}/${GITHUB_REPOSITORY:-flexops/flexops}
  export VERSION REVISION CREATED SOURCE REPOSITORY=$IMAGE
  run docker buildx create --use --driver docker-container
  run docker buildx bake -f docker/docker-bake.hcl "$row" --push \
    --set "$row.platform=$platform" --set "$row.tags=$IMAGE:$row-$machine" \
    --set "$row.attest=type=provenance,mode=max" --set "$row.attest=type=sbom"
}

join() {
  local row=$1 machine parts=() names=(--tag "$IMAGE:$1")
  [[ ${GITHUB_REF:-} != refs/tags/v* ]] || names+=(--tag "$IMAGE:$row-${GITHUB_REF#refs/tags/v}")
  for machine in $(machines "$row"); do
    parts+=("$IMAGE:$row-$machine")
  done
  run docker buildx imagetools create "${names[@]}" "${parts[@]}"
}

: "${IMAGE:?the repository, such as ghcr.io/flexops/flexops}"
case "${1:-} $#" in
  'login 1') login ;;
  'build 3') build "$2" "$3" ;;
  'join 2') join "$2" ;;
  *) refuse "publish_image.sh ${*:-} is not understood" ;;
esac
