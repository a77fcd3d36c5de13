#!/bin/sh
# Makes the toolkit from the package index (/opt/toolkit), if there is one, the system's:
# /usr/local/cuda.
set -eu
for toolkit in /opt/toolkit/nvidia/cu*; do
  [ ! -d "$toolkit" ] || ln -sfn "$toolkit" /usr/local/cuda
done
