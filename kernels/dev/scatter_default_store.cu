// The scatter with other cache hints.
#define TT_SCATTER_LOAD __ldcs
#define TT_SCATTER_STORE(to, value) (*(to) = (value))
#include "kv_cache.cuh"

extern "C" __global__ void __launch_bounds__(256) tt_ladder_scatter_default_store(const __grid_constant__ TtScatterParams p) {
    tt::reshape_and_cache<__nv_bfloat16, __nv_bfloat16, 1>(p);
}
