//! The rules of a batch before any builder sees it: order of rows, block tables and slots, padding for CUDA graphs, virtual
//! batches of local attention, micro-batches, what groups may share.
//!
//! Arithmetic on single vectors that builders need too lives in `timetable_types::batch`. This module must never know a
//! backend's metadata, a scheduler or a device.

mod dcp;
mod extras;
mod fast_prefill;
mod invariance;
mod local;
mod mamba;
mod mm_prefix;
mod padding;
mod reorder;
mod reuse;
mod slots;
mod step;
mod tables;
mod ubatch;

pub use dcp::{ContextQuerySplit, should_skip_dcp_context_attention, split_dcp_context_queries};
pub use extras::{ExtrasError, check_extras, padded_is_prefilling, speculation_extras};
pub use fast_prefill::{
    SharingLayer, arm_fast_prefill, fast_prefill_layers, make_kv_sharing_fast_prefill_step,
};
pub use invariance::{InvarianceFinding, check_batch_invariance};
pub use local::{
    LocalAttentionError, LocalBlockColumns, VirtualRows, make_local_attention_virtual_batches,
    max_virtual_rows,
};
pub use mamba::{NULL_BLOCK_ID, StateColumnError, mamba_get_block_table_tensor};
pub use mm_prefix::{fill_mm_prefix_query_ranges, retain_ranges_within_window};
pub use padding::{
    CaptureBatchError, PaddingError, PaddingValues, capture_batch, pad_query_start_loc, pad_step,
};
pub use reorder::{
    Reorder, ReorderRequest, order_decodes_first, reorder_batch_to_split_decodes_and_prefills,
};
pub use reuse::{GroupAction, GroupReuse, RunnerGeneration, plan_group_reuse};
pub use slots::{ContextParallel, SlotRule, slot_mapping_into};
pub use step::{GroupStep, StepTensors};
pub use tables::{BlockTables, GatheredTable, GroupTableConfig, TableError, window_null_blocks};
pub use ubatch::{
    UbatchConfig, UbatchError, UbatchSlice, check_ubatch_thresholds, is_last_ubatch_empty,
    maybe_create_ubatch_slices, pad_ubatch_slices, slice_input_batch, split_attn_metadata,
};
