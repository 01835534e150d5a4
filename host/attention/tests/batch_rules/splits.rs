//! split_decodes_and_prefills, split_decodes_prefills_and_extends, split_prefill_chunks.

use serde_json::{Value, json};
use timetable_attention::types::batch::{self, BatchRows, DecodeRule};

use crate::harness::{FieldError, Tally, flag, int, ints, list, run, uint};

/// The host-side vectors of a recorded CommonAttentionMetadata.
struct Rows {
    query_start_loc: Vec<i32>,
    seq_lens: Vec<i32>,
    is_prefilling: Vec<u8>,
    num_actual_tokens: u32,
    max_query_len: u32,
}

impl Rows {
    fn new(cam: &Value) -> Self {
        let bound = if cam["seq_lens_cpu_upper_bound"] == "=seq_lens" {
            "seq_lens"
        } else {
            "seq_lens_cpu_upper_bound"
        };
        Self {
            query_start_loc: ints(&cam["query_start_loc"]),
            seq_lens: ints(&cam[bound]),
            is_prefilling: list(&cam["is_prefilling"], |v| u8::from(flag(v))),
            num_actual_tokens: uint(&cam["num_actual_tokens"]),
            max_query_len: uint(&cam["max_query_len"]),
        }
    }

    fn borrow(&self) -> BatchRows<'_> {
        BatchRows {
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            is_prefilling: &self.is_prefilling,
            num_actual_tokens: self.num_actual_tokens,
            max_query_len: self.max_query_len,
        }
    }
}

pub fn split_decodes_and_prefills() -> Tally {
    run("split_decodes_and_prefills", |input| {
        let rule = DecodeRule {
            decode_threshold: uint(&input["decode_threshold"]),
            require_uniform: flag(&input["require_uniform"]),
            treat_short_extends_as_decodes: flag(&input["treat_short_extends_as_decodes"]),
        };
        let split = batch::split_decodes_and_prefills(&Rows::new(&input["cam"]).borrow(), rule)
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
        let rows = Rows::new(&input["cam"]);
        let s = batch::split_decodes_prefills_and_extends(
            &rows.borrow(),
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
