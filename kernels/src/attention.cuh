// What the decode and prefill kernels have in common: which keys an item sees, how its pages are found, fragments of keys
// and values for the tensor cores, scores, and the merge of partial results. Must never know how items were planned.
#pragma once

#include "common.cuh"

namespace tt {

// The state of one key and value in shared memory: 2 * D elements and 16 bytes, so that eight consecutive keys start in
// different banks.
template <class KV, int D>
constexpr int kStateBytes = 2 * D * static_cast<int>(sizeof(KV)) + 16;

// Keys [low, high) that some packed row of the item sees, and the range [low_all, high_all) that each of them sees.
struct KeyRange {
    int low, high, low_all, high_all;
};

// Keys of one query position. Bottom-right aligned: the request's last token stands at its last key. A window of w reaches
// back w - 1 keys and, where attention is not causal, as far ahead.
__device__ __forceinline__ int first_key(int position, int window) { return window > 0 ? position - window + 1 : 0; }
__device__ __forceinline__ int after_key(int position, int window, bool causal) {
    return causal ? position + 1 : (window > 0 ? position + window : 0x7fffffff);
}

__device__ __forceinline__ KeyRange key_range(const TtWorkItem &item, int heads_per_kv_head, int window) {
    int shift = item.kv_len - item.query_len;
    int first = item.row_begin / heads_per_kv_head + shift;
    int last = (item.row_end - 1) / heads_per_kv_head + shift;
    int end = min(item.key_end, item.kv_len);
    KeyRange range;
    range.low = max(item.key_begin, first_key(first, window));
    range.low_all = max(item.key_begin, first_key(last, window));
    range.high = min(end, after_key(last, window, item.causal != 0));
    range.high_all = min(end, after_key(first, window, item.causal != 0));
    return range;
}

// threadIdx.x, read anew at every call: what derives from it is not kept in registers from one item of a block to the next.
__device__ __forceinline__ unsigned thread_index() {
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ TtWorkItem load_item(const TtWorkItem *from) {
    union {
        int4 words[3];
        TtWorkItem item;
    } u;
    const int4 *words = reinterpret_cast<const int4 *>(from);
    u.words[0] = __ldg(words);
    u.words[1] = __ldg(words + 1);
    u.words[2] = __ldg(words + 2);
    return u.item;
}

__device__ __forceinline__ TtWorkHeader load_header(const TtWorkHeader *from) {
    // Volatile: read anew for every item.
    int4 words;
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(from));
    return TtWorkHeader{words.x, words.y, words.z, words.w};
}

// What a block is at, in shared memory, where it takes no registers while keys are walked: written by thread 0, read after the
// next barrier.
struct __align__(16) CurrentItem {
    TtWorkItem item;
    int kv_head;
    unsigned next;  // the block's next pair
};

// Where a warp's runs of keys stand in the cache. Run j starts at key first + j * step; a run never leaves its page. Block
// ids are read 32 at a time, one batch ahead of their use.
struct PageWalk {
    const int32_t *table;
    int64_t block_stride, token_stride;
    int first, step, count, block_size, lane;
    int64_t offset;
    int first_id, next_id;

