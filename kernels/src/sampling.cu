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
// Nothing is sorted: a sum is searched digit by digit of the order's key, by a histogram for each. The first digit leaves few
// tokens that still matter, as a rule: if they fit, they are listed in shared memory, in any order, and the row is read no more.
#include "common.cuh"

namespace {

using u64 = unsigned long long;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr int kListed = 3072;
constexpr int kNone = 0x7fffffff;

struct Shared {
    unsigned low[kBins], high[kBins];  // a histogram's weights
    int listed_ids[kListed];
    float listed[kListed];
    int num_listed;
    u64 sums[kWarps];
    float best[kWarps];
    int ids[kWarps];
    u64 above, equal;
    int found;
};
// One block's; at namespace scope, so that functions that are not inlined need not be told.
__shared__ Shared shared;

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

// What tokens are ordered by: IEEE's total order of their logits, their weights, or, lowest first, their ids.
enum Order { NOTHING, LOGIT, WEIGHT, ID };

// What a search adds up, over which tokens, in which order.
struct Sum {
    Order order;    // largest key first
    bool weighted;  // weights; else 1 for each token
    Order only;     // only tokens whose key of this order is `only_key`
    unsigned only_key;
};

// Where to stop, as a function of the whole sum: at the token at which the running sum exceeds the target.
struct Target {
    enum { AT, SHARE, REACH } kind;
    u64 at;       // AT: this
    double part;  // SHARE: this part of the whole, REACH: where the sum has reached this part of it

    __device__ u64 of(u64 total) const {
        if (kind == AT) {
            return at;
        }
        const double target = part * static_cast<double>(total);
        if (kind == SHARE) {
            const u64 sum = target > 0.0 ? __double2ull_rd(target) : 0;
            return sum < total || total == 0 ? sum : total - 1;
        }
        const u64 sum = target > 1.0 ? __double2ull_ru(target) : 1;
        return (sum < total ? sum : total) - 1;
    }
};

// Where a search ended: the key, the sum over all larger keys, how far into the sum over tokens with this key the target
// lies, and that sum. Not `good`: the target is not below the whole sum.
struct Found {
    bool good;
    unsigned key;
    u64 above, left, equal;
    int num_listed;
};

struct Row {
    const float *logits;
    int vocabulary;
    float best, temperature;
    float one;         // 2^shift: sums are in units of its inverse
    float negligible;  // a smaller logit's weight is less than half a unit
    // The candidates: larger than this in order, or equal to it with an id of at most the last.
    unsigned least;
    int last;
    // Tokens listed; 0: the row's own logits are to be read.
    int num_listed;

    // Within [0, 1]. An infinite best leaves only itself: infinity less infinity is not a number.
    __device__ __forceinline__ float weight(float x) const {
        if (x == best) {
            return 1.0f;
        }
        float w = x >= negligible ? expf((x - best) / temperature) : 0.0f;
        return w > 0.0f ? w : 0.0f;
    }
    __device__ __forceinline__ u64 fixed(float w) const { return __float2ull_rn(w * one); }
    // What a weight's key of order WEIGHT stands for.
    __device__ __forceinline__ u64 fixed_of_key(unsigned key) const { return fixed(__uint_as_float(key >> 2)); }

    // A token's part of the sum, 0 for one that is none of its; and its key.
    __device__ __forceinline__ u64 measure(const Sum &sum, int id, float x, unsigned &key) const {
        const unsigned order = order_of(x);
        if (isnan(x) || order < least || (order == least && id > last)) {
            return 0;
        }
        float w = 0.0f;
        if (sum.weighted || sum.only == WEIGHT) {
            w = weight(x);
        }
        const unsigned likely = __float_as_uint(w) << 2;
        if (sum.only != NOTHING && (sum.only == LOGIT ? order : likely) != sum.only_key) {
            return 0;
        }
        key = sum.order == LOGIT ? order : sum.order == WEIGHT ? likely : ~static_cast<unsigned>(id);
        return sum.weighted ? fixed(w) : 1;
    }

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

