/* The contract timetable:attention@0.1.0 for builders of FLASH_ATTN in C: its records as they lie in a guest's memory, and the
 * component's exports around four functions of yours. No libc and no WASI: include it once, in a program of one file.
 *
 * A record of the canonical ABI lies as a C structure of wasm32 does: fields in order, each at a multiple of its own alignment.
 * A list or string is an address and a length, an option a byte and the value, a variant a byte and the largest payload.
 *
 * Compile with clang, or with zig, which contains one; then make a component of the module:
 *
 *   clang --target=wasm32 -O3 -nostdlib -ffreestanding -mbulk-memory -Wl,--no-entry -o mine.core.wasm mine.c
 *   zig cc -target wasm32-freestanding -O3 -nostdlib -mcpu=generic+bulk_memory -Wl,--no-entry -o mine.core.wasm mine.c
 *   timetable componentize mine.core.wasm -o mine.wasm
 */
#ifndef TIMETABLE_FLASH_ATTN_H
#define TIMETABLE_FLASH_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---------------------------------------------------------------- lists */

typedef struct { const char *at; uint32_t len; } tt_string; /* UTF-8, no zero at the end */
typedef struct { int32_t *at; uint32_t len; } tt_list_s32;
typedef struct { uint32_t *at; uint32_t len; } tt_list_u32;
typedef struct { uint8_t *at; uint32_t len; } tt_list_u8;
typedef struct { void *at; uint32_t len; } tt_list; /* of records that this header does not spell out */
typedef struct { uint8_t some; uint32_t value; } tt_option_u32;
typedef struct { uint8_t some; double value; } tt_option_f64;

/* ---------------------------------------------------------------- what a builder is made of */

typedef struct {
    uint8_t mamba_type, cache_mode;
    uint32_t num_speculative_blocks, chunk_size;
} tt_mamba_spec;

typedef struct {
    uint8_t kind; /* 0: full attention, 1: sliding window, … as in types.wit */
    uint32_t block_size, num_kv_heads, head_size, head_size_v;
    uint8_t dtype;
    tt_option_u32 sliding_window, attention_chunk_size;
    bool dcp_sharded;
    struct { uint8_t some; tt_mamba_spec value; } mamba;
} tt_kv_cache_spec;

typedef struct {
    uint32_t num_heads;
    double scale;
    tt_option_f64 logits_soft_cap;
    tt_list_s32 sliding_windows;
    uint8_t model_dtype;
    tt_string kv_cache_dtype;
    uint8_t kv_cache_layout;
    bool has_sinks, use_rswa;
    uint32_t rswa_window, kv_lora_rank, qk_rope_head_dim;
} tt_attention_config;

typedef struct {
    uint32_t max_num_seqs, max_num_batched_tokens, max_model_len, max_num_blocks_per_req, num_speculative_tokens;
    bool parallel_drafting;
} tt_scheduler_config;

typedef struct { uint8_t mode; tt_list_u32 capture_sizes; uint32_t max_capture_size; } tt_cudagraph_config;

typedef struct {
    uint32_t dcp_world_size, dcp_rank, cp_kv_cache_interleave_size;
    bool prefill_context_parallel;
} tt_parallel_config;

typedef struct {
    uint32_t compute_capability[2], num_workers, ctas_per_worker, flash_attn_version;
    bool trtllm_attention, xqa;
} tt_device_config;

typedef struct { tt_string key, value; } tt_option;

typedef struct {
    tt_kv_cache_spec kv_cache_spec;
    tt_list layer_names;
    tt_attention_config attention;
    tt_scheduler_config scheduler;
    tt_cudagraph_config cudagraph;
    tt_parallel_config parallel;
    tt_device_config device;
    bool batch_invariant;
    uint32_t max_num_splits;
    bool model_runner_v2;
    struct { tt_option *at; uint32_t len; } options;
} tt_builder_config;

/* ---------------------------------------------------------------- a step */

/* Tag 0: `all` for the batch; 1: per request, on the device. */
typedef struct { uint8_t per_request; bool all; } tt_causal;

