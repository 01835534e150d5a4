/* What the host passes to the kernels: plain structs, passed by value, that the host mirrors field by field.
 *
 * Knows layouts and units; must never know how work was chosen, nor any CUDA type. Every offset is 64-bit. Strides are in
 * elements. T tokens, R requests (rows), W block-table columns, Hq query heads, Hkv KV heads, D head size, G = Hq / Hkv.
 *
 * A packed row is one query token of one of the G query heads that share a KV head, token-major: packed row p of a request
 * is token p / G, head kv_head * G + p % G. */
#ifndef TIMETABLE_PARAMS_H
#define TIMETABLE_PARAMS_H

#ifdef __CUDACC_RTC__
typedef int int32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

/* One work item: one tile of packed query rows of one request against one range of its keys; executed once per KV head.
 * 48 bytes, aligned to 16. */
typedef struct TtWorkItem {
    int32_t row;         /* the request's pages begin at block_table + row * block_table_stride */
    int32_t first_token; /* the request's first query token */
    int32_t query_len;   /* query tokens of the request */
    int32_t kv_len;      /* keys of the request, this step's included */
    int32_t row_begin;   /* packed query rows [row_begin, row_end) of the request; at most the kernel's tile */
    int32_t row_end;
    int32_t key_begin; /* keys [key_begin, key_end); key_begin is a multiple of the block size */
    int32_t key_end;
    int32_t causal;     /* 0 or 1 */
    int32_t slot;       /* where this item's partial result goes; num_slots > 1 only */
    int32_t first_slot; /* the tile's partials are slots [first_slot, first_slot + num_slots), in key order */
    int32_t num_slots;  /* 1: the item writes the output itself */
} TtWorkItem;

/* Written by a plan kernel, read by every attention launch of the step. 16 bytes. */
typedef struct TtWorkHeader {
    int32_t num_items;  /* may exceed max_work_items only where a plan broke its promise; kernels clamp */
    int32_t tail_begin; /* tokens [tail_begin, tail_end) belong to no request: output 0, LSE -inf */
    int32_t tail_end;
    int32_t reserved;
} TtWorkHeader;

/* Arguments of tt_plan_flash_attn: from num_splits to work items, once per step. */
typedef struct TtPlanParams {
    TtWorkHeader *header;
    TtWorkItem *items;              /* [max_work_items] */
    const int32_t *query_start_loc; /* [R + 1] */
    const int32_t *seq_lens;        /* [R] */
    const int32_t *num_splits;      /* [R], each at least 1; null: all 1 */
    const int32_t *row_order;       /* [R], a permutation: the order in which rows' tiles start; null: natural */
    const int32_t *causal;          /* [R]; null: causal_all */
    int32_t num_reqs;
    int32_t num_tokens; /* tokens of the (padded) batch */
    int32_t block_size;
    int32_t heads_per_kv_head;
    int32_t tile_rows;       /* packed rows of one tile: 16 for the decode kernels, 64 or 128 for the prefill kernels */
    int32_t min_packed_rows; /* only requests with at least, and at most, this many packed rows */
    int32_t max_packed_rows;
    int32_t max_num_splits; /* the launch promise: larger entries are cut to it */
    int32_t max_work_items; /* the launch promise: items beyond it are dropped, never written */
    int32_t causal_all;
    int32_t with_tail; /* 1: this launch's kernel also clears the tokens that no request covers */
    int32_t reserved;
} TtPlanParams;

/* What a step changes of one FlashInfer work list; in device memory, so that a captured graph replays with any of them. What
 * exceeds the launch's limits is cut to them. 40 bytes. */
typedef struct TtWorkListSizes {
    int32_t num_items;   /* w */
    int32_t num_reqs;    /* n */
    int32_t num_tiles;   /* query tiles of all requests */
    int32_t first_token; /* the part's first token */
    int32_t cta_tile_q;
    int32_t kv_chunk_size;
    int32_t causal;
    int32_t tail_begin; /* as in the header; equal: none */
    int32_t tail_end;
    int32_t reserved;
} TtWorkListSizes;

/* Arguments of tt_plan_flashinfer: a FlashInfer work list of one part (decodes or prefills), to work items. The attention
 * kernels then take paged_kv_indices for block_table, and 1 for its stride. */
