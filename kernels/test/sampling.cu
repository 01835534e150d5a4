// tt_sample_f32 against the host's sampler, written out plainly, and its time.
#include "device.h"

#include <cstring>

namespace {

// Where total order puts a float.
int32_t total_order(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ static_cast<int32_t>(static_cast<uint32_t>(bits >> 31) >> 1);
}

struct Candidate {
    int id;
    float weight;
};
bool likelier(const Candidate &a, const Candidate &b) {
    int32_t x = total_order(a.weight), y = total_order(b.weight);
    return x != y ? x > y : a.id < b.id;
}

// The largest logit's token, the lowest of equals; -1 where nothing is a number.
int greedy(const float *logits, int vocabulary) {
    int best = -1;
    for (int i = 0; i < vocabulary; ++i) {
        if (!std::isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) {
            best = i;
        }
    }
    return best;
}

// What the host's sampler draws from: candidates in the order in which it adds up their weights.
struct Draw {
    std::vector<Candidate> candidates;
    double total = 0;

    Draw(const float *logits, int vocabulary, const TtSampleRow &row) {
        const float top = logits[greedy(logits, vocabulary)];
        for (int i = 0; i < vocabulary; ++i) {
            if (!std::isnan(logits[i])) {
                candidates.push_back({i, logits[i]});
            }
        }
        if (row.top_k > 0 && static_cast<size_t>(row.top_k) < candidates.size()) {
            std::nth_element(candidates.begin(), candidates.begin() + row.top_k - 1, candidates.end(), likelier);
            candidates.resize(row.top_k);
            std::sort(candidates.begin(), candidates.end(), [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
        }
        for (auto &c : candidates) {
            c.weight = c.weight == top ? 1.0f : std::exp((c.weight - top) / row.temperature);
            total += c.weight;
        }
        if (row.top_p < 1.0f) {
            const double p = row.top_p, negligible = (1 - p) * total / static_cast<double>(candidates.size());
            candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                            [&](const Candidate &c) { return !(c.weight >= negligible); }),
                             candidates.end());
            std::sort(candidates.begin(), candidates.end(), likelier);
            double reached = 0;
            size_t count = 0;
            while (count < candidates.size()) {
                reached += candidates[count++].weight;
                if (reached >= p * total) {
                    break;
                }
            }
            candidates.resize(count);
            total = reached;
        }
    }
    int token(double uniform) const {
        double left = uniform * total;
        for (const auto &c : candidates) {
            left -= c.weight;
            if (left < 0) {
                return c.id;
            }
        }
        for (size_t i = candidates.size(); i-- > 0;) {
            if (candidates[i].weight > 0) {
                return candidates[i].id;
            }
        }
        return candidates[0].id;
    }
    // How far `uniform` is from the numbers that give this token, which may be one ever drawn.
    double distance(int id, double uniform) const {
        double sum = 0, at = uniform * total;
        for (const auto &c : candidates) {
            if (c.id == id && c.weight > 0) {
                return std::max({sum - at, at - sum - c.weight, 0.0}) / total;
            }
            sum += c.weight;
        }
        return INFINITY;
    }
};

int reference(const float *logits, int vocabulary, const TtSampleRow &row) {
    int best = greedy(logits, vocabulary);
    return best < 0 || row.temperature == 0.0f ? best : Draw(logits, vocabulary, row).token(row.uniform);
}

float random_float(float deviation) { return std::normal_distribution<float>(0, deviation)(random_engine); }
double random_uniform() { return std::uniform_real_distribution<double>(0, 1)(random_engine); }

enum Kind { NORMAL, TIES, EQUAL, ZEROS, SOME_NAN, SOME_INFINITE, ALL_MINUS, LONELY, ALL_NAN, PEAKED, KINDS };

void fill(float *logits, int n, int kind) {
    for (int i = 0; i < n; ++i) {
        float x = random_float(3);
        switch (kind) {
            case TIES:
                x = std::round(2 * x) / 2;
                break;
            case EQUAL:
                x = 1.25f;
                break;
            case ZEROS:
                x = random_int(0, 1) ? 0.0f : -0.0f;
                break;
            case SOME_NAN:
                x = random_int(0, 2) ? x : random_int(0, 1) ? NAN : -NAN;
                break;
            case SOME_INFINITE:
                x = random_int(0, 3) ? x : random_int(0, n > 3 ? n / 3 : 1) ? -INFINITY : INFINITY;
                break;
            case ALL_MINUS:
                x = random_int(0, 9) ? -INFINITY : NAN;
                break;
            case LONELY:
            case ALL_NAN:
                x = NAN;
                break;
            case PEAKED:
                x = 40 * x;
                break;
            default:
                break;
        }
        logits[i] = x;
    }
    if (kind == LONELY) {
        logits[random_int(0, n - 1)] = random_float(1);
    }
}

// Weights differ by a unit in the last place between two exponential functions. So a token is right, too, if the host's
// sampler gives it for numbers a hair's breadth beside these, or one of the same likelihood to within that.
bool right(const float *logits, int vocabulary, const TtSampleRow &row, int got, bool &exact) {
    const int want = reference(logits, vocabulary, row);
    exact = got == want;
    if (exact) {
        return true;
    }
    if (got < 0 || got >= vocabulary || want < 0 || row.temperature == 0.0f) {
        return false;
    }
    for (float times : {1.0f, 0.99999f, 0.999999f, 1.000001f, 1.00001f}) {
        TtSampleRow other = row;
        other.top_p = row.top_p < 1.0f ? std::min(row.top_p * times, std::nextafter(1.0f, 0.0f)) : row.top_p;
        Draw draw(logits, vocabulary, other);
        if (draw.distance(got, row.uniform) <= 1e-6) {
            return true;
        }
        const int id = draw.token(row.uniform);
        if (row.top_p < 1.0f && std::fabs(static_cast<double>(logits[id]) - logits[got]) / row.temperature <= 1e-6) {
            return true;
        }
    }
    return false;
}

}  // namespace

