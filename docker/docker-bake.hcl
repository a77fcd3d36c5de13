# generated from flexops/targets/matrix.toml by `flexops target render`
#
#   docker buildx bake -f docker/docker-bake.hcl cu130-sm90      one image
#   docker buildx bake -f docker/docker-bake.hcl cuda            all of an accelerator
#   STAGE=dev docker buildx bake -f docker/docker-bake.hcl cpu   the stage for kernel work

variable "REPOSITORY" { default = "flexops" }
variable "STAGE" { default = "runtime" }
variable "INDEX_URL" { default = "" }
variable "ACCEPT_TORCH" { default = "" }
variable "JOBS" { default = "" }
variable "VERSION" { default = "unknown" }
variable "REVISION" { default = "unknown" }
variable "SOURCE" { default = "" }
variable "CREATED" { default = "" }

target "_common" {
  context = "."
  target  = STAGE
  args = {
    INDEX_URL    = INDEX_URL
    ACCEPT_TORCH = ACCEPT_TORCH
    JOBS         = JOBS
    VERSION      = VERSION
    REVISION     = REVISION
    SOURCE       = SOURCE
    CREATED      = CREATED
  }
}

group "default" {
  targets = ["cpu", "cu121-sm80", "cu121-sm89", "cu121-sm90", "cu126-sm80", "cu126-sm89", "cu126-sm90", "cu128-sm75", "cu128-sm80", "cu128-sm89", "cu128-sm90", "cu128-sm100", "cu128-sm120", "cu130-sm75", "cu130-sm80", "cu130-sm89", "cu130-sm90", "cu130-sm100", "cu130-sm120", "cu132-sm80", "cu132-sm89", "cu132-sm90", "cu132-sm100", "cu132-sm120", "rocm72-gfx90a", "rocm72-gfx942"]
}

group "cuda" {
  targets = ["cu121-sm80", "cu121-sm89", "cu121-sm90", "cu126-sm80", "cu126-sm89", "cu126-sm90", "cu128-sm75", "cu128-sm80", "cu128-sm89", "cu128-sm90", "cu128-sm100", "cu128-sm120", "cu130-sm75", "cu130-sm80", "cu130-sm89", "cu130-sm90", "cu130-sm100", "cu130-sm120", "cu132-sm80", "cu132-sm89", "cu132-sm90", "cu132-sm100", "cu132-sm120"]
}

group "rocm" {
  targets = ["rocm72-gfx90a", "rocm72-gfx942"]
}

target "cpu" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cpu"
  tags       = ["${REPOSITORY}:cpu${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cpu"
    EXTRA_INDEX          = "https://download.pytorch.org/whl/cpu"
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cpu"
    ARCH_LIST            = ""
    TARGET               = "cpu"
    LEAST_DRIVER         = ""
  }
}

target "cu121-sm80" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu121-sm80${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:22.04"
    RUNTIME_BASE         = "ubuntu:22.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu121"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.1"
    ARCH_LIST            = "8.0"
    TARGET               = "cu121-sm80"
    LEAST_DRIVER         = "525"
  }
}

target "cu121-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu121-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:22.04"
    RUNTIME_BASE         = "ubuntu:22.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu121"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.1"
    ARCH_LIST            = "8.9"
    TARGET               = "cu121-sm89"
    LEAST_DRIVER         = "525"
  }
}

target "cu121-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu121-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:22.04"
    RUNTIME_BASE         = "ubuntu:22.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu121"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.1"
    ARCH_LIST            = "9.0"
    TARGET               = "cu121-sm90"
    LEAST_DRIVER         = "525"
  }
}

target "cu126-sm80" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu126-sm80${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu126"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.6"
    ARCH_LIST            = "8.0"
    TARGET               = "cu126-sm80"
    LEAST_DRIVER         = "525"
  }
}

target "cu126-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu126-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu126"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.6"
    ARCH_LIST            = "8.9"
    TARGET               = "cu126-sm89"
    LEAST_DRIVER         = "525"
  }
}

