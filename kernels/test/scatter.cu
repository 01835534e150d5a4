// reshape_and_cache, bit for bit against the host, and its time.
#include "device.h"

#include <cstring>

namespace {

struct Scatter {
    const char *kernel;
    int kind, cache_kind;
};
const Scatter kinds[] = {{"tt_reshape_and_cache_bf16", 0, 0},
                         {"tt_reshape_and_cache_f16", 1, 1},
                         {"tt_reshape_and_cache_f32", 2, 2},
                         {"tt_reshape_and_cache_bf16_fp8", 0, 3},
                         {"tt_reshape_and_cache_f16_fp8", 1, 3}};

TtScatterParams strides(bool nhd, int heads, int size, int page) {
    TtScatterParams p = {};
    int64_t content = 2 * size;
    p.kv_token_stride = nhd ? heads * content : content;
    p.kv_head_stride = nhd ? content : page * content;
    p.kv_block_stride = content * heads * page;
    p.key_stride = p.value_stride = static_cast<int64_t>(heads) * size;
    p.num_kv_heads = heads;
    p.head_size = size;
    p.block_size = page;
    return p;
}

void scatter(const std::string &kernel, const TtScatterParams &p, int cache_bytes, int tokens_per_thread) {
    int vectors = 2 * p.num_kv_heads * p.head_size * cache_bytes / 16;
    dim3 block(std::min(256, (vectors + 31) / 32 * 32));
    block.y = 256 / block.x;
    int tokens = tokens_per_thread * static_cast<int>(block.y);
    launch(kernel, static_cast<unsigned>((p.num_slots + tokens - 1) / tokens), block, 0, p);
}

float widen(const unsigned char *from, int kind) {
    if (kind == 0) {
        __nv_bfloat16 x;
        std::memcpy(&x, from, 2);
        return __bfloat162float(x);
    }
    __half x;
    std::memcpy(&x, from, 2);
    return __half2float(x);
}

void one(const Scatter &kind, bool nhd, int heads, int size, int page, int tokens, bool per_head) {
    int blocks = tokens / page * 2 + 3;
    int in = element_bytes(kind.kind), out = element_bytes(kind.cache_kind);
    TtScatterParams p = strides(nhd, heads, size, page);
    size_t count = static_cast<size_t>(tokens) * heads * size;
    // A stride beyond the rows, as in a fused QKV projection.
    p.key_stride = static_cast<int64_t>(heads) * size + 64;
    size_t padded = static_cast<size_t>(tokens) * p.key_stride;
    Buffer<unsigned char> key(padded * in), value(count * in);
    size_t cache_bytes = static_cast<size_t>(blocks) * p.kv_block_stride * out;
    Buffer<unsigned char> cache(cache_bytes);
    fill_normal(key.data, padded, kind.kind, kind.cache_kind == 3 ? 60.0f : 1.0f);
    fill_normal(value.data, count, kind.kind, 1.0f);
    std::vector<int64_t> slots(static_cast<size_t>(blocks) * page);
    for (size_t i = 0; i < slots.size(); ++i) {
        slots[i] = static_cast<int64_t>(i);
    }
    std::shuffle(slots.begin(), slots.end(), random_engine);
    slots.resize(tokens - 1);  // Fewer slots than rows.
    for (auto &slot : slots) {
        slot = random_int(0, 9) == 0 ? -1 : slot;
    }
    std::vector<float> scales(2 * heads);
    for (auto &scale : scales) {
        scale = 0.25f * random_int(1, 8) + 0.1f;
    }
    Buffer<int64_t> slot_mapping(slots);
    Buffer<float> scale(scales);
    p.key = key.data;
    p.value = value.data;
    p.kv_cache = cache.data;
    p.slot_mapping = slot_mapping.data;
    p.num_slots = static_cast<int64_t>(slots.size());
    p.k_scale = scale.data;
    p.v_scale = scale.data + heads;
    p.kv_scale_stride = per_head;
    scatter(kind.kernel, p, out, 1);
    CUDA(cudaStreamSynchronize(stream));

    std::vector<unsigned char> want(cache_bytes, 0xff), hk = key.host(), hv = value.host(), got = cache.host();
    for (size_t t = 0; t < slots.size(); ++t) {
        if (slots[t] < 0) {
            continue;
        }
        for (int h = 0; h < heads; ++h) {
            size_t to = slots[t] / page * p.kv_block_stride + slots[t] % page * p.kv_token_stride + h * p.kv_head_stride;
            for (int d = 0; d < 2 * size; ++d) {
                bool v = d >= size;
                const unsigned char *from = v ? &hv[(t * p.value_stride + h * size + d - size) * in]
                                              : &hk[(t * p.key_stride + h * size + d) * in];
                if (kind.cache_kind != 3) {
                    std::memcpy(&want[(to + d) * out], from, in);
                } else {
                    float x = widen(from, kind.kind) / scales[(v ? heads : 0) + (per_head ? h : 0)];
                    want[to + d] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
                }
            }
        }
    }
    size_t wrong = 0;
    for (size_t i = 0; i < cache_bytes; ++i) {
        wrong += want[i] != got[i];
    }
    char what[200];
    std::snprintf(what, sizeof what, "%s nhd=%d heads=%d size=%d page=%d tokens=%d: %zu of %zu bytes differ", kind.kernel, nhd,
                  heads, size, page, tokens, wrong, cache_bytes);
    results.check(wrong == 0, what);
}

}  // namespace

