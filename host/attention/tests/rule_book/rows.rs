//! Rules over whole steps: methods of the metadata, context-parallel queries, fast prefill, local attention, micro-batches,
//! the order of rows.

use serde_json::{Value, json};
use timetable_attention::batch::{self, ReorderRequest, UbatchConfig, UbatchSlice};

use crate::harness::{FieldError, Tally, flag, int, list, run, uint};
use crate::steps;

pub fn common_attn_metadata_methods() -> Tally {
    run("common_attn_metadata_methods", |input| {
        let step = steps::parse(&input["cam"]);
        Ok(json!({
            "unpadded": steps::render(&step.unpadded(uint(&input["num_actual_tokens"]), uint(&input["num_actual_reqs"]))),
            "num_computed_tokens": step.compute_num_computed_tokens(),
            "naive_query_lens": step.naive_query_lens(),
            "token_to_req_indices": step.token_to_req_indices(),
        }))
    })
}

pub fn dcp_context_query_split() -> Tally {
    run("dcp_context_query_split", |input| {
        let step = steps::parse(&input["cam"]);
        let split = batch::split_dcp_context_queries(&steps::rows(&step));
        Ok(json!({
            "split_dcp_context_queries":
                [split.num_decodes, split.num_extends, split.num_decode_tokens, split.num_extend_tokens],
            "should_skip_dcp_context_attention": batch::should_skip_dcp_context_attention(&steps::rows(&step)),
        }))
    })
}

pub fn make_kv_sharing_fast_prefill_common_attn_metadata() -> Tally {
    run(
        "make_kv_sharing_fast_prefill_common_attn_metadata",
        |input| {
            let step = steps::parse(&input["cam"]);
            Ok(match batch::make_kv_sharing_fast_prefill_step(&step) {
                Some(made) => steps::render(&made),
                None => json!({"unchanged": true}),
            })
        },
    )
}

pub fn make_local_attention_virtual_batches() -> Tally {
    run("make_local_attention_virtual_batches", |input| {
        let step = steps::parse(&input["cam"]);
        let chunk = uint(&input["attn_chunk_size"]);
        let (made, columns) =
            batch::make_local_attention_virtual_batches(chunk, &step, uint(&input["block_size"]))
                .map_err(|error| FieldError::new("AssertionError", &error))?;
        let bound = batch::max_virtual_rows(
            step.batch_size(),
            step.cam.num_actual_tokens as usize,
            chunk,
        );
        assert!(
            made.batch_size() <= bound,
            "{} virtual rows, bound {bound}",
            made.batch_size()
        );
        let mut other = step.tensors;
        other.block_table.iter_mut().for_each(|id| *id += 1000);
        let table = columns.gather(other.table());
        Ok(json!({
            "cam": steps::render(&made),
            "block_table_from_plus_1000":
                table.chunks(columns.blocks_per_chunk).map(|row| json!(row)).collect::<Vec<_>>(),
        }))
    })
}

pub fn reorder_batch_to_split_decodes_and_prefills() -> Tally {
    run("reorder_batch_to_split_decodes_and_prefills", |input| {
        let mut ids = list(&input["req_ids"], Value::clone);
        let column = |name: &str| list(&input[name], uint);
        let (scheduled, computed) = (
            column("num_scheduled_tokens"),
            column("num_computed_tokens"),
        );
        let requests: Vec<ReorderRequest> = column("num_prompt_tokens")
            .iter()
            .enumerate()
            .map(|(row, &num_prompt_tokens)| ReorderRequest {
                num_scheduled_tokens: scheduled[row],
                num_computed_tokens: computed[row],
                num_prompt_tokens,
            })
            .collect();
        let reorder = batch::reorder_batch_to_split_decodes_and_prefills(
            &requests,
            uint(&input["decode_threshold"]),
        );
        reorder.apply(&mut ids);
        Ok(json!({"modified": reorder.modified(), "req_ids": ids, "swaps": reorder.swaps}))
    })
}

fn slices(slices: &[UbatchSlice]) -> Value {
    slices
        .iter()
        .map(|s| {
            json!([
                [s.requests.start, s.requests.end],
                [s.tokens.start, s.tokens.end]
            ])
        })
        .collect()
}

pub fn split_attn_metadata() -> Tally {
    run("split_attn_metadata", |input| {
        let (tokens_padded, reqs_padded) = (
            int(&input["num_tokens_padded"]) as usize,
            int(&input["num_reqs_padded"]) as usize,
        );
        let split_point = input["split_point"].as_u64().map(|point| point as usize);
        let scheduled = list(&input["num_scheduled_tokens"], uint);
        let parts = int(&input["num_ubatches"]) as usize;
        let cut = batch::maybe_create_ubatch_slices(&scheduled, tokens_padded, parts, split_point);
        let padded = batch::pad_ubatch_slices(&cut, tokens_padded, reqs_padded);
        let split = match batch::split_attn_metadata(&padded, &steps::parse(&input["cam"])) {
            Ok(parts) => parts.iter().map(steps::render).collect(),
            Err(error) => {
                let class = match error {
                    batch::UbatchError::NoSuchRow { .. } => "IndexError",
                    _ => "AssertionError",
                };
                json!({"$error": [class, error.to_string()]})
            }
        };
        Ok(
            json!({"ubatch_slices": slices(&cut), "ubatch_slices_padded": slices(&padded), "split": split}),
        )
    })
}

pub fn ubatch_thresholds() -> Tally {
    run("ubatch_thresholds", |input| {
        let config = UbatchConfig {
            use_ubatching: flag(&input["use_ubatching"]),
            dbo_decode_token_threshold: uint(&input["dbo_decode_token_threshold"]),
            dbo_prefill_token_threshold: uint(&input["dbo_prefill_token_threshold"]),
        };
        let (orig, padded) = (
            uint(&input["orig_num_tokens"]),
            uint(&input["padded_num_tokens"]),
        );
        let uniform = flag(&input["uniform_decode"]);
        Ok(json!({
            "check_ubatch_thresholds": batch::check_ubatch_thresholds(&config, uint(&input["num_tokens"]), uniform),
            "is_last_ubatch_empty": batch::is_last_ubatch_empty(orig, padded, uint(&input["num_ubatches"])),
        }))
    })
}

#[test]
fn common_attn_metadata_methods_conforms() {
    common_attn_metadata_methods().check();
}

#[test]
fn dcp_context_query_split_conforms() {
    dcp_context_query_split().check();
}

#[test]
fn make_kv_sharing_fast_prefill_common_attn_metadata_conforms() {
    make_kv_sharing_fast_prefill_common_attn_metadata().check();
}

#[test]
fn make_local_attention_virtual_batches_conforms() {
    make_local_attention_virtual_batches().check();
}

#[test]
fn reorder_batch_to_split_decodes_and_prefills_conforms() {
    reorder_batch_to_split_decodes_and_prefills().check();
}

#[test]
fn split_attn_metadata_conforms() {
    split_attn_metadata().check();
}

#[test]
fn ubatch_thresholds_conforms() {
    ubatch_thresholds().check();
}
