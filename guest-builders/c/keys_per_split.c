/* A builder of FLASH_ATTN in C: a split for every `keys-per-split` keys of a request (an option, 1,024 without it), as far as the
 * host has room for.
 *
 *   zig cc -target wasm32-freestanding -O3 -nostdlib -mcpu=generic+bulk_memory -Wl,--no-entry -o /tmp/c.core.wasm keys_per_split.c
 *   timetable componentize /tmp/c.core.wasm -o c.wasm && timetable check c.wasm && timetable reload FLASH_ATTN c.wasm
 */
#include "timetable_flash_attn.h"

struct tt_builder {
    uint32_t keys_per_split, max_num_splits, head_bytes;
};

static tt_builder *tt_create(const tt_builder_config *config, const char **why_not)
{
    if (config->parallel.dcp_world_size > 1) {
        *why_not = "decode context parallelism is beyond this builder";
        return NULL;
    }
    tt_builder *self = tt_allocate(sizeof *self, _Alignof(tt_builder));
    self->keys_per_split = tt_number_option(config, "keys-per-split", 1024);
    if (!self->keys_per_split) {
        *why_not = "option keys-per-split is 0; give a number of keys, or leave it out (default 1024)";
        return NULL;
    }
    bool split = !config->batch_invariant && config->max_num_splits;
    self->max_num_splits = split ? config->max_num_splits : 1;
    /* A partial result: an f32 output row and a log-sum-exp for each query head. */
    self->head_bytes = config->attention.num_heads * (config->kv_cache_spec.head_size_v + 1) * 4;
    return self;
}

static void tt_info(const tt_builder *self, tt_builder_info *info)
{
    static uint8_t needs[] = {TT_NEED_SEQ_LENS_CPU_UPPER_BOUND};
    (void)self;
    info->name = tt_text("flash-attn in C, keys per split");
    info->cudagraph_support = TT_ALWAYS;
    info->supports_update_block_table = true;
    info->needs = (tt_list_u8){needs, sizeof needs};
}

static void tt_promise(const tt_builder *self, const tt_capture_shape *shape, tt_launch_promise *promise)
{
    promise->max_num_splits = self->max_num_splits;
    promise->max_work_items = shape->num_reqs * self->max_num_splits;
    if (self->max_num_splits > 1)
        promise->scratch_bytes = (uint64_t)shape->num_tokens * self->max_num_splits * self->head_bytes;
}

static const char *tt_build(const tt_builder *self, const tt_common_attention_metadata *common, bool fast_build,
                            tt_metadata *metadata)
{
    uint32_t rows = common->num_reqs, largest = 1;
    (void)fast_build;
    if (common->seq_lens_cpu_upper_bound.len != rows)
        return "a length for each row is needed";
    int32_t *splits = tt_allocate(rows * sizeof *splits, _Alignof(int32_t));
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t keys = (uint32_t)common->seq_lens_cpu_upper_bound.at[row];
        uint32_t count = keys / self->keys_per_split + (keys % self->keys_per_split != 0);
        count = count < 1 ? 1 : count > self->max_num_splits ? self->max_num_splits : count;
        largest = count > largest ? count : largest;
        splits[row] = (int32_t)count;
    }
    metadata->schedule.max_num_splits = largest;
    metadata->schedule.num_splits = (tt_list_s32){splits, rows};
    return NULL;
}
