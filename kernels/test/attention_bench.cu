// The attention kernels' times: the peers' shapes, and the ladders.
#include "batch.cuh"

namespace {

Shape decode_shape(int batch, int context, int splits, bool nhd, int cache_kind = 0, int page = 16) {
    Shape s;
    s.kv_heads = 8;
    s.group = 4;
    s.size = 128;
    s.nhd = nhd;
    s.page = page;
    s.cache_kind = cache_kind;
    s.poison = false;
    s.query_lens.assign(batch, 1);
    s.kv_lens.assign(batch, context);
    if (splits > 1) {
        s.splits.assign(batch, splits);
    }
    return s;
}

double time_decode(const Shape &s, const std::string &kernel, int promise = 1, unsigned most_blocks = 0) {
    size_t bytes = static_cast<size_t>(s.query_lens.size()) * s.kv_lens[0] * s.kv_heads * s.size * 2 * element_bytes(s.cache_kind);
    int sets = std::max<int>(1, std::min<int>(6, static_cast<int>(6000000000ull / bytes)));
    std::vector<std::unique_ptr<Batch>> batches;
    std::vector<std::unique_ptr<Plan>> plans;
    std::vector<std::unique_ptr<Scratch>> scratches;
    for (int i = 0; i < sets; ++i) {
        batches.emplace_back(new Batch(s));
        plans.emplace_back(new Plan(*batches[i], 16, 0, 0x7fffffff, false, promise));
        scratches.emplace_back(new Scratch(*batches[i], *plans[i]));
    }
    Buffer<unsigned char> output(batches[0]->query.size);
    return graph_time(sets, 60, [&](int i) {
        attention(kernel, *batches[i], *plans[i], *scratches[i], output.data, nullptr, 128, most_blocks);
    });
}

}  // namespace

