// A random batch on the device, its plans and launches, and the check of one launch against the reference.
#pragma once

#include "device.h"
#include "reference.cuh"

namespace {

struct Shape {
    int kind = 0, cache_kind = 0, size = 128, kv_heads = 2, group = 4, page = 16;
    bool nhd = true;
    int window = 0;
    float cap = 0;
    bool causal = true;
    bool per_row_causal = false;
    std::vector<int> query_lens, kv_lens, splits;
    int padding = 0;       // tokens beyond the last request's
    int work_list = 0;     // > 0: a FlashInfer work list with chunks of that many keys
    bool poison = true;
    bool reversed = false; // rows' tiles in reverse order
};

const char *const kind_names[] = {"bf16", "f16", "f32", "fp8"};

std::string kernel_name(const char *what, const Shape &s) {
    std::string name = std::string("tt_") + what + "_" + kind_names[s.kind];
    if (s.cache_kind == 3) {
        name += "_fp8";
    }
    return name + "_d" + std::to_string(s.size);
}

struct Batch {
    Shape shape;
    int tokens = 0, padded = 0, rows = 0, width = 1, blocks = 0;
    int64_t block_stride, head_stride, token_stride;
    std::vector<int32_t> starts{0}, table, causal;
    Buffer<int32_t> d_starts, d_lens, d_table, d_splits, d_order, d_row_of_token, d_causal;
    Buffer<unsigned char> query, cache;
    Buffer<float> scales;

    explicit Batch(const Shape &s) : shape(s) {
        rows = static_cast<int>(s.query_lens.size());
        std::vector<int32_t> row_of_token;
        size_t pages = 0;
        for (int r = 0; r < rows; ++r) {
            tokens += s.query_lens[r];
            starts.push_back(tokens);
            row_of_token.resize(tokens, r);
            pages += (s.kv_lens[r] + s.page - 1) / s.page;
            width = std::max(width, (s.kv_lens[r] + s.page - 1) / s.page);
        }
        width += 1;
        padded = tokens + s.padding;
        row_of_token.resize(padded, -1);
        blocks = static_cast<int>(pages) + 2;
        std::vector<int32_t> order(blocks);
        for (int i = 0; i < blocks; ++i) {
            order[i] = i;
        }
        std::shuffle(order.begin(), order.end(), random_engine);
        // A column that is not the request's names a block that does not exist.
        table.assign(static_cast<size_t>(std::max(rows, 1)) * width, 0x3fffffff);
        std::vector<unsigned char> seen(static_cast<size_t>(blocks) * s.page, 0);
        size_t next = 0;
        for (int r = 0; r < rows; ++r) {
            causal.push_back(s.per_row_causal ? random_int(0, 1) : s.causal);
            for (int i = 0; i < (s.kv_lens[r] + s.page - 1) / s.page; ++i) {
                table[static_cast<size_t>(r) * width + i] = order[next++];
            }
            int first = s.window > 0 ? std::max(0, s.kv_lens[r] - s.query_lens[r] - s.window + 1) : 0;
            if (s.query_lens[r] == 0) {
                first = s.kv_lens[r];
            }
            for (int k = first; k < s.kv_lens[r]; ++k) {
                seen[static_cast<size_t>(table[static_cast<size_t>(r) * width + k / s.page]) * s.page + k % s.page] = 1;
            }
        }
        int64_t content = 2 * s.size;
        token_stride = s.nhd ? s.kv_heads * content : content;
        head_stride = s.nhd ? content : s.page * content;
        block_stride = content * s.kv_heads * s.page;
        d_starts = Buffer<int32_t>(starts);
        d_lens = Buffer<int32_t>(std::vector<int32_t>(s.kv_lens.begin(), s.kv_lens.end()));
        d_table = Buffer<int32_t>(table);
        d_row_of_token = Buffer<int32_t>(row_of_token);
        d_causal = Buffer<int32_t>(causal);
        if (!s.splits.empty()) {
            d_splits = Buffer<int32_t>(std::vector<int32_t>(s.splits.begin(), s.splits.end()));
        }
        if (s.reversed) {
            std::vector<int32_t> reverse(rows);
            for (int i = 0; i < rows; ++i) {
                reverse[i] = rows - 1 - i;
            }
            d_order = Buffer<int32_t>(reverse);
        }
        query = Buffer<unsigned char>(static_cast<size_t>(padded) * heads() * s.size * element_bytes(s.kind));
        size_t states = static_cast<size_t>(blocks) * block_stride;
        cache = Buffer<unsigned char>(states * element_bytes(s.cache_kind));
        fill_normal(query.data, static_cast<size_t>(padded) * heads() * s.size, s.kind, 1.0f);
        fill_normal(cache.data, states, s.cache_kind, 1.0f);
        if (s.cache_kind == 3) {
            std::vector<float> values;
            for (int i = 0; i < 2 * s.kv_heads; ++i) {
                values.push_back(0.5f + 0.125f * random_int(0, 8));
            }
            scales = Buffer<float>(values);
        }
        if (s.poison) {
            Buffer<unsigned char> d_seen(seen);
            poison_kernel<<<blocks * s.page, 128, 0, stream>>>(
                cache.data, d_seen.data, block_stride, head_stride, token_stride, s.page, s.kv_heads,
                2 * s.size * element_bytes(s.cache_kind), element_bytes(s.cache_kind));
            CUDA(cudaGetLastError());
            CUDA(cudaStreamSynchronize(stream));
        }
    }
    int heads() const { return shape.kv_heads * shape.group; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.size)); }
};

