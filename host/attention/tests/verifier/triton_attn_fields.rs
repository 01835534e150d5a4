//! TRITON_ATTN: each field of its record, broken once.

use timetable_attention::{
    Grant, VerifyContext, plain_builder, rules,
    types::{
        Causal, Dtype, EncoderInputs, Family, Input, KvCacheSpecKind, LaunchPromise, Matrix,
        Metadata, MmDocRange, PageSelection, RowRange, Tensor, TensorSlice, triton_attn,
    },
    verify,
};

use crate::support::{Batch, fixed_batch, fixed_config};

/// 16 segments for up to 64 rows, in scratch for 64 tokens.
fn good(batch: &Batch) -> triton_attn::Metadata {
    let mut builder = plain_builder(Family::TritonAttn, &batch.config).expect("plain");
    let metadata = builder.build(&batch.step.cam, false).expect("built");
    let Metadata::TritonAttn(mut record) = metadata else {
        panic!("another family");
    };
    divide(&mut record, 64, 16, 64);
    record
}

fn divide(record: &mut triton_attn::Metadata, threshold: u32, segments: u32, rows: u32) {
    record.seq_threshold_3d = threshold;
    record.num_par_softmax_segments = segments;
    record.softmax_segm_output.shape = vec![rows, 8, segments, 64];
    record.softmax_segm_max.shape = vec![rows, 8, segments];
    record.softmax_segm_expsum.shape = vec![rows, 8, segments];
}

fn within(
    batch: &Batch,
    record: &triton_attn::Metadata,
    promise: Option<&LaunchPromise>,
) -> String {
    let metadata = Metadata::TritonAttn(record.clone());
    batch.with(Grant::Exact, |ctx| {
        let ctx = VerifyContext { promise, ..*ctx };
        match verify(&metadata, &ctx) {
            Ok(()) => "accepted".to_owned(),
            Err(refusal) => refusal.to_string(),
        }
    })
}

fn verdict(batch: &Batch, record: &triton_attn::Metadata) -> String {
    within(batch, record, None)
}

/// Four decodes of one token, lengths 40, 17, 32 and 5.
fn decodes() -> Batch {
    let mut batch = fixed_batch(fixed_config());
    let (tensors, cam) = (&mut batch.step.tensors, &mut batch.step.cam);
    tensors.query_start_loc = vec![0, 1, 2, 3, 4];
    tensors.seq_lens = vec![40, 17, 32, 5];
    cam.query_start_loc_cpu = vec![0, 1, 2, 3, 4];
    cam.seq_lens_cpu_upper_bound = vec![40, 17, 32, 5];
    cam.max_query_len = 1;
    batch
}

