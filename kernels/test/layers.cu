// The other layers against f64 on the host, the ceilings, and times.
#include "device.h"

#include <cstring>

namespace {

std::vector<double> widen(const std::vector<unsigned char> &from, int kind) {
    size_t n = from.size() / element_bytes(kind);
    std::vector<double> to(n);
    for (size_t i = 0; i < n; ++i) {
        if (kind == 0) {
            __nv_bfloat16 x;
            std::memcpy(&x, &from[2 * i], 2);
            to[i] = __bfloat162float(x);
        } else if (kind == 1) {
            __half x;
            std::memcpy(&x, &from[2 * i], 2);
            to[i] = __half2float(x);
        } else {
            float x;
            std::memcpy(&x, &from[4 * i], 4);
            to[i] = x;
        }
    }
    return to;
}

const char *const names[] = {"bf16", "f16", "f32"};
const double rounding[] = {1.0 / 256, 1.0 / 2048, 1e-6};

// Every element within the type's rounding, relative to the larger of its size and `floor` (which cancellation leaves, or the
// smallest normal f16).
void compare(const std::string &what, const Buffer<unsigned char> &got, const std::vector<double> &want, int kind,
             double floor) {
    auto h = widen(got.host(), kind);
    size_t bad = 0, first = 0;
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        double off = std::fabs(h[i] - want[i]);
        error += off * off;
        norm += want[i] * want[i];
        if (!(off <= rounding[kind] * std::max({std::fabs(want[i]), floor, kind == 1 ? 6.2e-5 : 0.0})) && bad++ == 0) {
            first = i;
        }
    }
    double whole = std::sqrt(error / norm), bar = kind == 0 ? 1e-2 : kind == 1 ? 2e-3 : 2e-6;
    char text[200];
    std::snprintf(text, sizeof text, "%s %s: %zu of %zu beyond rounding, first %zu got %g want %g, whole %.2e", what.c_str(),
                  names[kind], bad, want.size(), first, bad ? h[first] : 0, bad ? want[first] : 0, whole);
    results.check(bad == 0 && whole <= bar && h.size() >= want.size(), text);
}

__global__ void copy_kernel(uint4 *to, const uint4 *from, size_t n) {
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i + 3 * step < n; i += 4 * step) {
        uint4 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[j] = __ldcs(from + i + j * step);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            __stcs(to + i + j * step, x[j]);
        }
    }
}

// Reads everything, writes next to nothing: what a decode's traffic looks like.
__global__ void __launch_bounds__(512) read_kernel(unsigned *to, const uint4 *from, size_t n) {
    unsigned sum = 0;
    size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] = __ldcs(from + i + j * step);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
        }
    }
    if (sum == 0x12345678u) {
        *to = sum;
    }
}