// FlashInfer's list of the batch's rows [first, first + query_lens.size()), items in a random order. Requests whose packed rows
// are within [low, high] get items.
struct WorkList {
    std::vector<int32_t> requests, q, k, merges{0}, indptr{0}, indices;

    WorkList(const Batch &b, const std::vector<int> &query_lens, const std::vector<int> &kv_lens, int tile, int chunk,
             int low = 0, int high = 0x7fffffff, int first_row = 0) {
        const Shape &s = b.shape;
        for (size_t r = 0; r < query_lens.size(); ++r) {
            int packed = query_lens[r] * s.group, pages = (kv_lens[r] + s.page - 1) / s.page;
            for (int i = 0; i < pages; ++i) {
                indices.push_back(b.table[(first_row + r) * b.width + i]);
            }
            indptr.push_back(static_cast<int32_t>(indices.size()));
            bool chosen = packed >= low && packed <= high;
            for (int t = 0; t < (packed + tile - 1) / tile; ++t) {
                // Chunks wholly outside the window are left out.
                int position = kv_lens[r] - query_lens[r] + t * tile / s.group;
                int from = s.window > 0 ? std::max(0, position - s.window + 1) / chunk : 0;
                int chunks = std::max((kv_lens[r] + chunk - 1) / chunk, from + 1);
                for (int c = from; chosen && c < chunks; ++c) {
                    requests.push_back(static_cast<int32_t>(r));
                    q.push_back(t);
                    k.push_back(c);
                }
                merges.push_back(static_cast<int32_t>(requests.size()));
            }
        }
        for (size_t i = requests.size(); i-- > 1;) {
            size_t j = random_int(0, static_cast<int>(i));
            std::swap(requests[i], requests[j]);
            std::swap(q[i], q[j]);
            std::swap(k[i], k[j]);
        }
    }
    int tiles() const { return static_cast<int>(merges.size()) - 1; }
};

// What one step's launches need: the plan's results and the scratch. `tile` 16 runs the decode kernel.
struct Plan {
    Buffer<TtWorkHeader> header{1};
    Buffer<TtWorkItem> items;
    Buffer<int32_t> request_indices, qo_tiles, kv_tiles, merge, page_indptr, page_indices;
    Buffer<TtWorkListSizes> sizes{1};
    int max_items = 1, tile = 16, partial_rows = 16;
    bool flat_pages = false;

    // Packed-row limits choose the requests. There is room for what they need, or for `promise` items if that is more.
    Plan(const Batch &b, int tile_rows, int low, int high, bool with_tail, int promise = 1) : tile(tile_rows) {
        const Shape &s = b.shape;
        int items_bound = 0, most = 1, largest = 1;
        for (int r = 0; r < b.rows; ++r) {
            int packed = s.query_lens[r] * s.group;
            if (packed > 0 && packed >= low && packed <= high) {
                int splits = s.splits.empty() ? 1 : s.splits[r];
                items_bound += (packed + tile - 1) / tile * splits;
                most = std::max(most, splits);
                largest = std::max(largest, std::min(packed, tile));
            }
        }
        partial_rows = largest;
        if (s.work_list > 0) {
            list(b, low, high, with_tail);
            return;
        }
        max_items = std::max(items_bound, promise);
        items.resize(max_items);
        TtPlanParams p = {};
        p.header = header.data;
        p.items = items.data;
        p.query_start_loc = b.d_starts.data;
        p.seq_lens = b.d_lens.data;
        p.num_splits = s.splits.empty() ? nullptr : b.d_splits.data;
        p.row_order = s.reversed ? b.d_order.data : nullptr;
        p.causal = b.d_causal.data;
        p.num_reqs = b.rows;
        p.num_tokens = b.padded;
        p.block_size = s.page;
        p.heads_per_kv_head = s.group;
        p.tile_rows = tile;
        p.min_packed_rows = low;
        p.max_packed_rows = high;
        p.max_num_splits = most;
        p.max_work_items = max_items;
        p.with_tail = with_tail;
        launch("tt_plan_flash_attn", 1, 1024, 0, p);
    }

