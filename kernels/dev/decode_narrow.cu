// The decode kernel with items of up to 8 packed rows in their own form: the one in use, with and without the hint that its
// loads may leave the L2 first, and other shapes of it.
#include "decode.cuh"

#define TT_STEP(name, WARPS, STAGES, PER_SM)                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)                                   \
        name(const __grid_constant__ TtAttentionParams p) {                                            \
        tt::decode_attention<__nv_bfloat16, __nv_bfloat16, 128, WARPS, STAGES>(p);                     \
    }                                                                                                  \
    extern "C" {                                                                                       \
    __device__ int tt_shared_bytes_##name = tt::kDecodeSharedBytes<__nv_bfloat16, 128, WARPS, STAGES>; \
    }

TT_STEP(tt_ladder_14_w4_s3_narrow, 4, 3, 2)
TT_STEP(tt_ladder_15_w4_s2_x3_narrow, 4, 2, 3)
TT_STEP(tt_ladder_16_w8_s3_x1_narrow, 8, 3, 1)