// Independent mma.sync m16n8k16 on registers alone, on random operands.
__global__ void __launch_bounds__(256) mma_kernel(float *to, const unsigned *from, int rounds) {
    unsigned a[4], b[2];
    for (int i = 0; i < 4; ++i) {
        a[i] = from[threadIdx.x * 8 + i];
    }
    b[0] = from[threadIdx.x * 8 + 4];
    b[1] = from[threadIdx.x * 8 + 5];
    float d[8][4] = {};
    for (int i = 0; i < rounds; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    float sum = 0;
    for (int j = 0; j < 8; ++j) {
        sum += d[j][0] + d[j][1] + d[j][2] + d[j][3];
    }
    to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// `wide`: everything in whole vectors of 16 bytes.
void test_layers(int kind, bool wide) {
    const std::string suffix = std::string("_") + names[kind];
    const int rows = 5, hidden = (wide ? 576 : 578) + 16 * random_int(0, 40), bytes = element_bytes(kind);
    const size_t n = static_cast<size_t>(rows) * hidden;
    Buffer<unsigned char> x(n * bytes), weight(static_cast<size_t>(hidden) * bytes), rest(n * bytes), out(n * bytes);
    fill_normal(x.data, n, kind, 1.0f);
    fill_normal(weight.data, hidden, kind, 1.0f);
    fill_normal(rest.data, n, kind, 1.0f);
    CUDA(cudaStreamSynchronize(stream));
    auto hx = widen(x.host(), kind), hw = widen(weight.host(), kind), hr = widen(rest.host(), kind);
    for (bool residual : {false, true}) {
        out.poison();
        const int threads = 32 << random_int(0, 3);
        launch("tt_rms_norm" + suffix, rows, threads, 0, (void *)out.data, (const void *)x.data,
               (void *)(residual ? rest.data : nullptr), (const void *)weight.data, (int64_t)hidden, (int64_t)hidden,
               (int64_t)hidden, hidden, 1e-5f);
        CUDA(cudaStreamSynchronize(stream));
        // The residual as it was rounded.
        auto sum = residual ? widen(rest.host(), kind) : hx;
        std::vector<double> want(n);
        for (int r = 0; r < rows; ++r) {
            double squares = 0;
            for (int i = 0; i < hidden; ++i) {
                squares += sum[r * hidden + i] * sum[r * hidden + i];
            }
            for (int i = 0; i < hidden; ++i) {
                want[r * hidden + i] = sum[r * hidden + i] / std::sqrt(squares / hidden + 1e-5) * hw[i];
            }
        }
        compare(residual ? "rms_norm + residual" : "rms_norm", out, want, kind, 0);
        if (residual) {
            std::vector<double> added(n);
            for (size_t i = 0; i < n; ++i) {
                added[i] = hx[i] + hr[i];
            }
            compare("residual", rest, added, kind, 0);
        }
    }
    // RoPE: 3 heads of 64, some of whose dimensions are rotated.
    for (int interleaved : {0, 1}) {
        const int heads = 3, size = 64, rotary = wide ? 48 : 20, positions = 50;
        const size_t m = static_cast<size_t>(rows) * heads * size;
        Buffer<unsigned char> q(m * bytes);
        fill_normal(q.data, m, kind, 1.0f);
        CUDA(cudaStreamSynchronize(stream));
        auto want = widen(q.host(), kind);
        std::vector<float> table(positions * rotary);
        for (int p = 0; p < positions; ++p) {
            for (int i = 0; i < rotary / 2; ++i) {
                double angle = p * std::pow(10000.0, -2.0 * i / rotary);
                table[p * rotary + i] = static_cast<float>(std::cos(angle));
                table[p * rotary + rotary / 2 + i] = static_cast<float>(std::sin(angle));
            }
        }
        std::vector<int64_t> at(rows);
        for (int r = 0; r < rows; ++r) {
            at[r] = random_int(0, positions - 1);
            for (int h = 0; h < heads; ++h) {
                for (int i = 0; i < rotary / 2; ++i) {
                    double *base = &want[(r * heads + h) * size];
                    double &a = base[interleaved ? 2 * i : i], &b = base[interleaved ? 2 * i + 1 : i + rotary / 2];
                    double cosine = table[at[r] * rotary + i], sine = table[at[r] * rotary + rotary / 2 + i];
                    double u = a, v = b;
                    a = u * cosine - v * sine;
                    b = v * cosine + u * sine;
                }
            }
        }
        Buffer<float> d_table(table);
        Buffer<int64_t> d_at(at);
        launch("tt_rope" + suffix, rows, 128, 0, (void *)q.data, (const void *)d_at.data, (const void *)d_table.data,
               (int64_t)(heads * size), heads, size, rotary, interleaved);
        CUDA(cudaStreamSynchronize(stream));
        compare("rope", q, want, kind, 0.5);
    }
    {
        const int size = hidden / 2;
        Buffer<unsigned char> y(static_cast<size_t>(rows) * size * bytes);
        launch("tt_silu_mul" + suffix, rows, 256, 0, (void *)y.data, (const void *)x.data, (int64_t)size, (int64_t)hidden,
               size);
        CUDA(cudaStreamSynchronize(stream));
        std::vector<double> want(static_cast<size_t>(rows) * size);
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < size; ++i) {
                double g = hx[r * hidden + i];
                want[r * size + i] = g / (1 + std::exp(-g)) * hx[r * hidden + size + i];
            }
        }
        compare("silu_mul", y, want, kind, 0);
    }
    if (!wide) {
        return;
    }
    {
        std::vector<int32_t> ids = {3, 0, -1, 4, rows};
        Buffer<int32_t> d_ids(ids);
        Buffer<unsigned char> y(n * bytes);
        launch("tt_embedding" + suffix, rows, 128, 0, (void *)y.data, (const void *)x.data, (const void *)d_ids.data,
               (int64_t)hidden, hidden, rows);
        CUDA(cudaStreamSynchronize(stream));
        auto got = widen(y.host(), kind);
        size_t wrong = 0;
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < hidden; ++i) {
                bool real = ids[r] >= 0 && ids[r] < rows;
                wrong += !(got[r * hidden + i] == (real ? hx[ids[r] * hidden + i] : 0.0));
            }
        }
        results.check(wrong == 0, "embedding" + suffix);
    }
    {
        // A packed row of queries, keys and values: the queries' and the keys' heads normed, each kind by its weight.
        const int heads = 5, kv_heads = 2, size = random_int(0, 1) ? 128 : 80, stride = (heads + 2 * kv_heads) * size + 16;
        const size_t m = static_cast<size_t>(rows) * stride;
        Buffer<unsigned char> qkv(m * bytes), norms(static_cast<size_t>(2) * size * bytes);
        fill_normal(qkv.data, m, kind, 1.0f);
        fill_normal(norms.data, 2 * size, kind, 1.0f);
        CUDA(cudaStreamSynchronize(stream));
        auto want = widen(qkv.host(), kind), hn = widen(norms.host(), kind);
        const auto before = qkv.host();
        for (int part = 0; part < 2; ++part) {
            const size_t first = static_cast<size_t>(part) * heads * size;
            launch("tt_head_norm" + suffix, rows, 128, 0, (void *)(qkv.data + first * bytes),
                   (const void *)(norms.data + static_cast<size_t>(part) * size * bytes), (int64_t)stride,
                   part == 0 ? heads : kv_heads, size, 1e-6f);
            for (int r = 0; r < rows; ++r) {
                for (int h = 0; h < (part == 0 ? heads : kv_heads); ++h) {
                    double *x = &want[static_cast<size_t>(r) * stride + first + static_cast<size_t>(h) * size], squares = 0;
                    for (int i = 0; i < size; ++i) {
                        squares += x[i] * x[i];
                    }
                    for (int i = 0; i < size; ++i) {
                        x[i] = x[i] / std::sqrt(squares / size + 1e-6) * hn[part * size + i];
                    }
                }
            }
        }
        CUDA(cudaStreamSynchronize(stream));
        compare("head_norm", qkv, want, kind, 0);
        auto after = qkv.host();
        bool kept = true;
        for (int r = 0; r < rows; ++r) {
            size_t from = (static_cast<size_t>(r) * stride + (heads + kv_heads) * size) * bytes;
            size_t to = static_cast<size_t>(r + 1) * stride * bytes;
            kept &= std::equal(before.begin() + from, before.begin() + to, after.begin() + from);
        }
        results.check(kept, "head_norm" + suffix + ": the values were written");
    }
    for (int size : {576, 40, 37}) {
        // Rows by index, some of which do not exist; 37 elements are not whole vectors, nor is every row aligned.
        const int from_rows = 9, stride = size + (size == 40 ? 8 : 3), out_stride = size + 8;
        Buffer<unsigned char> from(static_cast<size_t>(from_rows) * stride * bytes);
        fill_normal(from.data, static_cast<size_t>(from_rows) * stride, kind, 1.0f);
        std::vector<int32_t> indices = {8, 0, -1, 3, 3, 9, 0x7fffffff, random_int(0, 8)};
        const size_t count = indices.size();
        Buffer<int32_t> d_indices(indices);
        Buffer<unsigned char> to(count * out_stride * bytes);
        launch("tt_gather_rows" + suffix, static_cast<unsigned>(count), 128, 0, (void *)to.data, (const void *)from.data,
               (const int32_t *)d_indices.data, (int64_t)out_stride, (int64_t)stride, size, from_rows);
        CUDA(cudaStreamSynchronize(stream));
        auto source = from.host(), got = to.host();
        bool good = true;
        for (size_t r = 0; r < count; ++r) {
            bool real = indices[r] >= 0 && indices[r] < from_rows;
            for (size_t i = 0; i < static_cast<size_t>(out_stride) * bytes; ++i) {
                unsigned char want = 0xff;
                if (i < static_cast<size_t>(size) * bytes) {
                    want = real ? source[static_cast<size_t>(indices[r]) * stride * bytes + i] : 0;
                }
                good &= got[r * out_stride * bytes + i] == want;
            }
        }
        results.check(good, "gather_rows" + suffix + " of " + std::to_string(size));
    }
    {
        // Two states of 4 heads, some without keys (what they hold is NaN), one with an LSE of plus infinity.
        const int heads = 4, size = 96;
        const size_t m = static_cast<size_t>(rows) * heads;
        Buffer<unsigned char> p(m * size * bytes), q(m * size * bytes), y(m * size * bytes);
        fill_normal(p.data, m * size, kind, 1.0f);
        fill_normal(q.data, m * size, kind, 1.0f);
        std::vector<float> lp(m), lq(m);
        for (size_t i = 0; i < m; ++i) {
            lp[i] = i % 5 == 0 ? -INFINITY : 0.01f * random_int(-500, 500);
            lq[i] = i % 7 == 0 || i == 10 ? -INFINITY : i == 3 ? INFINITY : 0.01f * random_int(-500, 500);
            if (i % 5 == 0) {
                CUDA(cudaMemset(p.data + i * size * bytes, 0xff, size * bytes));
            }
        }
        Buffer<float> dp(lp), dq(lq), dl(m);
        CUDA(cudaStreamSynchronize(stream));
        launch("tt_merge_states" + suffix, dim3(rows, heads), 128, 0, (void *)y.data, dl.data, (const void *)p.data,
               (const float *)dp.data, (const void *)q.data, (const float *)dq.data, (int64_t)(heads * size),
               (int64_t)(heads * size), (int64_t)(heads * size), size);
        CUDA(cudaStreamSynchronize(stream));
        auto hp = widen(p.host(), kind), hq = widen(q.host(), kind);
        auto hl = dl.host();
        std::vector<double> want(m * size);
        bool lse_good = true;
        for (size_t i = 0; i < m; ++i) {
            double a = std::exp(lp[i]), b = std::isinf(lq[i]) ? 0 : std::exp(lq[i]), lse = std::log(a + b);
            lse_good &= a + b == 0 ? hl[i] == -INFINITY : std::fabs(hl[i] - lse) < 2e-6 * std::max(1.0, std::fabs(lse));
            for (int d = 0; d < size; ++d) {
                double x = a == 0 ? 0 : a * hp[i * size + d], z = b == 0 ? 0 : b * hq[i * size + d];
                want[i * size + d] = a + b == 0 ? 0 : (x + z) / (a + b);
            }
        }
        compare("merge_states", y, want, kind, 0.5);
        results.check(lse_good, "merge_states LSE");
    }
    for (int vocabulary : {1, 31, 49152, 50257}) {
        const size_t m = static_cast<size_t>(rows) * vocabulary;
        Buffer<unsigned char> logits(m * bytes);
        fill_normal(logits.data, m, kind, 3.0f);
        CUDA(cudaMemset(logits.data, 0xff, static_cast<size_t>(vocabulary) * bytes));  // a row of NaN
        CUDA(cudaMemset(logits.data + vocabulary * bytes, 0xff, bytes));               // one NaN, at the front
        Buffer<int32_t> best(rows);
        launch("tt_argmax" + suffix, rows, 1024, 0, (void *)best.data, (const void *)logits.data, (int64_t)vocabulary,
               vocabulary);
        CUDA(cudaStreamSynchronize(stream));
        auto h = widen(logits.host(), kind);
        auto got = best.host();
        for (int r = 0; r < rows; ++r) {
            int want = 0;
            double top = -INFINITY;
            for (int i = 0; i < vocabulary; ++i) {
                if (h[static_cast<size_t>(r) * vocabulary + i] > top) {
                    top = h[static_cast<size_t>(r) * vocabulary + i];
                    want = i;
                }
            }
            results.check(got[r] == want, "argmax" + suffix + " of " + std::to_string(vocabulary) + ": got " +
                                              std::to_string(got[r]) + " want " + std::to_string(want));
        }
    }
}

}  // namespace

