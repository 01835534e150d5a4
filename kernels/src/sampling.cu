// From a row of logits to a token: temperature, top-k, top-p and one random number that the host drew. Must never know a
// request, a seed or where logits come from.
//
// The host's sampler is the specification. The largest logit is the best token, the lowest id of equals; NaN never is. At
// temperature 0 that is the answer. Otherwise: the top_k largest (−0 below +0, lower ids first among equals); weights
// exp((logit − best) / temperature), the best one's 1; the likeliest that reach top_p of their sum; then the token at which
// the running sum of weights exceeds `uniform` of the whole. That sum runs in order of ids or, below a top_p of 1, likeliest
// first, as the nucleus was taken.
//
// Sums are of integers, weights as multiples of 2^-shift: no order of additions changes a result, so two runs are equal.
// Nothing is sorted: a sum is searched digit by digit of the order's key, by a histogram over the row for each.
#include "common.cuh"

namespace {

using u64 = unsigned long long;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr int kNone = 0x7fffffff;

struct Shared {
    unsigned low[kBins], high[kBins];  // a histogram's weights
    u64 sums[kWarps];
    float best[kWarps];
    int ids[kWarps];
    u64 above, equal;
    int found;
};

__device__ u64 warp_sum(u64 x) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, mask);
    }
    return x;
}

__device__ u64 warp_running_sum(u64 x) {
    for (int step = 1; step < 32; step <<= 1) {
        u64 before = __shfl_up_sync(0xffffffffu, x, step);
        x += static_cast<int>(threadIdx.x % 32) >= step ? before : 0;
    }
    return x;
}