void bench_attention() {
    struct Case {
        int batch, context;
        double peer;
        std::vector<int> splits;
    };
    const Case cases[] = {{1, 8192, 25, {16, 32, 33, 64}}, {1, 131072, 136, {32, 33, 66}}, {16, 8192, 134, {2, 4, 8}},
                          {64, 1024, 80, {1, 2}},      {64, 8192, 495, {1, 2, 4}},   {256, 1024, 273, {1, 2}},
                          {256, 4096, 989, {1, 2}}};
    std::printf("decode bf16, 32 query heads, 8 KV heads, head 128, page 16, graph replays\n");
    std::printf("%6s %8s %7s %7s %9s %8s %8s %8s\n", "batch", "context", "layout", "splits", "us", "TB/s", "peer us", "peer/us");
    for (const Case &c : cases) {
        double bytes = static_cast<double>(c.batch) * c.context * 8 * 128 * 4;
        for (bool nhd : {true, false}) {
            for (int splits : c.splits) {
                Shape s = decode_shape(c.batch, c.context, splits, nhd);
                double us = time_decode(s, kernel_name("decode", s));
                std::printf("%6d %8d %7s %7d %9.1f %8.3f %8.0f %8.2f\n", c.batch, c.context, nhd ? "NHD" : "HND", splits, us,
                            bytes / us / 1e6, c.peer, c.peer / us);
            }
        }
    }
    for (int batch : {16, 64, 256}) {
        int context = batch == 16 ? 8192 : batch == 64 ? 8192 : 4096, splits = batch == 16 ? 2 : 1;
        Shape s = decode_shape(batch, context, splits, true, 3);
        double us = time_decode(s, kernel_name("decode", s));
        std::printf("fp8 cache: batch %d context %d splits %d NHD: %.1f us %.3f TB/s\n", batch, context, splits, us,
                    static_cast<double>(batch) * context * 8 * 128 * 2 / us / 1e6);
    }
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    const unsigned captured = 16 * properties.multiProcessorCount / 8 * 8;
    std::printf("decode of 256 in a graph, 256 items: promised 256, 8,192, and 8,192 with a grid of %u and of %u blocks\n",
                captured, captured / 8);
    for (int context : {16, 1024, 4096}) {
        Shape s = decode_shape(256, context, 1, true);
        const std::string kernel = kernel_name("decode", s);
        std::printf("context %5d: %8.1f %8.1f %8.1f %8.1f us\n", context, time_decode(s, kernel), time_decode(s, kernel, 8192),
                    time_decode(s, kernel, 8192, captured), time_decode(s, kernel, 8192, captured / 8));
    }
    {
        Shape s = decode_shape(256, 4096, 1, true);
        Batch b(s);
        Plan warm(b, 16, 0, 0x7fffffff, false);
        double us = graph_time(1, 60, [&](int) {
            TtPlanParams p = {};
            p.header = warm.header.data;
            p.items = warm.items.data;
            p.query_start_loc = b.d_starts.data;
            p.seq_lens = b.d_lens.data;
            p.num_reqs = b.rows;
            p.num_tokens = b.padded;
            p.block_size = s.page;
            p.heads_per_kv_head = s.group;
            p.tile_rows = 16;
            p.max_packed_rows = 16;
            p.max_num_splits = 1;
            p.max_work_items = warm.max_items;
            launch("tt_plan_flash_attn", 1, 1024, 0, p);
        });
        std::printf("plan of 256 decodes, once a step: %.1f us\n", us);
    }
    std::printf("prefill, 32 query heads, 8 KV heads, head 128, page 16, causal, graph replays\n");
    std::printf("%6s %8s %8s %6s %7s %9s %9s\n", "batch", "query", "context", "dtype", "layout", "us", "TFLOP/s");
    struct Prefill {
        int batch, query, context, kind;
    };
    for (const Prefill &c : {Prefill{1, 8192, 8192, 0}, Prefill{1, 8192, 8192, 1}, Prefill{4, 2048, 2048, 0},
                             Prefill{16, 512, 512, 0}, Prefill{4, 2048, 16384, 0}, Prefill{1, 32768, 32768, 0}}) {
        for (bool nhd : {true, false}) {
            Shape s = decode_shape(c.batch, c.context, 1, nhd);
            s.kind = s.cache_kind = c.kind;
            s.query_lens.assign(c.batch, c.query);
            Batch b(s);
            Plan plan(b, 128, 0, 0x7fffffff, false);
            Scratch scratch(b, plan);
            Buffer<unsigned char> output(b.query.size);
            Buffer<float> lse(static_cast<size_t>(b.padded) * b.heads());
            double us = graph_time(1, 15, [&](int) {
                attention(kernel_name("prefill", s), b, plan, scratch, output.data, nullptr);
            });
            double before = c.context - c.query;
            double flop = 4.0 * 32 * 128 * (c.query * before + c.query * (c.query + 1.0) / 2) * c.batch;
            std::printf("%6d %8d %8d %6s %7s %9.1f %9.1f\n", c.batch, c.query, c.context, kind_names[c.kind], nhd ? "NHD" : "HND",
                        us, flop / us / 1e6);
            if (c.batch == 4 && c.context == 2048 && nhd) {
                attention(kernel_name("prefill", s), b, plan, scratch, output.data, lse.data);
                CUDA(cudaStreamSynchronize(stream));
                Worst worst;
                std::string why;
                results.check(compare(b, output, lse, worst, why), "prefill 4x2048: " + why);
                std::printf("       every element of it against f64: row %.2e whole %.2e\n", worst.row, worst.total);
            }
        }
    }
}

// Short queries onto long contexts, as extends and speculation bring them: by each kernel that can.
void bench_extends() {
    std::printf("extends bf16, NHD: us by tile of 16 (decode), 64 and 128 rows\n%6s %8s %8s %7s %9s %9s %9s\n", "batch", "query",
                "context", "splits", "16", "64", "128");
    struct Case {
        int batch, query, context, splits;
    };
    for (const Case &c : {Case{64, 4, 4096, 1}, Case{64, 8, 4096, 1}, Case{64, 16, 4096, 1}, Case{64, 32, 4096, 1},
                          Case{4, 16, 32768, 8}}) {
        Shape s = decode_shape(c.batch, c.context, c.splits, true);
        s.query_lens.assign(c.batch, c.query);
        Batch b(s);
        std::printf("%6d %8d %8d %7d", c.batch, c.query, c.context, c.splits);
        for (int tile : {16, 64, 128}) {
            std::string kernel = kernel_name(tile == 16 ? "decode" : "prefill", s) + (tile == 64 ? "_r64" : "");
            Plan plan(b, tile, 0, 0x7fffffff, false);
            Scratch scratch(b, plan);
            Buffer<unsigned char> output(b.query.size);
            std::printf(" %9.1f",
                        graph_time(1, 30, [&](int) { attention(kernel, b, plan, scratch, output.data, nullptr); }));
        }
        std::printf("\n");
    }
}

