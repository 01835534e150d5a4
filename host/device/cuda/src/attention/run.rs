//! Launches: the plan kernels once a step, scatter and attention once a layer. The same for an eager step and for a graph that
//! is captured. It must never know metadata: what a step chose lies in device memory.

use timetable_types::Family;

use super::config::GroupConfig;
use super::launch::{Launch, ListLaunch};
use super::workspace::{ListPtrs, Workspace};
use crate::cache::KvCache;
use crate::driver::{DevicePtr, Stream};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::ops::Rows;
use crate::params::{
    AttentionParams, PlainAttentionParams, PlanParams, ScatterParams, WorkListParams,
};
use crate::upload::StepPtrs;

/// One layer's queries and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionIo {
    /// `[T, Hq, D]` by token stride; 16-byte aligned, as is its stride.
    pub query: Rows,
    /// `[T, Hq, D]` by token stride, written: the step's padded tokens, zeros where no request covers one. Aligned as the query.
    pub output: Rows,
    /// f32 `[T, Hq]`, written: the natural log-sum-exp of the scores, −∞ where there was no key. Null: not wanted.
    pub lse: DevicePtr,
}

/// A group's launches of one step or graph. Everything they read and write is the step's buffers, the workspace, and what the
/// layer brings.
#[derive(Clone, Copy, Debug)]
pub struct GroupLaunch<'s> {
    config: &'s GroupConfig,
    workspace: &'s Workspace,
    ptrs: &'s StepPtrs,
    launch: &'s Launch,
}

impl<'s> GroupLaunch<'s> {
    /// Of a group, without its state: for graphs that another thread captures with a workspace of their own.
    pub fn new(
        config: &'s GroupConfig,
        workspace: &'s Workspace,
        ptrs: &'s StepPtrs,
        launch: &'s Launch,
    ) -> Self {
        Self {
            config,
            workspace,
            ptrs,
            launch,
        }
    }

    /// What is launched.
    pub fn launch(&self) -> &Launch {
        self.launch
    }

    /// From the unpacked schedule or work list to work items: one small launch a list, once a step, before the first layer.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// Workspace and step's buffers are live until `stream` has passed the launches (in a capture: at every launch of the graph);
    /// when they run, the step that was prepared for this launch has been unpacked.
    pub unsafe fn plan(&self, stream: &Stream, kernels: &Kernels) -> Result<()> {
        for (index, list) in self.lists() {
            self.check_tile(kernels, list)?;
            match self.config.family {
                Family::Flashinfer => {
                    // SAFETY: the caller's.
                    unsafe {
                        kernels.plan_flashinfer(stream, &self.work_list_params(index, list))
                    }?;
                }
                _ => {
                    // SAFETY: the caller's.
                    unsafe { kernels.plan_flash_attn(stream, &self.plan_params(index, list)) }?;
                }
            }
        }
        Ok(())
    }

    /// One layer's keys and values (`[T, Hkv, D]` by token strides) into its cache, at the step's slots: padded tokens have
    /// none. Slots are the host's own, never a builder's.
    ///
    /// # Errors
    /// A cache that is not this group's, or what the driver says.
    ///
    /// # Safety
    /// As [`GroupLaunch::plan`]; keys and values have the step's padded tokens, and the slots are the cache's.
    pub unsafe fn update_cache(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        cache: &KvCache,
        key: Rows,
        value: Rows,
    ) -> Result<()> {
        self.config.check_cache(cache)?;
        let params = ScatterParams {
            key: key.ptr,
            value: value.ptr,
            kv_cache: cache.ptr,
            slot_mapping: self.ptrs.slot_mapping,
            k_scale: cache.k_scale,
            v_scale: cache.v_scale,
            key_stride: key.stride,
            value_stride: value.stride,
            kv_block_stride: cache.strides.block,
            kv_head_stride: cache.strides.head,
            kv_token_stride: cache.strides.token,
            num_slots: i64::from(self.launch.num_tokens),
            num_kv_heads: self.config.num_kv_heads as i32,
            head_size: self.config.head_size as i32,
            block_size: self.config.block_size as i32,
            kv_scale_stride: cache.scale_stride,
        };
        // SAFETY: the caller's.
        unsafe {
            kernels.reshape_and_cache(
                stream,
                self.config.element,
                self.config.cache_element(),
                &params,
            )
        }
    }

