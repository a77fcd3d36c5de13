#!/usr/bin/env bash
# Compiles every operator ahead of time, for exactly the devices of this variant, and installs the
# wheel that holds them.
set -euo pipefail

# conda's ninja is the program, without the metadata of the package index's wheel: `pip check` would
# miss what nothing needs.
sed -i '/^  "ninja",$/d' pyproject.toml

export FLEXOPS_AOT=all FLEXOPS_AOT_DEVICES=cpu
export FLEXOPS_CACHE_DIR=$SRC_DIR/.flexops-cache
export MAX_JOBS=${CPU_COUNT:-1}
# The linker would write this into the libraries, which find torch's without it: torch has loaded
# them.
unset LD_RUN_PATH
# The clock, in a recipe's script. It would be part of what the libraries are known by, and nothing
# here tells the time.
unset SOURCE_DATE_EPOCH
if [[ -z ${CCACHE_DIR:-} ]]; then
  unset CCACHE_DIR
fi
if [[ $CUDA_ARCH_LIST != None ]]; then
  export FLEXOPS_AOT_DEVICES=cpu,cuda TORCH_CUDA_ARCH_LIST=$CUDA_ARCH_LIST CUDA_HOME=$BUILD_PREFIX
fi

# Installed by its name from a folder of wheels: what is installed from a path notes that path, of
# this machine, in direct_url.json.
"$PYTHON" -m pip wheel . --no-deps --no-build-isolation --no-index -v --wheel-dir wheels
"$PYTHON" -m pip install flexops-torch --no-deps --no-index --find-links wheels
# conda writes this script when it installs; here it holds this build's folder, and its digest would
# differ at each.
sed -i 's|^\(.*bin/flexops\),.*|\1,,|' "$SP_DIR"/flexops_torch-*.dist-info/RECORD