    // All requests are one part.
    void list(const Batch &b, int low, int high, bool with_tail) {
        const Shape &s = b.shape;
        const WorkList list(b, s.query_lens, s.kv_lens, tile, s.work_list, low, high);
        request_indices = Buffer<int32_t>(list.requests);
        qo_tiles = Buffer<int32_t>(list.q);
        kv_tiles = Buffer<int32_t>(list.k);
        merge = Buffer<int32_t>(list.merges);
        page_indptr = Buffer<int32_t>(list.indptr);
        page_indices = Buffer<int32_t>(list.indices);
        flat_pages = true;
        const int tiles = list.tiles();
        max_items = std::max<int>(static_cast<int>(list.requests.size()), 1);
        items.resize(max_items);
        TtWorkListSizes z = {};
        z.num_items = static_cast<int32_t>(list.requests.size());
        z.num_reqs = b.rows;
        z.num_tiles = tiles;
        z.cta_tile_q = tile;
        z.kv_chunk_size = s.work_list;
        z.causal = s.causal;
        z.tail_begin = with_tail ? b.tokens : 0;
        z.tail_end = with_tail ? b.padded : 0;
        sizes = Buffer<TtWorkListSizes>(std::vector<TtWorkListSizes>{z});
        TtWorkListParams p = {};
        p.header = header.data;
        p.items = items.data;
        p.sizes = sizes.data;
        p.qo_indptr = b.d_starts.data;
        p.paged_kv_indptr = page_indptr.data;
        p.seq_lens = b.d_lens.data;
        p.request_indices = request_indices.data;
        p.qo_tile_indices = qo_tiles.data;
        p.kv_tile_indices = kv_tiles.data;
        p.merge_indptr = merge.data;
        p.heads_per_kv_head = s.group;
        p.tile_rows = tile;
        p.max_work_items = max_items;
        p.max_reqs = b.rows;
        p.max_tiles = tiles;
        p.max_tokens = b.padded;
        launch("tt_plan_flashinfer", 1, 1024, 4 * (b.rows + 1 + tiles), p);
    }
};

struct Scratch {
    Buffer<float> output, lse;
    Buffer<int32_t> counters;
    Scratch(const Batch &b, const Plan &plan)
        : output(static_cast<size_t>(plan.max_items) * b.shape.kv_heads * plan.partial_rows * b.shape.size),
          lse(static_cast<size_t>(plan.max_items) * b.shape.kv_heads * plan.partial_rows),
          counters(static_cast<size_t>(plan.max_items) * b.shape.kv_heads) {
        counters.zero();
    }
};

// All but what a plan decides.
TtAttentionParams attention_params(const Batch &b, const Scratch &scratch, void *output, float *lse) {
    const Shape &s = b.shape;
    TtAttentionParams p = {};
    p.query = b.query.data;
    p.kv_cache = b.cache.data;
    p.output = output;
    p.lse = lse;
    p.partial_output = scratch.output.data;
    p.partial_lse = scratch.lse.data;
    p.merge_counters = scratch.counters.data;
    if (s.cache_kind == 3) {
        p.k_scale = b.scales.data;
        p.v_scale = b.scales.data + s.kv_heads;
        p.kv_scale_stride = 1;
    }
    p.query_stride = p.output_stride = static_cast<int64_t>(b.heads()) * s.size;
    p.kv_block_stride = b.block_stride;
    p.kv_head_stride = b.head_stride;
    p.kv_token_stride = b.token_stride;
    p.num_heads = b.heads();
    p.num_kv_heads = s.kv_heads;
    p.block_size = s.page;
    p.sliding_window = s.window;
    p.scale = b.scale();
    p.soft_cap = s.cap;
    return p;
}

