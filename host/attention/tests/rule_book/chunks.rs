//! get_dcp_local_seq_lens, plan_mla_context_chunks, and the chunks of the Mamba family.

use serde_json::{Value, json};
use timetable_attention::types::batch::{self, ContextBudget, ContextRows, PAD};

use crate::harness::{FieldError, Tally, int, ints, run, uint};

pub fn get_dcp_local_seq_lens() -> Tally {
    run("get_dcp_local_seq_lens", |input| {
        let seq_lens = ints(&input["seq_lens"]);
        let (ranks, interleave) = (
            uint(&input["dcp_size"]),
            uint(&input["cp_kv_cache_interleave_size"]),
        );
        if input["dcp_rank"].is_null() {
            let all = batch::dcp_local_seq_lens_all_ranks(&seq_lens, ranks, interleave);
            return Ok(all.chunks(ranks as usize).map(|row| json!(row)).collect());
        }
        let mut local = Vec::new();
        batch::dcp_local_seq_lens_into(
            &seq_lens,
            ranks,
            uint(&input["dcp_rank"]),
            interleave,
            &mut local,
        );
        Ok(json!(local))
    })
}

pub fn plan_mla_context_chunks() -> Tally {
    run("plan_mla_context_chunks", |input| {
        let rows = &input["padded_rows"];
        let budget = ContextBudget {
            row_budget: int(&input["row_budget"]) as i32,
            max_context_chunk: int(&input["max_context_chunk"]) as i32,
            split_alignment: int(&input["split_alignment"]) as i32,
            rows: ContextRows {
                dcp_world_size: uint(&rows["dcp_world_size"]),
                interleave: uint(&rows["interleave"]),
            },
        };
        let chunks = batch::plan_mla_context_chunks(&ints(&input["context_lens"]), budget)
            .map_err(|error| FieldError::new("ValueError", &error))?;
        Ok(chunks
            .iter()
            .map(|chunk| {
                json!({
                    "__class__": "_ContextChunkPlan",
                    "request_start": chunk.request_start,
                    "request_end": chunk.request_end,
                    "starts": chunk.starts,
                    "seq_lens": chunk.seq_lens,
                    "is_continuation": chunk.is_continuation,
                })
            })
            .collect())
    })
}

/// A padded buffer's head as the vectors keep it: the list and two of its padding values.
fn head(list: &[i32]) -> Value {
    json!(list.iter().copied().chain([PAD, PAD]).collect::<Vec<_>>())
}

pub fn compute_causal_conv1d_metadata() -> Tally {
    run("compute_causal_conv1d_metadata", |input| {
        let plan = batch::compute_causal_conv1d_metadata(&ints(&input["query_start_loc_p"]));
        Ok(json!({
            "nums": plan.nums,
            "tot": plan.total,
            "mlist": plan.prefill_of_program,
            "mlist_len": plan.prefill_of_program.len(),
            "offsetlist": plan.block_of_program,
            "batch_ptr_len": plan.padded_len,
            "batch_ptr_head": head(&plan.prefill_of_program),
            "batch_ptr_tail_all_pad": true,
            "token_chunk_offset_head": head(&plan.block_of_program),
        }))
    })
}

pub fn mamba_compute_chunk_metadata() -> Tally {
    run("mamba_compute_chunk_metadata", |input| {
        let offsets = &input["checkpoint_offsets_p"];
        let offsets = if offsets.is_null() {
            Vec::new()
        } else {
            ints(offsets)
        };
        let computed = ints(&input["num_computed_tokens_p"]);
        assert_eq!(computed.len() as i64, int(&input["num_prefills"]));
        let chunk_size = int(&input["chunk_size"]) as i32;
        let starts = ints(&input["query_start_loc_p"]);
        let chunks = batch::mamba_compute_chunk_metadata(chunk_size, &computed, &starts, &offsets);
        Ok(json!({
            "cu_chunk_seqlen": chunks.cu_chunk_seqlen,
            "seq_idx": chunks.seq_idx,
            "last_chunk_indices": chunks.last_chunk_indices,
            "checkpoint_chunk_indices": chunks.checkpoint_chunk_indices,
        }))
    })
}

pub fn mamba2_compute_varlen_chunk_metadata() -> Tally {
    run("mamba2_compute_varlen_chunk_metadata", |input| {
        let starts = ints(&input["query_start_loc"]);
        let chunks =
            batch::mamba2_compute_varlen_chunk_metadata(&starts, int(&input["chunk_size"]) as i32);
        Ok(json!({
            "cu_chunk_seqlens": chunks.cu_chunk_seqlens,
            "last_chunk_indices": chunks.last_chunk_indices,
            "seq_idx_chunks": chunks.seq_idx_chunks,
        }))
    })
}

#[test]
fn get_dcp_local_seq_lens_conforms() {
    get_dcp_local_seq_lens().check();
}

#[test]
fn plan_mla_context_chunks_conforms() {
    plan_mla_context_chunks().check();
}

#[test]
fn compute_causal_conv1d_metadata_conforms() {
    compute_causal_conv1d_metadata().check();
}

#[test]
fn mamba_compute_chunk_metadata_conforms() {
    mamba_compute_chunk_metadata().check();
}

#[test]
fn mamba2_compute_varlen_chunk_metadata_conforms() {
    mamba2_compute_varlen_chunk_metadata().check();
}