typedef struct TtWorkListParams {
    TtWorkHeader *header;
    TtWorkItem *items;              /* [max_work_items] */
    const TtWorkListSizes *sizes;   /* on the device */
    const int32_t *qo_indptr;       /* [n + 1], rebased to the part */
    const int32_t *paged_kv_indptr; /* [n + 1] */
    const int32_t *seq_lens;        /* [n] keys of each request */
    const int32_t *request_indices; /* [w] */
    const int32_t *qo_tile_indices; /* [w] */
    const int32_t *kv_tile_indices; /* [w] */
    const int32_t *merge_indptr;    /* [num_tiles + 1] */
    int32_t heads_per_kv_head;
    int32_t tile_rows;      /* the attention kernel's: 16, 64 or 128; a list with a larger cta_tile_q gives no items */
    int32_t max_work_items; /* the launch promise: items and partial results beyond it are dropped, never written */
    int32_t max_reqs;       /* requests and tiles beyond these are ignored; the launch's dynamic shared memory is */
    int32_t max_tiles;      /* 4 * (max_reqs + 1 + max_tiles) bytes */
    int32_t max_tokens;     /* tokens of the (padded) batch: no item and no tail reaches beyond */
} TtWorkListParams;

/* Arguments of the decode and prefill kernels: one layer. */
typedef struct TtAttentionParams {
    const void *query;          /* [T, Hq, D] */
    const void *kv_cache;       /* [num_blocks, Hkv, block_size, 2 * D] by strides; a key, then its value, adjacent */
    void *output;               /* [T, Hq, D], the query's dtype */
    float *lse;                 /* f32 [T, Hq], natural log; null: not wanted */
    float *partial_output;      /* f32 [max_work_items, Hkv, partial_rows, D] */
    float *partial_lse;         /* f32 [max_work_items, Hkv, partial_rows], log2 */
    int32_t *merge_counters;    /* s32 [max_work_items, Hkv]: zero before the first launch; every launch leaves zeros */
    const int32_t *block_table; /* s32 [R, W] */
    const TtWorkHeader *header;
    const TtWorkItem *items;
    const float *k_scale; /* fp8 caches: [1], or [Hkv] with kv_scale_stride 1; null: 1 */
    const float *v_scale;
    int64_t query_stride;  /* of a token; heads are D apart */
    int64_t output_stride; /* of a token */
    int64_t kv_block_stride;
    int64_t kv_head_stride;
    int64_t kv_token_stride; /* 16-byte multiples, as all of the cache's strides */
    int64_t block_table_stride;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t block_size;     /* a multiple of 16 */
    int32_t sliding_window; /* keys a token sees, itself included; 0: all */
    int32_t partial_rows;   /* at least the packed rows of any item with num_slots > 1 */
    int32_t max_work_items;
    int32_t kv_scale_stride;
    float scale;
    float soft_cap; /* 0: none */
    int32_t reserved;
} TtAttentionParams;

/* Arguments of the plain f32 attention kernel. */
typedef struct TtPlainAttentionParams {
    const float *query;    /* [T, Hq, D] */
    const float *kv_cache; /* as above */
    float *output;         /* [T, Hq, D] */
    float *lse;            /* [T, Hq] or null */
    const int32_t *block_table;
    const int32_t *query_start_loc; /* [R + 1] */
    const int32_t *seq_lens;        /* [R] */
    const int32_t *causal;          /* [R]; null: causal_all */
    int64_t query_stride;
    int64_t output_stride;
    int64_t kv_block_stride;
    int64_t kv_head_stride;
    int64_t kv_token_stride;
    int64_t block_table_stride;
    int32_t num_reqs;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_size; /* at most 256 */
    int32_t block_size;
    int32_t sliding_window;
    int32_t causal_all;
    float scale;
    float soft_cap;
} TtPlainAttentionParams;

/* Arguments of reshape_and_cache. */
typedef struct TtScatterParams {
    const void *key;   /* [T', Hkv, D], heads D apart */
    const void *value; /* [T', Hkv, D] */
    void *kv_cache;
    const int64_t *slot_mapping; /* [num_slots]; negative: skipped */
    const float *k_scale;        /* fp8: stored = convert(x / scale), saturating; null: 1 */
    const float *v_scale;
    int64_t key_stride; /* of a token */
    int64_t value_stride;
    int64_t kv_block_stride;
    int64_t kv_head_stride;
    int64_t kv_token_stride;
    int64_t num_slots;
    int32_t num_kv_heads;
    int32_t head_size; /* a multiple of 16 */
    int32_t block_size;
    int32_t kv_scale_stride;
} TtScatterParams;

