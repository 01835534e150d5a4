// The model's other layers: RMSNorm, RoPE, SiLU times, embedding, rows gathered, greedy argmax. Plain rather than clever. Arithmetic is
// f32 whatever the element type; each element is rounded once. Must never know attention.
#include "common.cuh"

namespace tt {

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float sums[32];
    for (int mask = 16; mask > 0; mask >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, mask);
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < blockDim.x / 32; ++i) {
        total += sums[i];
    }
    __syncthreads();
    return total;
}

// Elements of a 16-byte vector.
template <class E>
constexpr int kWide = 16 / static_cast<int>(sizeof(E));

// Whether rows that begin at `p`, `stride` elements apart, all begin at a multiple of 16 bytes. A null is no obstacle. That it
// does not depend on the row keeps a row's result independent of where in the batch it stands.
template <class E>
__device__ __forceinline__ bool aligned(const E *p, int64_t stride) {
    return (reinterpret_cast<unsigned long long>(p) | static_cast<unsigned long long>(stride) * sizeof(E)) % 16 == 0;
}

// A vector's elements, widened, and back.
template <class E>
struct Vector {
    float x[kWide<E>];

    __device__ __forceinline__ explicit Vector(const uint4 &words) {
        const E *elements = reinterpret_cast<const E *>(&words);
#pragma unroll
        for (int i = 0; i < kWide<E>; ++i) {
            x[i] = Type<E>::widen(elements[i]);
        }
    }
    __device__ __forceinline__ uint4 narrow() const {
        uint4 words;
        E *elements = reinterpret_cast<E *>(&words);
#pragma unroll
        for (int i = 0; i < kWide<E>; ++i) {
            elements[i] = Type<E>::narrow(x[i]);
        }
        return words;
    }
};

// The same by 16-byte vectors; `vectors` of them a row. A thread's first two stay in registers.
template <class E>
__device__ __forceinline__ void rms_norm_vectors(uint4 *out, const uint4 *in, uint4 *rest, const uint4 *weight, int vectors,
                                                 int hidden, float eps) {
    constexpr int kKept = 2;
    uint4 kept[kKept], weights[kKept];
    float squares = 0.0f;
    auto take = [&](int at) {
        uint4 words = in[at];
        Vector<E> x(words);
        if (rest != nullptr) {
            const Vector<E> y(rest[at]);
#pragma unroll
            for (int i = 0; i < kWide<E>; ++i) {
                x.x[i] += y.x[i];
            }
            words = x.narrow();
            rest[at] = words;
            x = Vector<E>(words);
        }
#pragma unroll
        for (int i = 0; i < kWide<E>; ++i) {
            squares = fmaf(x.x[i], x.x[i], squares);
        }
        return words;
    };
    const int step = static_cast<int>(blockDim.x), first = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        if (first + i * step < vectors) {
            kept[i] = take(first + i * step);
            weights[i] = weight[first + i * step];
        }
    }
    for (int at = first + kKept * step; at < vectors; at += step) {
        take(at);
    }
    const float factor = rsqrtf(block_sum(squares) / static_cast<float>(hidden) + eps);
    auto put = [&](int at, const uint4 &words, const uint4 &by) {
        Vector<E> x(words);
        const Vector<E> w(by);
#pragma unroll
        for (int i = 0; i < kWide<E>; ++i) {
            x.x[i] = x.x[i] * factor * w.x[i];
        }
        out[at] = x.narrow();
    };
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        if (first + i * step < vectors) {
            put(first + i * step, kept[i], weights[i]);
        }
    }
    for (int at = first + kKept * step; at < vectors; at += step) {
        put(at, rest != nullptr ? rest[at] : in[at], weight[at]);
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight, one block a row. With a residual, x = input + residual, which is written back
// to the residual, rounded, before it is normalised. The output may be the input.
template <class E>
__device__ __forceinline__ void rms_norm(E *output, const E *input, E *residual, const E *weight, int64_t output_stride,
                                         int64_t input_stride, int64_t residual_stride, int hidden, float eps) {
    const int64_t row = blockIdx.x;
    const E *in = input + row * input_stride;
    E *rest = residual == nullptr ? nullptr : residual + row * residual_stride;
    E *out = output + row * output_stride;
    if (hidden % kWide<E> == 0 && aligned(output, output_stride) && aligned(input, input_stride) && aligned(weight, 0) &&
        (residual == nullptr || aligned(residual, residual_stride))) {
        rms_norm_vectors<E>(reinterpret_cast<uint4 *>(out), reinterpret_cast<const uint4 *>(in), reinterpret_cast<uint4 *>(rest),
                            reinterpret_cast<const uint4 *>(weight), hidden / kWide<E>, hidden, eps);
        return;
    }
    float squares = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        float x = Type<E>::widen(in[i]);
        if (rest != nullptr) {
            E sum = Type<E>::narrow(x + Type<E>::widen(rest[i]));
            rest[i] = sum;
            x = Type<E>::widen(sum);
        }
        squares = fmaf(x, x, squares);
    }
    const float factor = rsqrtf(block_sum(squares) / static_cast<float>(hidden) + eps);
    const E *from = rest != nullptr ? rest : in;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        out[i] = Type<E>::narrow(Type<E>::widen(from[i]) * factor * Type<E>::widen(weight[i]));
    }
}