    /// One layer's attention over its cache, which the step's keys have been written to.
    ///
    /// # Errors
    /// A cache that is not this group's, or what the driver says.
    ///
    /// # Safety
    /// As [`GroupLaunch::plan`], whose launches come before on the same stream; queries and outputs have the step's padded tokens.
    pub unsafe fn attend(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        cache: &KvCache,
        io: &AttentionIo,
    ) -> Result<()> {
        self.config.check_cache(cache)?;
        if self.config.is_plain() {
            // SAFETY: the caller's.
            return unsafe { kernels.plain_attention(stream, &self.plain_params(cache, io)) };
        }
        for (index, list) in self.lists() {
            let kernel = kernels.attention(
                list.kind,
                self.config.element,
                self.config.cache_element(),
                self.config.head_size as usize,
            )?;
            // SAFETY: the caller's.
            unsafe {
                kernels.paged_attention(
                    stream,
                    kernel,
                    &self.attention_params(index, list, cache, io),
                    list.max_blocks,
                )
            }?;
        }
        Ok(())
    }

    pub(super) fn lists(&self) -> impl Iterator<Item = (usize, &'s ListLaunch)> {
        let lists = self.launch.lists.iter().enumerate();
        lists.filter_map(|(index, list)| list.as_ref().map(|list| (index, list)))
    }

    /// Does the kernel take the tiles that were counted with?
    fn check_tile(&self, kernels: &Kernels, list: &ListLaunch) -> Result<()> {
        let kernel = kernels.attention(
            list.kind,
            self.config.element,
            self.config.cache_element(),
            self.config.head_size as usize,
        )?;
        if kernel.tile_rows() < list.tile_rows {
            return Err(CudaError::Invalid {
                what: "a list's tile in packed rows",
                value: format!(
                    "{}, {} takes {}",
                    list.tile_rows,
                    kernel.name(),
                    kernel.tile_rows()
                ),
                remedy: "build the kernels again (cargo xtask kernels)",
            });
        }
        Ok(())
    }

    pub(super) fn plan_params(&self, index: usize, list: &ListLaunch) -> PlanParams {
        let ptrs = self.workspace.ptrs();
        PlanParams {
            header: ptrs.lists[index].header,
            items: ptrs.lists[index].items,
            query_start_loc: ptrs.query_start_loc,
            seq_lens: ptrs.seq_lens,
            num_splits: ptrs.num_splits,
            row_order: ptrs.row_order,
            causal: ptrs.causal,
            num_reqs: self.launch.num_reqs as i32,
            num_tokens: self.launch.num_tokens as i32,
            block_size: self.config.block_size as i32,
            heads_per_kv_head: self.config.heads_per_kv_head() as i32,
            tile_rows: list.tile_rows as i32,
            min_packed_rows: list.min_packed_rows as i32,
            max_packed_rows: list.max_packed_rows as i32,
            max_num_splits: self.launch.max_num_splits as i32,
            max_work_items: list.max_work_items as i32,
            causal_all: 0,
            // Once is enough: the first list, or the only one.
            with_tail: i32::from(index == 0 || self.launch.lists[0].is_none()),
            reserved: 0,
        }
    }

