// tt_plan_flashinfer as a captured graph holds it: sizes from device memory, and lists that no verifier has seen.
#include "batch.cuh"

namespace {

// A launch's constants and buffers: all that is fixed when a graph is captured.
struct Part {
    int tile, max_items, max_reqs, max_tiles, max_tokens;
    Buffer<TtWorkHeader> header{1};
    Buffer<TtWorkItem> items;
    Buffer<TtWorkListSizes> sizes{1};
    Buffer<int32_t> starts, indptr, lens, requests, q, k, merges, indices;

    Part(int tile_rows, int items_limit, int reqs_limit, int tiles_limit, int tokens_limit, size_t pages)
        : tile(tile_rows), max_items(items_limit), max_reqs(reqs_limit), max_tiles(tiles_limit), max_tokens(tokens_limit),
          items(items_limit + 1), starts(reqs_limit + 1), indptr(reqs_limit + 1), lens(reqs_limit), requests(items_limit),
          q(items_limit), k(items_limit), merges(tiles_limit + 1), indices(pages) {}

    template <class T>
    static void set(Buffer<T> &to, const std::vector<T> &from) {
        to.poison();
        if (from.size() > to.size) {
            std::printf("FATAL a test's list is larger than its buffer\n");
            std::exit(2);
        }
        CUDA(cudaMemcpy(to.data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    // The part begins at the batch's row first_row.
    void set(const Batch &b, const std::vector<int> &query_lens, const std::vector<int> &kv_lens, int first_row,
             int first_token, int tile_q, int chunk, int tail_begin, int tail_end) {
        const WorkList list(b, query_lens, kv_lens, tile_q, chunk, 0, 0x7fffffff, first_row);
        std::vector<int32_t> from{0};
        for (int length : query_lens) {
            from.push_back(from.back() + length);
        }
        set(starts, from);
        set(indptr, list.indptr);
        set(lens, std::vector<int32_t>(kv_lens.begin(), kv_lens.end()));
        set(requests, list.requests);
        set(q, list.q);
        set(k, list.k);
        set(merges, list.merges);
        set(indices, list.indices);
        TtWorkListSizes z = {};
        z.num_items = static_cast<int32_t>(list.requests.size());
        z.num_reqs = static_cast<int32_t>(query_lens.size());
        z.num_tiles = list.tiles();
        z.first_token = first_token;
        z.cta_tile_q = tile_q;
        z.kv_chunk_size = chunk;
        z.causal = 1;
        z.tail_begin = tail_begin;
        z.tail_end = tail_end;
        set(sizes, std::vector<TtWorkListSizes>{z});
    }
    void plan(int group) {
        TtWorkListParams p = {};
        p.header = header.data;
        p.items = items.data;
        p.sizes = sizes.data;
        p.qo_indptr = starts.data;
        p.paged_kv_indptr = indptr.data;
        p.seq_lens = lens.data;
        p.request_indices = requests.data;
        p.qo_tile_indices = q.data;
        p.kv_tile_indices = k.data;
        p.merge_indptr = merges.data;
        p.heads_per_kv_head = group;
        p.tile_rows = tile;
        p.max_work_items = max_items;
        p.max_reqs = max_reqs;
        p.max_tiles = max_tiles;
        p.max_tokens = max_tokens;
        launch("tt_plan_flashinfer", 1, 1024, 4 * (max_reqs + 1 + max_tiles), p);
    }
};

// One graph, a decode and a prefill part in it, captured with short requests and small lists; replayed with long ones, with
// other tiles and chunks, and with fewer requests than it was captured for.
void test_replay(bool small) {
    Shape s;
    const int longest = small ? 400 : 20000;
    s.query_lens = {1, 2, 1, 70, 9};
    s.kv_lens = {longest, 17, longest / 3 + 1, longest / 7 + 70, 40};
    s.padding = 3;
    Batch b(s);
    const int decodes = 3, limit = small ? 60 : 1500;
    const size_t pages = static_cast<size_t>(b.blocks);
    Part decode(16, limit, decodes + 1, 8, b.padded, pages), prefill(128, limit, 4, 12, b.padded, pages);
    Plan scratch_of(b, 128, 0, 0x7fffffff, false);
    scratch_of.max_items = limit;
    scratch_of.partial_rows = 128;
    Scratch decode_scratch(b, scratch_of), prefill_scratch(b, scratch_of);
    size_t elements = static_cast<size_t>(b.padded) * b.heads() * s.size;
    Buffer<unsigned char> output(elements * 2);
    Buffer<float> lse(static_cast<size_t>(b.padded) * b.heads());
    auto run = [&](Part &part, const char *kernel, const Scratch &scratch) {
        part.plan(s.group);
        TtAttentionParams p = attention_params(b, scratch, output.data, lse.data);
        p.block_table = part.indices.data;
        p.block_table_stride = 1;
        p.header = part.header.data;
        p.items = part.items.data;
        p.partial_rows = 128;
        p.max_work_items = limit;
        const std::string name = kernel_name(kernel, s);
        launch(name, static_cast<unsigned>(limit) * s.kv_heads, 128, modules.get(name).shared, p);
    };
    auto step = [&] {
        run(decode, "decode", decode_scratch);
        run(prefill, "prefill", prefill_scratch);
    };
    decode.set(b, {1}, {1}, 0, 0, 16, 16, 0, 0);
    prefill.set(b, {1}, {1}, decodes, 1, 128, 64, 2, b.padded);
    step();
    CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    const std::vector<int> queries(s.query_lens.begin(), s.query_lens.begin() + decodes), keys(s.kv_lens.begin(), s.kv_lens.begin() + decodes);
    const std::vector<int> more(s.query_lens.begin() + decodes, s.query_lens.end()), far(s.kv_lens.begin() + decodes, s.kv_lens.end());
    for (int round = 0; round < 3; ++round) {
        // Round 2: the last request of each part is gone, and its tokens are nobody's.
        const bool fewer = round == 2;
        const int chunk = 16 * random_int(small ? 1 : 4, 20);
        const int tail = fewer ? b.tokens - s.query_lens.back() : b.tokens;
        decode.set(b, fewer ? std::vector<int>{1, 2} : queries, fewer ? std::vector<int>{keys[0], keys[1]} : keys, 0, 0, 16, chunk,
                   fewer ? 3 : 0, fewer ? 4 : 0);
        prefill.set(b, fewer ? std::vector<int>{more[0]} : more, fewer ? std::vector<int>{far[0]} : far, decodes, 4,
                    round == 1 ? 64 : 128, chunk, tail, b.padded);
        if (fewer) {
            std::vector<int32_t> rows;
            for (int r = 0; r < b.rows; ++r) {
                rows.resize(b.starts[r + 1], r == 2 || r == 4 ? -1 : r);
            }
            rows.resize(b.padded, -1);
            b.d_row_of_token = Buffer<int32_t>(rows);
        }
        output.poison();
        lse.poison();
        CUDA(cudaGraphLaunch(replay, stream));
        CUDA(cudaStreamSynchronize(stream));
        auto replayed = output.host();
        Worst worst;
        std::string why;
        results.check(compare(b, output, lse, worst, why),
                      "work list, replay " + std::to_string(round) + " of a graph captured with small sizes: " + why);
        output.poison();
        step();
        CUDA(cudaStreamSynchronize(stream));
        results.check(output.host() == replayed, "work list: replay differs from the same launches");
    }
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
}

// Whatever a list holds, its items stay within the launch's limits.
void test_bad_lists() {
    for (int round = 0; round < 200; ++round) {
        const int group = random_int(1, 8), tile = random_int(0, 1) ? 16 : 128;
        Part part(tile, random_int(1, 40), random_int(1, 6), random_int(1, 20), random_int(1, 300), 1);
        auto wild = [](int low, int high) {
            const int extremes[] = {INT32_MIN, -1, INT32_MAX};
            return random_int(0, 5) == 0 ? extremes[random_int(0, 2)] : random_int(low, high);
        };
        auto some = [&](Buffer<int32_t> &to, int low, int high) {
            std::vector<int32_t> values(to.size);
            for (auto &v : values) {
                v = wild(low, high);
            }
            Part::set(to, values);
        };
        some(part.starts, 0, 400);
        some(part.indptr, 0, 100);
        some(part.lens, 0, 5000);
        some(part.requests, 0, part.max_reqs);
        some(part.q, 0, part.max_tiles);
        some(part.k, 0, 30);
        some(part.merges, 0, part.max_items + 2);
        TtWorkListSizes z = {wild(0, 60), wild(0, 9), wild(0, 30), wild(0, 400), random_int(0, 3) ? tile : wild(1, 200), wild(1, 600),
                             wild(0, 1), wild(0, 400), wild(0, 400), 0};
        Part::set(part.sizes, std::vector<TtWorkListSizes>{z});
        part.items.poison();
        part.plan(group);
        CUDA(cudaStreamSynchronize(stream));
        auto header = part.header.host()[0];
        auto items = part.items.host();
        bool good = header.num_items >= 0 && header.num_items <= part.max_items && header.tail_begin >= 0 &&
                    header.tail_end <= part.max_tokens && items[part.max_items].row == -1;
        for (int i = 0; good && i < header.num_items; ++i) {
            const TtWorkItem &x = items[i];
            int rows = x.row_end - x.row_begin;
            good = rows >= 0 && rows <= tile && x.row_begin >= 0 && x.row_end <= x.query_len * group && x.first_token >= 0 &&
                   x.query_len >= 0 && x.first_token + x.query_len <= part.max_tokens && x.kv_len >= 0 && x.key_begin >= 0 &&
                   x.key_begin <= x.key_end && x.key_end <= x.kv_len && x.num_slots >= 1 && x.first_slot >= 0 &&
                   x.slot >= x.first_slot && x.slot < x.first_slot + x.num_slots && x.first_slot + x.num_slots <= part.max_items;
        }
        results.check(good, "work list: a bad one leads beyond the launch's limits, round " + std::to_string(round));
    }
}

}  // namespace

void test_work_lists(bool small) {
    test_replay(small);
    test_bad_lists();
}