/* What one unpack operation computes. All elements are s32 unless the kind ends in 64. */
enum TtUnpackKind {
    TT_UNPACK_VALUES = 0,         /* list: rows values */
    TT_UNPACK_VALUES64 = 1,       /* list: rows values, s64 */
    TT_UNPACK_TABLE_UPDATES = 2,  /* list: rows triples (row, column, block), written to the block table */
    TT_UNPACK_COPY = 3,           /* source: rows elements */
    TT_UNPACK_COPY64 = 4,         /* source: rows elements, s64 */
    TT_UNPACK_REBASE = 5,         /* query_start_loc[first_row ..= first_row + rows] - query_start_loc[first_row] */
    TT_UNPACK_CONTEXT_LENS = 6,   /* seq_len - query_len of rows [first_row, + rows) */
    TT_UNPACK_HAS_CONTEXT = 7,    /* 1 where that is above 0 */
    TT_UNPACK_DCP_LOCAL = 8,      /* this rank's share of the lengths; option 0: seq_lens, 1: context lengths */
    TT_UNPACK_CU_PAGE_COUNTS = 9, /* 0, then the running sum of ceil(seq_len / block_size) of rows [first_row, + rows) */
    TT_UNPACK_GATHER_PAGES = 10,  /* list: paged_kv_indptr [rows + 1]; the first pages of rows [first_row, + rows) */
    TT_UNPACK_SELECT_PAGES = 11,  /* as above; list2: the columns */
    TT_UNPACK_STATE_INDICES = 12, /* list: rows row indices; width columns from 0 (option 0) or the last token's (1) */
    TT_UNPACK_ROWS = 13,          /* list: rows row indices; rows of source, width elements each */
    TT_UNPACK_ROWS64 = 14,        /* as above, s64 */
    TT_UNPACK_ROW_MASK = 15,      /* list: rows row indices; 1 there, 0 in the step's other rows */
    TT_UNPACK_ROW_TOKENS = 16,    /* list: rows row indices; their tokens, one row after the other */
    TT_UNPACK_TOKEN_TO_ROW = 17,  /* the row of each of the step's tokens; 0 beyond the last request's */
    TT_UNPACK_SEGMENT_IDS = 18,   /* list: cu_seq_lens [rows + 1]; the segment of each element */
    TT_UNPACK_CONV_ROWS = 19,     /* per width tokens of rows [first_row, + rows): the row, counted from first_row */
    TT_UNPACK_CONV_OFFSETS = 20,  /* the same chunks: the chunk's index within its row */
    TT_UNPACK_FEED_TOKENS = 21    /* list: rows token ids; v < 0 stands for source[-1 - v], of width elements */
};

/* One operation: writes destination[0, room), the tensor's own elements first and `fill` after them. 64 bytes. */
typedef struct TtUnpackOp {
    int32_t kind;
    int32_t rows;
    int32_t first_row;
    int32_t width;
    int32_t room; /* elements of the destination; none beyond is written */
    int32_t fill;
    int32_t option;
    int32_t reserved;
    void *destination;  /* a persistent buffer */
    const void *source; /* a device tensor, or null */
    int64_t list;       /* byte offset in the slot; 8-aligned for s64 */
    int64_t list2;
} TtUnpackOp;

/* Arguments of tt_unpack, one cooperative launch. Operations [0, num_first_ops) run first; the others may read what those
 * wrote: the step's inputs and the block table. Within either group no operation may depend on another. */
typedef struct TtUnpackParams {
    const void *slot;               /* the step's packed bytes on the device */
    const TtUnpackOp *ops;          /* within the slot, as a rule */
    const int32_t *query_start_loc; /* [R + 1] */
    const int32_t *seq_lens;        /* [R] */
    int32_t *block_table;           /* [R, W] */
    int64_t block_table_stride;
    int32_t num_first_ops;
    int32_t num_ops; /* all, the first included */
    int32_t num_reqs;
    int32_t num_tokens; /* padded */
    int32_t table_width;
    int32_t block_size;
    int32_t dcp_world_size;
    int32_t dcp_rank;
    int32_t dcp_interleave;
    int32_t reserved;
} TtUnpackParams;

/* How one row of logits becomes a token: what the host's SamplingParams say, and the row's one random number. 24 bytes. */
typedef struct TtSampleRow {
    float temperature; /* 0 (or not a positive number): the largest logit, the lowest id of equals */
    float top_p;       /* within (0, 1]; 1: all */
    int32_t top_k;     /* 0: all */
    int32_t reserved;
    double uniform; /* within [0, 1); unused at temperature 0 */
} TtSampleRow;

/* The host's mirror must have these sizes. */
#ifdef __cplusplus
static_assert(sizeof(TtWorkItem) == 48, "TtWorkItem");
static_assert(sizeof(TtWorkHeader) == 16, "TtWorkHeader");
static_assert(sizeof(TtPlanParams) == 104, "TtPlanParams");
static_assert(sizeof(TtWorkListSizes) == 40, "TtWorkListSizes");
static_assert(sizeof(TtWorkListParams) == 104, "TtWorkListParams");
static_assert(sizeof(TtAttentionParams) == 184, "TtAttentionParams");
static_assert(sizeof(TtPlainAttentionParams) == 152, "TtPlainAttentionParams");
static_assert(sizeof(TtScatterParams) == 112, "TtScatterParams");
static_assert(sizeof(TtUnpackOp) == 64, "TtUnpackOp");
static_assert(sizeof(TtUnpackParams) == 88, "TtUnpackParams");
static_assert(sizeof(TtSampleRow) == 24, "TtSampleRow");
#endif

#endif