void test_layers() {
    for (int kind = 0; kind < 3; ++kind) {
        test_layers(kind, true);
        test_layers(kind, false);
    }
}

void bench_ceilings() {
    const size_t bytes = 4ull << 30;
    Buffer<unsigned char> a(bytes), b(bytes);
    fill_normal(a.data, bytes / 4, 2, 1.0f);
    double us = graph_time(1, 20, [&](int) { CUDA(cudaMemcpyAsync(b.data, a.data, bytes, cudaMemcpyDeviceToDevice, stream)); });
    std::printf("ceiling: device copy of 4 GiB %.1f us, %.3f TB/s read + written\n", us, 2.0 * bytes / us / 1e6);
    us = graph_time(1, 20, [&](int) {
        copy_kernel<<<128 * 8, 512, 0, stream>>>(reinterpret_cast<uint4 *>(b.data), reinterpret_cast<uint4 *>(a.data), bytes / 16);
    });
    std::printf("ceiling: copy kernel of 4 GiB %.1f us, %.3f TB/s read + written\n", us, 2.0 * bytes / us / 1e6);
    us = graph_time(1, 20, [&](int) {
        read_kernel<<<128 * 4, 512, 0, stream>>>(reinterpret_cast<unsigned *>(b.data), reinterpret_cast<uint4 *>(a.data), bytes / 16);
    });
    std::printf("ceiling: read kernel of 4 GiB %.1f us, %.3f TB/s read\n", us, 1.0 * bytes / us / 1e6);
    Buffer<float> sums(132 * 2 * 256);
    fill_normal(a.data, 256 * 16, 0, 1.0f);
    const int rounds = 20000;
    us = graph_time(1, 10, [&](int) {
        mma_kernel<<<132 * 2, 256, 0, stream>>>(sums.data, reinterpret_cast<unsigned *>(a.data), rounds);
    });
    std::printf("ceiling: mma.sync bf16 %.1f TFLOP/s\n", 132.0 * 2 * 8 * rounds * 8 * 4096 / us / 1e6);
    Buffer<int32_t> best(1);
    Buffer<float> one(32);
    us = graph_time(1, 60, [&](int) {
        launch("tt_argmax_f32", 1, 32, 0, (void *)best.data, (const void *)one.data, (int64_t)32, 32);
    });
    std::printf("floor: graph of one tiny kernel %.1f us\n", us);
}