// RMSNorm of each head in place, one warp a head; `weight` has head_size elements. Grid: (tokens); the heads of a packed row
// that share a weight, so that a row of queries, keys and values takes two launches.
template <class E>
__device__ __forceinline__ void head_norm(E *x, const E *weight, int64_t stride, int num_heads, int head_size, float eps) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < num_heads; head += blockDim.x / 32) {
        E *at = x + blockIdx.x * stride + static_cast<int64_t>(head) * head_size;
        float squares = 0.0f;
        for (int i = lane; i < head_size; i += 32) {
            float value = Type<E>::widen(at[i]);
            squares = fmaf(value, value, squares);
        }
        for (int mask = 16; mask > 0; mask >>= 1) {
            squares += __shfl_xor_sync(0xffffffffu, squares, mask);
        }
        const float factor = rsqrtf(squares / static_cast<float>(head_size) + eps);
        for (int i = lane; i < head_size; i += 32) {
            at[i] = Type<E>::narrow(Type<E>::widen(at[i]) * factor * Type<E>::widen(weight[i]));
        }
    }
}

__device__ __forceinline__ void rotate(float &u, float &v, float cosine, float sine) {
    const float first = u * cosine - v * sine;
    v = v * cosine + u * sine;
    u = first;
}

// Rotates the first rotary_size elements of each head in place. cos_sin is f32 [positions, rotary_size], cosines before
// sines. Pairs are (i, i + rotary_size / 2), or neighbours where interleaved. Grid: (tokens); positions are s64.
template <class E>
__device__ __forceinline__ void rope(E *x, const int64_t *positions, const float *cos_sin, int64_t stride, int num_heads,
                                     int head_size, int rotary_size, int interleaved) {
    const int64_t token = blockIdx.x;
    const int half = rotary_size / 2;
    const float *cosines = cos_sin + positions[token] * rotary_size;
    if (!interleaved && half % kWide<E> == 0 && head_size % kWide<E> == 0 && aligned(x, stride) && aligned(cos_sin, half)) {
        const int vectors = half / kWide<E>;
        for (int i = threadIdx.x; i < num_heads * vectors; i += blockDim.x) {
            const int head = i / vectors, pair = i % vectors * kWide<E>;
            uint4 *a = reinterpret_cast<uint4 *>(x + token * stride + static_cast<int64_t>(head) * head_size + pair);
            uint4 *b = a + vectors;
            Vector<E> u(*a), v(*b);
#pragma unroll
            for (int j = 0; j < kWide<E>; j += 4) {
                const float4 cosine = __ldg(reinterpret_cast<const float4 *>(cosines + pair + j));
                const float4 sine = __ldg(reinterpret_cast<const float4 *>(cosines + half + pair + j));
                rotate(u.x[j], v.x[j], cosine.x, sine.x);
                rotate(u.x[j + 1], v.x[j + 1], cosine.y, sine.y);
                rotate(u.x[j + 2], v.x[j + 2], cosine.z, sine.z);
                rotate(u.x[j + 3], v.x[j + 3], cosine.w, sine.w);
            }
            *a = u.narrow();
            *b = v.narrow();
        }
        return;
    }
    for (int i = threadIdx.x; i < num_heads * half; i += blockDim.x) {
        int head = i / half, pair = i % half;
        E *a = x + token * stride + static_cast<int64_t>(head) * head_size + (interleaved ? 2 * pair : pair);
        E *b = a + (interleaved ? 1 : half);
        float cosine = cosines[pair], sine = cosines[half + pair];
        float u = Type<E>::widen(*a), v = Type<E>::widen(*b);
        rotate(u, v, cosine, sine);
        *a = Type<E>::narrow(u);
        *b = Type<E>::narrow(v);
    }
}

