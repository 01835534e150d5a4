// Prefill and mixed attention: items of up to WARPS * BLOCKS * 16 packed query rows, on the tensor cores (mma.sync).
//
// A block runs one item for one KV head, and the next (each_item). Each warp owns BLOCKS * 16 rows and walks all keys of the
// item, KEYS at a time; the queries stay in shared memory, keys and values come through two stages filled by cp.async. Each B
// fragment read from shared memory serves BLOCKS mma row blocks: with two, the tensor cores and not shared memory set the pace.
//
// A row's sums depend on its own keys of the item's range alone, bit for bit: they are taken in runs of KEYS counted from the
// range's begin, whatever the item's rows, and a run that a row does not see leaves its sums as they are. Batch invariance rests
// on this.
//
// The seam for wgmma and TMA is this function: a kernel with the same arguments and items may take its place.
#pragma once

#include "attention.cuh"

namespace tt {

template <class KV, int D, int WARPS, int BLOCKS, int KEYS>
constexpr int kPrefillSharedBytes = WARPS * BLOCKS * 16 * (D * 2 + 16) + 2 * KEYS * kStateBytes<KV, D>;

// One item.
template <class E, class KV, int D, int WARPS, int BLOCKS, int KEYS>
__device__ __forceinline__ void prefill_item(const TtAttentionParams &p, const TtWorkItem &item, int kv_head,
                                             unsigned char *shared, const CurrentItem &current) {
    using F = Fragments<E, KV, D>;
    constexpr int kRows = WARPS * BLOCKS * 16;
    constexpr int kQueryBytes = D * 2 + 16;
    constexpr int kStage = KEYS * kStateBytes<KV, D>;
    constexpr int kRun = KEYS / WARPS;
    static_assert(KEYS % WARPS == 0 && 16 % kRun == 0, "a warp's run of keys stays in a page");

    const unsigned thread = thread_index();
    const int warp = thread / 32, lane = thread % 32;
    const int group = p.num_heads / p.num_kv_heads;
    const int rows = item.row_end - item.row_begin;
    const int window = p.sliding_window;
    const bool causal = item.causal != 0;
    const KeyRange range = key_range(item, group, window);
    const int begin = item.key_begin & ~15;
    const int start = begin + ((range.low - begin) & ~(KEYS - 1));
    const int tiles = range.high > range.low ? (range.high - start + KEYS - 1) / KEYS : 0;

    PageWalk walk;
    walk.table = p.block_table + item.row * p.block_table_stride;
    walk.block_stride = p.kv_block_stride;
    walk.token_stride = p.kv_token_stride;
    walk.first = start + warp * kRun;
    walk.step = KEYS;
    // Runs that begin before the last key: no block id is read beyond them.
    walk.count = range.high > walk.first ? (range.high - walk.first + KEYS - 1) / KEYS : 0;
    walk.block_size = p.block_size;
    walk.lane = lane;
    walk.ask();

    const KV *cache = static_cast<const KV *>(p.kv_cache) + kv_head * p.kv_head_stride;
    const unsigned queries = shared_address(shared);
    const unsigned stages = queries + kRows * kQueryBytes;
    auto issue = [&](int tile) {
        if (tile < tiles) {
            int64_t offset = walk.at(tile);
            copy_states<KV, D, kRun, false>(stages + (tile & 1) * kStage + warp * kRun * kStateBytes<KV, D>, cache + offset,
                                     p.kv_token_stride, walk.first + tile * KEYS, range.low, range.high, lane);
        }
        copy_commit();
    };

    for (int i = thread; i < kRows * (D / 8); i += WARPS * 32) {
        int row = i / (D / 8), chunk = i % (D / 8);
        int packed = item.row_begin + row;
        int token = packed / group, head = kv_head * group + packed - token * group;
        bool real = row < rows;
        const E *from = static_cast<const E *>(p.query) +
                        (real ? (item.first_token + token) * p.query_stride + head * D + chunk * 8 : 0);
        if constexpr (F::kFp8) {
            // Dimensions permuted as the keys' are: of each 16, words (2j, 2j + 1) go to words (j, j + 4).
            uint4 x = real ? __ldg(reinterpret_cast<const uint4 *>(from)) : make_uint4(0, 0, 0, 0);
            unsigned *to = reinterpret_cast<unsigned *>(shared + row * kQueryBytes + (chunk / 2) * 32) + (chunk % 2) * 2;
            F::permute_query(x.x, x.y);
            F::permute_query(x.z, x.w);
            to[0] = x.x;
            to[4] = x.y;
            to[1] = x.z;
            to[5] = x.w;
        } else {
            copy_async16<true>(queries + row * kQueryBytes + chunk * 16, from, real);
        }
    }
    walk.start();
    issue(0);

    float scale = p.scale, value_scale = 1.0f;
    if constexpr (F::kFp8) {
        scale *= kv_scale(p.k_scale, p.kv_scale_stride, kv_head) * Type<E>::kFp8Scale;
        value_scale = kv_scale(p.v_scale, p.kv_scale_stride, kv_head) * Type<E>::kFp8Scale;
    }
    const Scorer scorer(scale, p.soft_cap);
    // Scores are scaled on the way into the exponential, unless a cap, or a scale that turns their order, forbids it.
    const bool direct = scorer.capped || !(scorer.scale_log2 > 0.0f);
    const float to_log2 = direct ? 1.0f : scorer.scale_log2;
    float o[BLOCKS][D / 8][4];
    float top[BLOCKS][2], weight[BLOCKS][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            o[block][i][0] = o[block][i][1] = o[block][i][2] = o[block][i][3] = 0.0f;
        }
        top[block][0] = top[block][1] = minus_inf();
        weight[block][0] = weight[block][1] = 0.0f;
    }
    const int t = lane & 3;
    const unsigned query_lane =
        queries + (warp * BLOCKS * 16 + (lane & 15)) * kQueryBytes + (lane >> 4) * 16;
    const unsigned key_lane = F::key_lane(lane), value_lane = F::value_lane(lane);
    // A warp without rows only helps to copy.
    const bool busy = warp * BLOCKS * 16 < rows;

    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<0>();
        __syncthreads();
        // The stage that is filled now was read in the last round, before the barrier.
        issue(tile + 1);
        if (!busy) {
            continue;
        }
        const unsigned stage = stages + (tile & 1) * kStage;
        const int key = start + tile * KEYS;

