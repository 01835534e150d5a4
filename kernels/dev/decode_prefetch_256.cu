// The decode kernel with a wider L2 prefetch.
#define TT_L2_PREFETCH ".L2::256B"
#define TT_DECODE_ONCE false
#define TT_DECODE_NARROW false
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) tt_ladder_9_w4_s3_p256(const __grid_constant__ TtAttentionParams p) {
    tt::decode_attention<__nv_bfloat16, __nv_bfloat16, 128, 4, 3>(p);
}
extern "C" {
__device__ int tt_shared_bytes_tt_ladder_9_w4_s3_p256 = tt::kDecodeSharedBytes<__nv_bfloat16, 128, 4, 3>;
}
