// Attention kernels against the f64 reference: every element of random batches of every kind.
#include "batch.cuh"

namespace {

std::vector<int> random_ints(int n, int low, int high) {
    std::vector<int> v(n);
    for (int &x : v) {
        x = random_int(low, high);
    }
    return v;
}

// A graph captured when every length is 1 replays at full lengths, and with fewer requests, as if it were launched anew:
// the plan is part of it, and reads lengths and splits on the device.
void test_replay(bool small) {
    Shape s;
    const int longest = small ? 400 : 100000;
    s.query_lens = {1, 1, 1, 1};
    s.kv_lens = {longest, longest / 3 + 1, 17, longest / 7 + 1};
    s.splits = {16, 3, 40, 5};  // 40 is cut to the promise
    Batch b(s);
    const int promise = 16;
    Plan plan(b, 16, 0, 0x7fffffff, false);  // for its buffers, which are as large as 40 splits need
    Scratch scratch(b, plan);
    size_t elements = static_cast<size_t>(b.padded) * b.heads() * s.size;
    Buffer<unsigned char> output(elements * 2);
    Buffer<float> lse(static_cast<size_t>(b.padded) * b.heads());
    auto set = [&](std::vector<int32_t> lens, std::vector<int32_t> starts) {
        CUDA(cudaMemcpy(b.d_lens.data, lens.data(), lens.size() * 4, cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(b.d_starts.data, starts.data(), starts.size() * 4, cudaMemcpyHostToDevice));
    };
    TtPlanParams p = {};
    p.header = plan.header.data;
    p.items = plan.items.data;
    p.query_start_loc = b.d_starts.data;
    p.seq_lens = b.d_lens.data;
    p.num_splits = b.d_splits.data;
    p.causal = b.d_causal.data;
    p.num_reqs = b.rows;
    p.num_tokens = b.padded;
    p.block_size = s.page;
    p.heads_per_kv_head = s.group;
    p.tile_rows = p.max_packed_rows = 16;
    p.max_num_splits = promise;
    p.max_work_items = plan.max_items = promise * b.rows;
    p.with_tail = 1;
    auto step = [&] {
        launch("tt_plan_flash_attn", 1, 1024, 0, p);
        attention(kernel_name("decode", s), b, plan, scratch, output.data, lse.data);
    };
    set({1, 1, 1, 1}, b.starts);
    step();
    CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (bool padded : {false, true}) {
        std::vector<int32_t> lens(s.kv_lens.begin(), s.kv_lens.end()), starts = b.starts;
        if (padded) {
            lens[2] = lens[3] = 0;
            starts = {0, 1, 2, 2, 2};
            // The reference's view of the same batch.
            b.d_row_of_token = Buffer<int32_t>(std::vector<int32_t>{0, 1, -1, -1});
        }
        set(lens, starts);
        output.poison();
        lse.poison();
        CUDA(cudaGraphLaunch(replay, stream));
        CUDA(cudaStreamSynchronize(stream));
        auto replayed = output.host();
        Worst worst;
        std::string why;
        results.check(compare(b, output, lse, worst, why), "replay of a graph captured at length 1: " + why);
        output.poison();
        step();
        CUDA(cudaStreamSynchronize(stream));
        results.check(output.host() == replayed, "replay differs from the same launches");
    }
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
}

// A request alone gives the bits that it gives in a batch, with the same splits: by the decode and the prefill kernel.
void test_alone(bool small) {
    for (const char *how : {"decode", "prefill"}) {
        const bool decode = how[0] == 'd';
        Shape s;
        const int rows = 5, longest = small ? 200 : 3000;
        s.query_lens.assign(rows, decode ? 1 : 33);
        s.kv_lens = random_ints(rows, 40, longest);
        s.splits = random_ints(rows, 1, 6);
        Batch b(s);
        const int tile = decode ? 16 : 128;
        size_t row_bytes = static_cast<size_t>(b.heads()) * s.size * 2;
        auto run = [&] {
            Plan plan(b, tile, 0, 0x7fffffff, false);
            Scratch scratch(b, plan);
            Buffer<unsigned char> output(b.padded * row_bytes);
            attention(kernel_name(how, s), b, plan, scratch, output.data, nullptr);
            CUDA(cudaStreamSynchronize(stream));
            return output.host();
        };
        auto whole = run();
        const int chosen = random_int(0, rows - 1), length = s.query_lens[0];
        // The others' queries become empty; the one request keeps its tokens.
        std::vector<int32_t> starts(rows + 1, chosen * length);
        std::fill(starts.begin() + chosen + 1, starts.end(), (chosen + 1) * length);
        CUDA(cudaMemcpy(b.d_starts.data, starts.data(), starts.size() * 4, cudaMemcpyHostToDevice));
        auto alone = run();
        auto from = static_cast<std::ptrdiff_t>(chosen * length * row_bytes), to = from + static_cast<std::ptrdiff_t>(length * row_bytes);
        results.check(std::equal(whole.begin() + from, whole.begin() + to, alone.begin() + from),
                      std::string(how) + ": a request alone differs from itself in a batch");
        results.check(std::all_of(alone.begin(), alone.begin() + from, [](unsigned char x) { return x == 0xff; }),
                      std::string(how) + ": a request without queries was written");
    }
}

}  // namespace

void test_attention(bool small) {
    const int longest = small ? 150 : 1500;
    auto vary = [&](Shape s, int i) {
        s.page = i % 4 == 0 ? 16 : i % 4 == 1 ? 48 : i % 4 == 2 ? 64 : 256;
        s.nhd = i % 2 == 0;
        s.kv_heads = 1 + i % 3;
        s.window = i % 5 == 2 ? random_int(1, longest / 2) : i % 5 == 4 ? random_int(1, 40) : 0;
        s.cap = i % 3 == 1 ? 30.0f : 0.0f;
        s.padding = i % 4 == 3 ? 5 : 0;
        s.reversed = i % 7 == 3;
        return s;
    };
    struct Kind {
        int kind, cache;
        std::vector<int> sizes;
    };
    // Decode: one to four tokens a request, packed rows 1 to 16 and beyond one tile.
    int i = 0;
    for (const Kind &k : {Kind{0, 0, {64, 96, 128, 256}}, Kind{1, 1, {64, 96, 128, 256}}, Kind{0, 3, {64, 96, 128, 256}},
                          Kind{1, 3, {64, 96, 128, 256}}}) {
        for (int size : k.sizes) {
            for (int round = 0; round < (small ? 3 : 8); ++round, ++i) {
                Shape s = vary(Shape{}, i);
                s.kind = k.kind;
                s.cache_kind = k.cache;
                s.size = size;
                const int groups[] = {4, 1, 7, 8, 16, 3};
                s.group = groups[i % 6];
                int rows = small ? 3 : random_int(1, 9);
                s.query_lens = random_ints(rows, 0, round % 2 ? 4 : 1);
                s.kv_lens = random_ints(rows, 4, longest);
                s.causal = round != 3;
                if (round % 2 == 1) {
                    s.splits = random_ints(rows, 1, small ? 5 : 40);
                }
                if (round == 2) {
                    s.kv_lens[0] = 0;
                    s.query_lens[0] = 1;
                }
                if (round == 5 || (small && round == 2)) {
                    s.splits.clear();
                    s.work_list = s.page * random_int(1, 4);
                    s.reversed = false;
                }
                s.per_row_causal = round == 7;
                check(s, "decode");
            }
        }
    }
    // Prefill and mixed.
    for (const Kind &k : {Kind{0, 0, {64, 96, 128, 256}}, Kind{1, 1, {64, 96, 128, 256}}, Kind{0, 3, {64, 96, 128, 256}},
                          Kind{1, 3, {64, 96, 128, 256}}}) {
        for (int size : k.sizes) {
            for (int round = 0; round < (small ? 3 : 8); ++round, ++i) {
                Shape s = vary(Shape{}, i);
                s.kind = k.kind;
                s.cache_kind = k.cache;
                s.size = size;
                const int groups[] = {4, 1, 7, 8};
                s.group = groups[i % 4];
                int rows = small ? 2 : random_int(1, 6);
                s.query_lens = random_ints(rows, 0, small ? 60 : 400);
                s.kv_lens = random_ints(rows, 0, longest);
                for (int r = 0; r < rows; ++r) {
                    if (round % 2 == 1 && r % 2 == 0) {
                        s.query_lens[r] = 1;
                    }
                    s.kv_lens[r] += s.query_lens[r];
                }
                s.causal = round != 3;
                if (round % 3 == 1) {
                    s.splits = random_ints(rows, 1, 7);
                }
                bool list = round == 5 || (small && round == 2);
                if (list) {
                    s.work_list = s.page * random_int(1, 6);
                    s.splits.clear();
                    s.reversed = false;
                }
                s.per_row_causal = round == 7;
                check(s, round % 2 == 1 && !list ? "mixed" : "prefill");
                if (size != 256 && k.cache != 3 && round < 3) {
                    check(s, "prefill64");
                }
            }
        }
    }
    for (int size : {64, 96, 128, 256}) {
        for (int round = 0; round < (small ? 2 : 4); ++round, ++i) {
            Shape s = vary(Shape{}, i);
            s.kind = s.cache_kind = 2;
            s.size = size;
            int rows = small ? 2 : 4;
            s.query_lens = random_ints(rows, 0, round % 2 ? 1 : 60);
            s.kv_lens = random_ints(rows, 60, longest);
            s.causal = round != 3;
            check(s, "plain");
        }
    }
    test_replay(small);
    test_alone(small);
}

void print_worst() {
    for (auto &entry : worst_of) {
        std::printf("  worst %-16s row %.2e  element %.2e  whole %.2e  lse %.2e\n", entry.first.c_str(), entry.second.row,
                    entry.second.element, entry.second.total, entry.second.lse);
    }
}
