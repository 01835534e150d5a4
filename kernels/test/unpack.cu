// tt_unpack against plain loops on the host, element for element, and its time.
#include "device.h"

#include <cstring>

namespace {

struct Step {
    int reqs, tokens, padded, width, page, ranks, rank, interleave;
    std::vector<int32_t> starts{0}, lens, table;
    Buffer<int32_t> d_starts, d_lens, d_table;
    int stride;

    Step(int n, int longest_query, int longest, int page_size) : reqs(n), page(page_size) {
        for (int r = 0; r < n; ++r) {
            int query = random_int(0, longest_query);
            starts.push_back(starts.back() + query);
            lens.push_back(query + random_int(0, longest));
        }
        tokens = starts.back();
        padded = tokens + 7;
        width = (longest + longest_query + page - 1) / page + 1;
        stride = width + 3;
        ranks = random_int(1, 4);
        rank = random_int(0, ranks - 1);
        interleave = 1 << random_int(0, 4);
        for (int i = 0; i < n * stride; ++i) {
            table.push_back(random_int(0, 1 << 30));
        }
        d_starts = Buffer<int32_t>(starts);
        d_lens = Buffer<int32_t>(lens);
        d_table = Buffer<int32_t>(table);
    }
    int query(int r) const { return starts[r + 1] - starts[r]; }
    int local(int len) const {
        // Token t of a request is rank (t / interleave) % ranks' own.
        int count = 0;
        for (int t = 0; t < len; ++t) {
            count += t / interleave % ranks == rank;
        }
        return count;
    }
};

// The packed slot and its operations.
struct Pack {
    std::vector<unsigned char> slot;
    std::vector<TtUnpackOp> ops;
    std::vector<std::vector<int64_t>> want;
    std::vector<std::string> names;
    std::vector<Buffer<int64_t>> destinations;
    std::vector<bool> wide;

