#!/bin/sh
# Builds the harness. Usage: test/build.sh OUT_DIR. Needs nvcc and a driver's libcuda to link against (or its stub).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: test/build.sh OUT_DIR}
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/}nvcc}
arch=${HARNESS_ARCH:-90}
mkdir -p "$out"
pids=
objects=
for source in main scatter attention attention_bench layers sampling unpack work_list; do
    "$nvcc" -std=c++17 -O2 -gencode "arch=compute_$arch,code=sm_$arch" -I"$here" -I"$here/../src" -c "$here/$source.cu" \
        -o "$out/$source.o" &
    pids="$pids $!"
    objects="$objects $out/$source.o"
done
for pid in $pids; do wait "$pid"; done
stubs=$(dirname "$(command -v "$nvcc")")/../lib64/stubs
# shellcheck disable=SC2086
"$nvcc" -L"$stubs" -o "$out/harness" $objects -lcuda