// most_blocks: 0 for a grid that has a block for every item and head of the plan's promise.
void attention(const std::string &kernel, const Batch &b, const Plan &plan, const Scratch &scratch, void *output, float *lse,
               int threads = 128, unsigned most_blocks = 0) {
    TtAttentionParams p = attention_params(b, scratch, output, lse);
    p.block_table = plan.flat_pages ? plan.page_indices.data : b.d_table.data;
    p.block_table_stride = plan.flat_pages ? 1 : b.width;
    p.header = plan.header.data;
    p.items = plan.items.data;
    p.partial_rows = plan.partial_rows;
    p.max_work_items = plan.max_items;
    const Kernel &k = modules.get(kernel);
    if (kernel.find("_w2_") != std::string::npos) threads = 64;
    if (kernel.find("_w1_") != std::string::npos) threads = 32;
    if (kernel.find("_w8_") != std::string::npos) threads = 256;
    const unsigned blocks = static_cast<unsigned>(plan.max_items) * b.shape.kv_heads;
    launch(kernel, most_blocks == 0 ? blocks : std::min(blocks, most_blocks), threads, k.shared, p);
}

void plain(const Batch &b, float *output, float *lse) {
    const Shape &s = b.shape;
    TtPlainAttentionParams p = {};
    p.query = reinterpret_cast<const float *>(b.query.data);
    p.kv_cache = reinterpret_cast<const float *>(b.cache.data);
    p.output = output;
    p.lse = lse;
    p.block_table = b.d_table.data;
    p.query_start_loc = b.d_starts.data;
    p.seq_lens = b.d_lens.data;
    p.causal = b.d_causal.data;
    p.query_stride = p.output_stride = static_cast<int64_t>(b.heads()) * s.size;
    p.kv_block_stride = b.block_stride;
    p.kv_head_stride = b.head_stride;
    p.kv_token_stride = b.token_stride;
    p.block_table_stride = b.width;
    p.num_reqs = b.rows;
    p.num_tokens = b.padded;
    p.num_heads = b.heads();
    p.num_kv_heads = s.kv_heads;
    p.head_size = s.size;
    p.block_size = s.page;
    p.sliding_window = s.window;
    p.scale = b.scale();
    p.soft_cap = s.cap;
    launch("tt_attention_plain_f32", dim3(b.padded, b.heads()), 128, 0, p);
}

struct Worst {
    double row = 0, total = 0, element = 0, lse = 0;
};
std::map<std::string, Worst> worst_of;

// Compares every element; false if any row, element or LSE is beyond its bar.
bool compare(const Batch &b, const Buffer<unsigned char> &output, const Buffer<float> &lse, Worst &worst,
             std::string &why) {
    const Shape &s = b.shape;
    size_t rows = static_cast<size_t>(b.padded) * b.heads();
    Buffer<double> want(rows * s.size), want_lse(rows);
    Reference r = {b.query.data, b.cache.data, b.d_table.data, b.d_starts.data, b.d_lens.data, b.d_row_of_token.data,
                   b.d_causal.data, want.data, want_lse.data,
                   s.cache_kind == 3 ? b.scales.data : nullptr, s.cache_kind == 3 ? b.scales.data + s.kv_heads : nullptr,
                   b.block_stride, b.head_stride, b.token_stride, b.width, s.kind, s.cache_kind, b.heads(), s.kv_heads,
                   s.size, s.page, s.window, b.scale(), s.cap};
    reference_kernel<<<dim3(b.padded, b.heads()), 128, 0, stream>>>(r);
    CUDA(cudaGetLastError());
    Buffer<Sums> sums(rows);
    compare_kernel<<<static_cast<unsigned>((rows + 3) / 4), 128, 0, stream>>>(output.data, want.data, sums.data, s.kind, s.size,
                                                                             static_cast<int64_t>(rows));
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
    const double bar = s.kind == 0 ? 1e-2 : s.kind == 1 ? 2e-3 : 2e-6;
    const double lse_bar = s.kind == 2 ? 2e-6 : 2e-4;
    auto h = sums.host();
    auto hl = lse.host();
    auto wl = want_lse.host();
    double error = 0, norm = 0;
    size_t bad = 0;
    for (size_t i = 0; i < rows; ++i) {
        error += h[i].x;
        norm += h[i].y;
        bool good;
        if (h[i].y == 0) {
            good = h[i].x == 0 && std::isinf(hl[i]) && hl[i] < 0;
        } else {
            double row = std::sqrt(h[i].x / h[i].y), element = h[i].z / h[i].w;
            double off = std::fabs(hl[i] - wl[i]) / std::max(1.0, std::fabs(wl[i]));
            worst.row = std::max(worst.row, row);
            worst.element = std::max(worst.element, element);
            worst.lse = std::max(worst.lse, off);
            good = row <= bar && element <= bar && off <= lse_bar;
        }
        if (!good && bad++ == 0) {
            char text[200];
            std::snprintf(text, sizeof text, "first bad: token %zu head %zu err2 %g ref2 %g max %g lse %g want %g", i / b.heads(),
                          i % b.heads(), h[i].x, h[i].y, h[i].z, hl[i], wl[i]);
            why = text;
        }
    }
    double total = norm > 0 ? std::sqrt(error / norm) : 0;
    worst.total = std::max(worst.total, total);
    if (bad != 0) {
        why = std::to_string(bad) + " of " + std::to_string(rows) + " rows beyond the bar; " + why;
    }
    return bad == 0 && total <= bar;
}