    template <class T>
    int64_t put(const std::vector<T> &values) {
        slot.resize((slot.size() + 15) / 16 * 16);
        int64_t at = static_cast<int64_t>(slot.size());
        slot.resize(slot.size() + values.size() * sizeof(T) + 16);
        if (!values.empty()) {
            std::memcpy(&slot[at], values.data(), values.size() * sizeof(T));
        }
        return at;
    }
    // An operation whose own elements are `own`, in a destination with room for `spare` more.
    TtUnpackOp &add(const char *name, int kind, const std::vector<int64_t> &own, int spare = 5) {
        TtUnpackOp op = {};
        op.kind = kind;
        op.fill = -random_int(1, 9);
        op.width = 1;
        op.room = static_cast<int>(own.size()) + spare;
        want.push_back(own);
        want.back().resize(op.room, op.fill);
        wide.push_back(kind == TT_UNPACK_VALUES64 || kind == TT_UNPACK_COPY64 || kind == TT_UNPACK_ROWS64);
        names.push_back(name);
        destinations.emplace_back(static_cast<size_t>(op.room) + 2);
        op.destination = destinations.back().data;
        ops.push_back(op);
        return ops.back();
    }
    // An operation that writes into the step's own `to`, which its test looks at.
    TtUnpackOp &add_to(Buffer<int32_t> &to, int kind, int rows) {
        TtUnpackOp &op = add("", kind, {}, 0);
        op.destination = to.data;
        op.rows = rows;
        op.room = static_cast<int>(to.size);
        return op;
    }
    TtUnpackParams params(const Step &s, const void *packed, const TtUnpackOp *operations, int num_first) const {
        TtUnpackParams p = {};
        p.slot = packed;
        p.ops = operations;
        p.query_start_loc = s.d_starts.data;
        p.seq_lens = s.d_lens.data;
        p.block_table = s.d_table.data;
        p.block_table_stride = s.stride;
        p.num_first_ops = num_first;
        p.num_ops = static_cast<int32_t>(ops.size());
        p.num_reqs = s.reqs;
        p.num_tokens = s.padded;
        p.table_width = s.width;
        p.block_size = s.page;
        p.dcp_world_size = s.ranks;
        p.dcp_rank = s.rank;
        p.dcp_interleave = s.interleave;
        return p;
    }
    // On a grid of `blocks`; operations [0, num_first) before the others.
    void run(const Step &s, int blocks, int num_first) {
        for (auto &destination : destinations) {
            destination.poison();
        }
        Buffer<unsigned char> d_slot(slot);
        Buffer<TtUnpackOp> d_ops(ops);
        launch_cooperative("tt_unpack", blocks, 256, 0, params(s, d_slot.data, d_ops.data, num_first));
        CUDA(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < ops.size(); ++i) {
            auto raw = destinations[i].host();
            size_t wrong = 0;
            const int32_t *narrow = reinterpret_cast<const int32_t *>(raw.data());
            for (size_t j = 0; j < want[i].size(); ++j) {
                wrong += (wide[i] ? raw[j] : narrow[j]) != want[i][j];
            }
            bool guarded = wide[i] ? raw[want[i].size()] == -1 : narrow[want[i].size()] == -1;
            results.check(wrong == 0 && guarded, "unpack " + names[i] + ": " + std::to_string(wrong) + " of " +
                                                     std::to_string(want[i].size()) + " wrong" + (guarded ? "" : ", overrun"));
        }
    }
};

void one(int n, int longest_query, int longest, int page) {
    Step s(n, longest_query, longest, page);
    const std::vector<int32_t> old_table = s.table;
    Pack pack;
    // First what the step changes: the inputs, and entries of the block table, some of which do not exist. All the other
    // operations, in the same launch, read what these wrote.
    std::vector<int32_t> triples;
    for (int i = 0; i < 20 + 3 * n; ++i) {
        int row = random_int(-1, n), column = random_int(-1, s.width), block = random_int(0, 1 << 20);
        bool real = row >= 0 && row < n && column >= 0 && column < s.width;
        bool again = false;
        for (size_t j = 0; j < triples.size(); j += 3) {
            again |= triples[j] == row && triples[j + 1] == column;
        }
        if (again) {
            continue;
        }
        triples.insert(triples.end(), {row, column, block});
        if (real) {
            s.table[row * s.stride + column] = block;
        }
    }
    TtUnpackOp &updates = pack.add_to(s.d_table, TT_UNPACK_TABLE_UPDATES, static_cast<int>(triples.size() / 3));
    updates.list = pack.put(triples);
    TtUnpackOp &new_starts = pack.add_to(s.d_starts, TT_UNPACK_VALUES, n + 1);
    new_starts.list = pack.put(s.starts);
    TtUnpackOp &new_lens = pack.add_to(s.d_lens, TT_UNPACK_VALUES, n);
    new_lens.list = pack.put(s.lens);
    const int num_first = static_cast<int>(pack.ops.size());
    const int first = random_int(0, n - 1), rows = random_int(1, n - first);
    auto over_rows = [&](auto value) {
        std::vector<int64_t> own;
        for (int r = first; r < first + rows; ++r) {
            own.push_back(value(r));
        }
        return own;
    };
    auto range = [&](TtUnpackOp &op) -> TtUnpackOp & {
        op.first_row = first;
        op.rows = rows;
        return op;
    };
    std::vector<int32_t> values(random_int(0, 700)), chosen;
    std::vector<int64_t> own, wide(random_int(0, 700));
    for (auto &v : values) {
        v = random_int(-1000000, 1000000);
        own.push_back(v);
    }
    for (auto &v : wide) {
        v = (static_cast<int64_t>(random_int(-1000, 1000)) << 33) + random_int(0, 100);
    }
    auto &a = pack.add("values", TT_UNPACK_VALUES, own);
    a.list = pack.put(values);
    a.rows = static_cast<int32_t>(values.size());
    auto &b = pack.add("values64", TT_UNPACK_VALUES64, wide);
    b.list = pack.put(wide);
    b.rows = static_cast<int32_t>(wide.size());
    // Token ids, some of them references to what the step before sampled, one of which it did not.
    std::vector<int32_t> sampled(random_int(1, 300)), fed(random_int(1, 700));
    for (auto &v : sampled) {
        v = random_int(0, 1000000);
    }
    own.clear();
    for (auto &v : fed) {
        int from = random_int(0, static_cast<int>(sampled.size()) - 1);
        bool known = random_int(0, 1) != 0;
        v = known ? random_int(0, 1000000) : -1 - from;
        own.push_back(known ? v : sampled[from]);
    }
    Buffer<int32_t> d_sampled(sampled);
    auto &t = pack.add("feed tokens", TT_UNPACK_FEED_TOKENS, own);
    fed[0] = random_int(0, 1) != 0 ? -1 - static_cast<int>(sampled.size()) : INT32_MIN;
    pack.want.back()[0] = t.fill;
    t.list = pack.put(fed);
    t.rows = static_cast<int32_t>(fed.size());
    t.width = static_cast<int32_t>(sampled.size());
    t.source = d_sampled.data;
    own.assign(s.lens.begin(), s.lens.end());
    auto &c = pack.add("copy", TT_UNPACK_COPY, own);
    c.source = s.d_lens.data;
    c.rows = n;
    Buffer<int64_t> d_wide(wide);
    auto &d = pack.add("copy64", TT_UNPACK_COPY64, wide);
    d.source = d_wide.data;
    d.rows = static_cast<int32_t>(wide.size());

    own = over_rows([&](int r) { return s.starts[r] - s.starts[first]; });
    own.push_back(s.starts[first + rows] - s.starts[first]);
    range(pack.add("rebase", TT_UNPACK_REBASE, own));
    range(pack.add("context lens", TT_UNPACK_CONTEXT_LENS, over_rows([&](int r) { return s.lens[r] - s.query(r); })));
    range(pack.add("has context", TT_UNPACK_HAS_CONTEXT, over_rows([&](int r) { return s.lens[r] > s.query(r); })));
    range(pack.add("dcp seq lens", TT_UNPACK_DCP_LOCAL, over_rows([&](int r) { return s.local(s.lens[r]); })));
    range(pack.add("dcp context lens", TT_UNPACK_DCP_LOCAL, over_rows([&](int r) { return s.local(s.lens[r] - s.query(r)); })))
        .option = 1;
    own = {0};
    std::vector<int32_t> indptr = {0}, some = {0}, columns;
    std::vector<int64_t> pages, selected;
    for (int r = first; r < first + rows; ++r) {
        int count = (s.lens[r] + page - 1) / page;
        own.push_back(own.back() + count);
        indptr.push_back(indptr.back() + count);
        for (int i = 0; i < count; ++i) {
            pages.push_back(s.table[r * s.stride + i]);
            if (random_int(0, 2) == 0) {
                columns.push_back(i);
                selected.push_back(s.table[r * s.stride + i]);
            }
        }
        some.push_back(static_cast<int32_t>(columns.size()));
    }
    range(pack.add("cu page counts", TT_UNPACK_CU_PAGE_COUNTS, own));
    auto &e = range(pack.add("gather pages", TT_UNPACK_GATHER_PAGES, pages));
    e.list = pack.put(indptr);
    auto &f = range(pack.add("select pages", TT_UNPACK_SELECT_PAGES, selected));
    f.list = pack.put(some);
    f.list2 = pack.put(columns);
    for (int i = 0; i < n; ++i) {
        if (random_int(0, 1)) {
            chosen.push_back(i);
        }
    }
    std::shuffle(chosen.begin(), chosen.end(), random_engine);
    const int64_t at = pack.put(chosen);
    const int width = 2;
    std::vector<int64_t> states, lasts, gathered, tokens, mask(n, 0), gathered64;
    std::vector<int64_t> source64(n);
    for (auto &v : source64) {
        v = static_cast<int64_t>(random_int(0, 1000)) << 35;
    }
    for (int r : chosen) {
        mask[r] = 1;
        gathered64.push_back(source64[r]);
        for (int i = 0; i < width; ++i) {
            int last = std::max(s.lens[r] - 1, 0) / page + i;
            states.push_back(i < s.width ? s.table[r * s.stride + i] : 0);
            lasts.push_back(last < s.width ? s.table[r * s.stride + last] : INT64_MIN);
        }
        for (int i = 0; i < s.stride; ++i) {
            gathered.push_back(s.table[r * s.stride + i]);
        }
        for (int t = s.starts[r]; t < s.starts[r + 1]; ++t) {
            tokens.push_back(t);
        }
    }
    auto list = [&](TtUnpackOp &op, int w) -> TtUnpackOp & {
        op.list = at;
        op.rows = static_cast<int32_t>(chosen.size());
        op.width = w;
        return op;
    };
    list(pack.add("state indices", TT_UNPACK_STATE_INDICES, states), width);
    auto &g = list(pack.add("last state indices", TT_UNPACK_STATE_INDICES, lasts), width);
    g.option = 1;
    for (auto &v : pack.want.back()) {
        v = v == INT64_MIN ? g.fill : v;  // a column beyond the table
    }
    list(pack.add("rows", TT_UNPACK_ROWS, gathered), s.stride).source = s.d_table.data;
    Buffer<int64_t> d_source64(source64);
    list(pack.add("rows64", TT_UNPACK_ROWS64, gathered64), 1).source = d_source64.data;
    list(pack.add("row mask", TT_UNPACK_ROW_MASK, mask), 1);
    list(pack.add("row tokens", TT_UNPACK_ROW_TOKENS, tokens), 1);
    own.clear();
    for (int r = 0; r < n; ++r) {
        own.resize(own.size() + s.query(r), r);
    }
    own.resize(s.padded, 0);
    pack.add("token to row", TT_UNPACK_TOKEN_TO_ROW, own);
    own.clear();
    for (int i = 0; i < rows; ++i) {
        own.resize(own.size() + indptr[i + 1] - indptr[i], i);
    }
    auto &h = pack.add("segment ids", TT_UNPACK_SEGMENT_IDS, own);
    h.list = pack.put(indptr);
    h.rows = rows;
    std::vector<int64_t> conv_rows, conv_offsets;
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < (s.query(first + r) + 7) / 8; ++i) {
            conv_rows.push_back(r);
            conv_offsets.push_back(i);
        }
    }
    range(pack.add("conv rows", TT_UNPACK_CONV_ROWS, conv_rows)).width = 8;
    range(pack.add("conv offsets", TT_UNPACK_CONV_OFFSETS, conv_offsets)).width = 8;
    int multiprocessors = 0;
    CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    for (int blocks : {1, random_int(2, 31), multiprocessors}) {
        CUDA(cudaMemcpy(s.d_table.data, old_table.data(), old_table.size() * 4, cudaMemcpyHostToDevice));
        s.d_starts.poison();
        s.d_lens.poison();
        pack.run(s, blocks, num_first);
        results.check(s.d_table.host() == s.table, "unpack table updates: the block table");
        results.check(s.d_starts.host() == s.starts && s.d_lens.host() == s.lens, "unpack values: the step's inputs");
    }
}

}  // namespace

