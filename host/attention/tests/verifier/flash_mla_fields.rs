//! FLASHMLA and its relatives: each field of their records, broken once.

use timetable_attention::{
    Grant, VerifyContext, plain_builder, rules,
    types::{
        Causal, DcpLocal, DcpSource, Dtype, Family, Input, LaunchPromise, Matrix, Metadata,
        RowRange, Tensor, TensorSlice,
        batch::ContextWorkspace,
        flash_mla::{
            self, ChunkedContext, ContextChunk, DecodeSchedule, MlaDecode, MlaPrefill,
            MlaSchedulerMetadataCall, TileSchedule,
        },
    },
    verify,
};

use crate::support::{Batch, fixed_batch, fixed_config};

/// Two decodes, and two prefills of which the first has a context of 12 and the second is padding.
fn good(batch: &Batch) -> flash_mla::Metadata {
    let mut builder = plain_builder(Family::FlashMla, &batch.config).expect("plain");
    let metadata = builder.build(&batch.step.cam, false).expect("built");
    let Metadata::FlashMla(record) = metadata else {
        panic!("another family");
    };
    record
}

fn within(batch: &Batch, record: &flash_mla::Metadata, promise: Option<&LaunchPromise>) -> String {
    let metadata = Metadata::FlashMla(record.clone());
    batch.with(Grant::Exact, |ctx| {
        let ctx = VerifyContext { promise, ..*ctx };
        match verify(&metadata, &ctx) {
            Ok(()) => "accepted".to_owned(),
            Err(refusal) => refusal.to_string(),
        }
    })
}

fn verdict(batch: &Batch, record: &flash_mla::Metadata) -> String {
    within(batch, record, None)
}

