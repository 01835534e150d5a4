// Steps and variants of the scatter and prefill kernels, kept so that each can be measured again. LADDER.md has the figures.
#include "kv_cache.cuh"
#include "prefill.cuh"

#define TT_SCATTER(name, TOKENS)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ TtScatterParams p) { \
        tt::reshape_and_cache<__nv_bfloat16, __nv_bfloat16, TOKENS>(p);                                 \
    }

TT_SCATTER(tt_ladder_scatter_t1, 1)
TT_SCATTER(tt_ladder_scatter_t2, 2)
TT_SCATTER(tt_ladder_scatter_t4, 4)
TT_SCATTER(tt_ladder_scatter_t8, 8)

#define TT_PREFILL(name, WARPS, BLOCKS, KEYS, PER_SM)                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) name(const __grid_constant__ TtAttentionParams p) { \
        tt::prefill_attention<__nv_bfloat16, __nv_bfloat16, 128, WARPS, BLOCKS, KEYS>(p);                               \
    }                                                                                                                   \
    extern "C" {                                                                                                        \
    __device__ int tt_shared_bytes_##name = tt::kPrefillSharedBytes<__nv_bfloat16, 128, WARPS, BLOCKS, KEYS>;           \
    }

TT_PREFILL(tt_ladder_prefill_w4_r32_k64, 4, 2, 64, 2)
TT_PREFILL(tt_ladder_prefill_w4_r32_k32, 4, 2, 32, 2)
TT_PREFILL(tt_ladder_prefill_w8_r16_k64, 8, 1, 64, 1)
TT_PREFILL(tt_ladder_prefill_w8_r16_k64_x2, 8, 1, 64, 2)
TT_PREFILL(tt_ladder_prefill_w8_r16_k128, 8, 1, 128, 1)
TT_PREFILL(tt_ladder_prefill_w8_r32_k64, 8, 2, 64, 1)
TT_PREFILL(tt_ladder_prefill_w4_r16_k64_x3, 4, 1, 64, 2)

extern "C" __global__ void __launch_bounds__(128, 2)
    tt_ladder_prefill_w4_r32_k64_items(const __grid_constant__ TtAttentionParams p) {
    tt::prefill_attention<__nv_bfloat16, __nv_bfloat16, 128, 4, 2, 64, false>(p);
}
extern "C" {
__device__ int tt_shared_bytes_tt_ladder_prefill_w4_r32_k64_items =
    tt::kPrefillSharedBytes<__nv_bfloat16, 128, 4, 2, 64>;
}
