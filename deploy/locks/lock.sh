#!/bin/sh
# Writes the hash-pinned lists that the images are built from. Versions come from constraints.txt; what it does not name is
# whatever fits. torch and what its CUDA build brings are left out: the executor's image chooses between CPU and CUDA.
#   make lock
set -eu
cd "$(dirname "$0")/../.."
for extra in scheduler executor; do
  "${UV:-uv}" pip compile --quiet --generate-hashes --no-header --no-annotate --universal --python-version 3.11 \
    --constraint constraints.txt --extra "$extra" --extra tracing pyproject.toml deploy/locks/build.in |
    awk '/^[a-z]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' > "deploy/locks/$extra.txt"
done