        float s[BLOCKS][KEYS / 8][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                s[block][i][0] = s[block][i][1] = s[block][i][2] = s[block][i][3] = 0.0f;
            }
        }
#pragma unroll
        for (int span = 0; span < D / F::kSpan; ++span) {
            unsigned a[F::kSpan / 16][BLOCKS][4];
#pragma unroll
            for (int i = 0; i < F::kSpan / 16; ++i) {
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    load_matrix4(a[i][block],
                                 query_lane + block * 16 * kQueryBytes + (span * (F::kSpan / 16) + i) * 32);
                }
            }
#pragma unroll
            for (int run = 0; run < KEYS / 16; ++run) {
                unsigned b[F::kSpan / 16][2][2];
                F::keys(b, stage + run * 16 * kStateBytes<KV, D> + key_lane, span);
#pragma unroll
                for (int i = 0; i < F::kSpan / 16; ++i) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block) {
                        Type<E>::mma(s[block][2 * run], a[i][block], b[i][0][0], b[i][0][1]);
                        Type<E>::mma(s[block][2 * run + 1], a[i][block], b[i][1][0], b[i][1][1]);
                    }
                }
            }
        }

        const bool masked = key < range.low_all || key + KEYS > range.high_all;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            if (direct) {
#pragma unroll
                for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        s[block][i][j] = scorer.score(s[block][i][j]);
                    }
                }
            }
            if (masked) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int row = (warp * BLOCKS + block) * 16 + lane / 4 + 8 * half;
                    int position = item.kv_len - item.query_len + (item.row_begin + row) / group;
                    int low = max(range.low, first_key(position, window)) - key;
                    int high = min(range.high, after_key(position, window, causal)) - key;
