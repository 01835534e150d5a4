//! FLASH_ATTN: each field of its records, broken once.

use timetable_attention::{
    Grant, VerifyContext, plain_builder, rules,
    types::{
        Causal, Dtype, Family, Input, LaunchPromise, Matrix, Metadata, MmDocRange, PageSelection,
        RowRange, Tensor, TensorSlice,
        flash_attn::{self, Schedule, SchedulerMetadataCall, TileOrder},
    },
    verify,
};

use crate::support::{Batch, fixed_batch, fixed_config};

/// Splits, a tile order and a scheduler call, so that every field has a value to break.
fn good(batch: &Batch) -> flash_attn::Metadata {
    let mut builder = plain_builder(Family::FlashAttn, &batch.config).expect("plain");
    let metadata = builder.build(&batch.step.cam, false).expect("built");
    let Metadata::FlashAttn(mut record) = metadata else {
        panic!("another family");
    };
    record.schedule = Schedule {
        max_num_splits: 3,
        num_splits: vec![3, 1, 2, 1],
        tile_order: TileOrder::Rows(vec![2, 0, 3, 1]),
    };
    let sharded = batch.config.parallel.dcp_world_size > 1;
    record.scheduler_metadata = Some(SchedulerMetadataCall {
        batch_size: 4,
        max_seqlen_q: record.max_query_len,
        max_seqlen_k: if sharded {
            record.max_dcp_context_kv_len
        } else {
            record.max_seq_len
        },
        num_heads_q: 8 * batch.config.parallel.dcp_world_size,
        num_heads_kv: 2,
        headdim: 64,
        cache_seqlens: record
            .dcp_context_kv_lens
            .clone()
            .unwrap_or_else(|| record.seq_lens.clone()),
        qkv_dtype: Dtype::Bfloat16,
        cu_seqlens_q: Tensor::Input(Input::QueryStartLoc),
        page_size: 16,
        causal: !sharded,
        window_size: (-1, -1),
        num_splits: record.max_num_splits,
        scheduler_metadata_len: 17,
    });
    record
}

fn verdict(batch: &Batch, record: &flash_attn::Metadata) -> String {
    let metadata = Metadata::FlashAttn(record.clone());
    batch.with(Grant::Exact, |ctx| match verify(&metadata, ctx) {
        Ok(()) => "accepted".to_owned(),
        Err(refusal) => refusal.to_string(),
    })
}

fn call(record: &mut flash_attn::Metadata) -> &mut SchedulerMetadataCall {
    record.scheduler_metadata.as_mut().expect("given")
}

/// A change that may call closures of its test.
type Case<'a> = (&'a dyn Fn(&mut flash_attn::Metadata), &'a str);