    __device__ __forceinline__ int fetch(int run) const {
        return run < count ? __ldg(table + (first + run * step) / block_size) : 0;
    }
    __device__ __forceinline__ int64_t locate(int id, int run) const {
        int key = first + run * step;
        return static_cast<int64_t>(id) * block_stride + static_cast<int64_t>(key % block_size) * token_stride;
    }
    // Asks for the first block ids; `start` waits for them.
    __device__ __forceinline__ void ask() {
        first_id = fetch(lane);
        next_id = fetch(32 + lane);
    }
    __device__ __forceinline__ void start() { offset = locate(first_id, lane); }
    // Element offset of run `run`. All lanes, runs in order, none left out.
    __device__ __forceinline__ int64_t at(int run) {
        if (run > 0 && (run & 31) == 0) {
            offset = locate(next_id, run + lane);
            next_id = fetch(run + 32 + lane);
        }
        return __shfl_sync(0xffffffffu, offset, run & 31);
    }
};

// Copies ROWS states to shared memory, by one warp. States outside [low, high) become zeros: nothing is read there.
template <class KV, int D, int ROWS, bool ONCE>
__device__ __forceinline__ void copy_states(unsigned to, const KV *from, int64_t token_stride, int key, int low, int high,
                                            int lane) {
    constexpr int kChunks = 2 * D * static_cast<int>(sizeof(KV)) / 16;
    static_assert(ROWS * kChunks % 32 == 0, "a warp copies whole rounds");
#pragma unroll
    for (int i = 0; i < ROWS * kChunks / 32; ++i) {
        int index = i * 32 + lane;
        int row = index / kChunks, chunk = index % kChunks;
        bool valid = key + row >= low && key + row < high;
        const unsigned char *source = reinterpret_cast<const unsigned char *>(from + row * token_stride) + chunk * 16;
        copy_async16<ONCE>(to + row * kStateBytes<KV, D> + chunk * 16, source, valid);
    }
}

// Fragments of 16 keys (or values) as B operands of element type E. With fp8, the head's dimensions are permuted within
// each 16 (`permute_query` does the same to queries), and so are the output's columns (`store_columns` undoes it).
template <class E, class KV, int D>
struct Fragments {
    static constexpr bool kFp8 = IsFp8<KV>::value;
    static constexpr int kState = kStateBytes<KV, D>;
    // Dimensions that one ldmatrix covers.
    static constexpr int kSpan = kFp8 ? 32 : 16;

    static __device__ __forceinline__ unsigned key_lane(int lane) {
        return (((lane >> 4) << 3) + (lane & 7)) * kState + ((lane >> 3) & 1) * 16;
    }
    static __device__ __forceinline__ unsigned value_lane(int lane) {
        return ((((lane >> 3) & 1) << 3) + (lane & 7)) * kState + D * static_cast<int>(sizeof(KV)) + (lane >> 4) * 16;
    }

    // Keys [0, 16) of dimensions [span * kSpan, + kSpan): b[step][tile][2], step of 16 dimensions, tile of 8 keys.
    static __device__ __forceinline__ void keys(unsigned (&b)[kSpan / 16][2][2], unsigned address, int span) {
        unsigned r[4];
        load_matrix4(r, address + span * 32);
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Type<E>::from_fp8(r[i], b[i & 1][i >> 1][0], b[i & 1][i >> 1][1]);
            }
        } else {
            b[0][0][0] = r[0];
            b[0][0][1] = r[1];
            b[0][1][0] = r[2];
            b[0][1][1] = r[3];
        }
    }

    // Values of keys [0, 16), dimensions [span * kSpan, + kSpan): b[step][tile][2], tile of 8 output columns.
    static __device__ __forceinline__ void values(unsigned (&b)[kSpan / 16][2][2], unsigned address, int span) {
        unsigned r[4];
        load_matrix4_transposed(r, address + span * 32);
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Type<E>::from_fp8(r[i], b[i >> 1][0][i & 1], b[i >> 1][1][i & 1]);
            }
        } else {
            b[0][0][0] = r[0];
            b[0][0][1] = r[1];
            b[0][1][0] = r[2];
            b[0][1][1] = r[3];
        }
    }

    // Elements 4j .. 4j + 3 of a 16, as two words, to what an A fragment takes for columns 2j, 2j + 1 and 8 + 2j, 9 + 2j.
    static __device__ __forceinline__ void permute_query(unsigned &a, unsigned &b) {
        unsigned low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
        a = low;
        b = high;
    }

    // Calls store(column, a, b) for pairs of neighbouring columns of one row: `half` 0 is row lane / 4, 1 the row 8 below.
    template <class Store>
    static __device__ __forceinline__ void store_columns(const float (&o)[D / 8][4], int half, int lane, Store store) {
        int t = lane & 3;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const float *even = &o[2 * i][2 * half], *odd = &o[2 * i + 1][2 * half];
            if constexpr (kFp8) {
                store(16 * i + 4 * t, even[0], odd[0]);
                store(16 * i + 4 * t + 2, even[1], odd[1]);
            } else {
                store(16 * i + 2 * t, even[0], even[1]);
                store(16 * i + 8 + 2 * t, odd[0], odd[1]);
            }
        }
    }
};

