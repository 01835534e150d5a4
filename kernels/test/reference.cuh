// The f64 reference of attention, and the comparison with it. It shares nothing with the kernels but the meaning of a batch.
#pragma once

#include "device.h"

namespace {

__device__ double element(const void *from, int64_t at, int kind) {
    if (kind == 0) {
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(from)[at]);
    }
    if (kind == 1) {
        return __half2float(static_cast<const __half *>(from)[at]);
    }
    if (kind == 2) {
        return static_cast<const float *>(from)[at];
    }
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<const __nv_fp8_storage_t *>(from)[at], __NV_E4M3)));
}

struct Reference {
    const void *query, *cache;
    const int32_t *table, *query_start_loc, *seq_lens, *row_of_token, *causal;
    double *output, *lse;
    const float *k_scale, *v_scale;
    int64_t block_stride, head_stride, token_stride, width;
    int kind, cache_kind, heads, kv_heads, size, page, window;
    double scale, cap;
};

// One block of 128 threads per (token, query head).
__global__ void reference_kernel(Reference r) {
    __shared__ double query[256], scores[128];
    const int token = blockIdx.x, head = blockIdx.y, kv_head = head / (r.heads / r.kv_heads), row = r.row_of_token[token];
    double out[2] = {0, 0}, weight = 0, top = -INFINITY;
    if (row >= 0) {
        int begin = r.query_start_loc[row], length = r.query_start_loc[row + 1] - begin, keys = r.seq_lens[row];
        int position = keys - length + token - begin;
        int low = r.window > 0 ? max(0, position - r.window + 1) : 0;
        int high = r.causal[row] ? min(keys, position + 1) : r.window > 0 ? min(keys, position + r.window) : keys;
        for (int d = threadIdx.x; d < r.size; d += 128) {
            query[d] = element(r.query, (static_cast<int64_t>(token) * r.heads + head) * r.size + d, r.kind);
        }
        auto at = [&](int key) {
            return r.table[row * r.width + key / r.page] * r.block_stride + key % r.page * r.token_stride +
                   kv_head * r.head_stride;
        };
        for (int base = low; base < high; base += 128) {
            int count = min(128, high - base);
            __syncthreads();
            if (threadIdx.x < count) {
                int64_t from = at(base + threadIdx.x);
                double sum = 0;
                for (int d = 0; d < r.size; ++d) {
                    sum += query[d] * element(r.cache, from + d, r.cache_kind);
                }
                sum *= r.scale * (r.k_scale ? r.k_scale[kv_head] : 1.0f);
                scores[threadIdx.x] = r.cap > 0 ? r.cap * tanh(sum / r.cap) : sum;
            }
            __syncthreads();
            double highest = top;
            for (int i = 0; i < count; ++i) {
                highest = fmax(highest, scores[i]);
            }
            double shrink = top == -INFINITY ? 0.0 : exp(top - highest);
            top = highest;
            __syncthreads();
            if (threadIdx.x < count) {
                scores[threadIdx.x] = exp(scores[threadIdx.x] - highest);
            }
            __syncthreads();
            weight *= shrink;
            out[0] *= shrink;
            out[1] *= shrink;
            for (int i = 0; i < count; ++i) {
                int64_t from = at(base + i) + r.size;
                weight += scores[i];
                for (int j = 0; j < 2; ++j) {
                    int d = threadIdx.x + 128 * j;
                    if (d < r.size) {
                        out[j] += scores[i] * element(r.cache, from + d, r.cache_kind);
                    }
                }
            }
        }
    }
    int64_t index = static_cast<int64_t>(token) * r.heads + head;
    for (int j = 0; j < 2; ++j) {
        int d = threadIdx.x + 128 * j;
        if (d < r.size) {
            r.output[index * r.size + d] = weight == 0 ? 0 : out[j] / weight * (r.v_scale ? r.v_scale[kv_head] : 1.0f);
        }
    }
    if (threadIdx.x == 0) {
        r.lse[index] = weight == 0 ? -INFINITY : top + log(weight);
    }
}

// Of one row: squared error, squared reference, largest error and largest reference.
struct Sums {
    double x, y, z, w;
};

// One warp per (token, head): squared error, squared norm, largest error, largest magnitude.
__global__ void compare_kernel(const void *got, const double *want, Sums *out, int kind, int size, int64_t rows) {
    int64_t row = blockIdx.x * 4ll + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    double error = 0, norm = 0, worst = 0, largest = 0;
    for (int d = threadIdx.x % 32; d < size; d += 32) {
        double w = want[row * size + d], x = element(got, row * size + d, kind), difference = x - w;
        difference = difference == difference ? fabs(difference) : INFINITY;
        error += difference * difference;
        norm += w * w;
        worst = fmax(worst, difference);
        largest = fmax(largest, fabs(w));
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        error += __shfl_xor_sync(0xffffffffu, error, mask);
        norm += __shfl_xor_sync(0xffffffffu, norm, mask);
        worst = fmax(worst, __shfl_xor_sync(0xffffffffu, worst, mask));
        largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    }
    if (threadIdx.x % 32 == 0) {
        out[row] = Sums{error, norm, worst, largest};
    }
}

// NaN into every state that no query of its request sees: other requests' blocks, tails of pages, keys before a window.
__global__ void poison_kernel(unsigned char *cache, const unsigned char *seen, int64_t block_stride, int64_t head_stride,
                              int64_t token_stride, int page, int heads, int content_bytes, int bytes) {
    int64_t slot = blockIdx.x;
    if (seen[slot]) {
        return;
    }
    for (int i = threadIdx.x; i < heads * content_bytes; i += blockDim.x) {
        int head = i / content_bytes;
        cache[(slot / page * block_stride + slot % page * token_stride + head * head_stride) * bytes + i % content_bytes] =
            0xff;
    }
}

}  // namespace
