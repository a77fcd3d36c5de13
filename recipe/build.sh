#!/usr/bin/env bash
# Compiles every operator ahead of time, for exactly the devices of this variant, and installs the wheel that holds them.
set -euo pipefail

# conda's ninja is the program, without the metadata of the package index's wheel: `pip check` would miss what nothing needs.
sed -i '/^  "ninja",$/d' pyproject.toml

export FLEXOPS_AOT=all FLEXOPS_AOT_DEVICES=cpu
export FLEXOPS_CACHE_DIR=$SRC_DIR/.flexops-cache
export MAX_JOBS=${CPU_COUNT:-1}
# The linker would write this into the libraries, which find torch's without it: torch has loaded them.
unset LD_RUN_PATH
if [[ -z ${CCACHE_DIR:-} ]]; then
  unset CCACHE_DIR
fi
if [[ $CUDA_ARCH_LIST != None ]]; then
  export FLEXOPS_AOT_DEVICES=cpu,cuda TORCH_CUDA_ARCH_LIST=$CUDA_ARCH_LIST CUDA_HOME=$BUILD_PREFIX
fi

"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-index -v