type Break = (fn(&mut flash_attn::Metadata), &'static str);

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
            |m| m.seq_lens = Tensor::Input(Input::DcpLocalSeqLens),
            "seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| m.block_table = FOREIGN(),
            "block_table must refer to the step's own block_table of its rows",
        ),
        (
            |m| {
                m.block_table = Tensor::Slice(TensorSlice {
                    source: Input::BlockTable,
                    start: 1,
                    end: 4,
                });
            },
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
            |m| m.causal = Causal::PerRequest,
            "causal is 2, must be as configured (1)",
        ),
        (
            |m| m.max_dcp_context_kv_len = 1,
            "max_dcp_context_kv_len is 1, must be 0",
        ),
        (
            |m| m.dcp_context_kv_lens = Some(Tensor::Input(Input::SeqLens)),
            "dcp_context_kv_lens is given, must be absent",
        ),
        (|m| m.num_decode_reqs = 2, "num_decode_reqs is 2, must be 0"),
        (
            |m| m.num_prefill_reqs = 1,
            "num_prefill_reqs is 1, must be 0",
        ),
        (
            |m| m.num_decode_tokens = 2,
            "num_decode_tokens is 2, must be 0",
        ),
        (
            |m| m.num_prefill_tokens = 20,
            "num_prefill_tokens is 20, must be 0",
        ),
        (
            |m| m.max_num_splits = 5,
            "max_num_splits is 5, must be at most 4",
        ),
        (
            |m| m.mm_prefix_query_range = Some(FOREIGN()),
            "mm_prefix_query_range is given, must be absent",
        ),
        (
            |m| m.rswa_prefix_lens = Some(Tensor::Input(Input::RswaPrefixLens)),
            "rswa_prefix_lens is given, must be absent",
        ),
        (
            |m| m.rswa_window = 7,
            "rswa_window is 7, must be as configured (0)",
        ),
        (
            |m| m.schedule.max_num_splits = 0,
            "schedule.max_num_splits is 0, must be at least 1",
        ),
        (
            |m| m.schedule.max_num_splits = 5,
            "schedule.max_num_splits is 5, must be at most 4",
        ),
        (
            |m| m.schedule.max_num_splits = 2,
            "schedule.num_splits[0] is 3, must be at most 2",
        ),
        (
            |m| m.schedule.num_splits[1] = 0,
            "schedule.num_splits[1] is 0, must be at least 1",
        ),
        (
            |m| m.schedule.num_splits[1] = i32::MIN,
            "schedule.num_splits[1] is -2147483648, must be at least 1",
        ),
        (
            |m| m.schedule.num_splits.truncate(3),
            "schedule.num_splits has 3 elements, must have 4",
        ),
        (
            |m| m.schedule.tile_order = TileOrder::Rows(vec![0, 1, 2]),
            "schedule.tile_order has 3 elements, must have 4",
        ),
        (
            |m| m.schedule.tile_order = TileOrder::Rows(vec![0, 1, 2, 4]),
            "schedule.tile_order[3] is 4, must be below 4",
        ),
        (
            |m| m.schedule.tile_order = TileOrder::Rows(vec![0, -1, 2, 3]),
            "schedule.tile_order[1] is -1, must be at least 0",
        ),
        (
            |m| m.schedule.tile_order = TileOrder::Rows(vec![0, 1, 1, 3]),
            "schedule.tile_order[2] is 1, which occurred before; each may occur once",
        ),
        (
            |m| call(m).batch_size = 3,
            "scheduler_metadata.batch_size is 3, must be 4",
        ),
        (
            |m| call(m).max_seqlen_q = 1,
            "scheduler_metadata.max_seqlen_q is 1, must be 20",
        ),
        (
            |m| call(m).max_seqlen_k = 1,
            "scheduler_metadata.max_seqlen_k is 1, must be 40",
        ),
        (
            |m| call(m).num_heads_q = 9,
            "scheduler_metadata.num_heads_q is 9, must be 8",
        ),
        (
            |m| call(m).num_heads_kv = 8,
            "scheduler_metadata.num_heads_kv is 8, must be 2",
        ),
        (
            |m| call(m).headdim = 8,
            "scheduler_metadata.headdim is 8, must be 64",
        ),
        (
            |m| call(m).cache_seqlens = FOREIGN(),
            "scheduler_metadata.cache_seqlens must refer to the step's own key lengths, as the record has them",
        ),
        (
            |m| call(m).qkv_dtype = Dtype::Int32,
            "scheduler_metadata.qkv_dtype is 6, must be as configured (2)",
        ),
        (
            |m| call(m).cu_seqlens_q = FOREIGN(),
            "scheduler_metadata.cu_seqlens_q must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| call(m).page_size = 32,
            "scheduler_metadata.page_size is 32, must be 16",
        ),
        (
            |m| call(m).causal = false,
            "scheduler_metadata.causal is 0, must be as configured (1)",
        ),
        (
            |m| call(m).window_size = (63, 0),
            "scheduler_metadata.window_size is 63, must be as configured (-1)",
        ),
        (
            |m| call(m).num_splits = 2,
            "scheduler_metadata.num_splits is 2, must be 1",
        ),
        (
            |m| call(m).scheduler_metadata_len = 1 << 20,
            "scheduler_metadata.scheduler_metadata_len is 1048576, must be at most 273",
        ),
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
fn context_parallel_fields_have_rules() {
    let mut config = fixed_config();
    config.parallel.dcp_world_size = 2;
    config.kv_cache_spec.dcp_sharded = true;
    let batch = fixed_batch(config);
    let base = good(&batch);
    assert_eq!(verdict(&batch, &base), "accepted");
    let counts = |m: &mut flash_attn::Metadata, counts: [u32; 4]| {
        [
            m.num_decode_reqs,
            m.num_decode_tokens,
            m.num_prefill_reqs,
            m.num_prefill_tokens,
        ] = counts;
    };
    // Contexts are 39, 16, 12 and 0; this rank's longest share is 20.
    let cases: &[Case<'_>] = &[
        (
            &|m| m.max_dcp_context_kv_len = 19,
            "max_dcp_context_kv_len is 19, must be at least 20",
        ),
        (
            &|m| m.max_dcp_context_kv_len = 0,
            "max_dcp_context_kv_len is 0, must be at least 20",
        ),
        (
            &|m| m.max_dcp_context_kv_len = 2_050,
            "max_dcp_context_kv_len is 2050, must be at most 2049",
        ),
        (
            &|m| m.dcp_context_kv_lens = None,
            "dcp_context_kv_lens is missing",
        ),
        (
            &|m| m.dcp_context_kv_lens = Some(Tensor::ContextLens(RowRange { start: 0, end: 4 })),
            "dcp_context_kv_lens must refer to the step's own dcp-local context lengths of all rows",
        ),
        (&|m| counts(m, [2, 2, 1, 20]), "accepted"),
        (&|m| counts(m, [2, 2, 2, 22]), "accepted"),
        (
            &|m| counts(m, [5, 22, 0, 0]),
            "num_decode_reqs is 5, must be at most 4",
        ),
        (
            &|m| counts(m, [2, 3, 1, 20]),
            "num_decode_tokens is 3, must be 2",
        ),
        (
            &|m| counts(m, [2, 2, 3, 22]),
            "num_prefill_reqs is 3, must be at most 2",
        ),
        (
            &|m| counts(m, [2, 2, 1, 19]),
            "num_prefill_tokens is 19, must be 20",
        ),
        (
            &|m| counts(m, [2, 2, 0, 0]),
            "num_prefill_reqs[2] is 12, must be 0",
        ),
    ];
    for (change, expected) in cases {
        let mut record = base.clone();
        record.scheduler_metadata = None;
        change(&mut record);
        assert_eq!(verdict(&batch, &record), *expected);
    }
}

