// Checks every kernel on the device against f64 references on fresh random inputs, then times them.
//
//   harness FATBIN_DIR [test] [small] [verbose] [bench] [ladder]
//
// Checks print what failed and one line at the end; `verbose` adds the worst errors of each kind. Exit code 0: nothing
// failed. The seed is printed; SEED=n repeats a run.
#include "device.h"

#include <chrono>
#include <set>

Modules modules;
cudaStream_t stream;
Results results;
std::mt19937_64 random_engine;

namespace {

__device__ unsigned long long mix(unsigned long long x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__global__ void fill_normal_kernel(void *to, size_t count, int kind, float deviation, unsigned long long seed) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        unsigned long long bits = mix(seed ^ mix(i));
        float a = (static_cast<unsigned>(bits) + 1.0f) * 2.3283064e-10f, b = static_cast<unsigned>(bits >> 32) * 2.3283064e-10f;
        float x = sqrtf(-2.0f * logf(fminf(a, 1.0f))) * cospif(2.0f * b) * deviation;
        if (kind == 0) {
            static_cast<__nv_bfloat16 *>(to)[i] = __float2bfloat16_rn(x);
        } else if (kind == 1) {
            static_cast<__half *>(to)[i] = __float2half_rn(x);
        } else if (kind == 2) {
            static_cast<float *>(to)[i] = x;
        } else {
            static_cast<__nv_fp8_storage_t *>(to)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        }
    }
}

}  // namespace

void fill_normal(void *to, size_t count, int kind, float deviation) {
    if (count != 0) {
        size_t blocks = std::min<size_t>((count + 255) / 256, 132 * 16);
        fill_normal_kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(to, count, kind, deviation, random_engine());
        CUDA(cudaGetLastError());
    }
}

double graph_time(int sets, int iterations, const std::function<void(int)> &work) {
    std::vector<cudaGraphExec_t> graphs(sets);
    for (int i = 0; i < sets; ++i) {
        work(i);  // Loads what is loaded lazily.
        CUDA(cudaStreamSynchronize(stream));
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work(i);
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&graphs[i], graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    // At least 30 ms of it first: a clock that rested needs that long.
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < std::max(sets, 4); ++i) {
            CUDA(cudaGraphLaunch(graphs[i % sets], stream));
        }
        CUDA(cudaStreamSynchronize(stream));
    } while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(30));
    std::vector<cudaEvent_t> begin(iterations), end(iterations);
    for (int i = 0; i < iterations; ++i) {
        CUDA(cudaEventCreate(&begin[i]));
        CUDA(cudaEventCreate(&end[i]));
        CUDA(cudaEventRecord(begin[i], stream));
        CUDA(cudaGraphLaunch(graphs[i % sets], stream));
        CUDA(cudaEventRecord(end[i], stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    std::vector<float> times(iterations);
    for (int i = 0; i < iterations; ++i) {
        CUDA(cudaEventElapsedTime(&times[i], begin[i], end[i]));
        CUDA(cudaEventDestroy(begin[i]));
        CUDA(cudaEventDestroy(end[i]));
    }
    for (auto graph : graphs) {
        CUDA(cudaGraphExecDestroy(graph));
    }
    std::sort(times.begin(), times.end());
    return times[iterations / 2] * 1e3;
}

int main(int argc, char **argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    if (argc < 2) {
        std::printf("usage: %s FATBIN_DIR [test] [small] [verbose] [bench] [ladder]\n", argv[0]);
        return 2;
    }
    std::set<std::string> asked(argv + 2, argv + argc);
    unsigned long long seed = std::getenv("SEED") ? std::strtoull(std::getenv("SEED"), nullptr, 10)
                                                  : (static_cast<unsigned long long>(std::random_device()()) << 16);
    random_engine.seed(seed);
    CUDA(cudaFree(nullptr));
    CUDA(cudaStreamCreate(&stream));
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    if (asked.count("bench") || asked.count("ladder")) {
        std::printf("device %s, %d multiprocessors, L2 %d MB\n", properties.name, properties.multiProcessorCount,
                    properties.l2CacheSize >> 20);
    }
    for (const char *name : {"kv_cache", "plan", "decode", "prefill", "attention_plain", "layers", "merge", "sampling",
                             "unpack"}) {
        modules.load(std::string(argv[1]) + "/" + name + ".fatbin");
    }
    if (asked.count("ladder")) {
        for (const char *name : {"decode_ladder", "decode_prefetch_256", "decode_prefetch_none", "decode_evict_first",
                                 "decode_items_first", "decode_narrow", "other_ladders", "scatter_default_store",
                                 "scatter_cached_load", "scatter_cached_load_stream_store"}) {
            modules.load(std::string(argv[1]) + "/" + name + ".fatbin");
        }
    }
    bool small = asked.count("small") != 0;
    if (asked.count("test") || small) {
        std::string counts;
        auto part = [&](const char *name, const std::function<void()> &test) {
            int before = results.passed + results.failed;
            test();
            counts += std::string(counts.empty() ? "" : ", ") + name + " " + std::to_string(results.passed + results.failed - before);
        };
        part("scatter", [&] { test_scatter(small); });
        part("layers", test_layers);
        part("sampling", [&] { test_sampling(small); });
        part("unpack", test_unpack);
        part("work lists", [&] { test_work_lists(small); });
        part("attention", [&] { test_attention(small); });
        if (asked.count("verbose")) {
            print_worst();
        }
        std::printf("%s: checks %d PASS, %d FAIL (%s); seed %llu on %s\n", results.failed == 0 ? "PASS" : "FAIL", results.passed,
                    results.failed, counts.c_str(), seed, properties.name);
    }
    if (asked.count("bench")) {
        bench_ceilings();
        bench_scatter();
        bench_attention();
        bench_extends();
        bench_layers();
        bench_unpack();
        bench_sampling();
    }
    if (asked.count("ladder")) {
        bench_scatter_ladder();
        bench_ladder();
    }
    CUDA(cudaDeviceSynchronize());
    return results.failed == 0 ? 0 : 1;
}