// Larger for what the host sorts first: IEEE's total order.
__device__ unsigned order_of(float x) {
    unsigned bits = __float_as_uint(x);
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Where a search by key ended: the key, the weight of all larger keys, how far into the weight of those with this key the
// target lies, and that weight.
struct Found {
    unsigned key;
    u64 above, left, equal;
};

struct Row {
    Shared &shared;
    const float *logits;
    int vocabulary;
    float best, temperature;
    float one;         // 2^shift: sums are in units of its inverse
    float negligible;  // a smaller logit's weight is less than half a unit
    // The candidates: larger than this in order, or equal to it with an id of at most the last.
    unsigned least;
    int last;

    // f(id, logit) for ids [begin, end), by one warp, in any order. `begin` is a multiple of 4.
    template <class F>
    __device__ __forceinline__ void for_each(int begin, int end, F f) const {
        const int lane = threadIdx.x % 32;
        int at = begin;
        if (reinterpret_cast<u64>(logits) % 16 == 0) {
            constexpr int kBatch = 4;
            const float4 *quads = reinterpret_cast<const float4 *>(logits);
            for (int quad = begin / 4 + lane; quad < end / 4; quad += 32 * kBatch) {
                float4 x[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    x[i] = quad + 32 * i < end / 4 ? __ldg(quads + quad + 32 * i) : make_float4(0, 0, 0, 0);
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    int id = 4 * (quad + 32 * i);
                    if (id < end / 4 * 4) {
                        f(id, x[i].x);
                        f(id + 1, x[i].y);
                        f(id + 2, x[i].z);
                        f(id + 3, x[i].w);
                    }
                }
            }
            at = end / 4 * 4;
        }
        for (int id = at + lane; id < end; id += 32) {
            f(id, __ldg(logits + id));
        }
    }
    // Each warp its own ids of [begin, end): all warps have `span` of them, but for the last.
    template <class F>
    __device__ __forceinline__ void for_share(int begin, int end, int span, F f) const {
        const int warp = threadIdx.x / 32;
        if (warp < (end - begin + span - 1) / span) {
            for_each(begin + warp * span, min(end - begin, (warp + 1) * span) + begin, f);
        }
    }
    __device__ static int span_of(int count) { return max((count + kWarps - 1) / kWarps + 3, 4) / 4 * 4; }

    // The best logit and its id; kNone if there is no number.
    __device__ void find_best(float &value, int &id) const {
        float top = tt::minus_inf();
        int at = kNone;
        auto take = [&](int i, float x) {
            if (x > top || (x == top && i < at)) {
                top = x;
                at = i;
            }
        };
        for_share(0, vocabulary, span_of(vocabulary), take);
        for (int mask = 16; mask > 0; mask >>= 1) {
            float x = __shfl_xor_sync(0xffffffffu, top, mask);
            int i = __shfl_xor_sync(0xffffffffu, at, mask);
            take(i, x);
        }
        if (threadIdx.x % 32 == 0) {
            shared.best[threadIdx.x / 32] = top;
            shared.ids[threadIdx.x / 32] = at;
        }
        __syncthreads();
        for (int i = 0; i < kWarps; ++i) {
            take(shared.ids[i], shared.best[i]);
        }
        value = top;
        id = at;
    }

    __device__ __forceinline__ bool is_candidate(int id, float x) const {
        unsigned order = order_of(x);
        return !isnan(x) && (order > least || (order == least && id <= last));
    }
    // Within [0, 1]. An infinite best leaves only itself: infinity less infinity is not a number.
    __device__ __forceinline__ float weight(float x) const {
        if (x == best) {
            return 1.0f;
        }
        float w = x >= negligible ? expf((x - best) / temperature) : 0.0f;
        return w > 0.0f ? w : 0.0f;
    }
    __device__ __forceinline__ u64 fixed(float w) const { return __float2ull_rn(w * one); }
    // Larger for the likelier, of a weight within [0, 1].
    __device__ static unsigned order_of_weight(float w) { return __float_as_uint(w) << 2; }

    __device__ __forceinline__ void add(int bin, u64 x) const {
        unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
        high += atomicAdd(shared.low + bin, low) + low < low ? 1 : 0;
        if (high != 0) {
            atomicAdd(shared.high + bin, high);
        }
    }

    // Descending in keys, where the running sum of weights exceeds target_of(the whole sum). item(id, logit, key) gives a
    // weight and the key. False where the target is not below the sum.
    template <class Item, class Target>
    __device__ bool search_keys(Item item, Target target_of, Found &found) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned prefix = 0, mask = 0;
        u64 target = 0;
        found.above = 0;
        for (int digit = 0; digit < 3; ++digit) {
            const int low_bit = digit == 0 ? 21 : digit == 1 ? 10 : 0;
            const unsigned digit_mask = digit == 2 ? 0x3ffu : 0x7ffu;
            for (int i = threadIdx.x; i < kBins; i += kThreads) {
                shared.low[i] = shared.high[i] = 0;
            }
            __syncthreads();
            for_share(0, vocabulary, span_of(vocabulary), [&](int id, float x) {
                unsigned key = 0;
                u64 w = item(id, x, key);
                if (w != 0 && (key & mask) == prefix) {
                    add((key >> low_bit) & digit_mask, w);
                }
            });
            __syncthreads();
            // A thread has two bins, the largest come first.
            const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
            const u64 first = (static_cast<u64>(shared.high[bin]) << 32) + shared.low[bin];
            const u64 second = (static_cast<u64>(shared.high[bin - 1]) << 32) + shared.low[bin - 1];
            u64 sum = warp_running_sum(first + second), total = 0;
            if (lane == 31) {
                shared.sums[warp] = sum;
            }
            __syncthreads();
            for (int i = 0; i < kWarps; ++i) {
                sum += i < warp ? shared.sums[i] : 0;
                total += shared.sums[i];
            }
            if (digit == 0) {
                target = target_of(total);
                if (target >= total) {
                    __syncthreads();
                    return false;
                }
            }
            const u64 before = sum - first - second;
            if (before <= target && target < sum) {
                const bool in_first = target < before + first;
                shared.found = in_first ? bin : bin - 1;
                shared.above = in_first ? before : before + first;
                shared.equal = in_first ? first : second;
            }
            __syncthreads();
            prefix |= static_cast<unsigned>(shared.found) << low_bit;
            mask |= digit_mask << low_bit;
            target -= shared.above;
            found.above += shared.above;
            found.equal = shared.equal;
        }
        __syncthreads();
        found.key = prefix;
        found.left = target;
        return true;
    }

    // Ascending in ids, the id at which the running sum of weight_of(id, logit) exceeds target_of(the whole sum); kNone
    // where the target is not below the sum.
    template <class Weight, class Target>
    __device__ int search_ids(Weight weight_of, Target target_of) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int begin = 0, end = vocabulary;
        u64 target = 0;
        for (bool whole = true; whole || end - begin > 128; whole = false) {
            const int span = span_of(end - begin);
            u64 sum = 0;
            for_share(begin, end, span, [&](int id, float x) { sum += weight_of(id, x); });
            sum = warp_sum(sum);
            if (lane == 0) {
                shared.sums[warp] = sum;
            }
            __syncthreads();
            if (whole) {
                u64 total = 0;
                for (int i = 0; i < kWarps; ++i) {
                    total += shared.sums[i];
                }
                target = target_of(total);
                if (target >= total) {
                    __syncthreads();
                    return kNone;
                }
            }
            int part = 0;
            while (part < kWarps - 1 && target >= shared.sums[part]) {
                target -= shared.sums[part++];
            }
            begin += part * span;
            end = min(begin + span, end);
            __syncthreads();
        }
        if (warp == 0) {
            int id = kNone;
            for (int at = begin; at < end && id == kNone; at += 32) {
                u64 w = at + lane < end ? weight_of(at + lane, __ldg(logits + at + lane)) : 0;
                u64 sum = warp_running_sum(w);
                unsigned beyond = __ballot_sync(0xffffffffu, sum > target);
                if (beyond != 0) {
                    id = at + __ffs(static_cast<int>(beyond)) - 1;
                }
                target -= __shfl_sync(0xffffffffu, sum, 31);  // Meaningless once found.
            }
            if (lane == 0) {
                shared.found = id;
            }
        }
        __syncthreads();
        int id = shared.found;
        __syncthreads();
        return id;
    }
};

