//! What a step's metadata means, apart from how its work is divided: which keys each row's queries attend to, and by which
//! numbers.
//!
//! Two builders may divide the same work in other ways: splits, the order of tiles, chunks and workers, decodes and prefills,
//! bounds of a launch. A candidate that is tried on live steps, or on recorded ones, may differ in these and in nothing else.
//! Records are destructured exhaustively, so that a new field does not compile before it is said to have a meaning or none.
//!
//! Both sides are taken as accepted by the verifier for the step, which fixes all that this module does not look at; other
//! metadata gives some answer, and never a panic. It must never know who built them, nor a device.

use std::fmt;

use timetable_types::{
    Causal, Dtype, Family, KvCacheLayout, Metadata, Tensor,
    flash_attn::{self, Schedule},
    flash_mla,
    flashinfer::{self, Decode, Plan, Prefill, TrtllmDecode, TrtllmPrefill, WorkList},
    triton_attn,
};

use crate::VerifyContext;

/// Characters of a value in a difference's text.
const MAX_VALUE_CHARS: usize = 80;

/// The first thing in which two builders' metadata for one step differ in meaning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// Metadata of two families.
    #[error("served was metadata of {}, and this is of {}", .served.interface(), .other.interface())]
    Family {
        /// Of what was served.
        served: Family,
        /// Of the other.
        other: Family,
    },
    /// A value that every row, or one row, is computed by.
    #[error("`{field}`{} is {other} where {served} was served", at(.row))]
    Value {
        /// The field's name.
        field: &'static str,
        /// The row, where rows may differ.
        row: Option<u32>,
        /// What was served.
        served: String,
        /// What the other has.
        other: String,
    },
    /// Rows that attend to other keys, as only the grant `subset` allows.
    #[error(
        "{rows} of the step's rows attend to other keys; the first is row {row}: {left_out} blocks that were served are left \
         out and {added} others are added, the first of them in column {column} of its block table"
    )]
    Keys {
        /// Rows that differ.
        rows: u32,
        /// The first of them.
        row: u32,
        /// Blocks of its keys that were served and are not in the other.
        left_out: u32,
        /// Blocks that are in the other and were not served.
        added: u32,
        /// The first such block, as a column of the row's block table.
        column: u32,
    },
}

fn at(row: &Option<u32>) -> String {
    row.map_or_else(String::new, |row| format!(" of row {row}"))
}

/// Does `other` mean the same as `served`, for the step of `ctx`? Time and memory are linear in the step's rows and the chosen
/// pages; nothing is allocated where neither side chooses pages.
///
/// # Errors
/// The first difference: values before keys, rows in order.
pub fn compare(
    served: &Metadata,
    other: &Metadata,
    ctx: &VerifyContext<'_>,
) -> Result<(), Difference> {
    match (served, other) {
        (Metadata::FlashAttn(served), Metadata::FlashAttn(other)) => {
            values(None, &flash_attn(served), &flash_attn(other))
        }
        (Metadata::Flashinfer(served), Metadata::Flashinfer(other)) => {
            flashinfer(served, other, ctx)
        }
        (Metadata::TritonAttn(served), Metadata::TritonAttn(other)) => {
            values(None, &triton_attn(served), &triton_attn(other))
        }
        (Metadata::FlashMla(served), Metadata::FlashMla(other)) => {
            values(None, &flash_mla(served), &flash_mla(other))
        }
        // Its record leaves a builder nothing to choose: only equal ones are known to mean the same.
        (Metadata::Mamba(_), Metadata::Mamba(_)) => match served == other {
            true => Ok(()),
            false => Err(difference("metadata", None, served, other)),
        },
        _ => Err(Difference::Family {
            served: served.family(),
            other: other.family(),
        }),
    }
}