typedef struct {
    uint32_t num_reqs, num_actual_tokens, max_query_len, max_seq_len;
    tt_causal causal;
    uint32_t block_table_width, slot_mapping_len;
    tt_list_s32 query_start_loc_cpu;      /* [num_reqs + 1] */
    tt_list_s32 seq_lens_cpu_upper_bound; /* [num_reqs] */
    tt_list_u8 is_prefilling;
    struct { uint8_t some; tt_list_s32 dcp_local_seq_lens_cpu_upper_bound; } dcp;
    struct { uint8_t some; tt_list_s32 encoder_seq_lens_cpu; } encoder;
    struct { uint8_t some; uint32_t num_logits_indices, max_logits_per_req, num_logits_indices_padded; } fast_prefill;
    tt_list_u32 req_idx;
    tt_list mm_req_doc_ranges;
    tt_list_s32 replayssm_decode_base_cpu;
    tt_list extras;
} tt_common_attention_metadata;

/* ---------------------------------------------------------------- what a builder returns */

/* The host's tensors of a step, by name. */
enum { TT_QUERY_START_LOC, TT_SEQ_LENS, TT_BLOCK_TABLE, TT_SLOT_MAPPING, TT_POSITIONS, TT_CAUSAL, TT_DCP_LOCAL_SEQ_LENS,
       TT_ENCODER_SEQ_LENS, TT_LOGITS_INDICES_PADDED, TT_RSWA_PREFIX_LENS };

/* Tag 0: the whole tensor `input`. The other cases are in types.wit; `payload` is as large as the largest. */
typedef struct {
    uint8_t tag;
    union { uint8_t input; uint32_t payload[4]; } of;
} tt_tensor;

typedef struct { uint8_t some; tt_tensor value; } tt_option_tensor;

typedef struct {
    uint32_t batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim;
    tt_tensor cache_seqlens;
    uint8_t qkv_dtype;
    tt_tensor cu_seqlens_q;
    uint32_t page_size;
    bool causal;
    int32_t window_size[2];
    uint32_t num_splits, scheduler_metadata_len;
} tt_scheduler_metadata_call;

typedef struct {
    uint32_t max_num_splits;
    tt_list_s32 num_splits; /* [num_reqs], or empty: all 1 */
    struct { uint8_t by_rows; tt_list_s32 rows; } tile_order;
} tt_schedule;

typedef struct {
    uint32_t num_actual_tokens, max_query_len;
    tt_tensor query_start_loc;
    uint32_t max_seq_len;
    tt_tensor seq_lens, block_table, slot_mapping;
    tt_causal causal;
    uint32_t max_dcp_context_kv_len;
    tt_option_tensor dcp_context_kv_lens;
    uint32_t num_decode_reqs, num_prefill_reqs, num_decode_tokens, num_prefill_tokens, max_num_splits;
    struct { uint8_t some; tt_scheduler_metadata_call value; } scheduler_metadata;
    tt_option_tensor mm_prefix_query_range, rswa_prefix_lens;
    uint32_t rswa_window;
    tt_schedule schedule;
} tt_metadata;

/* ---------------------------------------------------------------- what a builder says of itself */

enum { TT_NEVER, TT_UNIFORM_SINGLE_TOKEN_DECODE, TT_UNIFORM_BATCH, TT_ALWAYS };
/* Host vectors that a builder may ask for. */
enum { TT_NEED_QUERY_START_LOC_CPU, TT_NEED_SEQ_LENS_CPU_UPPER_BOUND, TT_NEED_IS_PREFILLING };
enum { TT_INVALID_VALUE, TT_ASSERTION, TT_NOT_IMPLEMENTED };

typedef struct {
    tt_string name;
    uint8_t cudagraph_support;
    tt_option_u32 reorder_batch_threshold, varlen_cudagraph_max_query_len;
    bool supports_update_block_table, supports_draft_decode_metadata_update;
    tt_list_u8 needs;
    uint64_t max_scratch_bytes;
} tt_builder_info;

typedef struct { uint32_t num_tokens, num_reqs, max_query_len; tt_option_u32 uniform_query_len; } tt_capture_shape;

typedef struct {
    uint32_t max_num_splits, max_work_items;
    uint64_t scratch_bytes;
    uint32_t max_query_len;
    tt_option_u32 uniform_query_len;
} tt_launch_promise;

typedef struct { uint8_t kind; tt_string message; } tt_build_error;