#pragma unroll
                    for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            int at = i * 8 + 2 * t + j;
                            if (at < low || at >= high) {
                                s[block][i][2 * half + j] = minus_inf();
                            }
                        }
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float high = minus_inf();
#pragma unroll
                for (int i = 0; i < KEYS / 8; ++i) {
                    high = fmaxf(high, fmaxf(s[block][i][2 * half], s[block][i][2 * half + 1]));
                }
                high = fmaxf(quad_max(high), top[block][half]);
                // In log2 units; the largest score stays the largest, since the factor is positive.
                float shift = high == minus_inf() ? 0.0f : high * to_log2;
                if (__any_sync(0xffffffffu, high > top[block][half])) {
                    // Not fused, so that it is 1 for a row whose largest score stays, though its neighbours' do not.
                    float shrink = exp2_approx(__fmul_rn(top[block][half], to_log2) - shift);
                    top[block][half] = high;
                    weight[block][half] *= shrink;
#pragma unroll
                    for (int i = 0; i < D / 8; ++i) {
                        o[block][i][2 * half] *= shrink;
                        o[block][i][2 * half + 1] *= shrink;
                    }
                }
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float w = exp2_approx(fmaf(s[block][i][2 * half + j], to_log2, -shift));
                        s[block][i][2 * half + j] = w;
                        sum += w;
                    }
                }
                weight[block][half] += sum;
            }
        }

#pragma unroll
        for (int run = 0; run < KEYS / 16; ++run) {
            unsigned a[BLOCKS][4];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const float(*w)[4] = &s[block][2 * run];
                a[block][0] = Type<E>::pack(w[0][0], w[0][1]);
                a[block][1] = Type<E>::pack(w[0][2], w[0][3]);
                a[block][2] = Type<E>::pack(w[1][0], w[1][1]);
                a[block][3] = Type<E>::pack(w[1][2], w[1][3]);
            }
#pragma unroll
            for (int span = 0; span < D / F::kSpan; ++span) {
                unsigned b[F::kSpan / 16][2][2];
                F::values(b, stage + run * 16 * kStateBytes<KV, D> + value_lane, span);
#pragma unroll
                for (int i = 0; i < F::kSpan / 16; ++i) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block) {
                        float(*to)[4] = &o[block][(span * (F::kSpan / 16) + i) * 2];
                        Type<E>::mma(to[0], a[block], b[i][0][0], b[i][0][1]);
                        Type<E>::mma(to[1], a[block], b[i][1][0], b[i][1][1]);
                    }
                }
            }
        }
    }
    copy_wait<0>();

    // Read again where it is needed again, and not kept in registers over the keys. Without keys there was no barrier yet.
    if (tiles == 0) {
        __syncthreads();
    }
    const TtWorkItem done = current.item;
    const int head_of_item = current.kv_head;
    const bool whole = done.num_slots <= 1;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = (warp * BLOCKS + block) * 16 + lane / 4 + 8 * half;
            float total = quad_sum(weight[block][half]);
            if (row >= done.row_end - done.row_begin) {
                continue;
            }
            float inverse = total == 0.0f ? 0.0f : value_scale / total;
            float lse = total == 0.0f ? minus_inf() : top[block][half] * to_log2 + log2f(total);
            if (whole) {
                int packed = done.row_begin + row;
                int64_t token = done.first_token + packed / group;
                int head = head_of_item * group + packed % group;
                E *out = static_cast<E *>(p.output) + token * p.output_stride + head * D;
                F::store_columns(o[block], half, lane, [&](int column, float x, float y) {
                    *reinterpret_cast<unsigned *>(out + column) = Type<E>::pack(x * inverse, y * inverse);
                });
                if (t == 0 && p.lse != nullptr) {
                    p.lse[token * p.num_heads + head] = lse * kLn2;
                }
            } else {
                int64_t at = partial_index(p, done.slot, head_of_item, row);
                F::store_columns(o[block], half, lane, [&](int column, float x, float y) {
                    *reinterpret_cast<float2 *>(p.partial_output + at * D + column) = make_float2(x * inverse, y * inverse);
                });
                if (t == 0) {
                    p.partial_lse[at] = lse;
                }
            }
        }
    }
    if (!whole) {
        merge_if_last<E, D, WARPS * 32>(p, done, head_of_item, group);
    }
}

template <class E, class KV, int D, int WARPS, int BLOCKS, int KEYS, bool HEADS_FIRST = true>
__device__ __forceinline__ void prefill_attention(const TtAttentionParams &p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ CurrentItem current;
    // The heads of one item are neighbours, so that the longest items of every head start first and the shortest end the
    // launch. (Not HEADS_FIRST: the items of one head are.)
    each_item<E, D, HEADS_FIRST>(p, current, [&](const TtWorkItem &item, int kv_head) {
        prefill_item<E, KV, D, WARPS, BLOCKS, KEYS>(p, item, kv_head, shared, current);
    });
}

}  // namespace tt