type Break = (fn(&mut triton_attn::Metadata), &'static str);

#[test]
fn every_field_has_a_rule() {
    const FOREIGN: fn() -> Tensor = || Tensor::Values(vec![0, 1, 2, 22, 22]);
    let cases: &[Break] = &[
        (
            |m| m.num_actual_tokens = 23,
            "num_actual_tokens is 23, must be 24",
        ),
        (
            |m| m.max_query_len = 19,
            "max_query_len is 19, must be at least 20",
        ),
        (
            |m| m.max_query_len = 21,
            "max_query_len is 21, must be at most 20",
        ),
        (
            |m| m.query_start_loc = FOREIGN(),
            "query_start_loc must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| m.max_seq_len = 39,
            "max_seq_len is 39, must be at least 40",
        ),
        (
            |m| m.max_seq_len = 4_097,
            "max_seq_len is 4097, must be at most 4096",
        ),
        (
            |m| m.seq_lens = Tensor::Input(Input::EncoderSeqLens),
            "seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| m.block_table = FOREIGN(),
            "block_table must refer to the step's own block_table of its rows",
        ),
        (
            |m| m.slot_mapping = Tensor::Input(Input::Positions),
            "slot_mapping must refer to the step's own slot_mapping",
        ),
        (
            |m| m.causal = Causal::All(false),
            "causal is 0, must be as configured (1)",
        ),
        (
            |m| m.num_par_softmax_segments = 0,
            "num_par_softmax_segments is 0, must be one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            |m| m.num_par_softmax_segments = 12,
            "num_par_softmax_segments is 12, must be one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            |m| divide(m, 64, 128, 64),
            "num_par_softmax_segments is 128, must be one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            |m| m.num_par_softmax_segments = 8,
            "softmax_segm_output[2] is 16, must be 8",
        ),
        (
            |m| m.softmax_segm_output.shape[1] = 7,
            "softmax_segm_output[1] is 7, must be 8",
        ),
        (
            |m| m.softmax_segm_output.shape[3] = 128,
            "softmax_segm_output[3] is 128, must be 64",
        ),
        (
            |m| m.softmax_segm_output.shape.truncate(3),
            "softmax_segm_output has 3 elements, must have 4",
        ),
        (
            |m| m.softmax_segm_output.dtype = Dtype::Bfloat16,
            "softmax_segm_output is 2, must be as configured (0)",
        ),
        (
            |m| m.softmax_segm_max.shape[0] = 63,
            "softmax_segm_max[0] is 63, must be 64",
        ),
        (
            |m| m.softmax_segm_max.shape.push(1),
            "softmax_segm_max has 4 elements, must have 3",
        ),
        (
            |m| m.softmax_segm_expsum.shape[2] = 32,
            "softmax_segm_expsum[2] is 32, must be 16",
        ),
        (
            |m| m.softmax_segm_expsum.dtype = Dtype::Int32,
            "softmax_segm_expsum is 6, must be as configured (0)",
        ),
        (
            |m| divide(m, 64, 16, 1 << 20),
            "softmax_segm_output[0] is 1048576, must be at most 32768",
        ),
        (
            |m| m.mm_prefix_range = Some(FOREIGN()),
            "mm_prefix_range is given, must be absent",
        ),
        (
            |m| m.rswa_prefix_lens = Some(Tensor::Input(Input::RswaPrefixLens)),
            "rswa_prefix_lens is given, must be absent",
        ),
        (
            |m| m.rswa_window = 7,
            "rswa_window is 7, must be as configured (0)",
        ),
        // A threshold is no bound of anything, and prefills need no scratch.
        (|m| m.seq_threshold_3d = u32::MAX, "accepted"),
        (|m| divide(m, 64, 16, 0), "accepted"),
        (|m| divide(m, 64, 64, 8_192), "accepted"),
    ];
    let batch = fixed_batch(fixed_config());
    assert_eq!(verdict(&batch, &good(&batch)), "accepted");
    for (change, expected) in cases {
        let mut record = good(&batch);
        change(&mut record);
        assert_eq!(verdict(&batch, &record), *expected);
    }
}

#[test]
fn decodes_that_the_3d_form_may_run_have_a_place_each() {
    let batch = decodes();
    let with = |threshold, segments, rows| {
        let mut record = good(&batch);
        divide(&mut record, threshold, segments, rows);
        verdict(&batch, &record)
    };
    assert_eq!(with(4, 16, 4), "accepted");
    assert_eq!(
        with(4, 16, 3),
        "softmax_segm_output[0] is 3, must be at least 4"
    );
    // Five rows at least: four are run by the 2D form.
    assert_eq!(with(3, 16, 0), "accepted");
    assert_eq!(
        with(u32::MAX, 1, 0),
        "softmax_segm_output[0] is 0, must be at least 4"
    );
}

#[test]
fn a_captured_graph_bounds_segments_and_scratch() {
    let batch = decodes();
    let mut promise = LaunchPromise {
        max_num_splits: 16,
        max_work_items: 0,
        scratch_bytes: 64 * 8 * 16 * 66 * 4,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    let mut record = good(&batch);
    assert_eq!(within(&batch, &record, Some(&promise)), "accepted");
    promise.scratch_bytes -= 1;
    assert_eq!(
        within(&batch, &record, Some(&promise)),
        "scratch_bytes is 2162688, must be at most 2162687"
    );
    divide(&mut record, 64, 32, 4);
    assert_eq!(
        within(&batch, &record, Some(&promise)),
        "num_par_softmax_segments is 32, must be at most 16"
    );
}

type Edit = (fn(&mut Matrix), &'static str);

#[test]
fn spans_have_a_rule() {
    let mut batch = fixed_batch(fixed_config());
    let range = |row, start, end| MmDocRange { row, start, end };
    batch.step.cam.mm_req_doc_ranges = vec![range(2, 3, 9), range(0, 1, 5), range(2, 10, 14)];
    let base = good(&batch);
    assert_eq!(verdict(&batch, &base), "accepted");
    let edit = |change: &dyn Fn(&mut Matrix)| {
        let mut record = base.clone();
        let Some(Tensor::Matrix(matrix)) = &mut record.mm_prefix_range else {
            panic!("no spans");
        };
        change(matrix);
        verdict(&batch, &record)
    };
    let cases: [Edit; 8] = [
        (|m| m.values[8] = 4, "mm_prefix_range[2] is 4, must be 3"),
        (
            |m| m.values[11] = 13,
            "mm_prefix_range[2] is 13, must be 14",
        ),
        (|m| m.values[1] = -1, "mm_prefix_range[0] is -1, must be 5"),
        (|m| m.values[3] = 9, "mm_prefix_range[0] is 9, must be 0"),
        (|m| m.values[4] = 1, "mm_prefix_range[1] is 1, must be 0"),
        (|m| m.columns = 2, "mm_prefix_range is 2, must be 4"),
        (
            |m| m.rows = 3,
            "mm_prefix_range has 3 elements, must have 4",
        ),
        (
            |m| m.values.truncate(15),
            "mm_prefix_range has 15 elements, must have 16",
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(edit(&change), expected);
    }
    let mut record = base.clone();
    record.mm_prefix_range = Some(Tensor::Values(vec![0; 16]));
    assert_eq!(
        verdict(&batch, &record),
        "mm_prefix_range must refer to the step's own spans, as a matrix by value"
    );
    record.mm_prefix_range = None;
    assert_eq!(verdict(&batch, &record), "mm_prefix_range is missing");
}

#[test]
fn prefix_windows_encoders_and_flags_per_request_are_references() {
    let mut config = fixed_config();
    config.attention.use_rswa = true;
    config.attention.rswa_window = 8;
    let mut batch = fixed_batch(config);
    batch.step.tensors.rswa_prefix_lens = Some(vec![3, 4, 5, 0]);
    batch.step.cam.causal = Causal::PerRequest;
    batch.step.tensors.causal = Some(vec![1, 0, 1, 1]);
    let base = good(&batch);
    assert_eq!(verdict(&batch, &base), "accepted");
    let mut record = base.clone();
    record.rswa_window = 9;
    assert_eq!(verdict(&batch, &record), "rswa_window is 9, must be 8");
    record.rswa_prefix_lens = Some(Tensor::Input(Input::SeqLens));
    assert_eq!(
        verdict(&batch, &record),
        "rswa_prefix_lens must refer to the step's own rswa_prefix_lens"
    );
    record.rswa_prefix_lens = None;
    assert_eq!(verdict(&batch, &record), "rswa_prefix_lens is missing");
    record = base;
    record.causal = Causal::All(true);
    assert_eq!(
        verdict(&batch, &record),
        "causal is 1, must be as configured (2)"
    );

    let mut config = fixed_config();
    config.kv_cache_spec.kind = KvCacheSpecKind::CrossAttention;
    let mut batch = fixed_batch(config);
    let lens = vec![33, 17, 64, 0];
    batch.step.cam.encoder = Some(EncoderInputs {
        encoder_seq_lens_cpu: lens.clone(),
    });
    batch.step.tensors.encoder_seq_lens = Some(lens);
    let mut record = good(&batch);
    assert_eq!(verdict(&batch, &record), "accepted");
    record.max_seq_len = 63;
    assert_eq!(
        verdict(&batch, &record),
        "max_seq_len is 63, must be at least 64"
    );
    record = good(&batch);
    record.seq_lens = Tensor::Input(Input::SeqLens);
    assert_eq!(
        verdict(&batch, &record),
        "seq_lens must refer to the step's own encoder_seq_lens"
    );
}

#[test]
fn context_parallelism_is_refused_and_has_no_plain_builder() {
    let mut config = fixed_config();
    let record = good(&fixed_batch(config.clone()));
    config.parallel.dcp_world_size = 2;
    config.kv_cache_spec.dcp_sharded = true;
    let batch = fixed_batch(config);
    assert_eq!(verdict(&batch, &record), "dcp_world_size is 2, must be 1");
    let error = plain_builder(Family::TritonAttn, &batch.config)
        .err()
        .expect("no ranks");
    assert_eq!(
        error.message,
        "DCP not supported: dcp_world_size is 2; run TRITON_ATTN with 1, or choose FLASH_ATTN or FLASHINFER"
    );
}

/// The record has no way to leave blocks out, so the grant to do so changes nothing.
#[test]
fn the_grant_subset_allows_no_more() {
    assert!(!rules(Family::TritonAttn).expect("rules").selects_blocks);
    let batch = fixed_batch(fixed_config());
    for table in [
        Tensor::SelectPages(PageSelection {
            rows: RowRange { start: 0, end: 4 },
            columns: vec![0, 2, 1, 0, 1],
        }),
        Tensor::Slice(TensorSlice {
            source: Input::BlockTable,
            start: 0,
            end: 4,
        }),
    ] {
        let mut record = good(&batch);
        record.block_table = table;
        let metadata = Metadata::TritonAttn(record);
        for grant in [Grant::Exact, Grant::Subset] {
            let found = batch.with(grant, |ctx| {
                verify(&metadata, ctx).map_err(|r| r.to_string())
            });
            let refused = "block_table must refer to the step's own block_table of its rows";
            assert_eq!(found, Err(refused.to_owned()), "{grant:?}");
        }
    }
}