/// A field's value, as far as it has a meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value<'a> {
    Flag(bool),
    Number(i64),
    Real(Option<f64>),
    Dtype(Dtype),
    Layout(KvCacheLayout),
    Causal(&'a Causal),
    Tensor(Option<&'a Tensor>),
    /// Whatever the configuration says: no difference from anything that the verifier accepted.
    Configured,
}

type Named<'a> = (&'static str, Value<'a>);

fn values(row: Option<u32>, served: &[Named<'_>], other: &[Named<'_>]) -> Result<(), Difference> {
    for ((field, served), (_, other)) in served.iter().zip(other) {
        let either = [served, other];
        if served != other && !either.contains(&&Value::Configured) {
            return Err(difference(field, row, served, other));
        }
    }
    Ok(())
}

#[cold]
fn difference(
    field: &'static str,
    row: Option<u32>,
    served: &dyn fmt::Debug,
    other: &dyn fmt::Debug,
) -> Difference {
    let short =
        |value: &dyn fmt::Debug| format!("{value:?}").chars().take(MAX_VALUE_CHARS).collect();
    Difference::Value {
        field,
        row,
        served: short(served),
        other: short(other),
    }
}

fn flash_attn(metadata: &flash_attn::Metadata) -> [Named<'_>; 10] {
    let flash_attn::Metadata {
        num_actual_tokens,
        query_start_loc,
        seq_lens,
        block_table,
        slot_mapping,
        causal,
        dcp_context_kv_lens,
        mm_prefix_query_range,
        rswa_prefix_lens,
        rswa_window,
        schedule,
        // Bounds of a launch: at least the true maxima.
        max_query_len: _,
        max_seq_len: _,
        max_dcp_context_kv_len: _,
        // Which of two passes a row's context takes.
        num_decode_reqs: _,
        num_prefill_reqs: _,
        num_decode_tokens: _,
        num_prefill_tokens: _,
        // What the field's own scheduler is asked, which nothing here executes.
        max_num_splits: _,
        scheduler_metadata: _,
    } = metadata;
    // How the work is divided.
    let Schedule {
        max_num_splits: _,
        num_splits: _,
        tile_order: _,
    } = schedule;
    // No span at all is as good as none.
    let spans = mm_prefix_query_range.as_ref().filter(|spans| match spans {
        Tensor::Matrix(matrix) => matrix.values.iter().any(|value| *value != -1),
        _ => true,
    });
    // Without prefix lengths the window is not used.
    let window = if rswa_prefix_lens.is_some() {
        *rswa_window
    } else {
        0
    };
    [
        (
            "num_actual_tokens",
            Value::Number((*num_actual_tokens).into()),
        ),
        ("query_start_loc", Value::Tensor(Some(query_start_loc))),
        ("seq_lens", Value::Tensor(Some(seq_lens))),
        ("block_table", Value::Tensor(Some(block_table))),
        ("slot_mapping", Value::Tensor(Some(slot_mapping))),
        ("causal", Value::Causal(causal)),
        (
            "dcp_context_kv_lens",
            Value::Tensor(dcp_context_kv_lens.as_ref()),
        ),
        ("mm_prefix_query_range", Value::Tensor(spans)),
        ("rswa_prefix_lens", Value::Tensor(rswa_prefix_lens.as_ref())),
        ("rswa_window", Value::Number(window.into())),
    ]
}

fn triton_attn(metadata: &triton_attn::Metadata) -> [Named<'_>; 9] {
    let triton_attn::Metadata {
        num_actual_tokens,
        query_start_loc,
        seq_lens,
        block_table,
        slot_mapping,
        causal,
        mm_prefix_range,
        rswa_prefix_lens,
        rswa_window,
        // Bounds of a launch: at least the true maxima.
        max_query_len: _,
        max_seq_len: _,
        // How the work is divided.
        seq_threshold_3d: _,
        num_par_softmax_segments: _,
        softmax_segm_output: _,
        softmax_segm_max: _,
        softmax_segm_expsum: _,
    } = metadata;
    // Without prefix lengths the window is not used.
    let window = if rswa_prefix_lens.is_some() {
        *rswa_window
    } else {
        0
    };
    [
        (
            "num_actual_tokens",
            Value::Number((*num_actual_tokens).into()),
        ),
        ("query_start_loc", Value::Tensor(Some(query_start_loc))),
        ("seq_lens", Value::Tensor(Some(seq_lens))),
        ("block_table", Value::Tensor(Some(block_table))),
        ("slot_mapping", Value::Tensor(Some(slot_mapping))),
        ("causal", Value::Causal(causal)),
        ("mm_prefix_range", Value::Tensor(mm_prefix_range.as_ref())),
        ("rswa_prefix_lens", Value::Tensor(rswa_prefix_lens.as_ref())),
        ("rswa_window", Value::Number(window.into())),
    ]
}

fn flash_mla(metadata: &flash_mla::Metadata) -> [Named<'_>; 6] {
    let flash_mla::Metadata {
        num_actual_tokens,
        query_start_loc,
        slot_mapping,
        causal,
        prefill,
        // The step's and the configuration's.
        num_reqs: _,
        head_dim: _,
        // Bounds of a launch: at least the true maxima.
        max_query_len: _,
        max_seq_len: _,
        // Who runs a row, not what it sees; the verifier has seen that each sees all of its keys.
        num_decodes: _,
        num_decode_tokens: _,
        num_prefills: _,
        decode: _,
    } = metadata;
    let dtype = |of: fn(&flash_mla::MlaPrefill) -> Dtype| match prefill {
        Some(prefill) => Value::Dtype(of(prefill)),
        None => Value::Configured,
    };
    [
        (
            "num_actual_tokens",
            Value::Number((*num_actual_tokens).into()),
        ),
        ("query_start_loc", Value::Tensor(Some(query_start_loc))),
        ("slot_mapping", Value::Tensor(Some(slot_mapping))),
        ("causal", Value::Flag(*causal)),
        ("q_data_type", dtype(|prefill| prefill.q_data_type)),
        ("output_dtype", dtype(|prefill| prefill.output_dtype)),
    ]
}

fn flashinfer(
    served: &flashinfer::Metadata,
    other: &flashinfer::Metadata,
    ctx: &VerifyContext<'_>,
) -> Result<(), Difference> {
    let (served, other) = (Halves::of(served, ctx), Halves::of(other, ctx));
    values(None, &served.whole, &other.whole)?;
    let mut differing: Option<Difference> = None;
    for row in 0..ctx.common.num_reqs {
        let (Some(served), Some(other)) = (served.at(row), other.at(row)) else {
            continue;
        };
        values(Some(row), &served.numbers, &other.numbers)?;
        // Pages in order, whatever their number: the common case, without a look at them.
        if served.chosen.is_none() && other.chosen.is_none() {
            continue;
        }
        let (mine, theirs) = (served.columns(row, ctx), other.columns(row, ctx));
        let gone = mine
            .iter()
            .filter(|column| theirs.binary_search(column).is_err());
        let new = theirs
            .iter()
            .filter(|column| mine.binary_search(column).is_err());
        let Some(column) = gone.clone().chain(new.clone()).min() else {
            continue;
        };
        match &mut differing {
            Some(Difference::Keys { rows, .. }) => *rows += 1,
            _ => {
                differing = Some(Difference::Keys {
                    rows: 1,
                    row,
                    left_out: gone.count() as u32,
                    added: new.count() as u32,
                    column: *column,
                });
            }
        }
    }
    differing.map_or(Ok(()), Err)
}

/// FLASHINFER's metadata: what all rows share, the rows that decode, and those that prefill.
struct Halves<'a> {
    whole: [Named<'a>; 4],
    num_decodes: u32,
    decode: Option<Half<'a>>,
    prefill: Option<Half<'a>>,
}

/// One half's rows [start, …).
struct Half<'a> {
    start: u32,
    is_decode: bool,
    numbers: [Named<'a>; 8],
    /// Row boundaries and columns, where pages are chosen; else all of a row's.
    chosen: Option<(&'a [i32], &'a [u32])>,
    /// Keys before a query that it sees; negative for all.
    window_left: i32,
}

impl<'a> Halves<'a> {
    fn of(metadata: &'a flashinfer::Metadata, ctx: &VerifyContext<'_>) -> Self {
        let flashinfer::Metadata {
            kv_cache_layout,
            num_actual_tokens,
            slot_mapping,
            q_data_type_prefill,
            q_data_type_decode,
            num_decodes,
            causal,
            prefill,
            decode,
            // What follows from `num_decodes`, which says who runs a row and not what it sees.
            num_decode_tokens: _,
            num_prefills: _,
            num_prefill_tokens: _,
        } = metadata;
        Halves {
            whole: [
                ("kv_cache_layout", Value::Layout(*kv_cache_layout)),
                (
                    "num_actual_tokens",
                    Value::Number((*num_actual_tokens).into()),
                ),
                ("slot_mapping", Value::Tensor(Some(slot_mapping))),
                ("causal", Value::Flag(*causal)),
            ],
            num_decodes: *num_decodes,
            decode: decode.as_ref().map(|decode| match decode {
                Decode::Wrapper(plan) => Half::plan(plan, 0, true, *q_data_type_decode),
                Decode::Trtllm(record) => Half::trtllm_decode(record, *q_data_type_decode, ctx),
            }),
            prefill: prefill.as_ref().map(|prefill| match prefill {
                Prefill::Wrapper(plan) => {
                    Half::plan(plan, *num_decodes, false, *q_data_type_prefill)
                }
                Prefill::Trtllm(record) => {
                    Half::trtllm_prefill(record, *num_decodes, *q_data_type_prefill, ctx)
                }
            }),
        }
    }

    fn at(&self, row: u32) -> Option<&Half<'a>> {
        if row < self.num_decodes {
            self.decode.as_ref()
        } else {
            self.prefill.as_ref()
        }
    }
}

