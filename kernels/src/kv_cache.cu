// reshape_and_cache: this step's keys and values into their slots. Blocks of (x, y) threads, x a multiple of 32 that is best
// the vectors of a token (2 * num_kv_heads * head_size * cache bytes / 16, at most 256), x * y at most 256. Grid:
// ceil(num_slots / y). Rows [0, num_slots) of key and value must exist.
#include "kv_cache.cuh"

#define TT_SCATTER(name, E, KV)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ TtScatterParams p) { \
        tt::reshape_and_cache<E, KV, 1>(p);                                                             \
    }

TT_SCATTER(tt_reshape_and_cache_bf16, __nv_bfloat16, __nv_bfloat16)
TT_SCATTER(tt_reshape_and_cache_f16, __half, __half)
TT_SCATTER(tt_reshape_and_cache_f32, float, float)
TT_SCATTER(tt_reshape_and_cache_bf16_fp8, __nv_bfloat16, tt::Fp8)
TT_SCATTER(tt_reshape_and_cache_f16_fp8, __half, tt::Fp8)
