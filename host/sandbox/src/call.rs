//! One call into a builder, as the group makes it and as a fault bundle keeps it.
//!
//! Must never know: what happens if the call fails.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use timetable_attention::{BuildFault, MetadataBuilder};
use timetable_types::{CaptureShape, CommonAttentionMetadata, Metadata};

/// What a builder was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    clippy::large_enum_variant,
    reason = "one value a call, never in a collection"
)]
pub enum BuilderCall<'a> {
    /// To be constructed, and to say what it is.
    Create,
    /// What a graph of that shape may rely on.
    LaunchPromise(CaptureShape),
    /// A step's metadata.
    Build {
        /// A cheap build rather than the best schedule.
        fast_build: bool,
    },
    /// Metadata for capturing a CUDA graph.
    BuildForCudagraphCapture,
    /// Metadata for a step of a drafter.
    BuildForDrafting {
        /// Which one.
        draft_index: u32,
    },
    /// An equal group's metadata for this group's block table.
    UpdateBlockTable {
        /// The equal group's metadata.
        metadata: Cow<'a, Metadata>,
    },
}

impl BuilderCall<'_> {
    /// Is it the one call of a step that is made in every step?
    pub(crate) fn is_step(&self) -> bool {
        matches!(self, BuilderCall::Build { .. })
    }

    /// Makes the call. None for those that give no metadata.
    pub(crate) fn on(
        &self,
        builder: &mut dyn MetadataBuilder,
        common: &CommonAttentionMetadata,
    ) -> Option<Result<Metadata, BuildFault>> {
        Some(match self {
            BuilderCall::Create | BuilderCall::LaunchPromise(_) => return None,
            BuilderCall::Build { fast_build } => builder.build(common, *fast_build),
            BuilderCall::BuildForCudagraphCapture => builder.build_for_cudagraph_capture(common),
            BuilderCall::BuildForDrafting { draft_index } => {
                builder.build_for_drafting(common, *draft_index)
            }
            BuilderCall::UpdateBlockTable { metadata }
                if builder.info().supports_update_block_table =>
            {
                builder.update_block_table(metadata, common)
            }
            // A builder that cannot update builds anew.
            BuilderCall::UpdateBlockTable { .. } => builder.build(common, false),
        })
    }

    /// The same, owning what it refers to.
    pub(crate) fn to_owned(&self) -> BuilderCall<'static> {
        match self {
            BuilderCall::Create => BuilderCall::Create,
            BuilderCall::LaunchPromise(shape) => BuilderCall::LaunchPromise(shape.clone()),
            BuilderCall::Build { fast_build } => BuilderCall::Build {
                fast_build: *fast_build,
            },
            BuilderCall::BuildForCudagraphCapture => BuilderCall::BuildForCudagraphCapture,
            BuilderCall::BuildForDrafting { draft_index } => BuilderCall::BuildForDrafting {
                draft_index: *draft_index,
            },
            BuilderCall::UpdateBlockTable { metadata } => BuilderCall::UpdateBlockTable {
                metadata: Cow::Owned(Metadata::clone(metadata)),
            },
        }
    }
}

/// Are these the same bit for bit? (Floats are compared by their digits: zeros of other signs differ, not-a-numbers are alike.)
pub(crate) fn identical(a: &Metadata, b: &Metadata) -> bool {
    // The records' own equality takes 0.0 and −0.0 for equal and a not-a-number for unequal to itself; integers, which is
    // nearly all that metadata consists of, it settles.
    if a.family() != b.family() {
        return false;
    }
    format!("{a:?}") == format!("{b:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(scale: f64) -> Metadata {
        let json = serde_json::json!({
            "family": "flashinfer", "kv_cache_layout": "LBNHC", "num_actual_tokens": 1, "slot_mapping": { "input": "slot_mapping" },
            "q_data_type_prefill": "float32", "q_data_type_decode": "float32", "num_decodes": 1, "num_decode_tokens": 1,
            "num_prefills": 0, "num_prefill_tokens": 0, "causal": true, "prefill": null,
            "decode": { "wrapper": {
                "function": "batch_decode_plan", "qo_indptr": { "rebased_query_start_loc": { "start": 0, "end": 1 } },
                "paged_kv_indptr": [0, 1], "paged_kv_indices": { "gather_pages": { "start": 0, "end": 1 } },
                "paged_kv_last_page_len": [1], "seq_lens": [1], "num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 16,
                "causal": true, "sm_scale": 1.0, "window_left": -1, "logits_soft_cap": null, "q_data_type": "float32",
                "kv_data_type": "float32", "o_data_type": "float32", "fixed_split_size": -1, "disable_split_kv": false,
                "q_len_per_req": 1, "dcp_world_size": 1, "cudagraph_batch_size": 0,
                "work": { "kv_chunk_size": 16, "cta_tile_q": 16, "request_indices": [0], "qo_tile_indices": [0], "kv_tile_indices": [0],
                    "worker_indptr": [0, 1], "merge_indptr": [0, 1], "split_kv": false },
            } },
        });
        let mut metadata: Metadata = serde_json::from_value(json).expect("a record");
        if let Metadata::Flashinfer(record) = &mut metadata
            && let Some(timetable_types::flashinfer::Decode::Wrapper(plan)) = &mut record.decode
        {
            plan.sm_scale = scale;
        }
        metadata
    }

    #[test]
    fn bits_decide() {
        assert!(identical(&plan(0.125), &plan(0.125)));
        assert!(!identical(&plan(0.125), &plan(0.125 + f64::EPSILON / 8.0)));
        assert!(!identical(&plan(0.0), &plan(-0.0)));
        assert!(identical(&plan(f64::NAN), &plan(f64::NAN)));
    }
}
