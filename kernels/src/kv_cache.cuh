// The scatter into the KV cache. Must never know requests.
#pragma once

#include "common.cuh"

// How a vector is read and written; the ladder tries others.
#ifndef TT_SCATTER_LOAD
#define TT_SCATTER_LOAD __ldcs
#endif
#ifndef TT_SCATTER_STORE
#define TT_SCATTER_STORE(to, value) __stcs(to, value)
#endif

namespace tt {

// Elements of one vector: 16 bytes of the cache.
template <class KV>
constexpr int kVector = 16 / static_cast<int>(sizeof(KV));

// 16 bytes of cache from kVector elements, divided by `scale` where the cache is fp8.
template <class E, class KV>
struct Convert {
    struct Loaded {
        uint4 words;
    };
    static __device__ __forceinline__ Loaded load(const E *from) {
        return {TT_SCATTER_LOAD(reinterpret_cast<const uint4 *>(from))};
    }
    static __device__ __forceinline__ uint4 store(const Loaded &x, float) { return x.words; }
};

template <class E>
struct Convert<E, Fp8> {
    struct Loaded {
        uint4 words[2];
    };
    static __device__ __forceinline__ Loaded load(const E *from) {
        const uint4 *words = reinterpret_cast<const uint4 *>(from);
        return {{TT_SCATTER_LOAD(words), TT_SCATTER_LOAD(words + 1)}};
    }
    static __device__ __forceinline__ uint4 store(const Loaded &x, float scale) {
        const E *elements = reinterpret_cast<const E *>(x.words);
        unsigned out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned word = 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float2 pair = make_float2(Type<E>::widen(elements[4 * i + 2 * j]) / scale,
                                          Type<E>::widen(elements[4 * i + 2 * j + 1]) / scale);
                unsigned two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
                word |= two << (16 * j);
            }
            out[i] = word;
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
};

// Blocks of (x, y) threads: x over the vectors of a token, y over tokens. A thread takes the same vector of TOKENS tokens
// and loads all before it stores any; slots and rows are loaded side by side, so rows of slot -1 are read and dropped.
template <class E, class KV, int TOKENS>
__device__ __forceinline__ void reshape_and_cache(const TtScatterParams &p) {
    using C = Convert<E, KV>;
    const int half = p.head_size / kVector<KV>;
    const int vectors = 2 * half * p.num_kv_heads;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * TOKENS * blockDim.y + threadIdx.y;
    int64_t slots[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        int64_t token = first + i * blockDim.y;
        slots[i] = token < p.num_slots ? __ldg(p.slot_mapping + token) : -1;
    }
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        int head = v / (2 * half), part = v % (2 * half);
        bool is_value = part >= half;
        int element = head * p.head_size + (is_value ? part - half : part) * kVector<KV>;
        const E *source = static_cast<const E *>(is_value ? p.value : p.key) + element;
        const int64_t stride = is_value ? p.value_stride : p.key_stride;
        typename C::Loaded loaded[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            int64_t token = first + i * blockDim.y;
            if (token < p.num_slots) {
                loaded[i] = C::load(source + token * stride);
            }
        }
        float scale = 1.0f;
        if constexpr (IsFp8<KV>::value) {
            const float *scales = is_value ? p.v_scale : p.k_scale;
            scale = scales == nullptr ? 1.0f : __ldg(scales + static_cast<int64_t>(head) * p.kv_scale_stride);
        }
        KV *cache = static_cast<KV *>(p.kv_cache) + head * p.kv_head_stride + part * kVector<KV>;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            int64_t slot = slots[i];
            if (slot < 0) {
                continue;
            }
            // Slots fit 32 bits in all but the largest caches, and there a division may be narrow.
            int64_t block, state;
            if (slot <= 0x7fffffff) {
                block = static_cast<unsigned>(slot) / static_cast<unsigned>(p.block_size);
                state = static_cast<unsigned>(slot) % static_cast<unsigned>(p.block_size);
            } else {
                block = slot / p.block_size;
                state = slot % p.block_size;
            }
            uint4 *to = reinterpret_cast<uint4 *>(cache + block * p.kv_block_stride + state * p.kv_token_stride);
            TT_SCATTER_STORE(to, C::store(loaded[i], scale));
        }
    }
}

}  // namespace tt
