#!/usr/bin/env bash
# attach_to_release.sh DIR: attaches every conda package below DIR to the release of the tag in
# GITHUB_REF, which it makes, with the changelog's section as its text, if there is none; publishes
# it, and starts the workflow that puts its packages into the channel. Both processors have packages
# of one name, so a file is called <platform>--<package>.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

directory=${1:?attach_to_release.sh DIR}
tag=${GITHUB_REF#refs/tags/}
[[ $tag == v* ]] ||
  { printf 'GITHUB_REF is %s, and no tag of a release\n' "${GITHUB_REF:-not set}" >&2 && exit 2; }

if ! gh release view "$tag" >/dev/null 2>&1; then
  python3 tools/flexops_tools/release.py notes "${tag#v}" |
    gh release create "$tag" --draft --verify-tag --title "flexops ${tag#v}" --notes-file -
fi
find "$directory" -name '*.conda' | sort | while read -r package; do
  named=$directory/$(basename "$(dirname "$package")")--${package##*/}
  mv "$package" "$named"
  gh release upload "$tag" "$named" --clobber
done
# The channel is made of published releases: a draft's files cannot be downloaded.
gh release edit "$tag" --draft=false
gh workflow run docs.yml --ref main