    pub(super) fn work_list_params(&self, index: usize, list: &ListLaunch) -> WorkListParams {
        let ListPtrs {
            header,
            items,
            sizes,
            qo_indptr,
            paged_kv_indptr,
            seq_lens,
            request_indices,
            qo_tile_indices,
            kv_tile_indices,
            merge_indptr,
        } = self.workspace.ptrs().lists[index];
        WorkListParams {
            header,
            items,
            sizes,
            qo_indptr,
            paged_kv_indptr,
            seq_lens,
            request_indices,
            qo_tile_indices,
            kv_tile_indices,
            merge_indptr,
            heads_per_kv_head: self.config.heads_per_kv_head() as i32,
            tile_rows: list.tile_rows as i32,
            max_work_items: list.max_work_items as i32,
            max_reqs: list.max_reqs as i32,
            max_tiles: list.max_tiles as i32,
            max_tokens: self.launch.num_tokens as i32,
        }
    }

    pub(super) fn attention_params(
        &self,
        index: usize,
        list: &ListLaunch,
        cache: &KvCache,
        io: &AttentionIo,
    ) -> AttentionParams {
        let ptrs = self.workspace.ptrs();
        // FLASHINFER's items name places in the gathered pages, FLASH_ATTN's rows of the block table.
        let (table, table_stride) = match self.config.family {
            Family::Flashinfer => (ptrs.pages, 1),
            _ => (self.ptrs.block_table, self.ptrs.limits.table_width as i64),
        };
        AttentionParams {
            query: io.query.ptr,
            kv_cache: cache.ptr,
            output: io.output.ptr,
            lse: io.lse,
            partial_output: ptrs.partial_output,
            partial_lse: ptrs.partial_lse,
            merge_counters: ptrs.merge_counters,
            block_table: table,
            header: ptrs.lists[index].header,
            items: ptrs.lists[index].items,
            k_scale: cache.k_scale,
            v_scale: cache.v_scale,
            query_stride: io.query.stride,
            output_stride: io.output.stride,
            kv_block_stride: cache.strides.block,
            kv_head_stride: cache.strides.head,
            kv_token_stride: cache.strides.token,
            block_table_stride: table_stride,
            num_heads: self.config.num_heads as i32,
            num_kv_heads: self.config.num_kv_heads as i32,
            block_size: self.config.block_size as i32,
            sliding_window: self.window(),
            partial_rows: list.partial_rows as i32,
            max_work_items: list.max_work_items as i32,
            kv_scale_stride: cache.scale_stride,
            scale: self.config.scale,
            soft_cap: self.config.logits_soft_cap.unwrap_or(0.0),
            reserved: 0,
        }
    }

    pub(super) fn plain_params(&self, cache: &KvCache, io: &AttentionIo) -> PlainAttentionParams {
        let ptrs = self.workspace.ptrs();
        let table = match self.config.family {
            Family::Flashinfer => ptrs.plain_table,
            _ => self.ptrs.block_table,
        };
        PlainAttentionParams {
            query: io.query.ptr,
            kv_cache: cache.ptr,
            output: io.output.ptr,
            lse: io.lse,
            block_table: table,
            query_start_loc: ptrs.query_start_loc,
            seq_lens: ptrs.seq_lens,
            causal: ptrs.causal,
            query_stride: io.query.stride,
            output_stride: io.output.stride,
            kv_block_stride: cache.strides.block,
            kv_head_stride: cache.strides.head,
            kv_token_stride: cache.strides.token,
            block_table_stride: self.ptrs.limits.table_width as i64,
            num_reqs: self.launch.num_reqs as i32,
            num_tokens: self.launch.num_tokens as i32,
            num_heads: self.config.num_heads as i32,
            num_kv_heads: self.config.num_kv_heads as i32,
            head_size: self.config.head_size as i32,
            block_size: self.config.block_size as i32,
            sliding_window: self.window(),
            causal_all: 0,
            scale: self.config.scale,
            soft_cap: self.config.logits_soft_cap.unwrap_or(0.0),
        }
    }

    fn window(&self) -> i32 {
        // `check` refused windows of 2³¹ and more.
        self.config.sliding_window.map_or(0, |window| window as i32)
    }
}