type Break = (fn(&mut flash_mla::Metadata), &'static str);

fn check(batch: &Batch, base: &flash_mla::Metadata, cases: &[Break]) {
    assert_eq!(verdict(batch, base), "accepted");
    for (change, expected) in cases {
        let mut record = base.clone();
        change(&mut record);
        assert_eq!(verdict(batch, &record), *expected);
    }
}

fn decode(record: &mut flash_mla::Metadata) -> &mut MlaDecode {
    record.decode.as_mut().expect("decodes")
}

fn prefill(record: &mut flash_mla::Metadata) -> &mut MlaPrefill {
    record.prefill.as_mut().expect("prefills")
}

fn context(record: &mut flash_mla::Metadata) -> &mut ChunkedContext {
    prefill(record).chunked_context.as_mut().expect("context")
}

fn chunk(record: &mut flash_mla::Metadata, index: usize) -> &mut ContextChunk {
    &mut context(record).chunks[index]
}

fn foreign() -> Tensor {
    Tensor::Values(vec![0, 1, 2, 22, 22])
}

#[test]
fn every_outer_field_has_a_rule() {
    let batch = fixed_batch(fixed_config());
    let cases: &[Break] = &[
        (|m| m.num_reqs = 3, "num_reqs is 3, must be 4"),
        (
            |m| m.num_actual_tokens = 22,
            "num_actual_tokens is 22, must be 24",
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
            |m| m.max_seq_len = 39,
            "max_seq_len is 39, must be at least 40",
        ),
        (
            |m| m.max_seq_len = 4_097,
            "max_seq_len is 4097, must be at most 4096",
        ),
        (
            |m| m.query_start_loc = foreign(),
            "query_start_loc must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| m.slot_mapping = Tensor::Input(Input::Positions),
            "slot_mapping must refer to the step's own slot_mapping",
        ),
        (|m| m.num_decodes = 5, "num_decodes is 5, must be at most 4"),
        (|m| m.num_decodes = 3, "num_prefills is 2, must be 1"),
        (|m| m.num_prefills = 1, "num_prefills is 1, must be 2"),
        (
            |m| m.num_decode_tokens = 3,
            "num_decode_tokens is 3, must be 2",
        ),
        (
            |m| m.causal = false,
            "causal is 0, must be as configured (1)",
        ),
        (|m| m.head_dim = 576, "head_dim is 576, must be 64"),
        (|m| m.decode = None, "decode is missing"),
        (|m| m.prefill = None, "prefill is missing"),
        // The prefill's record is for other rows then.
        (
            |m| {
                (m.num_decodes, m.num_prefills, m.num_decode_tokens) = (1, 3, 1);
            },
            "decode.block_table must refer to the step's own block_table of its rows",
        ),
        (
            |m| {
                (m.num_decodes, m.num_prefills, m.num_decode_tokens) = (0, 4, 0);
            },
            "decode is given, must be absent",
        ),
    ];
    check(&batch, &good(&batch), cases);
    assert!(!rules(Family::FlashMla).expect("rules").selects_blocks);
}

#[test]
fn every_field_of_decodes_has_a_rule() {
    let batch = fixed_batch(fixed_config());
    let cases: &[Break] = &[
        (
            |m| decode(m).block_table = Tensor::Input(Input::BlockTable),
            "decode.block_table must refer to the step's own block_table of its rows",
        ),
        (
            |m| {
                decode(m).seq_lens = Tensor::Slice(TensorSlice {
                    source: Input::SeqLens,
                    start: 1,
                    end: 3,
                });
            },
            "decode.seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| decode(m).dcp_tot_seq_lens = Some(Tensor::Input(Input::SeqLens)),
            "decode.dcp_tot_seq_lens is given, must be absent",
        ),
        (
            |m| decode(m).query_start_loc = Some(Tensor::Input(Input::QueryStartLoc)),
            "decode.query_start_loc must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| decode(m).max_query_len = 0,
            "decode.max_query_len is 0, must be at least 1",
        ),
        // Without query starts it says where each row's tokens are.
        (
            |m| decode(m).max_query_len = 2,
            "decode.max_query_len[0] is 2, must be 1",
        ),
        (
            |m| {
                decode(m).query_start_loc = Some(Tensor::Slice(TensorSlice {
                    source: Input::QueryStartLoc,
                    start: 0,
                    end: 3,
                }));
                decode(m).max_query_len = 2;
            },
            "accepted",
        ),
        (
            |m| decode(m).max_seq_len = 39,
            "decode.max_seq_len is 39, must be at least 40",
        ),
        (
            |m| decode(m).max_num_splits = 5,
            "decode.max_num_splits is 5, must be at most 4",
        ),
    ];
    check(&batch, &good(&batch), cases);
}

fn call(record: &mut flash_mla::Metadata) -> &mut MlaSchedulerMetadataCall {
    match &mut decode(record).schedule {
        DecodeSchedule::FlashAttn(call) => call,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_field_of_a_scheduler_call_has_a_rule() {
    let mut config = fixed_config();
    config.attention.kv_lora_rank = 48;
    config.attention.qk_rope_head_dim = 16;
    let batch = fixed_batch(config);
    let mut base = good(&batch);
    let starts = Tensor::Slice(TensorSlice {
        source: Input::QueryStartLoc,
        start: 0,
        end: 3,
    });
    let of = decode(&mut base);
    of.query_start_loc = Some(starts.clone());
    of.max_num_splits = 3;
    of.schedule = DecodeSchedule::FlashAttn(MlaSchedulerMetadataCall {
        batch_size: 2,
        max_seqlen_q: 1,
        max_seqlen_k: 40,
        num_heads_q: 8,
        num_heads_kv: 1,
        headdim: 16,
        headdim_v: 48,
        cache_seqlens: of.seq_lens.clone(),
        qkv_dtype: Dtype::Bfloat16,
        cu_seqlens_q: starts,
        page_size: 16,
        causal: true,
        num_splits: 3,
        scheduler_metadata_len: 17,
    });
    let cases: &[Break] = &[
        (
            |m| call(m).batch_size = 4,
            "scheduler_metadata.batch_size is 4, must be 2",
        ),
        (
            |m| call(m).max_seqlen_q = 2,
            "scheduler_metadata.max_seqlen_q is 2, must be 1",
        ),
        (
            |m| call(m).max_seqlen_k = 39,
            "scheduler_metadata.max_seqlen_k is 39, must be 40",
        ),
        (
            |m| call(m).num_heads_q = 16,
            "scheduler_metadata.num_heads_q is 16, must be 8",
        ),
        (
            |m| call(m).num_heads_kv = 2,
            "scheduler_metadata.num_heads_kv is 2, must be 1",
        ),
        (
            |m| call(m).headdim = 64,
            "scheduler_metadata.headdim is 64, must be 16",
        ),
        (
            |m| call(m).headdim_v = 64,
            "scheduler_metadata.headdim_v is 64, must be 48",
        ),
        (
            |m| call(m).cache_seqlens = Tensor::Input(Input::SeqLens),
            "scheduler_metadata.cache_seqlens must refer to the step's own key lengths, as the record has them",
        ),
        (
            |m| call(m).qkv_dtype = Dtype::Float16,
            "scheduler_metadata.qkv_dtype is 1, must be as configured (2)",
        ),
        (
            |m| call(m).cu_seqlens_q = foreign(),
            "scheduler_metadata.cu_seqlens_q must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| call(m).page_size = 64,
            "scheduler_metadata.page_size is 64, must be 16",
        ),
        (
            |m| call(m).causal = false,
            "scheduler_metadata.causal is 0, must be as configured (1)",
        ),
        (
            |m| call(m).num_splits = 2,
            "scheduler_metadata.num_splits is 2, must be 3",
        ),
        (
            |m| call(m).scheduler_metadata_len = 1 << 20,
            "scheduler_metadata.scheduler_metadata_len is 1048576, must be at most 273",
        ),
    ];
    check(&batch, &base, cases);
}

fn tiles(record: &mut flash_mla::Metadata) -> (&mut Matrix, &mut Vec<i32>) {
    match &mut decode(record).schedule {
        DecodeSchedule::Tiles(TileSchedule {
            tile_scheduler_metadata: Tensor::Matrix(parts),
            num_splits: Tensor::Values(splits),
        }) => (parts, splits),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tile_schedule_has_every_page_of_every_decode_once() {
    let batch = fixed_batch(fixed_config());
    let mut base = good(&batch);
    // Three pages and two. The first part takes two, the second the rest of the first request and a page of the next.
    decode(&mut base).max_num_splits = 2;
    decode(&mut base).schedule = DecodeSchedule::Tiles(TileSchedule {
        tile_scheduler_metadata: Tensor::Matrix(Matrix {
            rows: 4,
            columns: 8,
            values: [
                [0, 0, 0, 2, 0, 0, 0, 0],
                [0, 2, 1, 1, 1, 0, 0, 0],
                [1, 1, 1, 2, 1, 0, 0, 0],
                [2, 0, 2, 0, 0, 0, 0, 0],
            ]
            .concat(),
        }),
        num_splits: Tensor::Values(vec![0, 2, 4]),
    });
    let cases: &[Break] = &[
        (
            |m| tiles(m).0.columns = 4,
            "schedule.tile_scheduler_metadata is 4, must be 8",
        ),
        (
            |m| tiles(m).0.rows = 3,
            "schedule.tile_scheduler_metadata has 32 elements, must have 24",
        ),
        (
            |m| tiles(m).0.values[3] = 1,
            "schedule.tile_scheduler_metadata[1] is 2, must be 1",
        ),
        (
            |m| tiles(m).0.values[3] = 4,
            "schedule.tile_scheduler_metadata[0] is 4, must be at most 3",
        ),
        (
            |m| tiles(m).0.values[8] = 1,
            "schedule.tile_scheduler_metadata[1] is 1, must be 0",
        ),
        (
            |m| tiles(m).0.values[10] = 2,
            "schedule.tile_scheduler_metadata[1] is 2, must be at most 1",
        ),
        (
            |m| tiles(m).0.values[11] = 0,
            "schedule.tile_scheduler_metadata[1] is 0, must be at least 1",
        ),
        (
            |m| tiles(m).0.values[12] = 0,
            "schedule.tile_scheduler_metadata[1] is 0, must be 1",
        ),
        (
            |m| tiles(m).0.values[13] = 7,
            "schedule.tile_scheduler_metadata[1] is 7, must be 0",
        ),
        // The last page is nobody's.
        (
            |m| {
                let (parts, _) = tiles(m);
                parts.rows = 2;
                parts.values.truncate(16);
            },
            "schedule.tile_scheduler_metadata is 1, must be at least 2",
        ),
        (
            |m| tiles(m).0.values[27] = 1,
            "schedule.tile_scheduler_metadata[3] is 1, must be 0",
        ),
        (|m| tiles(m).1[0] = 1, "schedule.num_splits is 1, must be 0"),
        (
            |m| tiles(m).1[1] = 1,
            "schedule.num_splits[1] is 1, must be 2",
        ),
        (
            |m| tiles(m).1[2] = 3,
            "schedule.num_splits[2] is 3, must be 4",
        ),
        (
            |m| tiles(m).1.push(4),
            "schedule.num_splits has 4 elements, must have 3",
        ),
        (
            |m| decode(m).max_num_splits = 1,
            "schedule.max_num_splits is 1, must be at least 2",
        ),
    ];
    check(&batch, &base, cases);
    let mut tensor = base.clone();
    if let DecodeSchedule::Tiles(schedule) = &mut decode(&mut tensor).schedule {
        schedule.num_splits = Tensor::SegmentIds;
    }
    assert_eq!(
        verdict(&batch, &tensor),
        "schedule.num_splits must refer to the step's own splits, by value"
    );
}

#[test]
fn every_field_of_prefills_has_a_rule() {
    let batch = fixed_batch(fixed_config());
    let cases: &[Break] = &[
        (
            |m| prefill(m).block_table = Tensor::Input(Input::BlockTable),
            "prefill.block_table must refer to the step's own block_table of its rows",
        ),
        (
            |m| {
                prefill(m).query_start_loc =
                    Tensor::RebasedQueryStartLoc(RowRange { start: 1, end: 4 });
            },
            "prefill.query_start_loc must refer to the step's own query_start_loc of its rows, rebased",
        ),
        (
            |m| prefill(m).max_query_len = 19,
            "prefill.max_query_len is 19, must be at least 20",
        ),
        (
            |m| prefill(m).q_data_type = Dtype::Float32,
            "prefill.q_data_type is 0, must be as configured (2)",
        ),
        (
            |m| prefill(m).output_dtype = Dtype::Float8E4m3,
            "prefill.output_dtype is 3, must be as configured (2)",
        ),
        (
            |m| prefill(m).query_lens_cpu[0] = 19,
            "prefill.query_lens_cpu[0] is 19, must be 20",
        ),
        (
            |m| prefill(m).query_lens_cpu.truncate(1),
            "prefill.query_lens_cpu has 1 elements, must have 2",
        ),
        (
            |m| prefill(m).use_dense_mha = true,
            "prefill.use_dense_mha is 1, must be as configured (0)",
        ),
        (
            |m| prefill(m).chunked_context = None,
            "prefill.chunked_context is missing",
        ),
        (
            |m| context(m).context_lens[0] = 11,
            "chunked_context.context_lens[0] is 11, must be 12",
        ),
        (
            |m| context(m).workspace.shape[0] = 11,
            "chunks.num_context_tokens is 12, must be at most 11",
        ),
        (
            |m| context(m).workspace.shape[0] = 1 << 26,
            "chunked_context.workspace is 67108864, must be at most 33554432",
        ),
        (
            |m| context(m).workspace.shape[1] = 576,
            "chunked_context.workspace[1] is 576, must be 64",
        ),
        (
            |m| context(m).workspace.shape.truncate(1),
            "chunked_context.workspace has 1 elements, must have 2",
        ),
        (
            |m| context(m).workspace.dtype = Dtype::Int32,
            "chunked_context.workspace is 6, must be as configured (2)",
        ),
        (
            |m| context(m).chunks.clear(),
            "chunked_context.chunks is 0, must be at least 2",
        ),
        (
            |m| context(m).empty_token_slices.clear(),
            "chunked_context.empty_token_slices has 0 elements, must have 1",
        ),
        (
            |m| context(m).empty_token_slices[0].start = 19,
            "chunked_context.empty_token_slices is 19, must be 20",
        ),
        (
            |m| {
                let last = context(m).chunks[0].clone();
                context(m).chunks.push(last);
            },
            "chunked_context.chunks.index is 0, must be 1",
        ),
        (
            |m| {
                let mut last = context(m).chunks[0].clone();
                last.index = 1;
                context(m).chunks.push(last);
            },
            "chunks.request_slice is given, must be absent",
        ),
    ];
    check(&batch, &good(&batch), cases);
}

/// Prefills with contexts of 40, 0, 33 and 20 tokens and 5, 3, 2 and 1 tokens of their own, in a workspace of 48 rows.
fn chunked(world: u32) -> (Batch, flash_mla::Metadata) {
    let mut config = fixed_config();
    config.parallel.dcp_world_size = world;
    config.kv_cache_spec.dcp_sharded = world > 1;
    config.parallel.cp_kv_cache_interleave_size = 8;
    let mut batch = fixed_batch(config);
    let (tensors, cam) = (&mut batch.step.tensors, &mut batch.step.cam);
    tensors.query_start_loc = vec![0, 5, 8, 10, 11];
    tensors.seq_lens = vec![45, 3, 35, 21];
    cam.query_start_loc_cpu = vec![0, 5, 8, 10, 11];
    cam.seq_lens_cpu_upper_bound = vec![45, 3, 35, 21];
    (cam.max_query_len, cam.max_seq_len) = (5, 45);
    (cam.num_actual_tokens, cam.slot_mapping_len) = (11, 11);
    tensors.slot_mapping.truncate(11);
    let mut record = good(&batch);
    assert_eq!((record.num_decodes, record.num_prefills), (0, 4));
    let workspace = ContextWorkspace::new(&batch.config, 48 * world).expect("a workspace");
    prefill(&mut record).chunked_context = workspace
        .chunked_context(vec![40, 0, 33, 20], &[0, 5, 8, 10, 11])
        .expect("a plan");
    (batch, record)
}

#[test]
fn every_field_of_chunks_has_a_rule() {
    let (batch, base) = chunked(1);
    let shape = base.prefill.as_ref().unwrap().chunked_context.as_ref();
    let slices: Vec<(u32, u32, bool)> = shape
        .unwrap()
        .chunks
        .iter()
        .map(|chunk| {
            let slice = &chunk.request_slice;
            (slice.start, slice.end, chunk.is_continuation)
        })
        .collect();
    // A row without context ends a chunk; the third row's context is whole, and 15 rows are no page of the fourth.
    assert_eq!(slices, [(0, 1, false), (2, 3, false), (3, 4, false)]);
    let cases: &[Break] = &[
        (
            |m| chunk(m, 0).request_slice.end = 2,
            "chunks.token_slice is 5, must be 8",
        ),
        (
            |m| chunk(m, 1).request_slice.start = 1,
            "chunks.request_slice is 1, must be 2",
        ),
        (
            |m| chunk(m, 1).token_slice.start = 7,
            "chunks.token_slice is 7, must be 8",
        ),
        (
            |m| chunk(m, 1).continuation_token_end = 8,
            "chunks.continuation_token_end is 8, must be 10",
        ),
        (
            |m| chunk(m, 1).is_continuation = true,
            "chunks.is_continuation is 1, must be as configured (0)",
        ),
        (
            |m| chunk(m, 1).num_context_tokens = 32,
            "chunks.num_context_tokens is 32, must be 33",
        ),
        (
            |m| chunk(m, 0).query_start_loc[1] = 4,
            "chunks.query_start_loc[1] is 4, must be 5",
        ),
        (
            |m| chunk(m, 0).max_query_len = 4,
            "chunks.max_query_len is 4, must be at least 5",
        ),
        (
            |m| chunk(m, 1).max_query_len = 6,
            "chunks.max_query_len is 6, must be at most 5",
        ),
        (
            |m| chunk(m, 0).cu_seq_lens[1] = 41,
            "chunks.cu_seq_lens[1] is 41, must be 40",
        ),
        (
            |m| chunk(m, 0).starts[0] = 16,
            "chunks.starts[0] is 16, must be 0",
        ),
        (
            |m| chunk(m, 0).max_seq_len = 39,
            "chunks.max_seq_len is 39, must be at least 40",
        ),
        (
            |m| chunk(m, 0).seq_lens[0] = 41,
            "chunks.seq_lens[0] is 41, must be at most 40",
        ),
        (
            |m| chunk(m, 0).seq_lens[0] = 39,
            "chunks.seq_lens[0] is 39, must be a positive multiple of 16",
        ),
        (
            |m| chunk(m, 0).seq_lens[0] = 0,
            "chunks.seq_lens[0] is 0, must be at least 1",
        ),
        (
            |m| chunk(m, 0).token_to_seq = Tensor::TokenToRow,
            "chunks.token_to_seq must refer to the step's own segment ids",
        ),
        (
            |m| chunk(m, 0).all_rows_active = false,
            "chunks.all_rows_active is 0, must be as configured (1)",
        ),
        (
            |m| chunk(m, 0).num_local_context_tokens = 20,
            "chunks.num_local_context_tokens is 20, must be 40",
        ),
        // A page of the first context is left out.
        (
            |m| {
                let chunk = chunk(m, 0);
                chunk.seq_lens = vec![32];
                chunk.cu_seq_lens = vec![0, 32];
                (chunk.num_context_tokens, chunk.num_local_context_tokens) = (32, 32);
            },
            "chunks.request_slice is 2, must be 0",
        ),
        (
            |m| drop(context(m).chunks.pop()),
            "chunked_context.chunks is 3, must be at least 4",
        ),
    ];
    check(&batch, &base, cases);
    let mut dcp = base;
    let (_, sharded) = chunked(2);
    chunk(&mut dcp, 0).dcp = sharded.prefill.unwrap().chunked_context.unwrap().chunks[0]
        .dcp
        .clone();
    assert_eq!(verdict(&batch, &dcp), "chunks.dcp is given, must be absent");
}

#[test]
fn a_context_may_go_on_in_the_next_chunk() {
    let (batch, mut base) = chunked(1);
    let workspace = ContextWorkspace::new(&batch.config, 32).expect("a workspace");
    prefill(&mut base).chunked_context = workspace
        .chunked_context(vec![40, 0, 33, 20], &[0, 5, 8, 10, 11])
        .expect("a plan");
    let cases: &[Break] = &[
        (
            |m| chunk(m, 1).is_continuation = false,
            "chunks.is_continuation is 0, must be as configured (1)",
        ),
        (
            |m| chunk(m, 1).starts[0] = 0,
            "chunks.starts[0] is 0, must be 32",
        ),
        (
            |m| chunk(m, 1).seq_lens[0] = 9,
            "chunks.seq_lens[0] is 9, must be at most 8",
        ),
        (
            |m| context(m).workspace.shape[0] = 31,
            "chunks.num_context_tokens is 32, must be at most 31",
        ),
    ];
    check(&batch, &base, cases);
}

fn ranks(record: &mut flash_mla::Metadata, index: usize) -> &mut flash_mla::DcpContextChunk {
    chunk(record, index).dcp.as_mut().expect("ranks")
}

#[test]
fn context_parallel_fields_have_rules() {
    let (batch, base) = chunked(2);
    let cases: &[Break] = &[
        (|m| chunk(m, 0).dcp = None, "chunks.dcp is missing"),
        (
            |m| ranks(m, 0).padded_local_seq_lens[0] = 20,
            "chunks.padded_local_seq_lens[0] is 20, must be 24",
        ),
        (
            |m| ranks(m, 0).local_context_lens_allranks[1] = 24,
            "chunks.local_context_lens_allranks[1] is 24, must be 16",
        ),
        (
            |m| ranks(m, 0).local_context_lens_allranks.truncate(1),
            "chunks.local_context_lens_allranks has 1 elements, must have 2",
        ),
        (
            |m| ranks(m, 0).padded_local_cu_seq_lens[1] = 25,
            "chunks.padded_local_cu_seq_lens[1] is 25, must be 24",
        ),
        (
            |m| ranks(m, 0).padded_local_token_to_seq = Tensor::TokenToRow,
            "chunks.padded_local_token_to_seq must refer to the step's own segment ids",
        ),
        (
            |m| ranks(m, 0).local_starts[0] = 8,
            "chunks.local_starts[0] is 8, must be 0",
        ),
        (
            |m| chunk(m, 0).num_local_context_tokens = 40,
            "chunks.num_local_context_tokens is 40, must be 24",
        ),
        // A rank's own 24 rows, and 48 of both.
        (
            |m| context(m).workspace.shape[0] = 71,
            "chunks.num_context_tokens is 72, must be at most 71",
        ),
    ];
    check(&batch, &base, cases);

    let mut config = fixed_config();
    config.parallel.dcp_world_size = 2;
    config.kv_cache_spec.dcp_sharded = true;
    let batch = fixed_batch(config);
    let base = good(&batch);
    // Lengths 40 and 17: this rank has 20 and 9 of them.
    let cases: &[Break] = &[
        (
            |m| m.max_seq_len = 19,
            "max_seq_len is 19, must be at least 20",
        ),
        (
            |m| m.max_seq_len = 2_049,
            "max_seq_len is 2049, must be at most 2048",
        ),
        (
            |m| decode(m).max_seq_len = 19,
            "decode.max_seq_len is 19, must be at least 20",
        ),
        (
            |m| decode(m).dcp_tot_seq_lens = None,
            "decode.dcp_tot_seq_lens is missing",
        ),
        (
            |m| {
                decode(m).seq_lens = Tensor::DcpLocal(DcpLocal {
                    source: DcpSource::ContextLens,
                    rows: RowRange { start: 0, end: 2 },
                });
            },
            "decode.seq_lens must refer to the step's own dcp_local_seq_lens of its rows",
        ),
        (
            |m| {
                decode(m).seq_lens = Tensor::Slice(TensorSlice {
                    source: Input::DcpLocalSeqLens,
                    start: 0,
                    end: 2,
                });
            },
            "accepted",
        ),
        (
            |m| {
                decode(m).schedule = DecodeSchedule::Tiles(TileSchedule {
                    tile_scheduler_metadata: Tensor::SegmentIds,
                    num_splits: Tensor::SegmentIds,
                });
            },
            "schedule.tile_scheduler_metadata is given, must be absent",
        ),
    ];
    check(&batch, &base, cases);
}

#[test]
fn a_captured_graph_holds_decodes_only() {
    let batch = fixed_batch(fixed_config());
    let mut promise = LaunchPromise {
        max_num_splits: 2,
        max_work_items: 0,
        scratch_bytes: 0,
        max_query_len: 20,
        uniform_query_len: None,
    };
    assert_eq!(
        within(&batch, &good(&batch), Some(&promise)),
        "prefill is given, must be absent"
    );
    let mut batch = batch;
    let (tensors, cam) = (&mut batch.step.tensors, &mut batch.step.cam);
    tensors.query_start_loc = vec![0, 1, 2, 3, 3];
    cam.query_start_loc_cpu = vec![0, 1, 2, 3, 3];
    cam.max_query_len = 1;
    promise.max_query_len = 1;
    let mut record = good(&batch);
    assert_eq!((record.num_decodes, record.num_decode_tokens), (4, 24));
    assert_eq!(within(&batch, &record, Some(&promise)), "accepted");
    decode(&mut record).max_num_splits = 3;
    assert_eq!(
        within(&batch, &record, Some(&promise)),
        "decode.max_num_splits is 3, must be at most 2"
    );
}

#[test]
fn steps_that_are_not_causal_have_no_group() {
    let mut batch = fixed_batch(fixed_config());
    let record = good(&batch);
    for causal in [Causal::All(false), Causal::PerRequest] {
        batch.step.cam.causal = causal;
        batch.step.tensors.causal = Some(vec![1; 4]);
        assert_eq!(
            verdict(&batch, &record),
            "causal is 1, must be as configured (1)"
        );
        let mut builder = plain_builder(Family::FlashMla, &batch.config).expect("plain");
        let error = builder.build(&batch.step.cam, false).expect_err("declined");
        assert!(
            error
                .to_string()
                .contains("Non-causal multi-token MLA requires"),
            "{error}"
        );
    }
}