std::string describe(const Shape &s, const char *how) {
    char text[300];
    std::snprintf(text, sizeof text, "%s %s cache %s D=%d Hkv=%d G=%d page=%d %s window=%d cap=%g causal=%d rows=%zu%s%s", how,
                  kind_names[s.kind], kind_names[s.cache_kind], s.size, s.kv_heads, s.group, s.page, s.nhd ? "NHD" : "HND",
                  s.window, s.cap, s.per_row_causal ? 2 : s.causal, s.query_lens.size(), s.splits.empty() ? "" : " split",
                  s.work_list ? " work list" : "");
    return text;
}

// how: "decode", "prefill", "mixed" (decode kernel for small rows, prefill for the others) or "plain".
void check(const Shape &shape, const char *how, const char *ladder = nullptr) {
    Batch b(shape);
    if (b.padded == 0) {
        return;
    }
    const std::string kind = how;
    size_t row_bytes = static_cast<size_t>(b.heads()) * shape.size * element_bytes(shape.kind);
    const int guard = 2;
    size_t rows = static_cast<size_t>(b.padded) * b.heads();
    Buffer<unsigned char> output((b.padded + guard) * row_bytes), again((b.padded + guard) * row_bytes);
    Buffer<unsigned char> shared((b.padded + guard) * row_bytes);
    Buffer<float> lse(rows + guard * b.heads()), lse_again(rows + guard * b.heads());
    Buffer<float> lse_shared(rows + guard * b.heads());
    std::string text = describe(shape, ladder ? ladder : how);
    auto run = [&](Buffer<unsigned char> &out, Buffer<float> &l, unsigned most_blocks = 0, int promise = 1) {
        if (kind == "plain") {
            plain(b, reinterpret_cast<float *>(out.data), l.data);
            CUDA(cudaStreamSynchronize(stream));
            return;
        }
        const int none = 0x7fffffff, tile = shape.size == 256 ? 64 : 128;
        std::vector<std::pair<std::string, Plan>> steps;
        if (kind == "decode") {
            steps.emplace_back(ladder ? ladder : kernel_name("decode", shape), Plan(b, 16, 0, none, true, promise));
        } else if (kind == "prefill") {
            steps.emplace_back(kernel_name("prefill", shape), Plan(b, tile, 0, none, true, promise));
        } else if (kind == "prefill64") {
            steps.emplace_back(kernel_name("prefill", shape) + "_r64", Plan(b, 64, 0, none, true, promise));
        } else {
            steps.emplace_back(kernel_name("decode", shape), Plan(b, 16, 0, 16, false, promise));
            steps.emplace_back(kernel_name("prefill", shape), Plan(b, tile, 17, none, true, promise));
        }
        for (auto &step : steps) {
            Scratch scratch(b, step.second);
            attention(step.first, b, step.second, scratch, out.data, l.data, 128, most_blocks);
            CUDA(cudaStreamSynchronize(stream));
            auto counters = scratch.counters.host();
            results.check(std::all_of(counters.begin(), counters.end(), [](int32_t x) { return x == 0; }),
                          text + ": merge counters are left non-zero");
        }
    };
    run(output, lse);
    run(again, lse_again);
    std::string why;
    bool good = compare(b, output, lse, worst_of[std::string(how) + " " + kind_names[shape.kind] +
                                                  (shape.cache_kind == 3 ? " fp8" : "")],
                        why);
    results.check(good, text + ": " + why);
    auto first = output.host(), second = again.host();
    results.check(first == second, text + ": two runs differ");
    if (kind != "plain" && !ladder) {
        // Blocks that share a list, with room for items that it does not have.
        const unsigned most_blocks = random_int(1, 3 * shape.kv_heads + 1);
        run(shared, lse_shared, most_blocks, random_int(1, 100));
        const auto a = lse.host(), c = lse_shared.host();
        results.check(shared.host() == first && std::equal(a.begin(), a.begin() + rows, c.begin()),
                      text + ": a grid of " + std::to_string(most_blocks) + " blocks gives other results");
    }
    results.check(std::all_of(first.begin() + b.padded * row_bytes, first.end(), [](unsigned char x) { return x == 0xff; }),
                  text + ": rows beyond the batch were written");
}

}  // namespace
