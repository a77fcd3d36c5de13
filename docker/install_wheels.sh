#!/bin/sh
# Installs from /opt/wheelhouse and from nowhere else.
#   install_wheels.sh runtime   what the image runs, by hash, into the environment /opt/flexops
#   install_wheels.sh build     what only building needs: Python tools into /opt/build; the CUDA
#                               toolkit into /opt/toolkit, where the base has none;
#                               what lists an image's contents into /opt/sbom
set -eu

wheelhouse=/opt/wheelhouse
pip="/opt/flexops/bin/python -m pip --disable-pip-version-check --no-cache-dir"
install="$pip install --quiet --no-index --find-links $wheelhouse"

if [ "$1" = runtime ]; then
  $install --require-hashes --requirement "$wheelhouse/runtime.lock"
  # The base's own, which venv has put there, unless it is locked.
  grep -q '^setuptools==' "$wheelhouse/runtime.lock" || $pip uninstall --quiet --yes setuptools
  # Byte code that nothing here loads: the colourings of hundreds of languages, 3 MB.
  rm -rf /opt/flexops/lib/python3*/site-packages/pygments/lexers/__pycache__
  mkdir -p /opt/flexops/share/flexops
  cat "$wheelhouse/runtime.lock" /opt/docker/pip.lock >/opt/flexops/share/flexops/requirements.lock
  exit 0
fi

mkdir -p /opt/build /opt/toolkit
grep -v -e '^cuda-toolkit' -e '^#' "$wheelhouse/build.txt" >/tmp/tools.txt
grep '^cuda-toolkit' "$wheelhouse/build.txt" >/tmp/toolkit.txt || true
python3 -m venv --without-pip /opt/sbom
$pip --python /opt/sbom/bin/python install --quiet --no-index --find-links "$wheelhouse/sbom" \
  --require-hashes --requirement /opt/docker/sbom.lock
$install --target /opt/build --requirement /tmp/tools.txt
if [ -s /tmp/toolkit.txt ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  $install --target /opt/toolkit --requirement /tmp/toolkit.txt
  sh /opt/docker/link_toolkit.sh
fi