/* As the contract computes them; a test of the host compares these numbers with its own. */
#define TT_SIZE(type, size) _Static_assert(sizeof(type) == (size), "the contract's " #type)
TT_SIZE(tt_kv_cache_spec, 60);
TT_SIZE(tt_attention_config, 72);
TT_SIZE(tt_builder_config, 248);
TT_SIZE(tt_common_attention_metadata, 124);
TT_SIZE(tt_tensor, 20);
TT_SIZE(tt_metadata, 316);
TT_SIZE(tt_builder_info, 48);
TT_SIZE(tt_launch_promise, 32);
TT_SIZE(tt_build_error, 12);

/* ---------------------------------------------------------------- yours */

typedef struct tt_builder tt_builder;

/* A builder for `config`, made of memory from `tt_allocate`; NULL, with the reason, if it cannot serve that configuration. */
static tt_builder *tt_create(const tt_builder_config *config, const char **why_not);
/* `info` is all zeros; say what differs. */
static void tt_info(const tt_builder *self, tt_builder_info *info);
static void tt_promise(const tt_builder *self, const tt_capture_shape *shape, tt_launch_promise *promise);
/* The step's metadata; NULL if it was built, else why the batch is declined. `metadata` already has the field's part of it, with
 * one split for every row. What it says must be a function of the configuration and of this call. */
static const char *tt_build(const tt_builder *self, const tt_common_attention_metadata *common, bool fast_build,
                            tt_metadata *metadata);

/* ---------------------------------------------------------------- memory: one arena, rewound after every call */

extern unsigned char __heap_base;
static uintptr_t tt_top, tt_kept;

static void *tt_allocate(size_t bytes, size_t align)
{
    if (!tt_top)
        tt_top = (uintptr_t)&__heap_base;
    uintptr_t block = (tt_top + align - 1) & ~(uintptr_t)(align - 1);
    uintptr_t end = block + bytes, has = (uintptr_t)__builtin_wasm_memory_size(0) << 16;
    if (end < block || (end > has && __builtin_wasm_memory_grow(0, (end - has + 65535) >> 16) == (size_t)-1))
        __builtin_trap();
    tt_top = end;
    return (void *)block;
}

__attribute__((export_name("cabi_realloc"))) void *tt_realloc(void *old, size_t old_size, size_t align, size_t size)
{
    if (!size)
        return (void *)align;
    unsigned char *block = tt_allocate(size, align);
    for (size_t i = 0; i < old_size && i < size; i++)
        block[i] = ((const unsigned char *)old)[i];
    return block;
}

static tt_string tt_text(const char *text)
{
    tt_string string = {text, 0};
    while (text[string.len])
        string.len++;
    return string;
}

/* The operator's option `name` as a number; `otherwise` where it is not given or is none. */
static inline uint32_t tt_number_option(const tt_builder_config *config, const char *name, uint32_t otherwise)
{
    tt_string wanted = tt_text(name);
    for (uint32_t i = 0; i < config->options.len; i++) {
        tt_option option = config->options.at[i];
        uint32_t at = 0, number = 0;
        while (at < wanted.len && at < option.key.len && wanted.at[at] == option.key.at[at])
            at++;
        if (at != wanted.len || option.key.len != wanted.len)
            continue;
        for (at = 0; at < option.value.len; at++) {
            uint32_t digit = (uint32_t)option.value.at[at] - '0';
            if (digit > 9 || number > 100000000)
                return otherwise;
            number = number * 10 + digit;
        }
        return at ? number : otherwise;
    }
    return otherwise;
}

/* ---------------------------------------------------------------- the component's exports */

#define TT_FLASH_ATTN "timetable:attention/flash-attn@0.1.0"
#define TT_EXPORT(name) __attribute__((export_name(TT_FLASH_ATTN "#" name)))
#define TT_AFTER(name) __attribute__((export_name("cabi_post_" TT_FLASH_ATTN "#" name)))

__attribute__((import_module("[export]" TT_FLASH_ATTN), import_name("[resource-new]builder")))
extern uint32_t tt_new_handle(const tt_builder *builder);

typedef struct { uint8_t is_error; union { uint32_t handle; tt_build_error error; } of; } tt_created;
typedef struct { uint8_t is_error; union { tt_metadata metadata; tt_build_error error; } of; } tt_built;
typedef struct { const tt_builder *self; tt_common_attention_metadata common; uint32_t extra; } tt_build_call;
typedef struct { const tt_builder *self; tt_metadata metadata; tt_common_attention_metadata common; } tt_update_call;

