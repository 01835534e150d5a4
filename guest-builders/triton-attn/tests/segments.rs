//! Thresholds, segments and scratch, where no recorded case goes: compute capability 12, speculation, batch invariance.

use proptest::prelude::*;
use timetable_guest::{
    Builder,
    testing::{batch, config},
    types::{
        BuilderConfig, CaptureShape, CudagraphMode, ErrorKind, Input, KvCacheSpecKind, MmDocRange,
        Tensor, triton_attn::Metadata,
    },
};
use triton_attn_builder::SoftmaxSegments;

fn build(config: BuilderConfig, rows: &[(u32, u32)]) -> Metadata {
    let mut builder = SoftmaxSegments::create(config).expect("a good configuration");
    builder.build(&batch(rows), false).expect("metadata")
}

/// (threshold, shape of the partial outputs) of a step of `rows` decodes.
fn shape(config: BuilderConfig, rows: usize) -> (u32, Vec<u32>) {
    let metadata = build(config, &vec![(1, 100); rows]);
    let (output, sums) = (&metadata.softmax_segm_output, &metadata.softmax_segm_max);
    assert_eq!(output.shape[..3], sums.shape);
    assert_eq!(*sums, metadata.softmax_segm_expsum);
    assert_eq!(output.shape[2], metadata.num_par_softmax_segments);
    (metadata.seq_threshold_3d, output.shape.clone())
}

fn graphs(mode: CudagraphMode, sizes: &[u32]) -> BuilderConfig {
    let mut config = config();
    config.scheduler.max_num_seqs = 256;
    config.cudagraph.mode = mode;
    config.cudagraph.capture_sizes = sizes.to_vec();
    config
}

#[test]
fn the_threshold_is_the_closest_captured_size_and_the_first_of_two() {
    for (mode, sizes, threshold) in [
        (CudagraphMode::None, &[1, 60][..], 64),
        (CudagraphMode::Piecewise, &[1, 60], 64),
        (CudagraphMode::Full, &[1, 60, 70], 60),
        (CudagraphMode::FullDecodeOnly, &[1, 60, 68], 60),
        (CudagraphMode::FullAndPiecewise, &[68, 60], 68),
        (CudagraphMode::Full, &[512], 512),
    ] {
        let (found, shape) = shape(graphs(mode, sizes), 3);
        assert_eq!(found, threshold, "{mode:?} {sizes:?}");
        assert_eq!(shape, [threshold.min(256), 8, 16, 64]);
    }
    let error = SoftmaxSegments::create(graphs(CudagraphMode::Full, &[]))
        .err()
        .expect("no sizes");
    assert_eq!(error.kind, ErrorKind::Assertion);
    assert!(
        error
            .message
            .starts_with("CUDA Graphs enabled but no capture sizes specified."),
        "{}",
        error.message
    );
}

#[test]
fn more_kv_heads_fill_the_grid_with_fewer_rows() {
    for (heads, threshold) in [(1, 128), (8, 16), (100, 1), (128, 1), (129, 0)] {
        let mut config = graphs(CudagraphMode::None, &[]);
        config.kv_cache_spec.num_kv_heads = heads;
        assert_eq!(shape(config, 1).0, threshold);
    }
}

#[test]
fn scratch_has_room_for_a_decode_with_its_drafts() {
    for (drafts, parallel, tokens) in [(0, false, 1), (3, false, 4), (3, true, 7), (9, false, 8)] {
        let mut config = graphs(CudagraphMode::None, &[]);
        config.scheduler.num_speculative_tokens = drafts;
        config.scheduler.parallel_drafting = parallel;
        assert_eq!(shape(config, 1).1[0], 64 * tokens);
    }
    let mut few = config();
    few.scheduler.max_num_seqs = 5;
    assert_eq!(shape(few, 1), (64, vec![5, 8, 16, 64]));
    let mut odd = config();
    odd.kv_cache_spec.head_size_v = 72;
    assert_eq!(shape(odd, 1).1[3], 128);
}

#[test]
fn compute_capability_12_has_64_segments_for_the_smallest_batches() {
    let mut config = graphs(CudagraphMode::None, &[]);
    config.device.compute_capability = (12, 0);
    config.device.num_workers = 188;
    // (188 − 1) / (16 · 2) = 5 rows; a quarter of 64 rows of 16 segments is more than that.
    assert_eq!(shape(config.clone(), 5), (64, vec![16, 8, 64, 64]));
    assert_eq!(shape(config.clone(), 6), (64, vec![64, 8, 16, 64]));
    // As many rows, but more tokens than the view has.
    let metadata = build(config.clone(), &[(17, 40)]);
    assert_eq!(metadata.softmax_segm_output.shape, [64, 8, 16, 64]);
    // Too few multiprocessors for one row.
    config.device.num_workers = 32;
    assert_eq!(shape(config.clone(), 1).1, [64, 8, 16, 64]);
    config.device.num_workers = 10_000;
    assert_eq!(shape(config, 64).1, [64, 8, 64, 64]);
}

#[test]
fn batch_invariance_divides_nothing() {
    let mut config = config();
    config.batch_invariant = true;
    assert_eq!(shape(config, 4), (0, vec![0, 8, 1, 64]));
}

