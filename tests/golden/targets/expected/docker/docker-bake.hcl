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
  targets = ["cpu", "cu121-sm89", "cu130-sm90", "rocm72-gfx90a"]
}

group "cuda" {
  targets = ["cu121-sm89", "cu130-sm90"]
}

group "rocm" {
  targets = ["rocm72-gfx90a"]
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

target "cu121-sm89" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu121-sm89${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "nvidia/cuda:12.1.1-devel-ubuntu22.04"
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

target "cu130-sm90" {
  inherits   = ["_common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:cu130-sm90${STAGE == "dev" ? "-dev" : ""}"]
  args = {
    BUILD_BASE           = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
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
