// The decode kernel whose loads are the first to leave the L2: the one in use, and one with three blocks a multiprocessor.
#define TT_DECODE_NARROW false
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) tt_ladder_11_w4_s3_ef(const __grid_constant__ TtAttentionParams p) {
    tt::decode_attention<__nv_bfloat16, __nv_bfloat16, 128, 4, 3>(p);
}
extern "C" {
__device__ int tt_shared_bytes_tt_ladder_11_w4_s3_ef = tt::kDecodeSharedBytes<__nv_bfloat16, 128, 4, 3>;
}

extern "C" __global__ void __launch_bounds__(128, 3) tt_ladder_13_w4_s2_x3_ef(const __grid_constant__ TtAttentionParams p) {
    tt::decode_attention<__nv_bfloat16, __nv_bfloat16, 128, 4, 2>(p);
}
extern "C" {
__device__ int tt_shared_bytes_tt_ladder_13_w4_s2_x3_ef = tt::kDecodeSharedBytes<__nv_bfloat16, 128, 4, 2>;
}