impl<'a> Half<'a> {
    fn plan(plan: &'a Plan, start: u32, is_decode: bool, q_data_type: Dtype) -> Self {
        let Plan {
            paged_kv_indptr,
            paged_kv_indices,
            causal,
            sm_scale,
            window_left,
            logits_soft_cap,
            q_data_type: planned_q_data_type,
            kv_data_type,
            o_data_type,
            work,
            // Which function plans; the queries of its rows, by reference.
            function: _,
            qo_indptr: _,
            // What follows from the pages and the step's lengths.
            paged_kv_last_page_len: _,
            seq_lens: _,
            // The configuration's.
            num_qo_heads: _,
            num_kv_heads: _,
            head_dim: _,
            page_size: _,
            dcp_world_size: _,
            // How the work is divided, and bounds of a launch.
            fixed_split_size: _,
            disable_split_kv: _,
            q_len_per_req: _,
            cudagraph_batch_size: _,
        } = plan;
        // The verifier has seen that it covers the keys.
        let WorkList {
            kv_chunk_size: _,
            cta_tile_q: _,
            request_indices: _,
            qo_tile_indices: _,
            kv_tile_indices: _,
            worker_indptr: _,
            merge_indptr: _,
            split_kv: _,
        } = work;
        let chosen = match paged_kv_indices {
            Tensor::SelectPages(selection) => {
                Some((paged_kv_indptr.as_slice(), selection.columns.as_slice()))
            }
            _ => None,
        };
        Half {
            start,
            is_decode,
            numbers: [
                ("q_data_type", Value::Dtype(q_data_type)),
                ("plan's q_data_type", Value::Dtype(*planned_q_data_type)),
                ("kv_data_type", Value::Dtype(*kv_data_type)),
                ("o_data_type", Value::Dtype(*o_data_type)),
                ("sm_scale", Value::Real(Some(*sm_scale))),
                ("logits_soft_cap", Value::Real(*logits_soft_cap)),
                ("window_left", Value::Number((*window_left).into())),
                ("plan's causal", Value::Flag(*causal)),
            ],
            chosen,
            window_left: *window_left,
        }
    }