void test_scatter(bool small) {
    for (const Scatter &kind : kinds) {
        for (bool nhd : {false, true}) {
            for (int size : {64, 96, 128, 256}) {
                one(kind, nhd, small ? 2 : 8, size, size == 96 ? 48 : 16, small ? 9 : 301, nhd);
            }
        }
        one(kind, true, 1, 128, 256, 1 + random_int(1, 40), true);
    }
}

namespace {

double time_scatter(const Scatter &kind, bool nhd, int tokens, int per_thread, double *moved) {
    const int heads = 8, size = 128, page = 16, blocks = 8192;
    TtScatterParams p = strides(nhd, heads, size, page);
    int in = element_bytes(kind.kind), out = element_bytes(kind.cache_kind);
    size_t count = static_cast<size_t>(tokens) * heads * size;
    const int sets = 6;
    std::vector<Buffer<unsigned char>> keys, values, caches;
    std::vector<int64_t> slots(static_cast<size_t>(blocks) * page);
    std::vector<int> order(blocks);
    for (int i = 0; i < blocks; ++i) {
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random_engine);
    slots.resize(tokens);
    // 256 requests of tokens / 256 tokens, as the peers' figure has it.
    int each = tokens / 256;
    for (int t = 0; t < tokens; ++t) {
        int request = t / each, position = t % each;
        slots[t] = static_cast<int64_t>(order[request * ((each + page - 1) / page) + position / page]) * page +
                   position % page;
    }
    Buffer<int64_t> mapping(slots);
    for (int s = 0; s < sets; ++s) {
        keys.emplace_back(count * in);
        values.emplace_back(count * in);
        caches.emplace_back(static_cast<size_t>(blocks) * p.kv_block_stride * out);
        fill_normal(keys[s].data, count, kind.kind, 1.0f);
        fill_normal(values[s].data, count, kind.kind, 1.0f);
    }
    double us = graph_time(sets, 60, [&](int s) {
        TtScatterParams q = p;
        q.key = keys[s].data;
        q.value = values[s].data;
        q.kv_cache = caches[s].data;
        q.slot_mapping = mapping.data;
        q.num_slots = tokens;
        scatter(kind.kernel, q, out, per_thread);
    });
    *moved = 2.0 * count * (in + out);
    return us;
}

}  // namespace

void bench_scatter() {
    std::printf("%-46s %9s %8s\n", "scatter, 8 KV heads, head 128, page 16", "us", "TB/s");
    for (const Scatter &kind : kinds) {
        for (bool nhd : {false, true}) {
            for (int tokens : {256, 8192}) {
                double bytes, us = time_scatter(kind, nhd, tokens, 1, &bytes);
                char name[100];
                std::snprintf(name, sizeof name, "%s %s %d tokens", kind.kernel + 3, nhd ? "NHD" : "HND", tokens);
                std::printf("%-46s %9.1f %8.3f\n", name, us, bytes / us / 1e6);
            }
        }
    }
}

void bench_scatter_ladder() {
    for (const char *name : {"tt_ladder_scatter_default_store", "tt_ladder_scatter_cached_load",
                             "tt_ladder_scatter_cached_load_stream_store"}) {
        double bytes, us = time_scatter({name, 0, 0}, true, 8192, 1, &bytes);
        std::printf("%-46s %9.1f %8.3f\n", name, us, bytes / us / 1e6);
    }
    for (int each : {1, 2, 4, 8}) {
        std::string name = "tt_ladder_scatter_t" + std::to_string(each);
        double bytes, us = time_scatter({name.c_str(), 0, 0}, true, 8192, each, &bytes);
        std::printf("%-46s %9.1f %8.3f\n", name.c_str(), us, bytes / us / 1e6);
    }
}