void test_unpack() {
    one(1, 3, 40, 16);
    one(7, 30, 300, 16);
    one(64, 5, 500, 48);
    one(600, 20, 200, 64);
    one(300, 2, 10000, 16);  // some 100,000 pages
}

void bench_unpack() {
    // A decode step of 256 requests of about 4,096 keys: inputs by value, then pages gathered.
    Step s(256, 1, 4096, 16);
    std::vector<int32_t> small(257, 1), indptr = {0}, triples;
    std::vector<int64_t> wide(256, 5);
    for (int r = 0; r < 256; ++r) {
        indptr.push_back(indptr.back() + (s.lens[r] + 15) / 16);
        triples.insert(triples.end(), {r, 3, 4});
    }
    Pack pack;
    std::vector<int64_t> own(256), pages(indptr.back());
    for (int i = 0; i < 2; ++i) {
        auto &op = pack.add("", TT_UNPACK_VALUES, own, 0);
        op.list = pack.put(small);
        op.rows = 256;
        auto &op64 = pack.add("", TT_UNPACK_VALUES64, own, 0);
        op64.list = pack.put(wide);
        op64.rows = 256;
    }
    auto &updates = pack.add_to(s.d_table, TT_UNPACK_TABLE_UPDATES, 256);
    updates.list = pack.put(triples);
    const int num_first = static_cast<int>(pack.ops.size());
    auto &gather = pack.add("", TT_UNPACK_GATHER_PAGES, pages, 0);
    gather.list = pack.put(indptr);
    gather.rows = 256;
    pack.add("", TT_UNPACK_CU_PAGE_COUNTS, own, 1).rows = 256;
    Buffer<unsigned char> slot(pack.slot);
    Buffer<TtUnpackOp> ops(pack.ops);
    for (int blocks : {16, 64, 132}) {
        double us = graph_time(1, 60, [&](int) {
            launch_cooperative("tt_unpack", blocks, 256, 0, pack.params(s, slot.data, ops.data, num_first));
        });
        std::printf("unpack of 256 decodes, %d pages gathered, %d blocks: %.1f us\n", indptr.back(), blocks, us);
    }
}