    fn trtllm_decode(record: &TrtllmDecode, q_data_type: Dtype, ctx: &VerifyContext<'_>) -> Self {
        // Lengths and tables are references, the mask is the causal one: who runs the rows is all that is chosen.
        let TrtllmDecode {
            kernel: _,
            block_tables: _,
            seq_lens: _,
            max_seq_len: _,
            q_len_per_req: _,
            q_cu_seq_lens: _,
            mask: _,
            dcp_query_start_loc: _,
        } = record;
        Half::unplanned(0, true, q_data_type, ctx)
    }

    fn trtllm_prefill(
        record: &TrtllmPrefill,
        start: u32,
        q_data_type: Dtype,
        ctx: &VerifyContext<'_>,
    ) -> Self {
        let TrtllmPrefill {
            block_tables: _,
            seq_lens: _,
            cum_seq_lens_q: _,
            cum_seq_lens_kv: _,
            max_q_len: _,
            max_seq_len: _,
        } = record;
        Half::unplanned(start, false, q_data_type, ctx)
    }

    /// Rows that a kernel runs by the configuration alone.
    fn unplanned(start: u32, is_decode: bool, q_data_type: Dtype, ctx: &VerifyContext<'_>) -> Self {
        let attention = &ctx.config.attention;
        Half {
            start,
            is_decode,
            numbers: [
                ("q_data_type", Value::Dtype(q_data_type)),
                ("plan's q_data_type", Value::Configured),
                ("kv_data_type", Value::Configured),
                ("o_data_type", Value::Configured),
                ("sm_scale", Value::Real(Some(attention.scale))),
                ("logits_soft_cap", Value::Real(attention.logits_soft_cap)),
                ("window_left", Value::Configured),
                ("plan's causal", Value::Configured),
            ],
            chosen: None,
            window_left: -1,
        }
    }

