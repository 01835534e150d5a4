// From a schedule to work items, on the device, once per step: no length needs to be known on the host. Must never know
// heads beyond their packing, dtypes or the cache.
#include "params.h"

namespace {

constexpr int kThreads = 1024;

// Inclusive sum over the block; `total` is the block's.
__device__ int block_sum(int value, int *total) {
    __shared__ int sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        int before = __shfl_up_sync(0xffffffffu, value, step);
        value += lane >= step ? before : 0;
    }
    if (lane == 31) {
        sums[warp] = value;
    }
    __syncthreads();
    if (warp == 0) {
        int sum = sums[lane];
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int before = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? before : 0;
        }
        sums[lane] = sum;
    }
    __syncthreads();
    value += warp > 0 ? sums[warp - 1] : 0;
    *total = sums[31];
    __syncthreads();
    return value;
}

__device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// One block of 1,024 threads. With s splits, P pages and block size B, split i covers the keys of pages
// [i * ceil(P / s), (i + 1) * ceil(P / s)); empty splits make no item. Tiles of a request start last first: with a causal
// mask the last are the longest.
extern "C" __global__ void __launch_bounds__(kThreads) tt_plan_flash_attn(const __grid_constant__ TtPlanParams p) {
    struct Row {
        int row, first_token, query_len, kv_len, pages_per_split, splits, begin;
    };
    __shared__ Row rows[kThreads];
    int base = 0;
    for (int chunk = 0; chunk < p.num_reqs; chunk += kThreads) {
        int at = chunk + threadIdx.x;
        Row row = {};
        int count = 0;
        if (at < p.num_reqs) {
            row.row = p.row_order != nullptr ? p.row_order[at] : at;
            row.first_token = p.query_start_loc[row.row];
            row.query_len = min(p.query_start_loc[row.row + 1], p.num_tokens) - row.first_token;
            row.kv_len = max(p.seq_lens[row.row], 0);
            int packed = row.query_len * p.heads_per_kv_head;
            if (row.query_len > 0 && packed >= p.min_packed_rows && packed <= p.max_packed_rows) {
                int pages = ceil_div(row.kv_len, p.block_size);
                int splits = p.num_splits != nullptr ? p.num_splits[row.row] : 1;
                splits = min(max(splits, 1), p.max_num_splits);
                row.pages_per_split = max(ceil_div(pages, splits), 1);
                row.splits = max(ceil_div(pages, row.pages_per_split), 1);
                count = ceil_div(packed, p.tile_rows) * row.splits;
            }
        }
        int total;
        row.begin = block_sum(count, &total) - count;
        rows[threadIdx.x] = row;
        __syncthreads();
        for (int i = threadIdx.x; i < total && base + i < p.max_work_items; i += kThreads) {
            // The last row that begins at or before item i: rows without items share their successor's begin.
            int low = 0, high = kThreads;
            while (high - low > 1) {
                int middle = (low + high) / 2;
                if (rows[middle].begin <= i) {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            const Row of = rows[low];
            int packed = of.query_len * p.heads_per_kv_head;
            int tile_from_end = (i - of.begin) / of.splits, split = (i - of.begin) % of.splits;
            int tile = ceil_div(packed, p.tile_rows) - 1 - tile_from_end;
            long long keys = static_cast<long long>(of.pages_per_split) * p.block_size;
            TtWorkItem item;
            item.row = of.row;
            item.first_token = of.first_token;
            item.query_len = of.query_len;
            item.kv_len = of.kv_len;
            item.row_begin = tile * p.tile_rows;
            item.row_end = min(item.row_begin + p.tile_rows, packed);
            item.key_begin = static_cast<int>(split * keys);
            item.key_end = static_cast<int>(min((split + 1) * keys, static_cast<long long>(of.kv_len)));
            item.causal = p.causal != nullptr ? p.causal[of.row] != 0 : p.causal_all;
            item.slot = base + i;
            item.first_slot = base + i - split;
            item.num_slots = of.splits;
            p.items[base + i] = item;
        }
        base += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        TtWorkHeader header = {};
        header.num_items = min(base, p.max_work_items);
        if (p.with_tail) {
            header.tail_begin = p.num_reqs > 0 ? min(p.query_start_loc[p.num_reqs], p.num_tokens) : 0;
            header.tail_end = p.num_tokens;
        }
        *p.header = header;
    }
}

// One block of 1,024 threads; 4 * (max_reqs + 1 + max_tiles) bytes of dynamic shared memory. Item w of the list becomes
// item w; one that names nothing becomes an item without rows. Whatever the list holds, nothing is written, or planned to
// be written by an attention kernel, beyond the launch's limits.
extern "C" __global__ void __launch_bounds__(kThreads) tt_plan_flashinfer(const __grid_constant__ TtWorkListParams p) {
    extern __shared__ int shared[];
    const TtWorkListSizes sizes = *p.sizes;
    const int tile_q = sizes.cta_tile_q, chunk_size = sizes.kv_chunk_size;
    const bool sound = tile_q > 0 && tile_q <= p.tile_rows && chunk_size > 0;
    const int num_reqs = min(max(sizes.num_reqs, 0), p.max_reqs), num_tiles = min(max(sizes.num_tiles, 0), p.max_tiles);
    const int num_items = sound ? min(max(sizes.num_items, 0), p.max_work_items) : 0;
    const int first_token = min(max(sizes.first_token, 0), p.max_tokens);
    // The request's first token, counted from the batch's, and its number of tokens.
    auto tokens_of = [&](int request, int &first) {
        int begin = p.qo_indptr[request], end = p.qo_indptr[request + 1], limit = p.max_tokens - first_token;
        begin = min(max(begin, 0), limit);
        first = first_token + begin;
        return min(max(end, begin), limit) - begin;
    };
    int *tile_begin = shared, *first_chunk = shared + p.max_reqs + 1;
    int base = 0;
    for (int chunk = 0; chunk < num_reqs; chunk += kThreads) {
        int at = chunk + threadIdx.x, count = 0;
        if (at < num_reqs && sound) {
            int first;
            count = min(ceil_div(tokens_of(at, first) * p.heads_per_kv_head, tile_q), num_tiles);
        }
        int total;
        int end = block_sum(count, &total);
        if (at < num_reqs) {
            tile_begin[at] = min(base + end - count, num_tiles);
        }
        base = min(base + total, num_tiles);
    }
    if (threadIdx.x == 0) {
        tile_begin[num_reqs] = base;
    }
    for (int tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
        first_chunk[tile] = 0x7fffffff;
    }
    __syncthreads();
    auto tile_of = [&](int w) -> int {
        int request = p.request_indices[w], q = p.qo_tile_indices[w];
        if (request < 0 || request >= num_reqs || q < 0 || p.kv_tile_indices[w] < 0) {
            return -1;
        }
        return q < tile_begin[request + 1] - tile_begin[request] ? tile_begin[request] + q : -1;
    };
    for (int w = threadIdx.x; w < num_items; w += kThreads) {
        int tile = tile_of(w);
        if (tile >= 0) {
            atomicMin(first_chunk + tile, p.kv_tile_indices[w]);
        }
    }
    __syncthreads();
    for (int w = threadIdx.x; w < num_items; w += kThreads) {
        TtWorkItem item = {};
        item.num_slots = 1;
        int tile = tile_of(w);
        if (tile >= 0) {
            int request = p.request_indices[w], chunk = p.kv_tile_indices[w], first;
            int begin = p.merge_indptr[tile], end = p.merge_indptr[tile + 1], index = chunk - first_chunk[tile];
            // Partial results [begin, end) are the tile's.
            if (begin >= 0 && begin < end && end <= p.max_work_items && index < end - begin) {
                long long key = static_cast<long long>(chunk) * chunk_size;
                item.row = p.paged_kv_indptr[request];
                item.query_len = tokens_of(request, first);
                item.first_token = first;
                item.kv_len = max(p.seq_lens[request], 0);
                item.row_begin = p.qo_tile_indices[w] * tile_q;
                item.row_end = min(item.row_begin + tile_q, item.query_len * p.heads_per_kv_head);
                item.key_begin = static_cast<int>(min(key, static_cast<long long>(item.kv_len)));
                item.key_end = static_cast<int>(min(key + chunk_size, static_cast<long long>(item.kv_len)));
                item.causal = sizes.causal;
                item.slot = begin + index;
                item.first_slot = begin;
                item.num_slots = end - begin;
            }
        }
        p.items[w] = item;
    }
    if (threadIdx.x == 0) {
        TtWorkHeader header = {};
        header.num_items = num_items;
        header.tail_begin = min(max(sizes.tail_begin, 0), p.max_tokens);
        header.tail_end = min(sizes.tail_end, p.max_tokens);
        *p.header = header;
    }
}
