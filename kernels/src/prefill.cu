// The prefill kernels. Grid: at most num_kv_heads * max_work_items blocks of 128 threads; fewer share the list. The
// symbols tt_shared_bytes_<name> and tt_tile_rows_<name> (s32, in the module) say how much dynamic shared memory a launch takes
// and how many packed rows an item may have: 128; 64 at a head of 256, and for those named _r64, which suit short queries and
// work lists of such tiles.
#include "prefill.cuh"

#define TT_PREFILL(name, E, KV, D, BLOCKS, KEYS)                                                             \
    extern "C" __global__ void __launch_bounds__(128, 2) name(const __grid_constant__ TtAttentionParams p) { \
        tt::prefill_attention<E, KV, D, 4, BLOCKS, KEYS>(p);                                                 \
    }                                                                                                        \
    extern "C" {                                                                                             \
    __device__ int tt_shared_bytes_##name = tt::kPrefillSharedBytes<KV, D, 4, BLOCKS, KEYS>;                 \
    __device__ int tt_tile_rows_##name = 4 * BLOCKS * 16;                                                    \
    }

TT_PREFILL(tt_prefill_bf16_d64, __nv_bfloat16, __nv_bfloat16, 64, 2, 64)
TT_PREFILL(tt_prefill_bf16_d96, __nv_bfloat16, __nv_bfloat16, 96, 2, 64)
TT_PREFILL(tt_prefill_bf16_d128, __nv_bfloat16, __nv_bfloat16, 128, 2, 64)
TT_PREFILL(tt_prefill_bf16_d256, __nv_bfloat16, __nv_bfloat16, 256, 1, 32)
TT_PREFILL(tt_prefill_f16_d64, __half, __half, 64, 2, 64)
TT_PREFILL(tt_prefill_f16_d96, __half, __half, 96, 2, 64)
TT_PREFILL(tt_prefill_f16_d128, __half, __half, 128, 2, 64)
TT_PREFILL(tt_prefill_f16_d256, __half, __half, 256, 1, 32)
TT_PREFILL(tt_prefill_bf16_fp8_d64, __nv_bfloat16, tt::Fp8, 64, 2, 64)
TT_PREFILL(tt_prefill_bf16_fp8_d96, __nv_bfloat16, tt::Fp8, 96, 2, 32)
TT_PREFILL(tt_prefill_bf16_fp8_d128, __nv_bfloat16, tt::Fp8, 128, 2, 32)
TT_PREFILL(tt_prefill_bf16_fp8_d256, __nv_bfloat16, tt::Fp8, 256, 1, 32)
TT_PREFILL(tt_prefill_f16_fp8_d64, __half, tt::Fp8, 64, 2, 64)
TT_PREFILL(tt_prefill_f16_fp8_d96, __half, tt::Fp8, 96, 2, 32)
TT_PREFILL(tt_prefill_f16_fp8_d128, __half, tt::Fp8, 128, 2, 32)
TT_PREFILL(tt_prefill_f16_fp8_d256, __half, tt::Fp8, 256, 1, 32)

TT_PREFILL(tt_prefill_bf16_d64_r64, __nv_bfloat16, __nv_bfloat16, 64, 1, 64)
TT_PREFILL(tt_prefill_bf16_d96_r64, __nv_bfloat16, __nv_bfloat16, 96, 1, 64)
TT_PREFILL(tt_prefill_bf16_d128_r64, __nv_bfloat16, __nv_bfloat16, 128, 1, 64)
TT_PREFILL(tt_prefill_f16_d64_r64, __half, __half, 64, 1, 64)
TT_PREFILL(tt_prefill_f16_d96_r64, __half, __half, 96, 1, 64)
TT_PREFILL(tt_prefill_f16_d128_r64, __half, __half, 128, 1, 64)
