#!/bin/sh
# Builds the kernels' fatbins with nvcc (on PATH, or under CUDA_HOME): one file a source, sm_80, sm_89, sm_90a, sm_100 and
# PTX of compute_80 and compute_90. Usage: build.sh OUT_DIR [TARGETS], targets such as "90a ptx80"; default: all.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT_DIR [TARGETS]}
targets=${2:-"80 89 90a 100 ptx80 ptx90"}
nvcc=${NVCC:-${CUDA_HOME:+$CUDA_HOME/bin/}nvcc}
mkdir -p "$out"
flags="-std=c++17 -O3 -Xptxas -v ${KERNEL_FLAGS:-}"
for target in $targets; do
    case $target in
        ptx*) flags="$flags -gencode arch=compute_${target#ptx},code=compute_${target#ptx}" ;;
        *) flags="$flags -gencode arch=compute_$target,code=sm_$target" ;;
    esac
done
pids=
for source in "$here"/src/*.cu ${EXTRA_SOURCES:-}; do
    name=$(basename "$source" .cu)
    # shellcheck disable=SC2086
    "$nvcc" $flags -I"$here/src" --threads 0 --split-compile 0 -fatbin -o "$out/$name.fatbin" "$source" >"$out/$name.log" 2>&1 &
    pids="$pids $!"
done
failed=0
for pid in $pids; do wait "$pid" || failed=1; done
if [ "$failed" != 0 ]; then
    cat "$out"/*.log | grep -v '^ptxas info' >&2
    exit 1
fi