TT_EXPORT("[static]builder.create") tt_created *tt_export_create(const tt_builder_config *config)
{
    static tt_created created;
    const char *why_not = "this configuration is not served";
    const tt_builder *builder = tt_create(config, &why_not);
    created.is_error = !builder;
    if (builder)
        created.of.handle = tt_new_handle(builder);
    else
        created.of.error = (tt_build_error){TT_NOT_IMPLEMENTED, tt_text(why_not)};
    return &created;
}

/* One instance has one builder, as long as it lives. */
TT_EXPORT("[dtor]builder") void tt_export_drop(const tt_builder *self) { (void)self; }

TT_EXPORT("[method]builder.info") tt_builder_info *tt_export_info(const tt_builder *self)
{
    static tt_builder_info info;
    tt_info(self, &info);
    return &info;
}

TT_EXPORT("[method]builder.launch-promise")
tt_launch_promise *tt_export_promise(const tt_builder *self, uint32_t num_tokens, uint32_t num_reqs, uint32_t max_query_len,
                                     uint32_t is_uniform, uint32_t uniform_query_len)
{
    static tt_launch_promise promise;
    tt_capture_shape shape = {num_tokens, num_reqs, max_query_len, {(uint8_t)is_uniform, uniform_query_len}};
    promise = (tt_launch_promise){.max_num_splits = 1, .max_query_len = max_query_len,
                                  .uniform_query_len = shape.uniform_query_len};
    tt_promise(self, &shape, &promise);
    return &promise;
}

static tt_tensor tt_input(uint8_t input)
{
    tt_tensor tensor = {0};
    tensor.of.input = input;
    return tensor;
}

static tt_built *tt_build_any(const tt_builder *self, const tt_common_attention_metadata *common, bool fast_build)
{
    static tt_built built;
    built = (tt_built){0};
    tt_metadata *metadata = &built.of.metadata;
    metadata->num_actual_tokens = common->num_actual_tokens;
    metadata->max_query_len = common->max_query_len;
    metadata->query_start_loc = tt_input(TT_QUERY_START_LOC);
    metadata->max_seq_len = common->max_seq_len;
    metadata->seq_lens = tt_input(TT_SEQ_LENS);
    metadata->block_table = tt_input(TT_BLOCK_TABLE);
    metadata->slot_mapping = tt_input(TT_SLOT_MAPPING);
    metadata->causal = common->causal;
    metadata->max_num_splits = 1;
    metadata->schedule.max_num_splits = 1;
    const char *why_not = tt_build(self, common, fast_build, metadata);
    if (why_not) {
        built.is_error = 1;
        built.of.error = (tt_build_error){TT_NOT_IMPLEMENTED, tt_text(why_not)};
    }
    return &built;
}

TT_EXPORT("[method]builder.build") tt_built *tt_export_build(const tt_build_call *call)
{
    return tt_build_any(call->self, &call->common, (uint8_t)call->extra);
}

TT_EXPORT("[method]builder.build-for-cudagraph-capture") tt_built *tt_export_capture(const tt_build_call *call)
{
    return tt_build_any(call->self, &call->common, false);
}

TT_EXPORT("[method]builder.build-for-drafting") tt_built *tt_export_draft(const tt_build_call *call)
{
    return tt_build_any(call->self, &call->common, true);
}

/* Built anew: table and slots are references. */
TT_EXPORT("[method]builder.update-block-table") tt_built *tt_export_update(const tt_update_call *call)
{
    return tt_build_any(call->self, &call->common, false);
}

/* The host has read what a call returned. What `create` allocated is kept. */
static void tt_rewind(void) { tt_top = tt_kept; }

TT_AFTER("[static]builder.create") void tt_after_create(const void *result) { (void)result; tt_kept = tt_top; }
TT_AFTER("[method]builder.info") void tt_after_info(const void *result) { (void)result; tt_rewind(); }
TT_AFTER("[method]builder.launch-promise") void tt_after_promise(const void *result) { (void)result; tt_rewind(); }
TT_AFTER("[method]builder.build") void tt_after_build(const void *result) { (void)result; tt_rewind(); }
TT_AFTER("[method]builder.build-for-cudagraph-capture") void tt_after_capture(const void *result) { (void)result; tt_rewind(); }
TT_AFTER("[method]builder.build-for-drafting") void tt_after_draft(const void *result) { (void)result; tt_rewind(); }
TT_AFTER("[method]builder.update-block-table") void tt_after_update(const void *result) { (void)result; tt_rewind(); }

#endif
