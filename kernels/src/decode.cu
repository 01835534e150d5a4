// The decode kernels. Grid: at most num_kv_heads * max_work_items blocks of 128 threads; fewer share the list. The
// symbols tt_shared_bytes_<name> and tt_tile_rows_<name> (s32, in the module) say how much dynamic shared memory a launch takes
// and how many packed rows an item may have.
#include "decode.cuh"

#define TT_DECODE(name, E, KV, D, STAGES, PER_SM)                                                                 \
    extern "C" __global__ void __launch_bounds__(128, PER_SM) name(const __grid_constant__ TtAttentionParams p) { \
        tt::decode_attention<E, KV, D, 4, STAGES>(p);                                                             \
    }                                                                                                             \
    extern "C" {                                                                                                  \
    __device__ int tt_shared_bytes_##name = tt::kDecodeSharedBytes<KV, D, 4, STAGES>;                             \
    __device__ int tt_tile_rows_##name = 16;                                                                      \
    }

// Stages: as many as let two blocks share a multiprocessor of 227 KB (one block, at a head of 256).
TT_DECODE(tt_decode_bf16_d64, __nv_bfloat16, __nv_bfloat16, 64, 6, 2)
TT_DECODE(tt_decode_bf16_d96, __nv_bfloat16, __nv_bfloat16, 96, 4, 2)
TT_DECODE(tt_decode_bf16_d128, __nv_bfloat16, __nv_bfloat16, 128, 3, 2)
TT_DECODE(tt_decode_bf16_d256, __nv_bfloat16, __nv_bfloat16, 256, 3, 1)
TT_DECODE(tt_decode_f16_d64, __half, __half, 64, 6, 2)
TT_DECODE(tt_decode_f16_d96, __half, __half, 96, 4, 2)
TT_DECODE(tt_decode_f16_d128, __half, __half, 128, 3, 2)
TT_DECODE(tt_decode_f16_d256, __half, __half, 256, 3, 1)
TT_DECODE(tt_decode_bf16_fp8_d64, __nv_bfloat16, tt::Fp8, 64, 8, 2)
TT_DECODE(tt_decode_bf16_fp8_d96, __nv_bfloat16, tt::Fp8, 96, 6, 2)
TT_DECODE(tt_decode_bf16_fp8_d128, __nv_bfloat16, tt::Fp8, 128, 5, 2)
TT_DECODE(tt_decode_bf16_fp8_d256, __nv_bfloat16, tt::Fp8, 256, 3, 2)
TT_DECODE(tt_decode_f16_fp8_d64, __half, tt::Fp8, 64, 8, 2)
TT_DECODE(tt_decode_f16_fp8_d96, __half, tt::Fp8, 96, 6, 2)
TT_DECODE(tt_decode_f16_fp8_d128, __half, tt::Fp8, 128, 5, 2)
TT_DECODE(tt_decode_f16_fp8_d256, __half, tt::Fp8, 256, 3, 2)
