// Plain f32 attention: the device's own reference. One block per token and query head; straight from query starts and
// lengths, so that it shares no plan, no tile and no fragment with the kernels that it checks.
//
// Keys are taken in blocks of 64 from key 0 on. Within a block everything is f32; across blocks the output and the sum of
// weights accumulate in f64, which keeps rounding flat at any context length.
#include "params.h"

namespace {

constexpr int kThreads = 128;
constexpr int kBlock = 64;
constexpr int kMaxHead = 256;

__device__ float minus_inf() { return __int_as_float(0xff800000); }

// The row that token `token` belongs to, or -1.
__device__ int row_of(const int32_t *query_start_loc, int num_reqs, int token) {
    if (num_reqs == 0 || token >= query_start_loc[num_reqs]) {
        return -1;
    }
    int low = 0, high = num_reqs;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (query_start_loc[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace

// Grid: (num_tokens, num_heads), 128 threads.
extern "C" __global__ void __launch_bounds__(kThreads) tt_attention_plain_f32(const __grid_constant__
                                                                              TtPlainAttentionParams p) {
    __shared__ float query[kMaxHead], scores[kBlock];
    const int token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int size = p.head_size;
    const int kv_head = head / (p.num_heads / p.num_kv_heads);
    float *out = p.output + token * p.output_stride + static_cast<int64_t>(head) * size;
    const int row = row_of(p.query_start_loc, p.num_reqs, token);
    int low = 0, high = 0;
    if (row >= 0) {
        int begin = p.query_start_loc[row], end = p.query_start_loc[row + 1];
        int kv_len = p.seq_lens[row];
        bool causal = p.causal != nullptr ? p.causal[row] != 0 : p.causal_all != 0;
        int position = kv_len - (end - begin) + (token - begin);
        low = p.sliding_window > 0 ? max(0, position - p.sliding_window + 1) : 0;
        high = causal ? position + 1 : (p.sliding_window > 0 ? position + p.sliding_window : kv_len);
        high = min(high, kv_len);
    }
    for (int d = threadIdx.x; d < size; d += kThreads) {
        query[d] = p.query[token * p.query_stride + static_cast<int64_t>(head) * size + d];
    }
    const float *cache = p.kv_cache + kv_head * p.kv_head_stride;
    const int32_t *table = p.block_table + (row < 0 ? 0 : row) * p.block_table_stride;
    auto state = [&](int key) {
        return cache + static_cast<int64_t>(table[key / p.block_size]) * p.kv_block_stride +
               key % p.block_size * p.kv_token_stride;
    };
    double sums[2] = {0.0, 0.0}, weight = 0.0;
    float top = minus_inf();
    for (int base = low / kBlock * kBlock; base < high; base += kBlock) {
        const int first = max(low - base, 0), after = min(high - base, kBlock);
        __syncthreads();
        for (int i = first + warp; i < after; i += kThreads / 32) {
            const float *key = state(base + i);
            float sum = 0.0f;
            for (int d = lane; d < size; d += 32) {
                sum = fmaf(query[d], key[d], sum);
            }
            for (int mask = 16; mask > 0; mask >>= 1) {
                sum += __shfl_xor_sync(0xffffffffu, sum, mask);
            }
            sum *= p.scale;
            if (p.soft_cap > 0.0f) {
                sum = p.soft_cap * tanhf(sum / p.soft_cap);
            }
            if (lane == 0) {
                scores[i] = sum;
            }
        }
        __syncthreads();
        float highest = top;
        for (int i = first; i < after; ++i) {
            highest = fmaxf(highest, scores[i]);
        }
        const double shrink = top == minus_inf() ? 0.0 : exp(static_cast<double>(top) - static_cast<double>(highest));
        const float shift = highest == minus_inf() ? 0.0f : highest;
        top = highest;
        __syncthreads();
        if (threadIdx.x < kBlock) {
            int i = threadIdx.x;
            scores[i] = i >= first && i < after ? expf(scores[i] - shift) : 0.0f;
        }
        __syncthreads();
        float total = 0.0f, part[2] = {0.0f, 0.0f};
        for (int i = first; i < after; ++i) {
            const float w = scores[i];
            const float *value = state(base + i) + size;
            total += w;
            for (int j = 0; j < 2; ++j) {
                int d = threadIdx.x + j * kThreads;
                if (d < size) {
                    part[j] = fmaf(w, value[d], part[j]);
                }
            }
        }
        weight = weight * shrink + total;
        for (int j = 0; j < 2; ++j) {
            sums[j] = sums[j] * shrink + part[j];
        }
    }
    for (int j = 0; j < 2; ++j) {
        int d = threadIdx.x + j * kThreads;
        if (d < size) {
            out[d] = weight == 0.0 ? 0.0f : static_cast<float>(sums[j] / weight);
        }
    }
    if (threadIdx.x == 0 && p.lse != nullptr) {
        p.lse[static_cast<int64_t>(token) * p.num_heads + head] =
            weight == 0.0 ? minus_inf() : static_cast<float>(static_cast<double>(top) + log(weight));
    }
}