#[test]
fn multimodal_spans_have_a_rule() {
    // Tokens 2.. of the step are positions 12.. of row 2.
    let mut batch = fixed_batch(fixed_config());
    batch.step.cam.mm_req_doc_ranges = vec![MmDocRange {
        row: 2,
        start: 10,
        end: 14,
    }];
    let base = good(&batch);
    assert_eq!(verdict(&batch, &base), "accepted");
    let edit = |change: &dyn Fn(&mut Matrix)| {
        let mut record = base.clone();
        let Some(Tensor::Matrix(matrix)) = &mut record.mm_prefix_query_range else {
            panic!("no spans");
        };
        change(matrix);
        verdict(&batch, &record)
    };
    assert_eq!(
        edit(&|m| m.values[4] = 9),
        "mm_prefix_query_range[2] is 9, must be 10"
    );
    assert_eq!(
        edit(&|m| m.values[9] = -1),
        "mm_prefix_query_range[4] is -1, must be 14"
    );
    assert_eq!(
        edit(&|m| m.values[20] = 3),
        "mm_prefix_query_range[10] is 3, must be -1"
    );
    assert_eq!(
        edit(&|m| m.columns = 3),
        "mm_prefix_query_range is 3, must be 2"
    );
    assert_eq!(
        edit(&|m| m.rows = 23),
        "mm_prefix_query_range has 23 elements, must have 24"
    );
    let mut record = base.clone();
    record.mm_prefix_query_range = None;
    assert_eq!(verdict(&batch, &record), "mm_prefix_query_range is missing");
    // The host names a span twice: its tokens are covered once, and no other token gains a span by it.
    let span = batch.step.cam.mm_req_doc_ranges[0].clone();
    batch.step.cam.mm_req_doc_ranges.push(span);
    assert_eq!(verdict(&batch, &base), "accepted");
    let mut record = base;
    if let Some(Tensor::Matrix(matrix)) = &mut record.mm_prefix_query_range {
        matrix.values[20..22].copy_from_slice(&[0, 31]);
    }
    assert_eq!(
        verdict(&batch, &record),
        "mm_prefix_query_range[10] is 0, must be -1"
    );
}

/// The record has no way to leave blocks out, so the grant to do so changes nothing.
#[test]
fn the_grant_subset_allows_no_more() {
    assert!(!rules(Family::FlashAttn).expect("rules").selects_blocks);
    assert!(rules(Family::Flashinfer).expect("rules").selects_blocks);
    let batch = fixed_batch(fixed_config());
    let base = good(&batch);
    for table in [
        Tensor::SelectPages(PageSelection {
            rows: RowRange { start: 0, end: 4 },
            columns: vec![0, 2, 1, 0, 1],
        }),
        Tensor::GatherPages(RowRange { start: 0, end: 4 }),
        Tensor::Slice(TensorSlice {
            source: Input::BlockTable,
            start: 0,
            end: 4,
        }),
    ] {
        let mut record = base.clone();
        record.block_table = table;
        let metadata = Metadata::FlashAttn(record);
        for grant in [Grant::Exact, Grant::Subset] {
            let found = batch.with(grant, |ctx| {
                verify(&metadata, ctx).map_err(|r| r.to_string())
            });
            let refused = "block_table must refer to the step's own block_table of its rows";
            assert_eq!(found, Err(refused.to_owned()), "{grant:?}");
        }
    }
}