    // Lists the tokens of the sum whose key is at least this, if they fit; returns how many, or 0.
    __device__ __forceinline__ int list(const Sum &sum, unsigned smallest) const {
        if (threadIdx.x == 0) {
            shared.num_listed = 0;
        }
        __syncthreads();
        for_share(0, vocabulary, span_of(vocabulary), [&](int id, float x) {
            unsigned key = 0;
            if (measure(sum, id, x, key) != 0 && key >= smallest) {
                // More than fit need no exact count.
                const int listed = *static_cast<volatile int *>(&shared.num_listed);
                const int at = listed > kListed ? kListed : atomicAdd(&shared.num_listed, 1);
                if (at < kListed) {
                    shared.listed_ids[at] = id;
                    shared.listed[at] = x;
                }
            }
        });
        __syncthreads();
        return shared.num_listed <= kListed ? shared.num_listed : 0;
    }
};

// The best logit and its id; kNone if there is no number.
__device__ void find_best(const Row &row, float &value, int &id) {
    float top = tt::minus_inf();
    int at = kNone;
    auto take = [&](int i, float x) {
        if (x > top || (x == top && i < at)) {
            top = x;
            at = i;
        }
    };
    row.for_share(0, row.vocabulary, Row::span_of(row.vocabulary), take);
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

__device__ __forceinline__ void add(int bin, u64 x) {
    unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
    high += atomicAdd(shared.low + bin, low) + low < low ? 1 : 0;
    if (high != 0) {
        atomicAdd(shared.high + bin, high);
    }
}

// Where a sum in order of keys exceeds its target. By id only over listed tokens. Where it lists tokens, those of smaller keys
// than the one found are left out: nothing that follows may ask for them.
__device__ __noinline__ Found search(const Row row, const Sum sum, const Target stop) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned mask = 0;
    u64 target = 0;
    Found found = {};
    found.num_listed = row.num_listed;
    for (int digit = 0; digit < 3; ++digit) {
        const int low_bit = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        const unsigned digit_mask = digit == 2 ? 0x3ffu : 0x7ffu;
        for (int i = threadIdx.x; i < kBins; i += kThreads) {
            shared.low[i] = shared.high[i] = 0;
        }
        __syncthreads();
        auto take = [&](int id, float x) {
            unsigned key = 0;
            u64 w = row.measure(sum, id, x, key);
            if (w != 0 && (key & mask) == found.key) {
                add((key >> low_bit) & digit_mask, w);
            }
        };
        if (found.num_listed == 0) {
            row.for_share(0, row.vocabulary, Row::span_of(row.vocabulary), take);
        }
        for (int i = threadIdx.x; i < found.num_listed; i += kThreads) {
            take(shared.listed_ids[i], shared.listed[i]);
        }
        __syncthreads();
        // A thread has two bins, the largest come first.
        const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
        const u64 first = (static_cast<u64>(shared.high[bin]) << 32) + shared.low[bin];
        const u64 second = (static_cast<u64>(shared.high[bin - 1]) << 32) + shared.low[bin - 1];
        u64 running = warp_running_sum(first + second), total = 0;
        if (lane == 31) {
            shared.sums[warp] = running;
        }
        __syncthreads();
        for (int i = 0; i < kWarps; ++i) {
            running += i < warp ? shared.sums[i] : 0;
            total += shared.sums[i];
        }
        if (digit == 0) {
            target = stop.of(total);
            if (target >= total) {
                __syncthreads();
                return found;
            }
        }
        const u64 before = running - first - second;
        if (before <= target && target < running) {
            const bool in_first = target < before + first;
            shared.found = in_first ? bin : bin - 1;
            shared.above = in_first ? before : before + first;
            shared.equal = in_first ? first : second;
        }
        __syncthreads();
        found.key |= static_cast<unsigned>(shared.found) << low_bit;
        mask |= digit_mask << low_bit;
        target -= shared.above;
        found.above += shared.above;
        found.equal = shared.equal;
        if (digit == 0 && found.num_listed == 0) {
            found.num_listed = row.list(sum, found.key);
        }
    }
    __syncthreads();
    found.good = true;
    found.left = target;
    return found;
}

// The id at which a sum in order of ids exceeds its target; kNone where the target is not below the whole.
__device__ __noinline__ int search_ids(const Row row, const Sum sum, const Target stop) {
    if (row.num_listed != 0) {
        const Found found = search(row, sum, stop);
        return found.good ? static_cast<int>(~found.key) : kNone;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int begin = 0, end = row.vocabulary;
    u64 target = 0;
    for (bool whole = true; whole || end - begin > 128; whole = false) {
        const int span = Row::span_of(end - begin);
        u64 part = 0;
        unsigned key;
        row.for_share(begin, end, span, [&](int id, float x) { part += row.measure(sum, id, x, key); });
        part = warp_sum(part);
        if (lane == 0) {
            shared.sums[warp] = part;
        }
        __syncthreads();
        if (whole) {
            u64 total = 0;
            for (int i = 0; i < kWarps; ++i) {
                total += shared.sums[i];
            }
            target = stop.of(total);
            if (target >= total) {
                __syncthreads();
                return kNone;
            }
        }
        int at = 0;
        while (at < kWarps - 1 && target >= shared.sums[at]) {
            target -= shared.sums[at++];
        }
        begin += at * span;
        end = min(begin + span, end);
        __syncthreads();
    }
    if (warp == 0) {
        int id = kNone;
        for (int at = begin; at < end && id == kNone; at += 32) {
            unsigned key;
            const u64 w = at + lane < end ? row.measure(sum, at + lane, __ldg(row.logits + at + lane), key) : 0;
            const u64 running = warp_running_sum(w);
            const unsigned beyond = __ballot_sync(0xffffffffu, running > target);
            if (beyond != 0) {
                id = at + __ffs(static_cast<int>(beyond)) - 1;
            }
            target -= __shfl_sync(0xffffffffu, running, 31);  // Meaningless once found.
        }
        if (lane == 0) {
            shared.found = id;
        }
    }
    __syncthreads();
    const int id = shared.found;
    __syncthreads();
    return id;
}

}  // namespace

// Grid: (rows), 1,024 threads. tokens[row] is the row's token; -1 where none of its logits is a number.
extern "C" __global__ void __launch_bounds__(kThreads)
    tt_sample_f32(int32_t *tokens, const float *logits, int64_t stride, int vocabulary, const TtSampleRow *rows) {
    const TtSampleRow how = rows[blockIdx.x];
    Row row = {};
    row.logits = logits + blockIdx.x * stride;
    row.vocabulary = vocabulary;
    int best;
    find_best(row, row.best, best);
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
    row.last = kNone;
    auto at = [](u64 target) { return Target{Target::AT, target, 0}; };
    if (how.top_k > 0 && how.top_k < vocabulary) {
        const Found found = search(row, Sum{LOGIT, false, NOTHING, 0}, at(how.top_k - 1));
        // With fewer numbers than that, all are candidates.
        if (found.good) {
            row.num_listed = found.num_listed;
            if (found.left + 1 < found.equal) {
                row.last = search_ids(row, Sum{ID, false, LOGIT, found.key}, at(found.left));
            }
            row.least = found.key;
        }
    }
    int token;
    if (how.top_p < 1.0f) {
        // The nucleus ends with the candidate at which the sum reaches top_p of the whole.
        const Sum likeliest = {WEIGHT, true, NOTHING, 0};
        Found found = search(row, likeliest, Target{Target::REACH, 0, how.top_p});
        row.num_listed = found.num_listed;
        const u64 each = row.fixed_of_key(found.key), reached = found.above + (found.left / each + 1) * each;
        found = search(row, likeliest, at(Target{Target::SHARE, 0, how.uniform}.of(reached)));
        row.num_listed = found.num_listed;
        const u64 nth = found.left / row.fixed_of_key(found.key);
        token = search_ids(row, Sum{ID, false, WEIGHT, found.key}, at(nth));
    } else {
        token = search_ids(row, Sum{ID, true, NOTHING, 0}, Target{Target::SHARE, 0, how.uniform});
    }
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token == kNone ? best : token;
    }
}
