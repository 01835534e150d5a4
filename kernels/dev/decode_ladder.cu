// The decode kernel's steps, kept so that each can be measured again: bf16, head 128. LADDER.md has the figures. Same
// arguments, items and results as tt_decode_bf16_d128.
#define TT_DECODE_ONCE false
#define TT_DECODE_NARROW false
#include "decode.cuh"

namespace {

// Step 0: no tensor cores, no shared-memory pipeline. A warp takes one key at a time, four elements a lane; at most four
// packed rows; one warp a block walks all keys.
__device__ void plain(const TtAttentionParams &p) {
    constexpr int D = 128;
    using E = __nv_bfloat16;
    __shared__ float shared[4][4][D + 2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int index = blockIdx.x / p.num_kv_heads, kv_head = blockIdx.x % p.num_kv_heads;
    const TtWorkItem item = tt::load_item(p.items + index);
    if (index >= tt::load_header(p.header).num_items) {
        return;
    }
    const int group = p.num_heads / p.num_kv_heads, rows = item.row_end - item.row_begin;
    const tt::KeyRange range = tt::key_range(item, group, p.sliding_window);
    const tt::Scorer scorer(p.scale, p.soft_cap);
    float q[4][4], o[4][4] = {}, top[4], weight[4] = {};
    for (int row = 0; row < 4; ++row) {
        int packed = item.row_begin + row;
        top[row] = tt::minus_inf();
        for (int i = 0; i < 4; ++i) {
            q[row][i] = row < rows ? tt::Type<E>::widen(static_cast<const E *>(
                                         p.query)[(item.first_token + packed / group) * p.query_stride +
                                                  (kv_head * group + packed % group) * D + lane * 4 + i])
                                   : 0.0f;
        }
    }
    const int32_t *table = p.block_table + item.row * p.block_table_stride;
    for (int key = range.low + warp; key < range.high; key += 4) {
        const E *state = static_cast<const E *>(p.kv_cache) + table[key / p.block_size] * p.kv_block_stride +
                         kv_head * p.kv_head_stride + key % p.block_size * p.kv_token_stride + lane * 4;
        uint2 k = __ldg(reinterpret_cast<const uint2 *>(state)), v = __ldg(reinterpret_cast<const uint2 *>(state + D));
        const E *ke = reinterpret_cast<const E *>(&k), *ve = reinterpret_cast<const E *>(&v);
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            float s = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s = fmaf(q[row][i], tt::Type<E>::widen(ke[i]), s);
            }
            for (int mask = 16; mask > 0; mask >>= 1) {
                s += __shfl_xor_sync(0xffffffffu, s, mask);
            }
            s *= scorer.scale_log2;
            float high = fmaxf(top[row], s), shrink = exp2f(top[row] - high), w = exp2f(s - high);
            top[row] = high;
            weight[row] = weight[row] * shrink + w;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                o[row][i] = o[row][i] * shrink + w * tt::Type<E>::widen(ve[i]);
            }
        }
    }
    for (int row = 0; row < 4; ++row) {
        for (int i = 0; i < 4; ++i) {
            shared[warp][row][lane * 4 + i] = o[row][i];
        }
        if (lane == 0) {
            shared[warp][row][D] = top[row];
            shared[warp][row][D + 1] = weight[row];
        }
    }
    __syncthreads();
    for (int row = 0; row < rows; ++row) {
        float high = tt::minus_inf(), total = 0.0f, sum = 0.0f;
        for (int w = 0; w < 4; ++w) {
            high = fmaxf(high, shared[w][row][D]);
        }
        float shift = high == tt::minus_inf() ? 0.0f : high;
        for (int w = 0; w < 4; ++w) {
            float factor = exp2f(shared[w][row][D] - shift);
            total += factor * shared[w][row][D + 1];
            sum += factor * shared[w][row][threadIdx.x];
        }
        sum = total == 0.0f ? 0.0f : sum / total;
        float lse = total == 0.0f ? tt::minus_inf() : shift + log2f(total);
        if (item.num_slots <= 1) {
            int packed = item.row_begin + row, head = kv_head * group + packed % group;
            int64_t token = item.first_token + packed / group;
            static_cast<E *>(p.output)[token * p.output_stride + head * D + threadIdx.x] = tt::Type<E>::narrow(sum);
            if (threadIdx.x == 0 && p.lse != nullptr) {
                p.lse[token * p.num_heads + head] = lse * tt::kLn2;
            }
        } else {
            int64_t at = tt::partial_index(p, item.slot, kv_head, row);
            p.partial_output[at * D + threadIdx.x] = sum;
            if (threadIdx.x == 0) {
                p.partial_lse[at] = lse;
            }
        }
    }
    if (item.num_slots > 1) {
        tt::merge_if_last<E, D, 128>(p, item, kv_head, group);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) tt_ladder_0_plain(const __grid_constant__ TtAttentionParams p) {
    plain(p);
}
extern "C" {
__device__ int tt_shared_bytes_tt_ladder_0_plain = 0;
}

#define TT_STEP(name, WARPS, STAGES, PER_SM)                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)                                       \
        name(const __grid_constant__ TtAttentionParams p) {                                                \
        tt::decode_attention<__nv_bfloat16, __nv_bfloat16, 128, WARPS, STAGES>(p);                         \
    }                                                                                                      \
    extern "C" {                                                                                           \
    __device__ int tt_shared_bytes_##name = tt::kDecodeSharedBytes<__nv_bfloat16, 128, WARPS, STAGES>;     \
    }

TT_STEP(tt_ladder_1_mma_w4_s1, 4, 1, 2)
TT_STEP(tt_ladder_2_w4_s2, 4, 2, 2)
TT_STEP(tt_ladder_3_w4_s3, 4, 3, 2)
TT_STEP(tt_ladder_4_w4_s2_x3, 4, 2, 3)
TT_STEP(tt_ladder_5_w4_s6_x1, 4, 6, 1)
TT_STEP(tt_ladder_6_w2_s3_x4, 2, 3, 4)
TT_STEP(tt_ladder_7_w8_s3_x1, 8, 3, 1)
TT_STEP(tt_ladder_8_w1_s3_x8, 1, 3, 8)
