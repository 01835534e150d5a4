// The harness's view of the device: checked calls, memory, modules loaded through the driver as the host loads them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "params.h"

#define CUDA(call)                                                                                       \
    do {                                                                                                 \
        cudaError_t code_ = (call);                                                                      \
        if (code_ != cudaSuccess) {                                                                      \
            std::printf("FATAL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code_));   \
            std::exit(2);                                                                                \
        }                                                                                                \
    } while (0)

#define DRIVER(call)                                                                                     \
    do {                                                                                                 \
        CUresult code_ = (call);                                                                         \
        if (code_ != CUDA_SUCCESS) {                                                                     \
            const char *text_ = nullptr;                                                                 \
            cuGetErrorString(code_, &text_);                                                             \
            std::printf("FATAL %s:%d %s: %s\n", __FILE__, __LINE__, #call, text_ ? text_ : "?");         \
            std::exit(2);                                                                                \
        }                                                                                                \
    } while (0)

// Device memory that starts as a pattern of 0xff: NaN as bf16, f16, f32 and e4m3, -1 as an integer.
template <class T>
struct Buffer {
    T *data = nullptr;
    size_t size = 0;
    Buffer() = default;
    explicit Buffer(size_t n) { resize(n); }
    explicit Buffer(const std::vector<T> &from) {
        resize(from.size());
        if (!from.empty()) {
            CUDA(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
        }
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    Buffer(Buffer &&o) noexcept : data(o.data), size(o.size) { o.data = nullptr; }
    Buffer &operator=(Buffer &&o) noexcept {
        std::swap(data, o.data);
        std::swap(size, o.size);
        return *this;
    }
    ~Buffer() { cudaFree(data); }
    void resize(size_t n) {
        cudaFree(data);
        size = n;
        CUDA(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
        poison();
    }
    void poison() { CUDA(cudaMemset(data, 0xff, std::max<size_t>(size, 1) * sizeof(T))); }
    void zero() { CUDA(cudaMemset(data, 0, std::max<size_t>(size, 1) * sizeof(T))); }
    std::vector<T> host() const {
        std::vector<T> to(size);
        if (size != 0) {
            CUDA(cudaMemcpy(to.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
        }
        return to;
    }
};

struct Kernel {
    CUfunction function = nullptr;
    int shared = 0;
    int registers = 0, local = 0;
};

struct Modules {
    std::vector<CUmodule> modules;
    std::map<std::string, Kernel> known;

    void load(const std::string &path) {
        std::ifstream file(path, std::ios::binary);
        std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        if (image.empty()) {
            std::printf("FATAL no kernels in %s: run build.sh first\n", path.c_str());
            std::exit(2);
        }
        CUmodule module;
        DRIVER(cuModuleLoadData(&module, image.data()));
        modules.push_back(module);
    }
    const Kernel &get(const std::string &name) {
        auto found = known.find(name);
        if (found != known.end()) {
            return found->second;
        }
        Kernel kernel;
        for (CUmodule module : modules) {
            if (cuModuleGetFunction(&kernel.function, module, name.c_str()) == CUDA_SUCCESS) {
                CUdeviceptr at;
                size_t bytes;
                bool dynamic = name.find("decode") == 3 || name.find("prefill") == 3 || name.find("ladder") == 3;
                dynamic = dynamic && name.find("scatter") == std::string::npos;
                if (dynamic && cuModuleGetGlobal(&at, &bytes, module, ("tt_shared_bytes_" + name).c_str()) == CUDA_SUCCESS) {
                    DRIVER(cuMemcpyDtoH(&kernel.shared, at, sizeof(int)));
                }
                if (kernel.shared > 48 * 1024) {
                    DRIVER(cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                              kernel.shared));
                }
                DRIVER(cuFuncGetAttribute(&kernel.registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel.function));
                DRIVER(cuFuncGetAttribute(&kernel.local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, kernel.function));
                return known[name] = kernel;
            }
        }
        std::printf("FATAL no kernel %s\n", name.c_str());
        std::exit(2);
    }
};

extern Modules modules;
extern cudaStream_t stream;

inline void launch_raw(const std::string &name, dim3 grid, dim3 block, int shared, void **args) {
    if (grid.x == 0 || grid.y == 0) {
        return;
    }
    DRIVER(cuLaunchKernel(modules.get(name).function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, args, nullptr));
}
template <class... Args>
void launch(const std::string &name, dim3 grid, dim3 block, int shared, Args... values) {
    void *args[] = {static_cast<void *>(&values)...};
    launch_raw(name, grid, block, shared, args);
}

// All blocks resident together, so that the kernel may hold a barrier over them.
template <class... Args>
void launch_cooperative(const std::string &name, dim3 grid, dim3 block, int shared, Args... values) {
    void *args[] = {static_cast<void *>(&values)...};
    DRIVER(cuLaunchCooperativeKernel(modules.get(name).function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                                     stream, args));
}

// Median microseconds of one replay of the graph that `work(i)` is captured into, the inputs i = 0 .. sets rotating.
double graph_time(int sets, int iterations, const std::function<void(int)> &work);

struct Results {
    int passed = 0, failed = 0;
    void check(bool good, const std::string &what) {
        if (good) {
            ++passed;
        } else {
            // What one mistake breaks a thousand times needs saying but a few.
            if (++failed <= 60) {
                std::printf("FAIL %s\n", what.c_str());
            }
        }
    }
};
extern Results results;
extern std::mt19937_64 random_engine;

inline int random_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_engine); }

// Random normal elements. kind: 0 bf16, 1 f16, 2 f32, 3 e4m3.
void fill_normal(void *to, size_t count, int kind, float deviation);
inline int element_bytes(int kind) { return kind == 2 ? 4 : kind == 3 ? 1 : 2; }

void test_scatter(bool small);
void test_layers();
void test_attention(bool small);
void test_work_lists(bool small);
void print_worst();
void test_unpack();
void test_sampling(bool small);
void bench_scatter();
void bench_unpack();
void bench_sampling();
void bench_attention();
void bench_extends();
void bench_layers();
void bench_ladder();
void bench_scatter_ladder();
void bench_ceilings();