// The share `part` of `sum`, as a target below it.
__device__ u64 target_within(double part, u64 sum) {
    double target = part * static_cast<double>(sum);
    u64 floor = target > 0.0 ? __double2ull_rd(target) : 0;
    return floor < sum ? floor : sum - 1;
}

}  // namespace

// Grid: (rows), 1,024 threads. tokens[row] is the row's token; -1 where none of its logits is a number.
extern "C" __global__ void __launch_bounds__(kThreads)
    tt_sample_f32(int32_t *tokens, const float *logits, int64_t stride, int vocabulary, const TtSampleRow *rows) {
    __shared__ Shared shared;
    const TtSampleRow how = rows[blockIdx.x];
    Row row = {shared, logits + blockIdx.x * stride, vocabulary};
    int best;
    row.find_best(row.best, best);
    if (best == kNone || !(how.temperature > 0.0f)) {
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = best == kNone ? -1 : best;
        }
        return;
    }
    row.temperature = how.temperature;
    // The sum of all weights stays below 2^63.
    const int shift = 31 + __clz(vocabulary);
    row.one = __int_as_float((127 + shift) << 23);
    row.negligible = row.best - static_cast<float>(shift + 2) * tt::kLn2 * how.temperature;
    row.least = 0;
    row.last = kNone;
    Found found;
    if (how.top_k > 0 && how.top_k < vocabulary) {
        auto item = [&](int, float x, unsigned &key) -> u64 {
            key = order_of(x);
            return isnan(x) ? 0 : 1;
        };
        // With fewer numbers than that, all are candidates.
        if (row.search_keys(item, [&](u64) { return static_cast<u64>(how.top_k - 1); }, found)) {
            int last = kNone;
            if (found.left + 1 < found.equal) {
                last = row.search_ids(
                    [&](int, float x) -> u64 { return !isnan(x) && order_of(x) == found.key ? 1 : 0; },
                    [&](u64) { return found.left; });
            }
            row.least = found.key;
            row.last = last;
        }
    }
    int token;
    if (how.top_p < 1.0f) {
        auto item = [&](int id, float x, unsigned &key) -> u64 {
            float w = row.is_candidate(id, x) ? row.weight(x) : 0.0f;
            key = Row::order_of_weight(w);
            return row.fixed(w);
        };
        // The nucleus ends with the candidate at which the sum reaches top_p of the whole.
        auto reaches = [&](u64 total) {
            double part = static_cast<double>(how.top_p) * static_cast<double>(total);
            u64 sum = part > 1.0 ? __double2ull_ru(part) : 1;
            return (sum < total ? sum : total) - 1;
        };
        auto weight_of_key = [&] { return row.fixed(__uint_as_float(found.key >> 2)); };
        row.search_keys(item, reaches, found);
        const u64 reached = found.above + (found.left / weight_of_key() + 1) * weight_of_key();
        row.search_keys(item, [&](u64) { return target_within(how.uniform, reached); }, found);
        const u64 nth = found.left / weight_of_key();
        token = row.search_ids(
            [&](int id, float x) -> u64 {
                return row.is_candidate(id, x) && Row::order_of_weight(row.weight(x)) == found.key ? 1 : 0;
            },
            [&](u64) { return nth; });
    } else {
        token = row.search_ids(
            [&](int id, float x) -> u64 { return row.is_candidate(id, x) ? row.fixed(row.weight(x)) : 0; },
            [&](u64 total) { return target_within(how.uniform, total); });
    }
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token == kNone ? best : token;
    }
}