void bench_ladder() {
    const char *const steps[] = {"tt_ladder_0_plain",    "tt_ladder_1_mma_w4_s1", "tt_ladder_2_w4_s2",
                                 "tt_ladder_3_w4_s3",    "tt_ladder_4_w4_s2_x3",  "tt_ladder_5_w4_s6_x1",
                                 "tt_ladder_6_w2_s3_x4", "tt_ladder_7_w8_s3_x1",  "tt_ladder_8_w1_s3_x8",
                                 "tt_ladder_9_w4_s3_p256", "tt_ladder_10_w4_s3_p0",
                                 "tt_ladder_11_w4_s3_ef", "tt_ladder_12_w4_s3_items",
                                 "tt_ladder_13_w4_s2_x3_ef",
                                 "tt_ladder_14_w4_s3_narrow",
                                 "tt_ladder_15_w4_s2_x3_narrow",
                                 "tt_ladder_16_w8_s3_x1_narrow"};
    struct Case {
        int batch, context, splits;
        bool nhd;
    };
    const Case cases[] = {{1, 8192, 32, true},  {1, 131072, 32, true}, {1, 131072, 32, false},
                          {16, 8192, 2, true},  {64, 8192, 1, true},   {256, 1024, 1, true},
                          {256, 4096, 1, true}};
    std::printf("%-24s %4s %6s", "decode ladder (us)", "regs", "smem");
    for (const Case &c : cases) {
        char text[40];
        std::snprintf(text, sizeof text, "%dx%d/%d%s", c.batch, c.context, c.splits, c.nhd ? "" : " HND");
        std::printf(" %16s", text);
    }
    std::printf("\n");
    for (const char *step : steps) {
        check(decode_shape(3, 700, 3, true), "decode", step);
        const Kernel &k = modules.get(step);
        std::printf("%-24s %4d %6d", step, k.registers, k.shared);
        for (const Case &c : cases) {
            std::printf(" %16.1f", time_decode(decode_shape(c.batch, c.context, c.splits, c.nhd), step));
        }
        std::printf("\n");
    }
    struct Variant {
        const char *name;
        int threads, tile;
    };
    std::printf("%-32s %4s %5s %6s %12s %12s %12s (TFLOP/s)\n", "prefill ladder", "regs", "local", "smem", "1x8192", "4x2048", "16x512");
    for (const Variant &v : {Variant{"tt_ladder_prefill_w4_r32_k64", 128, 128}, Variant{"tt_ladder_prefill_w4_r32_k32", 128, 128},
                             Variant{"tt_ladder_prefill_w8_r16_k64", 256, 128},
                             Variant{"tt_ladder_prefill_w8_r16_k64_x2", 256, 128},
                             Variant{"tt_ladder_prefill_w8_r16_k128", 256, 128},
                             Variant{"tt_ladder_prefill_w8_r32_k64", 256, 256},
                             Variant{"tt_ladder_prefill_w4_r16_k64_x3", 128, 64},
                             Variant{"tt_ladder_prefill_w4_r32_k64_items", 128, 128}}) {
        const Kernel &k = modules.get(v.name);
        std::printf("%-32s %4d %5d %6d", v.name, k.registers, k.local, k.shared);
        for (int batch : {1, 4, 16}) {
            const int length = 8192 / batch;
            Shape s = decode_shape(batch, batch == 16 ? 512 : length, 1, true);
            s.query_lens.assign(batch, batch == 16 ? 512 : length);
            Batch b(s);
            Plan plan(b, v.tile, 0, 0x7fffffff, false);
            Scratch scratch(b, plan);
            Buffer<unsigned char> output(b.query.size);
            double us = graph_time(1, 15, [&](int) {
                attention(v.name, b, plan, scratch, output.data, nullptr, v.threads);
            });
            double q = s.query_lens[0];
            std::printf(" %12.1f", 4.0 * 32 * 128 * (q * (q + 1) / 2) * batch / us / 1e6);
        }
        std::printf("\n");
    }
}