__device__ __forceinline__ float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// out[r, i] = silu(in[r, i]) * in[r, size + i]. Grid: (rows).
template <class E>
__device__ __forceinline__ void silu_mul(E *output, const E *input, int64_t output_stride, int64_t input_stride, int size) {
    const int64_t row = blockIdx.x;
    const E *in = input + row * input_stride;
    E *out = output + row * output_stride;
    if (size % kWide<E> == 0 && aligned(output, output_stride) && aligned(input, input_stride)) {
        const uint4 *gates = reinterpret_cast<const uint4 *>(in), *ups = gates + size / kWide<E>;
#pragma unroll 2
        for (int i = threadIdx.x; i < size / kWide<E>; i += blockDim.x) {
            Vector<E> gate(gates[i]);
            const Vector<E> up(ups[i]);
#pragma unroll
            for (int j = 0; j < kWide<E>; ++j) {
                gate.x[j] = silu_times(gate.x[j], up.x[j]);
            }
            reinterpret_cast<uint4 *>(out)[i] = gate.narrow();
        }
        return;
    }
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        out[i] = Type<E>::narrow(silu_times(Type<E>::widen(in[i]), Type<E>::widen(in[size + i])));
    }
}

// out[t] = table[ids[t]], zeros for an id outside the vocabulary. Rows of a multiple of 16 bytes. Grid: (tokens).
template <class E>
__device__ __forceinline__ void embedding(E *output, const E *table, const int32_t *ids, int64_t output_stride, int hidden,
                                          int vocabulary) {
    const int64_t token = blockIdx.x;
    const int id = ids[token];
    const bool real = id >= 0 && id < vocabulary;
    const uint4 *from = reinterpret_cast<const uint4 *>(table + static_cast<int64_t>(real ? id : 0) * hidden);
    uint4 *to = reinterpret_cast<uint4 *>(output + token * output_stride);
    for (int i = threadIdx.x; i < hidden / kWide<E>; i += blockDim.x) {
        to[i] = real ? __ldg(from + i) : make_uint4(0, 0, 0, 0);
    }
}

// out[r] = input[indices[r]], rows of `size` elements; zeros for an index outside [0, num_rows). Vectors of 16 bytes where
// everything is aligned to them. Grid: (rows).
template <class E>
__device__ __forceinline__ void gather_rows(E *output, const E *input, const int32_t *indices, int64_t output_stride,
                                            int64_t input_stride, int size, int num_rows) {
    const int index = indices[blockIdx.x];
    const bool real = index >= 0 && index < num_rows;
    const E *from = input + (real ? index : 0) * input_stride;
    E *to = output + blockIdx.x * output_stride;
    const int wide = aligned(from, 0) && aligned(to, 0) ? size / kWide<E> : 0;
    for (int i = threadIdx.x; i < wide; i += blockDim.x) {
        reinterpret_cast<uint4 *>(to)[i] = real ? reinterpret_cast<const uint4 *>(from)[i] : make_uint4(0, 0, 0, 0);
    }
    for (int i = wide * kWide<E> + threadIdx.x; i < size; i += blockDim.x) {
        to[i] = real ? from[i] : Type<E>::narrow(0.0f);
    }
}