#[test]
fn spans_prefix_windows_and_encoders() {
    let mut rswa = config();
    rswa.attention.use_rswa = true;
    rswa.attention.rswa_window = 24;
    let metadata = build(rswa, &[(1, 40)]);
    assert_eq!(
        metadata.rswa_prefix_lens,
        Some(Tensor::Input(Input::RswaPrefixLens))
    );
    assert_eq!(metadata.rswa_window, 24);

    let mut builder = SoftmaxSegments::create(config()).expect("a builder");
    let mut common = batch(&[(1, 40), (20, 32), (9, 30)]);
    let range = |row, start, end| MmDocRange { row, start, end };
    common.mm_req_doc_ranges = vec![range(1, 3, 9), range(1, 12, 20), range(2, 1, 1)];
    let metadata = builder.build(&common, false).expect("metadata");
    let Some(Tensor::Matrix(matrix)) = metadata.mm_prefix_range else {
        panic!("no spans");
    };
    assert_eq!((matrix.rows, matrix.columns), (3, 4));
    assert_eq!(matrix.values, [0, 0, 0, 0, 3, 9, 12, 20, 1, 1, 0, 0]);
    common.mm_req_doc_ranges[0].row = 3;
    let error = builder.build(&common, false).expect_err("row 3 of 3");
    assert_eq!(
        error.message,
        "mm_req_doc_ranges names row 3 of 3: ranges must be of the step's rows"
    );

    let mut cross = config();
    cross.kv_cache_spec.kind = KvCacheSpecKind::CrossAttention;
    let mut builder = SoftmaxSegments::create(cross).expect("a builder");
    let mut common = batch(&[(1, 4)]);
    common.encoder = Some(timetable_guest::types::EncoderInputs {
        encoder_seq_lens_cpu: vec![70],
    });
    let metadata = builder.build(&common, false).expect("metadata");
    assert_eq!(metadata.max_seq_len, 70);
    assert_eq!(metadata.seq_lens, Tensor::Input(Input::EncoderSeqLens));
}

#[test]
fn what_the_backend_does_not_have_is_declined() {
    let refusal = |edit: fn(&mut BuilderConfig)| {
        let mut config = config();
        edit(&mut config);
        let error = SoftmaxSegments::create(config).err().expect("declined");
        error.message
    };
    assert!(
        refusal(|config| config.parallel.dcp_world_size = 2).starts_with("DCP not supported: ")
    );
    assert_eq!(
        refusal(|config| config.kv_cache_spec.num_kv_heads = 0),
        "kv_cache_spec.num_kv_heads is 0; it must be from 1 to 2^30"
    );
    assert_eq!(
        refusal(|config| config.attention.num_heads = u32::MAX),
        "attention.num_heads is 4294967295; it must be from 1 to 2^30"
    );
}

proptest! {
    /// A step has no more scratch than its builder says, and no more segments and scratch than a graph of its shape was promised.
    #[test]
    fn scratch_is_within_what_was_said(
        rows in 0_usize..300,
        query in 1_u32..20,
        heads in 1_u32..200,
        (workers, capability) in (1_u32..4000, prop_oneof![Just(9_u32), Just(12)]),
        drafts in 0_u32..12,
        max_num_seqs in 1_u32..2000,
        sizes in proptest::collection::vec(1_u32..600, 1..9),
        is_captured in any::<bool>(),
    ) {
        let mode = if is_captured { CudagraphMode::Full } else { CudagraphMode::None };
        let mut config = graphs(mode, &sizes);
        config.kv_cache_spec.num_kv_heads = heads;
        config.device.compute_capability.0 = capability;
        config.device.num_workers = workers;
        config.scheduler.num_speculative_tokens = drafts;
        config.scheduler.max_num_seqs = max_num_seqs;
        let mut builder = SoftmaxSegments::create(config).unwrap();
        let common = batch(&vec![(query, query + 70); rows]);
        let metadata = builder.build(&common, false).unwrap();
        let shape = CaptureShape {
            num_tokens: common.num_actual_tokens,
            num_reqs: common.num_reqs,
            max_query_len: query,
            uniform_query_len: Some(query),
        };
        let promise = builder.launch_promise(&shape);
        let bytes: u64 = [
            &metadata.softmax_segm_output,
            &metadata.softmax_segm_max,
            &metadata.softmax_segm_expsum,
        ]
        .into_iter()
        .map(|scratch| scratch.shape.iter().map(|&size| u64::from(size)).product::<u64>() * 4)
        .sum();
        prop_assert_eq!(bytes, promise.scratch_bytes);
        prop_assert!(bytes <= builder.info().max_scratch_bytes);
        prop_assert_eq!(metadata.num_par_softmax_segments, promise.max_num_splits);
        // Single decodes that the 3D form may run have a place each.
        let room = metadata.softmax_segm_output.shape[0];
        if query == 1 && common.num_reqs <= metadata.seq_threshold_3d.min(max_num_seqs) {
            prop_assert!(room >= common.num_reqs, "{room} places");
        }
    }
}
