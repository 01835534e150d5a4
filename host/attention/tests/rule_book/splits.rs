//! split_decodes_and_prefills, split_decodes_prefills_and_extends, split_prefill_chunks.

use serde_json::json;
use timetable_attention::types::batch::{self, DecodeRule};

use crate::harness::{FieldError, Tally, flag, int, ints, run, uint};
use crate::steps;

pub fn split_decodes_and_prefills() -> Tally {
    run("split_decodes_and_prefills", |input| {
        let rule = DecodeRule {
            decode_threshold: uint(&input["decode_threshold"]),
            require_uniform: flag(&input["require_uniform"]),
            treat_short_extends_as_decodes: flag(&input["treat_short_extends_as_decodes"]),
        };
        let split =
            batch::split_decodes_and_prefills(&steps::rows(&steps::parse(&input["cam"])), rule)
                .map_err(|error| FieldError::new("IndexError", &error))?;
        Ok(json!([
            split.num_decodes,
            split.num_prefills,
            split.num_decode_tokens,
            split.num_prefill_tokens
        ]))
    })
}

pub fn split_decodes_prefills_and_extends() -> Tally {
    run("split_decodes_prefills_and_extends", |input| {
        let step = steps::parse(&input["cam"]);
        let s = batch::split_decodes_prefills_and_extends(
            &steps::rows(&step),
            uint(&input["decode_threshold"]),
        );
        Ok(json!([
            s.num_decodes,
            s.num_extends,
            s.num_prefills,
            s.num_decode_tokens,
            s.num_extend_tokens,
            s.num_prefill_tokens
        ]))
    })
}

pub fn split_prefill_chunks() -> Tally {
    run("split_prefill_chunks", |input| {
        let workspace_size = int(&input["workspace_size"]) as i32;
        let chunks = batch::split_prefill_chunks(
            &ints(&input["seq_lens"]),
            workspace_size,
            uint(&input["request_offset"]),
        )
        .map_err(|error| FieldError::new("AssertionError", &error))?;
        Ok(chunks
            .iter()
            .map(|chunk| json!([chunk.start, chunk.end]))
            .collect())
    })
}

#[test]
fn split_decodes_and_prefills_conforms() {
    split_decodes_and_prefills().check();
}

#[test]
fn split_decodes_prefills_and_extends_conforms() {
    split_decodes_prefills_and_extends().check();
}

#[test]
fn split_prefill_chunks_conforms() {
    split_prefill_chunks().check();
}