target "cu126-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu126-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu126"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.6"
    ARCH_LIST            = "9.0"
    TARGET               = "cu126-sm90"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm75" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm75${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "7.5"
    TARGET               = "cu128-sm75"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm80" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm80${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "8.0"
    TARGET               = "cu128-sm80"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "8.9"
    TARGET               = "cu128-sm89"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "9.0"
    TARGET               = "cu128-sm90"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm100" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm100${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "10.0"
    TARGET               = "cu128-sm100"
    LEAST_DRIVER         = "525"
  }
}

target "cu128-sm120" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu128-sm120${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu128"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda12.8"
    ARCH_LIST            = "12.0"
    TARGET               = "cu128-sm120"
    LEAST_DRIVER         = "525"
  }
}

target "cu130-sm75" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm75${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "7.5"
    TARGET               = "cu130-sm75"
    LEAST_DRIVER         = "580"
  }
}

target "cu130-sm80" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm80${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "8.0"
    TARGET               = "cu130-sm80"
    LEAST_DRIVER         = "580"
  }
}

target "cu130-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "8.9"
    TARGET               = "cu130-sm89"
    LEAST_DRIVER         = "580"
  }
}

target "cu130-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "9.0"
    TARGET               = "cu130-sm90"
    LEAST_DRIVER         = "580"
  }
}

target "cu130-sm100" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm100${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "10.0"
    TARGET               = "cu130-sm100"
    LEAST_DRIVER         = "580"
  }
}

target "cu130-sm120" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm120${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu130"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.0"
    ARCH_LIST            = "12.0"
    TARGET               = "cu130-sm120"
    LEAST_DRIVER         = "580"
  }
}

target "cu132-sm80" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu132-sm80${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu132"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.2"
    ARCH_LIST            = "8.0"
    TARGET               = "cu132-sm80"
    LEAST_DRIVER         = "580"
  }
}

target "cu132-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu132-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu132"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.2"
    ARCH_LIST            = "8.9"
    TARGET               = "cu132-sm89"
    LEAST_DRIVER         = "580"
  }
}

target "cu132-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu132-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu132"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.2"
    ARCH_LIST            = "9.0"
    TARGET               = "cu132-sm90"
    LEAST_DRIVER         = "580"
  }
}

target "cu132-sm100" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu132-sm100${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu132"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.2"
    ARCH_LIST            = "10.0"
    TARGET               = "cu132-sm100"
    LEAST_DRIVER         = "580"
  }
}

target "cu132-sm120" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu132-sm120${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "ubuntu:24.04"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = ""
    TOOLKIT_NAME         = "cu132"
    EXTRA_INDEX          = ""
    EXTRA_INDEX_REQUIRED = ""
    TORCH_FOR            = "cuda13.2"
    ARCH_LIST            = "12.0"
    TARGET               = "cu132-sm120"
    LEAST_DRIVER         = "580"
  }
}

target "rocm72-gfx90a" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.rocm"
  tags       = ["${REPOSITORY}:rocm72-gfx90a${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "rocm/dev-ubuntu-24.04:7.2.4-complete"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = "hipcc"
    TOOLKIT_NAME         = "rocm72"
    EXTRA_INDEX          = "https://download.pytorch.org/whl/rocm7.2"
    EXTRA_INDEX_REQUIRED = "1"
    TORCH_FOR            = "rocm7.2"
    ARCH_LIST            = "gfx90a"
    TARGET               = "rocm72-gfx90a"
    LEAST_DRIVER         = "30.10"
  }
}

target "rocm72-gfx942" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.rocm"
  tags       = ["${REPOSITORY}:rocm72-gfx942${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "rocm/dev-ubuntu-24.04:7.2.4-complete"
    RUNTIME_BASE         = "ubuntu:24.04"
    COMPILER             = "hipcc"
    TOOLKIT_NAME         = "rocm72"
    EXTRA_INDEX          = "https://download.pytorch.org/whl/rocm7.2"
    EXTRA_INDEX_REQUIRED = "1"
    TORCH_FOR            = "rocm7.2"
    ARCH_LIST            = "gfx942"
    TARGET               = "rocm72-gfx942"
    LEAST_DRIVER         = "30.10"
  }
}
