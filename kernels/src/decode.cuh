// Decode attention: items of at most 16 packed query rows, bound by memory bandwidth.
//
// A block runs one item for one KV head, and the next (each_item). Its warps share nothing until an item's end: each walks its
// own runs of 16 keys (run w, w + WARPS, ...) through a pipeline of STAGES shared-memory stages that it fills itself with
// cp.async, so that no barrier stands in the loop. The packed rows are the 16 rows of an mma tile, or, up to 8, its columns. At
// the end the warps' results are merged in warp order, and the item's partial is merged with the others of its tile by the
// block that comes last.
#pragma once

#include "attention.cuh"

// A decode reads each key and value once a step, so they may leave the L2 first. The ladder tries without the hint; heads
// of 256, short of registers, do without it, and so do fp8 caches, which gained nothing.
#ifndef TT_DECODE_ONCE
#define TT_DECODE_ONCE true
#endif
// Whether items of at most 8 packed rows have a form of their own.
#ifndef TT_DECODE_NARROW
#define TT_DECODE_NARROW true
#endif

namespace tt {

#ifdef TT_ITEMS_FIRST
constexpr bool kDecodeHeadsFirst = false;
#else
constexpr bool kDecodeHeadsFirst = true;
#endif

template <class KV, int D, int WARPS, int STAGES>
constexpr int kDecodeSharedBytes = WARPS * STAGES * 16 * kStateBytes<KV, D>;

// One item. NARROW: at most 8 packed rows, which are then the 8 columns of an mma and the keys (of a score) or dimensions
// (of an output) its 16 rows: half the work of padding rows to 16.
template <class E, class KV, int D, int WARPS, int STAGES, bool NARROW>
__device__ __forceinline__ void decode_item(const TtAttentionParams &p, const TtWorkItem &item, int kv_head,
                                            unsigned char *shared, float2 (&states)[WARPS][16], const CurrentItem &current) {
    // fp8 states are widened to f16, which is cheaper than to bf16, and exact.
    using M = typename Choose<IsFp8<KV>::value, __half, E>::type;
    using F = Fragments<M, KV, D>;
    constexpr int kRun = 16;
    constexpr int kStage = kRun * kStateBytes<KV, D>;
    constexpr int kOutStride = D + 4;
    constexpr bool kOnce = TT_DECODE_ONCE && !F::kFp8 && D <= 128;
    static_assert(kDecodeSharedBytes<KV, D, WARPS, STAGES> >= WARPS * 16 * kOutStride * 4, "the final merge fits");

    const unsigned thread = thread_index();
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int group = p.num_heads / p.num_kv_heads;
    const int rows = item.row_end - item.row_begin;
    const KeyRange range = key_range(item, group, p.sliding_window);
    const int start = range.low & ~15;
    const int runs = range.high > range.low ? (range.high - start + kRun - 1) / kRun : 0;
    const int count = runs > warp ? (runs - warp + WARPS - 1) / WARPS : 0;

    PageWalk walk;
    walk.table = p.block_table + item.row * p.block_table_stride;
    walk.block_stride = p.kv_block_stride;
    walk.token_stride = p.kv_token_stride;
    walk.first = start + warp * kRun;
    walk.step = WARPS * kRun;
    walk.count = count;
    walk.block_size = p.block_size;
    walk.lane = lane;
    walk.ask();
    walk.start();

    const KV *cache = static_cast<const KV *>(p.kv_cache) + kv_head * p.kv_head_stride;
    const unsigned stages = shared_address(shared) + warp * STAGES * kStage;
    auto issue = [&](int run, int stage) {
        if (run < count) {
            int64_t offset = walk.at(run);
            copy_states<KV, D, kRun, kOnce>(stages + stage * kStage, cache + offset, p.kv_token_stride,
                                            walk.first + run * walk.step, range.low, range.high, lane);
        }
        copy_commit();
    };
    constexpr int kAhead = STAGES > 1 ? STAGES - 1 : 1;
#pragma unroll
    for (int run = 0; run < kAhead; ++run) {
        if (STAGES > 1) {
            issue(run, run);
        }
    }

    // A thread has scores and outputs of two rows, and loads queries of kLoads: as A fragments rows g and g + 8, as a B
    // fragment row g.
    constexpr int kLoads = NARROW ? 1 : 2;
    auto row_of = [&](int half) { return NARROW ? 2 * t + half : g + 8 * half; };
    int row_low[2], row_high[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = row_of(half);
        int position = item.kv_len - item.query_len + (item.row_begin + row) / group;
        row_low[half] = max(range.low, first_key(position, p.sliding_window));
        row_high[half] = row < rows ? min(range.high, after_key(position, p.sliding_window, item.causal != 0)) : 0;
    }
    unsigned q[D / 16][2 * kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
        const int row = g + 8 * load, packed = item.row_begin + row;
        const int token = packed / group, member = packed - token * group;
        const bool real = row < rows;
        const unsigned *words = reinterpret_cast<const unsigned *>(
            static_cast<const E *>(p.query) +
            (real ? (item.first_token + token) * p.query_stride + (kv_head * group + member) * D : 0));
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            q[step][load] = real ? __ldg(words + step * 8 + (F::kFp8 ? 2 * t : t)) : 0;
            q[step][load + kLoads] = real ? __ldg(words + step * 8 + (F::kFp8 ? 2 * t + 1 : t + 4)) : 0;
        }
    }
    float scale = p.scale;
    // What a row's scores are too small by, where its queries were scaled to fit f16.
    float row_scale[2] = {1.0f, 1.0f};
    if constexpr (F::kFp8) {
        scale *= kv_scale(p.k_scale, p.kv_scale_stride, kv_head) * Type<M>::kFp8Scale;
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            if constexpr (!IsSame<E, M>::value) {
                float largest = 0.0f;
#pragma unroll
                for (int step = 0; step < D / 16; ++step) {
#pragma unroll
                    for (int i = load; i < 2 * kLoads; i += kLoads) {
                        float2 pair = Type<E>::unpack(q[step][i]);
                        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
                    }
                }
                largest = quad_max(largest);
                // 2^(14 - exponent): the largest element lands in [2^14, 2^15).
                int exponent = min(max((__float_as_int(largest) >> 23) - 127, -100), 100);
                const float factor = __int_as_float((14 - exponent + 127) << 23);
                row_scale[load] = __int_as_float((exponent - 14 + 127) << 23);
#pragma unroll
                for (int step = 0; step < D / 16; ++step) {
#pragma unroll
                    for (int i = load; i < 2 * kLoads; i += kLoads) {
                        float2 pair = Type<E>::unpack(q[step][i]);
                        q[step][i] = Type<M>::pack(pair.x * factor, pair.y * factor);
                    }
                }
            }
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                F::permute_query(q[step][load], q[step][load + kLoads]);
            }
        }
        if constexpr (NARROW && !IsSame<E, M>::value) {
            // From the lanes that loaded the rows that this one scores.
            const float own = row_scale[0];
            row_scale[0] = __shfl_sync(0xffffffffu, own, 8 * t);
            row_scale[1] = __shfl_sync(0xffffffffu, own, 8 * t + 4);
        }
    }
    const Scorer scorer(scale, p.soft_cap);

    // Which of a thread's two rows, and which key of the run, score i is of; which row output element j of a tile is of.
    constexpr int kScores = NARROW ? 4 : 8;
    auto score_half = [](int i) { return NARROW ? i & 1 : (i >> 1) & 1; };
    auto score_key = [&](int i) { return NARROW ? g + 8 * (i >> 1) : (i >> 2) * 8 + 2 * t + (i & 1); };
    auto output_half = [](int j) { return NARROW ? j & 1 : j >> 1; };
    auto row_max = [](float x) {
#pragma unroll
        for (int mask = NARROW ? 4 : 1; mask <= (NARROW ? 16 : 2); mask <<= 1) {
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
        }
        return x;
    };
    constexpr int kTiles = NARROW ? D / 16 : D / 8;
    float o[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    }
    float top[2] = {minus_inf(), minus_inf()}, weight[2] = {0.0f, 0.0f};
    const unsigned key_lane = F::key_lane(lane), value_lane = F::value_lane(lane);

    int stage = 0, fill = kAhead % STAGES;
    for (int run = 0; run < count; ++run) {
        if constexpr (STAGES > 1) {
            copy_wait<STAGES - 2>();
            __syncwarp();
            // The stage that is filled now was read in the last round, before the barrier.
            issue(run + kAhead, fill);
            fill = fill + 1 == STAGES ? 0 : fill + 1;
        } else {
            issue(run, 0);
            copy_wait<0>();
            __syncwarp();
        }
        const unsigned keys = stages + stage * kStage + key_lane, values = stages + stage * kStage + value_lane;
        // Two sums a tile, of even and odd steps: shorter chains.
        float even[kScores / 4][4] = {}, odd[kScores / 4][4] = {};
#pragma unroll
        for (int span = 0; span < D / F::kSpan; ++span) {
            unsigned b[F::kSpan / 16][2][2];
            F::keys(b, keys, span);
#pragma unroll
            for (int i = 0; i < F::kSpan / 16; ++i) {
                int step = span * (F::kSpan / 16) + i;
                if constexpr (NARROW) {
                    const unsigned a[4] = {b[i][0][0], b[i][1][0], b[i][0][1], b[i][1][1]};
                    Type<M>::mma(step % 2 ? odd[0] : even[0], a, q[step][0], q[step][1]);
                } else {
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        Type<M>::mma(step % 2 ? odd[tile] : even[tile], q[step], b[i][tile][0], b[i][tile][1]);
                    }
                }
            }
        }
        float s[kScores];
        const int key = walk.first + run * walk.step;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            float score = even[i / 4][i % 4] + odd[i / 4][i % 4];
            if constexpr (F::kFp8 && !IsSame<E, M>::value) {
                score *= row_scale[score_half(i)];
            }
            s[i] = scorer.score(score);
        }
        if (key < range.low_all || key + kRun > range.high_all) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                int at = key + score_key(i);
                if (at < row_low[score_half(i)] || at >= row_high[score_half(i)]) {
                    s[i] = minus_inf();
                }
            }
        }
        float shift[2], highest[2] = {top[0], top[1]};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            highest[score_half(i)] = fmaxf(highest[score_half(i)], s[i]);
        }
        bool raised = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            highest[half] = row_max(highest[half]);
            shift[half] = highest[half] == minus_inf() ? 0.0f : highest[half];
            raised |= highest[half] > top[half];
        }
        if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float shrink = exp2_approx(top[half] - shift[half]);
                top[half] = highest[half];
                weight[half] *= shrink;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (output_half(j) == half) {
                            o[i][j] *= shrink;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            s[i] = exp2_approx(s[i] - shift[score_half(i)]);
            weight[score_half(i)] += s[i];
        }
        unsigned w[kScores / 2];
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            w[i] = Type<M>::pack(s[2 * i], s[2 * i + 1]);
            if constexpr (NARROW) {
                w[i] = transpose_matrix(w[i]);
            }
        }