void test_sampling(bool small) {
    const float temperatures[] = {0.0f, 0.3f, 1.0f, 5.0f, 1e-3f, 1e30f};
    const float nuclei[] = {1.0f, 0.999f, 0.9f, 0.5f, 1e-3f, 1e-9f};
    size_t drawn = 0, off = 0;
    for (int vocabulary : {1, 2, 31, 128, 1000, 32000, 50257, 128256}) {
        if (small && vocabulary > 1000) {
            continue;
        }
        const int count = small ? 12 : 60, stride = vocabulary + random_int(0, 9);
        // Beyond a row lies what would win.
        std::vector<float> logits(static_cast<size_t>(count) * stride + 8, 1e30f);
        std::vector<TtSampleRow> rows(count);
        const int ks[] = {0, 1, 2, 50, 5000, vocabulary - 1, vocabulary, vocabulary + 5};
        for (int r = 0; r < count; ++r) {
            fill(&logits[static_cast<size_t>(r) * stride], vocabulary, r < 2 * KINDS ? r % KINDS : random_int(0, KINDS - 1));
            rows[r].temperature = r % 7 == 0 ? 0.0f : temperatures[random_int(0, 5)];
            rows[r].top_k = random_int(0, 1) ? 0 : ks[random_int(0, 7)];
            rows[r].top_p = random_int(0, 1) ? 1.0f : nuclei[random_int(0, 5)];
            rows[r].uniform = r % 9 == 1 ? 0.0 : r % 9 == 2 ? std::nextafter(1.0, 0.0) : random_uniform();
        }
        Buffer<float> d_logits(logits);
        Buffer<TtSampleRow> d_rows(rows);
        Buffer<int32_t> tokens(count + 1), again(count + 1);
        launch("tt_sample_f32", count, 1024, 0, tokens.data, (const float *)d_logits.data, (int64_t)stride, vocabulary,
               (const TtSampleRow *)d_rows.data);
        launch("tt_sample_f32", count, 1024, 0, again.data, (const float *)d_logits.data, (int64_t)stride, vocabulary,
               (const TtSampleRow *)d_rows.data);
        CUDA(cudaStreamSynchronize(stream));
        auto got = tokens.host();
        results.check(got == again.host(), "sampling of " + std::to_string(vocabulary) + ": two runs differ");
        for (int r = 0; r < count; ++r) {
            const float *row = &logits[static_cast<size_t>(r) * stride];
            bool exact = false, good = right(row, vocabulary, rows[r], got[r], exact);
            ++drawn;
            off += !exact;
            char text[300];
            int want = good ? got[r] : reference(row, vocabulary, rows[r]);
            std::snprintf(text, sizeof text,
                          "sampling row %d of %d logits, temperature %g top_k %d top_p %g uniform %.17g: got %d (%g) want %d (%g)",
                          r, vocabulary, rows[r].temperature, rows[r].top_k, rows[r].top_p, rows[r].uniform, got[r],
                          got[r] >= 0 && got[r] < vocabulary ? row[got[r]] : NAN, want, want >= 0 ? row[want] : NAN);
            results.check(good, text);
        }
    }
    results.check(off * 20 <= drawn, "sampling: " + std::to_string(off) + " of " + std::to_string(drawn) +
                                         " tokens are the host's only but for rounding, more than 5%");
}

void bench_sampling() {
    const int count = 256, vocabulary = 128256;
    Buffer<float> logits(static_cast<size_t>(count) * vocabulary);
    fill_normal(logits.data, logits.size, 2, 3.0f);
    Buffer<int32_t> tokens(count);
    struct How {
        const char *name;
        float temperature, top_p;
        int top_k;
    };
    for (const How &how : {How{"greedy", 0, 1, 0}, How{"temperature", 1, 1, 0}, How{"top-k 50", 1, 1, 50},
                           How{"top-p 0.9", 1, 0.9f, 0}, How{"top-k 50, top-p 0.9", 1, 0.9f, 50}}) {
        std::vector<TtSampleRow> rows(count, TtSampleRow{how.temperature, how.top_p, how.top_k, 0, 0});
        for (auto &row : rows) {
            row.uniform = random_uniform();
        }
        Buffer<TtSampleRow> d_rows(rows);
        double us = graph_time(1, 30, [&](int) {
            launch("tt_sample_f32", count, 1024, 0, tokens.data, (const float *)logits.data, (int64_t)vocabulary, vocabulary,
                   (const TtSampleRow *)d_rows.data);
        });
        std::printf("sample f32 %d x %d, %s: %.1f us\n", count, vocabulary, how.name, us);
    }
}
