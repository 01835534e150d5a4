// Merges two attention results over disjoint keys, such as a prefix's and a suffix's: out = (p * wp + s * ws) / (wp + ws)
// with w = e^(lse - max). An LSE of plus infinity counts as minus infinity; where both are, the output is 0 and the LSE minus
// infinity. Grid: (tokens, heads), 128 threads. LSE is f32 [T, H], natural; a null output_lse is not wanted.
#include "common.cuh"

namespace tt {

template <class E>
__device__ __forceinline__ void merge_states(E *output, float *output_lse, const E *prefix, const float *prefix_lse,
                                             const E *suffix, const float *suffix_lse, int64_t output_stride,
                                             int64_t prefix_stride, int64_t suffix_stride, int head_size) {
    const int64_t token = blockIdx.x, head = blockIdx.y, at = token * gridDim.y + head;
    float p = prefix_lse[at], s = suffix_lse[at];
    p = p == -minus_inf() ? minus_inf() : p;
    s = s == -minus_inf() ? minus_inf() : s;
    // A NaN is not hidden.
    const float top = p != p || s != s ? p + s : fmaxf(p, s);
    const bool none = top == minus_inf();
    const float wp = none ? 0.0f : expf(p - top), ws = none ? 0.0f : expf(s - top);
    const float inverse = none ? 0.0f : 1.0f / (wp + ws);
    for (int d = threadIdx.x; d < head_size; d += blockDim.x) {
        // A weight of 0 belongs to a state that nothing wrote.
        float x = wp == 0.0f ? 0.0f : wp * Type<E>::widen(prefix[token * prefix_stride + head * head_size + d]);
        float y = ws == 0.0f ? 0.0f : ws * Type<E>::widen(suffix[token * suffix_stride + head * head_size + d]);
        output[token * output_stride + head * head_size + d] = Type<E>::narrow((x + y) * inverse);
    }
    if (threadIdx.x == 0 && output_lse != nullptr) {
        output_lse[at] = none ? minus_inf() : top + logf(wp + ws);
    }
}

}  // namespace tt

#define TT_MERGE(suffix, E)                                                                                           \
    extern "C" __global__ void tt_merge_states_##suffix(E *output, float *output_lse, const E *prefix,                \
                                                        const float *prefix_lse, const E *suffix_output,              \
                                                        const float *suffix_lse, int64_t output_stride,               \
                                                        int64_t prefix_stride, int64_t suffix_stride, int head_size) { \
        tt::merge_states<E>(output, output_lse, prefix, prefix_lse, suffix_output, suffix_lse, output_stride,         \
                            prefix_stride, suffix_stride, head_size);                                                 \
    }

TT_MERGE(bf16, __nv_bfloat16)
TT_MERGE(f16, __half)
TT_MERGE(f32, float)