#pragma unroll
        for (int span = 0; span < D / F::kSpan; ++span) {
            unsigned b[F::kSpan / 16][2][2];
            F::values(b, values, span);
#pragma unroll
            for (int i = 0; i < F::kSpan / 16; ++i) {
                int step = span * (F::kSpan / 16) + i;
                if constexpr (NARROW) {
                    const unsigned a[4] = {b[i][0][0], b[i][1][0], b[i][0][1], b[i][1][1]};
                    Type<M>::mma(o[step], a, w[0], w[1]);
                } else {
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        Type<M>::mma(o[step * 2 + tile], w, b[i][tile][0], b[i][tile][1]);
                    }
                }
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if constexpr (STAGES == 1) {
            __syncwarp();
        }
    }
    copy_wait<0>();
    // A warp's result goes where another warp's stages may lie: all must be done reading.
    __syncthreads();

    float *out_shared = reinterpret_cast<float *>(shared) + warp * 16 * kOutStride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = weight[half];
#pragma unroll
        for (int mask = NARROW ? 4 : 1; mask <= (NARROW ? 16 : 2); mask <<= 1) {
            total += __shfl_xor_sync(0xffffffffu, total, mask);
        }
        const int row = row_of(half);
        if (row >= rows) {
            continue;
        }
        if ((NARROW ? g : t) == 0) {
            states[warp][row] = make_float2(top[half], total);
        }
        if constexpr (NARROW) {
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                out_shared[row * kOutStride + 16 * i + (F::kFp8 ? 2 * g : g)] = o[i][half];
                out_shared[row * kOutStride + 16 * i + (F::kFp8 ? 2 * g + 1 : g + 8)] = o[i][2 + half];
            }
        } else {
            F::store_columns(o, half, lane, [&](int column, float x, float y) {
                *reinterpret_cast<float2 *>(out_shared + row * kOutStride + column) = make_float2(x, y);
            });
        }
    }
    __syncthreads();

    float value_scale = 1.0f;
    if constexpr (F::kFp8) {
        value_scale = kv_scale(p.v_scale, p.kv_scale_stride, kv_head) * Type<M>::kFp8Scale;
    }
    // Read again where it is needed again, and not kept in registers over the keys.
    const TtWorkItem done = current.item;
    const int head_of_item = current.kv_head;
    const bool whole = done.num_slots <= 1;
    for (int i = thread; i < rows * (D / 4); i += WARPS * 32) {
        int row = i / (D / 4), column = i % (D / 4) * 4;
        float high = minus_inf();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            high = fmaxf(high, states[w][row].x);
        }
        float shift = high == minus_inf() ? 0.0f : high, total = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float2 state = states[w][row];
            float factor = exp2f(state.x - shift);
            const float4 x =
                *reinterpret_cast<const float4 *>(reinterpret_cast<float *>(shared) + (w * 16 + row) * kOutStride + column);
            total = fmaf(factor, state.y, total);
            sum.x = fmaf(factor, x.x, sum.x);
            sum.y = fmaf(factor, x.y, sum.y);
            sum.z = fmaf(factor, x.z, sum.z);
            sum.w = fmaf(factor, x.w, sum.w);
        }
        float inverse = total == 0.0f ? 0.0f : value_scale / total;
        sum = make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
        float lse = total == 0.0f ? minus_inf() : shift + log2f(total);
        if (whole) {
            int packed = done.row_begin + row;
            int64_t token = done.first_token + packed / group;
            int head = head_of_item * group + packed % group;
            E *out = static_cast<E *>(p.output) + token * p.output_stride + head * D + column;
            *reinterpret_cast<uint2 *>(out) = make_uint2(Type<E>::pack(sum.x, sum.y), Type<E>::pack(sum.z, sum.w));
            if (column == 0 && p.lse != nullptr) {
                p.lse[token * p.num_heads + head] = lse * kLn2;
            }
        } else {
            int64_t at = partial_index(p, done.slot, head_of_item, row);
            *reinterpret_cast<float4 *>(p.partial_output + at * D + column) = sum;
            if (column == 0) {
                p.partial_lse[at] = lse;
            }
        }
    }
    if (!whole) {
        merge_if_last<E, D, WARPS * 32>(p, done, head_of_item, group);
    }
}

template <class E, class KV, int D, int WARPS, int STAGES>
__device__ __forceinline__ void decode_attention(const TtAttentionParams &p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float2 states[WARPS][16];
    __shared__ CurrentItem current;
    each_item<E, D, kDecodeHeadsFirst>(p, current, [&](const TtWorkItem &item, int kv_head) {
        if (TT_DECODE_NARROW && item.row_end - item.row_begin <= 8) {
            decode_item<E, KV, D, WARPS, STAGES, true>(p, item, kv_head, shared, states, current);
        } else {
            decode_item<E, KV, D, WARPS, STAGES, false>(p, item, kv_head, shared, states, current);
        }
    });
}

}  // namespace tt
