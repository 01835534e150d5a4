// From one step's packed bytes to persistent buffers: values copied, symbolic tensors evaluated from the device's own query
// starts, lengths and block table. Must never know which backend a tensor is for.
//
// A cooperative launch of any number of blocks of 256 threads that are resident together, one a multiprocessor as a rule: a
// barrier over all of them stands between the first operations and the others. An operation is cut into slices, so that
// a large one is shared by many blocks, and small ones need few. Nothing is read or written outside the stated sizes,
// whatever the values: a row or column that does not exist gives `fill`.
#include <cooperative_groups.h>

#include "params.h"

namespace {

constexpr int kThreads = 256;
// Elements of a slice.
constexpr int kSlice = 4 * kThreads;

// The last index i in [0, count) with starts[i] <= at; starts[0] <= at.
__device__ int last_at_most(const int32_t *starts, int count, int at) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (starts[middle] <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Inclusive sum over the block.
__device__ int block_sum(int value, int *total) {
    __shared__ int sums[kThreads / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step <<= 1) {
        int before = __shfl_up_sync(0xffffffffu, value, step);
        value += lane >= step ? before : 0;
    }
    if (lane == 31) {
        sums[warp] = value;
    }
    __syncthreads();
    int all = 0;
    for (int i = 0; i < kThreads / 32; ++i) {
        value += i < warp ? sums[i] : 0;
        all += sums[i];
    }
    *total = all;
    __syncthreads();
    return value;
}

// Slices that an operation is cut into; one where its elements depend on each other.
__device__ int slices_of(const TtUnpackOp &op) {
    switch (op.kind) {
        case TT_UNPACK_CU_PAGE_COUNTS:
        case TT_UNPACK_ROW_MASK:
        case TT_UNPACK_ROW_TOKENS:
        case TT_UNPACK_CONV_ROWS:
        case TT_UNPACK_CONV_OFFSETS:
            return 1;
        default: {
            int elements = max(op.kind == TT_UNPACK_TABLE_UPDATES ? op.rows : op.room, 0);
            return elements / kSlice + (elements % kSlice != 0 ? 1 : 0);
        }
    }
}

// One slice of one operation, by one block.
struct Step {
    const TtUnpackParams &p;
    const TtUnpackOp &op;
    int slice;

    template <class T>
    __device__ const T *at(int64_t offset) const {
        return reinterpret_cast<const T *>(static_cast<const unsigned char *>(p.slot) + offset);
    }
    __device__ bool row_exists(int row) const { return row >= 0 && row < p.num_reqs; }
    __device__ int query_len(int row) const {
        return row_exists(row) ? p.query_start_loc[row + 1] - p.query_start_loc[row] : 0;
    }
    __device__ int seq_len(int row) const { return row_exists(row) ? p.seq_lens[row] : 0; }
    __device__ int page(int row, int column) const {
        return row_exists(row) && column >= 0 && column < p.table_width ? p.block_table[row * p.block_table_stride + column]
                                                                        : op.fill;
    }
    // base = L / I / N * I of interleave I and N ranks, and up to I of what is left over.
    __device__ int local_len(int len) const {
        int interleave = p.dcp_interleave, ranks = p.dcp_world_size;
        int base = len / interleave / ranks * interleave;
        return base + min(max(len - base * ranks - p.dcp_rank * interleave, 0), interleave);
    }

    // Writes destination[i] = value(i) for i < count, and the fill beyond; this slice's elements.
    template <class T, class Value>
    __device__ void write(int count, Value value) const {
        T *to = static_cast<T *>(op.destination);
        const int begin = slice * kSlice, end = begin + min(op.room - begin, kSlice);
        for (int i = begin + threadIdx.x; i < end; i += kThreads) {
            to[i] = i < count ? value(i) : static_cast<T>(op.fill);
        }
    }

    // Runs of elements, one a row: destination gets value(row index, element within the run). One block does it all.
    template <class Count, class Value>
    __device__ void write_runs(Count count, Value value) const {
        __shared__ int begins[kThreads];
        int32_t *to = static_cast<int32_t *>(op.destination);
        int base = 0;
        for (int chunk = 0; chunk < op.rows; chunk += kThreads) {
            int at = chunk + threadIdx.x, mine = at < op.rows ? max(count(at), 0) : 0, total;
            begins[threadIdx.x] = block_sum(mine, &total) - mine;
            __syncthreads();
            for (int i = threadIdx.x; i < total && base + i < op.room; i += kThreads) {
                int run = last_at_most(begins, kThreads, i);
                to[base + i] = value(chunk + run, i - begins[run]);
            }
            base = min(base + total, op.room);
            __syncthreads();
        }
        for (int i = base + threadIdx.x; i < op.room; i += kThreads) {
            to[i] = op.fill;
        }
    }

    __device__ void cumulative_pages() const {
        int32_t *to = static_cast<int32_t *>(op.destination);
        int base = 0;
        if (threadIdx.x == 0 && op.room > 0) {
            to[0] = 0;
        }
        for (int chunk = 0; chunk < op.rows; chunk += kThreads) {
            int at = chunk + threadIdx.x;
            int pages = at < op.rows ? (max(seq_len(op.first_row + at), 0) + p.block_size - 1) / p.block_size : 0;
            int total, sum = block_sum(pages, &total);
            if (at < op.rows && at + 1 < op.room) {
                to[at + 1] = base + sum;
            }
            base += total;
        }
        for (int i = op.rows + 1 + threadIdx.x; i < op.room; i += kThreads) {
            to[i] = op.fill;
        }
    }

    __device__ void mark_rows(const int32_t *rows) const {
        int32_t *to = static_cast<int32_t *>(op.destination);
        for (int i = threadIdx.x; i < op.room; i += kThreads) {
            to[i] = i < p.num_reqs ? 0 : op.fill;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < op.rows; i += kThreads) {
            if (row_exists(rows[i]) && rows[i] < op.room) {
                to[rows[i]] = 1;
            }
        }
    }

    __device__ void run() const {
        const int32_t *list = at<int32_t>(op.list);
        switch (op.kind) {
            case TT_UNPACK_VALUES:
                write<int32_t>(op.rows, [&](int i) { return list[i]; });
                break;
            case TT_UNPACK_VALUES64: {
                const int64_t *wide = at<int64_t>(op.list);
                write<int64_t>(op.rows, [&](int i) { return wide[i]; });
                break;
            }
            case TT_UNPACK_TABLE_UPDATES:
                for (int i = slice * kSlice + threadIdx.x; i < op.rows && i < (slice + 1) * kSlice; i += kThreads) {
                    int row = list[3 * i], column = list[3 * i + 1];
                    if (row_exists(row) && column >= 0 && column < p.table_width) {
                        p.block_table[row * p.block_table_stride + column] = list[3 * i + 2];
                    }
                }
                break;
            case TT_UNPACK_COPY: {
                const int32_t *from = static_cast<const int32_t *>(op.source);
                write<int32_t>(op.rows, [&](int i) { return from[i]; });
                break;
            }
            case TT_UNPACK_COPY64: {
                const int64_t *from = static_cast<const int64_t *>(op.source);
                write<int64_t>(op.rows, [&](int i) { return from[i]; });
                break;
            }
            case TT_UNPACK_REBASE: {
                const int32_t *starts = p.query_start_loc + op.first_row;
                int count = min(op.rows, p.num_reqs - op.first_row) + 1;
                write<int32_t>(count, [&](int i) { return starts[i] - starts[0]; });
                break;
            }
            case TT_UNPACK_CONTEXT_LENS:
                write<int32_t>(op.rows, [&](int i) { return seq_len(op.first_row + i) - query_len(op.first_row + i); });
                break;
            case TT_UNPACK_HAS_CONTEXT:
                write<int32_t>(op.rows, [&](int i) {
                    return seq_len(op.first_row + i) - query_len(op.first_row + i) > 0 ? 1 : 0;
                });
                break;
            case TT_UNPACK_DCP_LOCAL:
                write<int32_t>(op.rows, [&](int i) {
                    int row = op.first_row + i;
                    return local_len(seq_len(row) - (op.option != 0 ? query_len(row) : 0));
                });
                break;
            case TT_UNPACK_CU_PAGE_COUNTS:
                cumulative_pages();
                break;
            case TT_UNPACK_GATHER_PAGES:
                write<int32_t>(list[op.rows], [&](int i) {
                    int row = last_at_most(list, op.rows, i);
                    return page(op.first_row + row, i - list[row]);
                });
                break;
            case TT_UNPACK_SELECT_PAGES: {
                const int32_t *columns = at<int32_t>(op.list2);
                write<int32_t>(list[op.rows], [&](int i) {
                    return page(op.first_row + last_at_most(list, op.rows, i), columns[i]);
                });
                break;
            }
            case TT_UNPACK_STATE_INDICES:
                write<int32_t>(op.rows * op.width, [&](int i) {
                    int row = list[i / op.width];
                    int first = op.option != 0 ? max(seq_len(row) - 1, 0) / p.block_size : 0;
                    return page(row, first + i % op.width);
                });
                break;
            case TT_UNPACK_ROWS: {
                const int32_t *from = static_cast<const int32_t *>(op.source);
                write<int32_t>(op.rows * op.width, [&](int i) {
                    return from[static_cast<int64_t>(list[i / op.width]) * op.width + i % op.width];
                });
                break;
            }
            case TT_UNPACK_ROWS64: {
                const int64_t *from = static_cast<const int64_t *>(op.source);
                write<int64_t>(op.rows * op.width, [&](int i) {
                    return from[static_cast<int64_t>(list[i / op.width]) * op.width + i % op.width];
                });
                break;
            }
            case TT_UNPACK_ROW_MASK:
                mark_rows(list);
                break;
            case TT_UNPACK_ROW_TOKENS:
                write_runs([&](int i) { return query_len(list[i]); },
                           [&](int i, int token) { return p.query_start_loc[list[i]] + token; });
                break;
            case TT_UNPACK_TOKEN_TO_ROW: {
                int last = p.query_start_loc[p.num_reqs];
                write<int32_t>(p.num_tokens,
                               [&](int i) { return i < last ? last_at_most(p.query_start_loc, p.num_reqs, i) : 0; });
                break;
            }
            case TT_UNPACK_SEGMENT_IDS:
                write<int32_t>(list[op.rows], [&](int i) { return last_at_most(list, op.rows, i); });
                break;
            case TT_UNPACK_CONV_ROWS:
            case TT_UNPACK_CONV_OFFSETS:
                write_runs([&](int i) { return (query_len(op.first_row + i) + op.width - 1) / op.width; },
                           [&](int i, int chunk) { return op.kind == TT_UNPACK_CONV_ROWS ? i : chunk; });
                break;
            case TT_UNPACK_FEED_TOKENS: {
                const int32_t *sampled = static_cast<const int32_t *>(op.source);
                write<int32_t>(op.rows, [&](int i) {
                    int v = list[i];
                    return v >= 0 ? v : -1 - v < op.width ? sampled[-1 - v] : op.fill;
                });
                break;
            }
            default:
                break;
        }
    }
};

// Operations [first, end), shared by the blocks of the grid.
__device__ void run_operations(const TtUnpackParams &p, int first, int end) {
    __shared__ int begins[kThreads];
    __shared__ TtUnpackOp op;
    for (int chunk = first; chunk < end; chunk += kThreads) {
        const int at = chunk + threadIdx.x, mine = at < end ? slices_of(p.ops[at]) : 0;
        int total;
        begins[threadIdx.x] = block_sum(mine, &total) - mine;
        __syncthreads();
        int loaded = -1;
        for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
            const int index = last_at_most(begins, kThreads, unit);
            if (index != loaded) {
                __syncthreads();  // Nobody reads the operation before.
                if (threadIdx.x == 0) {
                    op = p.ops[chunk + index];
                }
                loaded = index;
                __syncthreads();
            }
            Step{p, op, unit - begins[index]}.run();
        }
        __syncthreads();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) tt_unpack(const __grid_constant__ TtUnpackParams p) {
    const int first = min(max(p.num_first_ops, 0), p.num_ops);
    if (first > 0) {
        run_operations(p, 0, first);
        cooperative_groups::this_grid().sync();
    }
    run_operations(p, first, p.num_ops);
}