// The index of the largest logit, the lowest of equals; NaN never wins, and a row of nothing else gives 0. Grid: (rows).
template <class E>
__device__ __forceinline__ void argmax(int32_t *output, const E *logits, int64_t stride, int vocabulary) {
    __shared__ float values[32];
    __shared__ int indices[32];
    const E *row = logits + blockIdx.x * stride;
    float best = minus_inf();
    int at = 0x7fffffff;
    auto take = [&](float x, int i) {
        if (x > best || (x == best && i < at)) {
            best = x;
            at = i;
        }
    };
    // Vectors of 16 bytes where the row is aligned, elements for the rest.
    const int wide = aligned(row, 0) ? vocabulary / kWide<E> : 0;
#pragma unroll 4
    for (int v = threadIdx.x; v < wide; v += blockDim.x) {
        uint4 words = __ldg(reinterpret_cast<const uint4 *>(row) + v);
        const E *elements = reinterpret_cast<const E *>(&words);
#pragma unroll
        for (int j = 0; j < kWide<E>; ++j) {
            take(Type<E>::widen(elements[j]), v * kWide<E> + j);
        }
    }
    for (int i = wide * kWide<E> + threadIdx.x; i < vocabulary; i += blockDim.x) {
        take(Type<E>::widen(row[i]), i);
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        float x = __shfl_xor_sync(0xffffffffu, best, mask);
        int i = __shfl_xor_sync(0xffffffffu, at, mask);
        take(x, i);
    }
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = best;
        indices[threadIdx.x / 32] = at;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; ++w) {
            take(values[w], indices[w]);
        }
        output[blockIdx.x] = at == 0x7fffffff ? 0 : at;
    }
}

}  // namespace tt

// Grid: one block a row (token); the block's size is a multiple of 32, at most 1,024.
#define TT_LAYERS(suffix, E)                                                                                          \
    extern "C" __global__ void tt_rms_norm_##suffix(E *output, const E *input, E *residual, const E *weight,          \
                                                    int64_t output_stride, int64_t input_stride,                      \
                                                    int64_t residual_stride, int hidden, float eps) {                 \
        tt::rms_norm<E>(output, input, residual, weight, output_stride, input_stride, residual_stride, hidden, eps);  \
    }                                                                                                                 \
    extern "C" __global__ void tt_rope_##suffix(E *x, const int64_t *positions, const float *cos_sin, int64_t stride, \
                                                int num_heads, int head_size, int rotary_size, int interleaved) {     \
        tt::rope<E>(x, positions, cos_sin, stride, num_heads, head_size, rotary_size, interleaved);                   \
    }                                                                                                                 \
    extern "C" __global__ void tt_silu_mul_##suffix(E *output, const E *input, int64_t output_stride,                 \
                                                    int64_t input_stride, int size) {                                 \
        tt::silu_mul<E>(output, input, output_stride, input_stride, size);                                            \
    }                                                                                                                 \
    extern "C" __global__ void tt_embedding_##suffix(E *output, const E *table, const int32_t *ids,                   \
                                                     int64_t output_stride, int hidden, int vocabulary) {             \
        tt::embedding<E>(output, table, ids, output_stride, hidden, vocabulary);                                      \
    }                                                                                                                 \
    extern "C" __global__ void tt_head_norm_##suffix(E *x, const E *weight, int64_t stride, int num_heads,            \
                                                     int head_size, float eps) {                                      \
        tt::head_norm<E>(x, weight, stride, num_heads, head_size, eps);                                               \
    }                                                                                                                 \
    extern "C" __global__ void tt_gather_rows_##suffix(E *output, const E *input, const int32_t *indices,             \
                                                       int64_t output_stride, int64_t input_stride, int size,         \
                                                       int num_rows) {                                                \
        tt::gather_rows<E>(output, input, indices, output_stride, input_stride, size, num_rows);                      \
    }                                                                                                                 \
    extern "C" __global__ void tt_argmax_##suffix(int32_t *output, const E *logits, int64_t stride, int vocabulary) { \
        tt::argmax<E>(output, logits, stride, vocabulary);                                                            \
    }

TT_LAYERS(bf16, __nv_bfloat16)
TT_LAYERS(f16, __half)
TT_LAYERS(f32, float)
