//! Each field of a step, broken once.

use timetable_attention::{
    Grant,
    types::{
        Causal, EncoderInputs, Extra, ExtraValue, FastPrefillInputs, KvCacheSpecKind, MmDocRange,
    },
    verify_step,
};

use crate::support::{Batch, fixed_batch, fixed_config};

fn verdict(batch: &Batch) -> String {
    batch.with(Grant::Exact, |ctx| match verify_step(ctx) {
        Ok(()) => "accepted".to_owned(),
        Err(refusal) => refusal.to_string(),
    })
}

fn sharded() -> Batch {
    let mut config = fixed_config();
    config.parallel.dcp_world_size = 2;
    config.kv_cache_spec.dcp_sharded = true;
    fixed_batch(config)
}

#[test]
fn the_fixed_batches_are_accepted() {
    assert_eq!(verdict(&fixed_batch(fixed_config())), "accepted");
    assert_eq!(verdict(&sharded()), "accepted");
}

type Break = (fn(&mut Batch), &'static str);

#[test]
fn every_field_has_a_rule() {
    let cases: &[Break] = &[
        (
            |b| b.step.cam.num_reqs = 5,
            "query_start_loc has 5 elements, must have 6",
        ),
        (
            |b| b.step.cam.num_reqs = u32::MAX,
            "num_reqs is 4294967295, must be at most 2147483647",
        ),
        (
            |b| b.step.cam.num_actual_tokens = 21,
            "query_start_loc[4] is 22, must be at most 21",
        ),
        (
            |b| b.step.cam.num_actual_tokens = u32::MAX,
            "num_actual_tokens is 4294967295, must be at most 2147483647",
        ),
        (
            |b| b.step.cam.num_actual_tokens = 25,
            "slot_mapping has 24 elements, must have 25",
        ),
        (
            |b| b.step.cam.max_query_len = 19,
            "max_query_len is 19, must be at least 20",
        ),
        (
            |b| b.step.cam.max_seq_len = 39,
            "seq_lens[0] is 40, must be at most 39",
        ),
        (
            |b| b.step.cam.max_seq_len = u32::MAX,
            "max_seq_len is 4294967295, must be at most 2147483647",
        ),
        (
            |b| b.step.cam.block_table_width = 3,
            "block_table_width is 3, must be 4",
        ),
        (
            |b| b.step.cam.slot_mapping_len = 23,
            "slot_mapping_len is 23, must be 24",
        ),
        (
            |b| b.step.cam.query_start_loc_cpu = vec![0, 2, 1, 22, 22],
            "query_start_loc_cpu[2] is 1, must be at least 2",
        ),
        (
            |b| b.step.cam.query_start_loc_cpu = vec![0, 1, 2, 23, 23],
            "max_query_len is 20, must be at least 21",
        ),
        (
            |b| b.step.cam.seq_lens_cpu_upper_bound = vec![39, 17, 32, 0],
            "seq_lens_cpu_upper_bound[0] is 39, must be at least 40",
        ),
        (
            |b| b.step.cam.seq_lens_cpu_upper_bound = vec![41, 17, 32, 0],
            "seq_lens_cpu_upper_bound[0] is 41, must be at most 40",
        ),
        (
            |b| b.step.cam.seq_lens_cpu_upper_bound = vec![40],
            "seq_lens_cpu_upper_bound has 1 elements, must have 4",
        ),
        (
            |b| b.step.cam.is_prefilling = vec![0; 5],
            "is_prefilling has 5 elements, must have 4",
        ),
        (
            |b| b.step.cam.is_prefilling = vec![0, 2],
            "is_prefilling[1] is 2, must be at most 1",
        ),
        (
            |b| b.step.cam.causal = Causal::PerRequest,
            "causal is missing",
        ),
        (
            |b| {
                b.step.cam.causal = Causal::PerRequest;
                b.step.tensors.causal = Some(vec![0, 1, 2, 0]);
            },
            "causal[2] is 2, must be at most 1",
        ),
        (
            |b| b.step.cam.req_idx = vec![1],
            "req_idx has 1 elements, must have 4",
        ),
        (
            |b| {
                b.step.cam.mm_req_doc_ranges = vec![MmDocRange {
                    row: 4,
                    start: 0,
                    end: 1,
                }];
            },
            "mm_req_doc_ranges is 4, must be at most 3",
        ),
        (
            |b| b.step.cam.replayssm_decode_base_cpu = vec![1],
            "replayssm_decode_base_cpu has 1 elements, must have 4",
        ),
        (
            |b| {
                b.step.cam.extras = vec![Extra {
                    name: "n".to_owned(),
                    value: ExtraValue::Device(2),
                }];
            },
            "extras is 0, must be at least 2",
        ),
        (
            |b| {
                b.step.cam.encoder = Some(EncoderInputs {
                    encoder_seq_lens_cpu: vec![],
                });
            },
            "encoder_seq_lens is missing",
        ),
        (
            |b| {
                b.step.cam.encoder = Some(EncoderInputs {
                    encoder_seq_lens_cpu: vec![1; 4],
                });
                b.step.tensors.encoder_seq_lens = Some(vec![1, 1, -1, 1]);
            },
            "encoder_seq_lens[2] is -1, must be at least 0",
        ),
        (
            |b| {
                b.step.cam.fast_prefill = Some(FastPrefillInputs {
                    num_logits_indices: 1,
                    max_logits_per_req: 1,
                    num_logits_indices_padded: 1,
                });
            },
            "logits_indices_padded is missing",
        ),
        (
            |b| {
                b.step.cam.fast_prefill = Some(FastPrefillInputs {
                    num_logits_indices: 1,
                    max_logits_per_req: 1,
                    num_logits_indices_padded: 1,
                });
                b.step.tensors.logits_indices_padded = Some(vec![24]);
            },
            "logits_indices_padded[0] is 24, must be at most 23",
        ),
        (
            |b| b.config.attention.use_rswa = true,
            "rswa_prefix_lens is missing",
        ),
        (
            |b| b.step.tensors.rswa_prefix_lens = Some(vec![1, 1, -1, 1]),
            "rswa_prefix_lens[2] is -1, must be at least 0",
        ),
        // The tensors.
        (
            |b| b.step.tensors.query_start_loc[0] = 1,
            "query_start_loc[0] is 1, must be 0",
        ),
        (
            |b| b.step.tensors.query_start_loc[1] = 3,
            "query_start_loc[2] is 2, must be at least 3",
        ),
        (
            |b| b.step.tensors.query_start_loc[2] = i32::MIN,
            "query_start_loc[2] is -2147483648, must be at least 1",
        ),
        (
            |b| b.step.tensors.seq_lens[2] = 19,
            "seq_lens[2] is 19, must be at least 20",
        ),
        (
            |b| b.step.tensors.seq_lens[3] = -1,
            "seq_lens[3] is -1, must be at least 0",
        ),
        (
            |b| b.step.tensors.seq_lens.truncate(3),
            "seq_lens has 3 elements, must have 4",
        ),
        (
            |b| b.step.tensors.block_table[2] = 11,
            "block_table[0] is 11, must be below 11",
        ),
        (
            |b| b.step.tensors.block_table[9] = -1,
            "block_table[2] is -1, must be at least 0",
        ),
        (
            |b| b.step.tensors.block_table[9] = 1 << 30,
            "block_table[2] is 1073741824, must be below 11",
        ),
        (
            |b| b.step.tensors.block_table.truncate(12),
            "block_table has 3 elements, must have 4",
        ),
        (
            |b| b.step.tensors.slot_mapping[1] = 11 * 16,
            "slot_mapping[1] is 176, must be below 176",
        ),
        (
            |b| b.step.tensors.slot_mapping[1] = -2,
            "slot_mapping[1] is -2, must be at least -1",
        ),
        (
            |b| b.step.tensors.slot_mapping[1] = i64::MAX,
            "slot_mapping[1] is 9223372036854775807, must be below 176",
        ),
        (
            |b| b.step.tensors.slot_mapping[22] = 5,
            "slot_mapping[22] is 5, must be -1",
        ),
        (
            |b| b.step.tensors.positions[3] = -1,
            "positions[3] is -1, must be at least 0",
        ),
        (
            |b| b.step.tensors.positions[3] = 4096,
            "positions[3] is 4096, must be at most 4095",
        ),
        (
            |b| b.step.tensors.positions.truncate(5),
            "positions has 5 elements, must have 22",
        ),
    ];
    for (change, expected) in cases {
        let mut batch = fixed_batch(fixed_config());
        change(&mut batch);
        assert_eq!(verdict(&batch), *expected);
    }
    let cases: &[Break] = &[
        (
            |b| b.step.tensors.dcp_local_seq_lens = None,
            "dcp_local_seq_lens is missing",
        ),
        (
            |b| b.step.tensors.dcp_local_seq_lens = Some(vec![20, 9, 15, 0]),
            "dcp_local_seq_lens[2] is 15, must be 16",
        ),
        (
            |b| {
                b.step
                    .cam
                    .dcp
                    .as_mut()
                    .expect("sharded")
                    .dcp_local_seq_lens_cpu_upper_bound[0] = 19;
            },
            "dcp_local_seq_lens_cpu_upper_bound[0] is 19, must be at least 20",
        ),
    ];
    for (change, expected) in cases {
        let mut batch = sharded();
        change(&mut batch);
        assert_eq!(verdict(&batch), *expected);
    }
}

/// Stale ids beyond a length are never read, and so not refused.
#[test]
fn columns_beyond_a_length_are_free() {
    let mut batch = fixed_batch(fixed_config());
    batch.step.tensors.block_table[3] = 1 << 30;
    batch.step.tensors.block_table[12] = -5;
    assert_eq!(verdict(&batch), "accepted");
}

/// 4 columns of pages of 256 hold 1,024 tokens, so a length of 1,025 is refused.
#[test]
fn field_case_12_a_table_narrower_than_a_length_is_refused() {
    for (len, expected) in [
        (1_024, "accepted"),
        (1_025, "block_table_width[0] is 4, must be at least 5"),
    ] {
        let mut config = fixed_config();
        config.kv_cache_spec.block_size = 256;
        let mut batch = fixed_batch(config);
        batch.step.tensors.seq_lens[0] = len;
        batch.step.cam.seq_lens_cpu_upper_bound[0] = len;
        batch.step.cam.max_seq_len = 1_025;
        assert_eq!(verdict(&batch), expected);
    }
}

/// Block 4, row [7, 3], positions 6..=9: positions 8 and 9 have no column. Their slots are −1, which alone
/// would be accepted, and the step is refused for the row.
#[test]
fn field_case_06_a_row_narrower_than_its_positions_is_refused() {
    let mut config = fixed_config();
    config.kv_cache_spec.block_size = 4;
    let mut batch = fixed_batch(config);
    batch.step = timetable_attention::batch::GroupStep::new(
        timetable_attention::batch::StepTensors {
            query_start_loc: vec![0, 4],
            seq_lens: vec![10],
            block_table: vec![7, 3],
            block_table_width: 2,
            slot_mapping: vec![14, 15, -1, -1],
            positions: vec![6, 7, 8, 9],
            ..Default::default()
        },
        vec![10],
        4,
        4,
        10,
    );
    assert_eq!(
        verdict(&batch),
        "block_table_width[0] is 2, must be at least 3"
    );
}

/// A block id equal to the number of blocks, in the largest table that a cache can have.
#[test]
fn field_case_12_block_ids_end_at_the_number_of_blocks() {
    let mut batch = fixed_batch(fixed_config());
    batch.num_blocks = i32::MAX as u32;
    batch.step.tensors.block_table[0] = i32::MAX;
    assert_eq!(
        verdict(&batch),
        "block_table[0] is 2147483647, must be below 2147483647"
    );
    batch.step.tensors.block_table[0] = i32::MAX - 1;
    assert_eq!(verdict(&batch), "accepted");
    batch.num_blocks = 0;
    assert!(
        verdict(&batch).contains("must be below 0"),
        "{}",
        verdict(&batch)
    );
}

/// Without keys in a cache there is no table to check; states are named by every column.
#[test]
fn other_kinds_of_cache_have_their_own_table_rule() {
    let mut batch = fixed_batch(fixed_config());
    batch.config.kv_cache_spec.kind = KvCacheSpecKind::EncoderOnlyAttention;
    batch.step.tensors.block_table = Vec::new();
    batch.step.tensors.block_table_width = 0;
    batch.step.cam.block_table_width = 0;
    assert_eq!(verdict(&batch), "accepted");
    let mut batch = fixed_batch(fixed_config());
    batch.config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
    batch.step.tensors.block_table[15] = 11;
    assert_eq!(verdict(&batch), "block_table[3] is 11, must be below 11");
}