    /// The columns of `row`'s block table that are attended to, rising.
    fn columns(&self, row: u32, ctx: &VerifyContext<'_>) -> Vec<u32> {
        let Some((indptr, columns)) = self.chosen else {
            return self.pages(row, ctx).collect();
        };
        let bound = |index: u32| {
            let sum = indptr.get(index as usize)?;
            usize::try_from(*sum).ok()
        };
        let own = (|| columns.get(bound(row - self.start)?..bound(row - self.start + 1)?))();
        own.unwrap_or_default().to_vec()
    }

    /// Pages of all the keys of `row` that this rank holds and this half reads, without those that its window has left behind:
    /// under decode context parallelism there is none, and a prefill plans over its context only.
    fn pages(&self, row: u32, ctx: &VerifyContext<'_>) -> std::ops::Range<u32> {
        let row = row as usize;
        let at = |values: &[i32], index: usize| values.get(index).copied().unwrap_or(0);
        let starts = ctx.inputs.query_start_loc;
        let len = at(ctx.lens(), row);
        let (dcp, query) = (ctx.dcp(), at(starts, row + 1).wrapping_sub(at(starts, row)));
        let (context, page) = (
            len.wrapping_sub(query),
            ctx.config.kv_cache_spec.block_size.max(1),
        );
        let keys = match dcp.world > 1 && !self.is_decode {
            true => dcp.local_len(context),
            false => dcp.local_len(len),
        };
        let first = if self.window_left < 0 || dcp.world > 1 {
            0
        } else {
            // Rejected drafts make a length shorter, and move the window down.
            let reach = i64::from(self.window_left)
                + i64::from(ctx.config.scheduler.num_speculative_tokens);
            (i64::from(context) - reach).max(0) as u32 / page
        };
        first..(keys.max(0) as u32).div_ceil(page)
    }
}