#[test]
fn prefix_windows_and_flags_per_request_are_references() {
    let mut config = fixed_config();
    config.attention.use_rswa = true;
    config.attention.rswa_window = 128;
    let mut batch = fixed_batch(config);
    batch.step.tensors.rswa_prefix_lens = Some(vec![30, 10, 32, 0]);
    batch.step.cam.causal = Causal::PerRequest;
    batch.step.tensors.causal = Some(vec![1, 1, 0, 1]);
    let base = good(&batch);
    assert_eq!(verdict(&batch, &base), "accepted");
    let mut record = base.clone();
    record.rswa_prefix_lens = None;
    assert_eq!(verdict(&batch, &record), "rswa_prefix_lens is missing");
    let mut record = base.clone();
    record.rswa_prefix_lens = Some(Tensor::Input(Input::SeqLens));
    assert_eq!(
        verdict(&batch, &record),
        "rswa_prefix_lens must refer to the step's own rswa_prefix_lens"
    );
    let mut record = base.clone();
    record.rswa_window = 127;
    assert_eq!(verdict(&batch, &record), "rswa_window is 127, must be 128");
    let mut record = base;
    record.causal = Causal::All(true);
    assert_eq!(
        verdict(&batch, &record),
        "causal is 1, must be as configured (2)"
    );
}

/// Field cases: the split count is within what the graph was captured with, and so is the longest query.
#[test]
fn a_captured_graph_bounds_splits_and_queries() {
    let batch = fixed_batch(fixed_config());
    let record = good(&batch);
    let promise = LaunchPromise {
        max_num_splits: 3,
        max_work_items: 20,
        scratch_bytes: 0,
        max_query_len: 20,
        uniform_query_len: None,
    };
    let with = |promise: &LaunchPromise, record: &flash_attn::Metadata| {
        let metadata = Metadata::FlashAttn(record.clone());
        batch.with(Grant::Exact, |ctx| {
            let captured = VerifyContext {
                promise: Some(promise),
                ..*ctx
            };
            verify(&metadata, &captured).map_err(|refusal| refusal.to_string())
        })
    };
    assert_eq!(with(&promise, &record), Ok(()));
    let fewer = LaunchPromise {
        max_num_splits: 2,
        ..promise
    };
    assert_eq!(
        with(&fewer, &record),
        Err("schedule.max_num_splits is 3, must be at most 2".to_owned())
    );
    // The sum of the rows' splits, of which the four rows may have one each whatever was promised.
    for (splits, verdict) in [
        (
            vec![3, 1, 1, 1],
            Err("schedule.work_items is 6, must be at most 5"),
        ),
        (vec![2, 1, 1, 1], Ok(())),
    ] {
        let mut sum = record.clone();
        sum.schedule.num_splits = splits;
        let five = LaunchPromise {
            max_work_items: 5,
            ..promise
        };
        assert_eq!(with(&five, &sum), verdict.map_err(str::to_owned));
        sum.schedule.num_splits = vec![1; 4];
        let none = LaunchPromise {
            max_work_items: 0,
            ..promise
        };
        assert_eq!(with(&none, &sum), Ok(()));
    }
    // The field's own maximum, which a full graph's step shows as configured, is not what the graph executes.
    let mut shown = record.clone();
    shown.max_num_splits = batch.config.max_num_splits;
    shown.scheduler_metadata = None;
    assert!(shown.max_num_splits > promise.max_num_splits);
    assert_eq!(with(&promise, &shown), Ok(()));
    let mut longer = record;
    longer.max_query_len = 21;
    longer.scheduler_metadata = None;
    assert_eq!(
        with(&promise, &longer),
        Err("max_query_len is 21, must be at most 20".to_owned())
    );
    let wide = LaunchPromise {
        max_query_len: 64,
        ..promise
    };
    assert_eq!(with(&wide, &longer), Ok(()));
}

/// A field case: after rejected speculation the device's lengths are below the host's bound; nothing needs to know.
#[test]
fn device_lengths_below_the_bound_pass() {
    let mut batch = fixed_batch(fixed_config());
    batch.step.tensors.seq_lens[0] = 37;
    assert_eq!(verdict(&batch, &good(&batch)), "accepted");
}