void bench_layers() {
    const int rows = 256, hidden = 4096, vocabulary = 128256;
    Buffer<unsigned char> x(2ull * rows * 2 * 14336), weight(2ull * hidden), out(2ull * rows * 14336);
    Buffer<unsigned char> logits(2ull * rows * vocabulary);
    fill_normal(x.data, static_cast<size_t>(rows) * 2 * 14336, 0, 1.0f);
    fill_normal(weight.data, hidden, 0, 1.0f);
    fill_normal(logits.data, static_cast<size_t>(rows) * vocabulary, 0, 1.0f);
    Buffer<int32_t> best(rows);
    double us = graph_time(1, 60, [&](int) {
        launch("tt_rms_norm_bf16", rows, 512, 0, (void *)out.data, (const void *)x.data, (void *)nullptr,
               (const void *)weight.data, (int64_t)hidden, (int64_t)hidden, (int64_t)hidden, hidden, 1e-5f);
    });
    std::printf("rms_norm bf16 %d x %d: %.1f us\n", rows, hidden, us);
    us = graph_time(1, 60, [&](int) {
        launch("tt_rms_norm_bf16", rows, 512, 0, (void *)out.data, (const void *)x.data, (void *)(x.data + 2ull * rows * hidden),
               (const void *)weight.data, (int64_t)hidden, (int64_t)hidden, (int64_t)hidden, hidden, 1e-5f);
    });
    std::printf("rms_norm + residual bf16 %d x %d: %.1f us\n", rows, hidden, us);
    Buffer<int64_t> positions(std::vector<int64_t>(rows, 7));
    Buffer<float> table(std::vector<float>(128 * 16, 0.5f));
    us = graph_time(1, 60, [&](int) {
        launch("tt_rope_bf16", rows, 640, 0, (void *)x.data, (const void *)positions.data, (const void *)table.data,
               (int64_t)(48 * 128), 40, 128, 128, 0);
    });
    std::printf("rope bf16 %d x 40 heads of 128: %.1f us\n", rows, us);
    us = graph_time(1, 60, [&](int) {
        launch("tt_silu_mul_bf16", rows, 1024, 0, (void *)out.data, (const void *)x.data, (int64_t)14336, (int64_t)28672, 14336);
    });
    std::printf("silu_mul bf16 %d x 14336: %.1f us\n", rows, us);
    us = graph_time(1, 60, [&](int) {
        launch("tt_argmax_bf16", rows, 1024, 0, (void *)best.data, (const void *)logits.data, (int64_t)vocabulary, vocabulary);
    });
    std::printf("argmax bf16 %d x %d: %.1f us\n", rows, vocabulary, us);
}