// Scores in log2 units.
struct Scorer {
    float scale_log2;  // no cap: score * scale_log2
    float inner;       // cap: cap_log2 * tanh(score * scale / cap), the argument doubled and in log2 units
    float cap_log2;
    bool capped;

    __device__ __forceinline__ Scorer(float scale, float cap) {
        capped = cap > 0.0f;
        scale_log2 = scale * kLog2e;
        cap_log2 = cap * kLog2e;
        inner = capped ? 2.0f * kLog2e * scale / cap : 0.0f;
    }
    __device__ __forceinline__ float score(float raw) const { return capped ? cap(raw) : raw * scale_log2; }
    __device__ __forceinline__ float cap(float score) const {
        // tanh(x) = 1 - 2 / (1 + e^2x): an absolute error near 1e-7, which a hardware tanh is far from.
        return cap_log2 * (1.0f - __fdividef(2.0f, 1.0f + exp2_approx(score * inner)));
    }
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float kv_scale(const float *scale, int stride, int kv_head) {
    return scale == nullptr ? 1.0f : __ldg(scale + static_cast<int64_t>(kv_head) * stride);
}

// Tokens that no request covers: zeros, and an LSE of minus infinity. Spread over the grid.
template <class E, int D>
__device__ __forceinline__ void clear_tail(const TtAttentionParams &p, const TtWorkHeader &header) {
    for (int token = header.tail_begin + blockIdx.x; token < header.tail_end; token += gridDim.x) {
        E *out = static_cast<E *>(p.output) + token * p.output_stride;
        for (int i = threadIdx.x; i < p.num_heads * (D / 8); i += blockDim.x) {
            reinterpret_cast<uint4 *>(out)[i] = make_uint4(0, 0, 0, 0);
        }
        if (p.lse != nullptr) {
            for (int i = threadIdx.x; i < p.num_heads; i += blockDim.x) {
                p.lse[static_cast<int64_t>(token) * p.num_heads + i] = minus_inf();
            }
        }
    }
}

// Calls run(item, kv_head), by the whole block, for each of its pairs of an item and a KV head: of all pairs, numbered so that
// the heads of one item are neighbours (not HEADS_FIRST: the items of one head are), block b runs b, b + gridDim.x, ... A full
// grid has a block for every pair of the launch promise; a smaller one is for promises far above what most steps have. `run`
// passes a barrier before it reads `current`. What an item does not need while it runs is read anew afterwards: the loop takes
// no registers.
template <class E, int D, bool HEADS_FIRST, class Run>
__device__ __forceinline__ void each_item(const TtAttentionParams &p, CurrentItem &current, Run run) {
    unsigned pair = blockIdx.x;
    while (true) {
        const int index = HEADS_FIRST ? pair / p.num_kv_heads : pair % p.max_work_items;
        const int kv_head = HEADS_FIRST ? pair % p.num_kv_heads : pair / p.max_work_items;
        const TtWorkItem item = load_item(p.items + index);
        const TtWorkHeader header = load_header(p.header);
        if (header.tail_begin < header.tail_end && pair < gridDim.x) {
            clear_tail<E, D>(p, header);
        }
        // Of the pairs that follow none has an item either. (Not HEADS_FIRST, which is for full grids.)
        if (index >= header.num_items) {
            return;
        }
        if (thread_index() == 0) {
            current.item = item;
            current.kv_head = kv_head;
            current.next = pair + gridDim.x;
        }
        run(item, kv_head);
        const unsigned pairs = static_cast<unsigned>(p.num_kv_heads) * p.max_work_items;
        if (gridDim.x >= pairs) {
            return;
        }
        // The item before is done with shared memory; then `current` is read, and free.
        __syncthreads();
        pair = current.next;
        __syncthreads();
        if (pair >= pairs) {
            return;
        }
    }
}

// Index of a partial result's row.
__device__ __forceinline__ int64_t partial_index(const TtAttentionParams &p, int slot, int kv_head, int row) {
    return (static_cast<int64_t>(slot) * p.num_kv_heads + kv_head) * p.partial_rows + row;
}

// Called by a whole block once its partial result is written. The block that comes last for its tile and head merges the
// tile's partials, in slot order whichever block that is, and leaves the counter zero.
template <class E, int D, int THREADS>
__device__ __forceinline__ void merge_if_last(const TtAttentionParams &p, const TtWorkItem &item, int kv_head,
                                              int heads_per_kv_head) {
    __shared__ int last;
    __threadfence();
    __syncthreads();
    const int thread = thread_index();
    if (thread == 0) {
        int *counter = p.merge_counters + static_cast<int64_t>(item.first_slot) * p.num_kv_heads + kv_head;
        last = atomicAdd(counter, 1) == item.num_slots - 1;
        if (last) {
            *counter = 0;
        }
    }
    __syncthreads();
    if (!last) {
        return;
    }
    __threadfence();
    constexpr int kVectors = (D / 4 + 31) / 32;
    int warp = thread / 32, lane = thread % 32;
    int64_t slot_step = static_cast<int64_t>(p.num_kv_heads) * p.partial_rows;
    for (int row = warp; row < item.row_end - item.row_begin; row += THREADS / 32) {
        int64_t base = partial_index(p, item.first_slot, kv_head, row);
        float top = minus_inf();
        for (int slot = lane; slot < item.num_slots; slot += 32) {
            top = fmaxf(top, __ldcg(p.partial_lse + base + slot * slot_step));
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
        }
        float shift = top == minus_inf() ? 0.0f : top;
        float4 sum[kVectors];
        float weights = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            sum[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        for (int first = 0; first < item.num_slots; first += 32) {
            float mine = first + lane < item.num_slots
                             ? exp2f(__ldcg(p.partial_lse + base + (first + lane) * slot_step) - shift)
                             : 0.0f;
            weights += mine;
            int count = min(32, item.num_slots - first);
#pragma unroll 8
            for (int i = 0; i < count; ++i) {
                float weight = __shfl_sync(0xffffffffu, mine, i);
                const float4 *from =
                    reinterpret_cast<const float4 *>(p.partial_output + (base + (first + i) * slot_step) * D);
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (v * 32 + lane < D / 4) {
                        float4 x = __ldcg(from + v * 32 + lane);
                        sum[v].x = fmaf(weight, x.x, sum[v].x);
                        sum[v].y = fmaf(weight, x.y, sum[v].y);
                        sum[v].z = fmaf(weight, x.z, sum[v].z);
                        sum[v].w = fmaf(weight, x.w, sum[v].w);
                    }
                }
            }
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
            weights += __shfl_xor_sync(0xffffffffu, weights, mask);
        }
        float inverse = weights == 0.0f ? 0.0f : 1.0f / weights;
        int packed = item.row_begin + row;
        int64_t token = item.first_token + packed / heads_per_kv_head;
        int head = kv_head * heads_per_kv_head + packed % heads_per_kv_head;
        E *out = static_cast<E *>(p.output) + token * p.output_stride + head * D;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (v * 32 + lane < D / 4) {
                uint2 pair = make_uint2(Type<E>::pack(sum[v].x * inverse, sum[v].y * inverse),
                                        Type<E>::pack(sum[v].z * inverse, sum[v].w * inverse));
                reinterpret_cast<uint2 *>(out)[v * 32 + lane] = pair;
            }
        }
        if (p.lse != nullptr && lane == 0) {
            p.lse[token * p.num_heads + head] = weights == 0.0f ? minus_inf() : (shift + log2f(weights)) * kLn2;
        }
    }
}

}  // namespace tt
