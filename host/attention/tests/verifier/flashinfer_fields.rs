//! FLASHINFER: each field of its records, broken once.

use timetable_attention::{
    Grant, VerifyContext,
    types::{
        Causal, DcpLocal, DcpSource, Dtype, Input, KvCacheLayout, LaunchPromise, Metadata,
        PageSelection, RowRange, Tensor, TensorSlice,
        flashinfer::{self, Decode, Plan, PlanFunction, Prefill, TrtllmDecode, TrtllmKernel},
    },
    verify,
};

use crate::{
    clever,
    support::{Batch, Random, fixed_batch, fixed_config},
};

/// One decode a row; chunks of one page, so that there is something to merge.
pub fn good(batch: &Batch) -> flashinfer::Metadata {
    let Metadata::Flashinfer(record) = clever::flashinfer(batch, &mut Random(7)) else {
        panic!("another family");
    };
    record
}

pub fn verdict(batch: &Batch, record: &flashinfer::Metadata, grant: Grant) -> String {
    let metadata = Metadata::Flashinfer(record.clone());
    batch.with(grant, |ctx| match verify(&metadata, ctx) {
        Ok(()) => "accepted".to_owned(),
        Err(refusal) => refusal.to_string(),
    })
}

fn decode(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.decode {
        Some(Decode::Wrapper(plan)) => plan,
        _ => panic!("no decode plan"),
    }
}

fn prefill(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.prefill {
        Some(Prefill::Wrapper(plan)) => plan,
        _ => panic!("no prefill plan"),
    }
}

/// Columns, page pointers, lengths, and what is said of them.
type Selection = (&'static [u32], &'static [i32], &'static [i32], &'static str);

type Break = (fn(&mut flashinfer::Metadata), &'static str);

#[test]
fn every_field_of_the_record_has_a_rule() {
    let cases: &[Break] = &[
        (
            |m| m.kv_cache_layout = KvCacheLayout::Lbhnc,
            "kv_cache_layout is 1, must be as configured (0)",
        ),
        (
            |m| m.num_actual_tokens = 22,
            "num_actual_tokens is 22, must be 24",
        ),
        (
            |m| m.slot_mapping = Tensor::Input(Input::Positions),
            "slot_mapping must refer to the step's own slot_mapping",
        ),
        (
            |m| m.q_data_type_prefill = Dtype::Float16,
            "q_data_type_prefill is 1, must be as configured (2)",
        ),
        (
            |m| m.q_data_type_decode = Dtype::Float8E4m3,
            "q_data_type_decode is 3, must be as configured (2)",
        ),
        (|m| m.num_decodes = 5, "num_decodes is 5, must be at most 4"),
        (|m| m.num_decodes = 1, "num_prefills is 2, must be 3"),
        (|m| m.num_prefills = 1, "num_prefills is 1, must be 2"),
        (
            |m| m.num_decode_tokens = 3,
            "num_decode_tokens is 3, must be 2",
        ),
        (
            |m| m.num_prefill_tokens = 20,
            "num_prefill_tokens is 20, must be 22",
        ),
        (
            |m| m.causal = false,
            "causal is 0, must be as configured (1)",
        ),
        (|m| m.prefill = None, "prefill is missing"),
        (|m| m.decode = None, "decode is missing"),
    ];
    let batch = fixed_batch(fixed_config());
    assert_eq!(verdict(&batch, &good(&batch), Grant::Exact), "accepted");
    for (change, expected) in cases {
        let mut record = good(&batch);
        change(&mut record);
        assert_eq!(verdict(&batch, &record, Grant::Exact), *expected);
    }
    let mut per_request = fixed_batch(fixed_config());
    let record = good(&per_request);
    per_request.step.cam.causal = Causal::PerRequest;
    assert_eq!(
        verdict(&per_request, &record, Grant::Exact),
        "causal is 1, must be as configured (0)"
    );
}

#[test]
fn every_field_of_a_plan_has_a_rule() {
    let cases: &[Break] = &[
        (
            |m| decode(m).function = PlanFunction::BatchPrefillPlan,
            "decode.function is 2, must be as configured (0)",
        ),
        (
            |m| prefill(m).function = PlanFunction::BatchDecodePlan,
            "prefill.function is 0, must be as configured (2)",
        ),
        (
            |m| prefill(m).function = PlanFunction::BatchDcpPrefillPlan,
            "prefill.function is 3, must be as configured (2)",
        ),
        (
            |m| prefill(m).qo_indptr = Tensor::Input(Input::QueryStartLoc),
            "prefill.qo_indptr must refer to the step's own query_start_loc of its rows, rebased",
        ),
        (
            |m| decode(m).qo_indptr = Tensor::Values(vec![0, 1, 2]),
            "decode.qo_indptr must refer to the step's own query_start_loc of its rows, rebased",
        ),
        (
            |m| decode(m).paged_kv_indptr = vec![0, 3],
            "decode.paged_kv_indptr has 2 elements, must have 3",
        ),
        (
            |m| decode(m).paged_kv_indptr = vec![1, 3, 5],
            "decode.paged_kv_indptr[0] is 1, must be 0",
        ),
        (
            |m| decode(m).paged_kv_indptr = vec![0, 2, 5],
            "decode.paged_kv_indptr[1] is 2, must be 3",
        ),
        (
            |m| decode(m).paged_kv_indptr = vec![0, 3, 6],
            "decode.paged_kv_indptr[2] is 6, must be 5",
        ),
        (
            |m| decode(m).paged_kv_indptr[1] = i32::MIN,
            "decode.paged_kv_indptr[1] is -2147483648, must be 3",
        ),
        (
            |m| decode(m).paged_kv_indices = Tensor::GatherPages(RowRange { start: 1, end: 3 }),
            "decode.paged_kv_indices must refer to the step's own block_table of its rows, by pages",
        ),
        (
            |m| decode(m).paged_kv_indices = Tensor::Values(vec![4, 5, 6, 7, 8]),
            "decode.paged_kv_indices must refer to the step's own block_table of its rows, by pages",
        ),
        (
            |m| decode(m).paged_kv_last_page_len = vec![8],
            "decode.paged_kv_last_page_len has 1 elements, must have 2",
        ),
        (
            |m| decode(m).paged_kv_last_page_len[0] = 9,
            "decode.paged_kv_last_page_len[0] is 9, must be 8",
        ),
        // A full page has 16 keys, not 0; padding has none.
        (
            |m| prefill(m).paged_kv_last_page_len[0] = 0,
            "prefill.paged_kv_last_page_len[0] is 0, must be 16",
        ),
        (
            |m| prefill(m).paged_kv_last_page_len[1] = 16,
            "prefill.paged_kv_last_page_len[1] is 16, must be 0",
        ),
        (
            |m| decode(m).seq_lens[1] = 18,
            "decode.seq_lens[1] is 18, must be 17",
        ),
        (
            |m| decode(m).seq_lens.push(1),
            "decode.seq_lens has 3 elements, must have 2",
        ),
        (
            |m| decode(m).num_qo_heads = 16,
            "decode.num_qo_heads is 16, must be 8",
        ),
        (
            |m| decode(m).num_kv_heads = 8,
            "decode.num_kv_heads is 8, must be 2",
        ),
        (
            |m| decode(m).head_dim = 128,
            "decode.head_dim is 128, must be 64",
        ),
        (
            |m| decode(m).page_size = 8,
            "decode.page_size is 8, must be 16",
        ),
        (
            |m| prefill(m).causal = false,
            "prefill.causal is 0, must be as configured (1)",
        ),
        (
            |m| prefill(m).sm_scale = 1.0,
            "prefill.sm_scale is 1, must be as configured (0)",
        ),
        (
            |m| prefill(m).sm_scale = f64::NAN,
            "prefill.sm_scale is 0, must be as configured (0)",
        ),
        (
            |m| prefill(m).window_left = 15,
            "prefill.window_left is 15, must be as configured (-1)",
        ),
        (
            |m| prefill(m).logits_soft_cap = Some(30.0),
            "prefill.logits_soft_cap is 30, must be as configured (0)",
        ),
        (
            |m| prefill(m).q_data_type = Dtype::Uint8,
            "prefill.q_data_type is 5, must be as configured (2)",
        ),
        (
            |m| prefill(m).kv_data_type = Dtype::Float8E5m2,
            "prefill.kv_data_type is 4, must be as configured (2)",
        ),
        (
            |m| prefill(m).o_data_type = Dtype::Float32,
            "prefill.o_data_type is 0, must be as configured (2)",
        ),
        (
            |m| prefill(m).fixed_split_size = 0,
            "prefill.fixed_split_size is 0, must be at least 1",
        ),
        (
            |m| decode(m).q_len_per_req = 0,
            "decode.q_len_per_req is 0, must be at least 1",
        ),
        (
            |m| decode(m).q_len_per_req = 21,
            "decode.q_len_per_req is 21, must be at most 20",
        ),
        (
            |m| decode(m).dcp_world_size = 2,
            "decode.dcp_world_size is 2, must be 1",
        ),
        (
            |m| decode(m).cudagraph_batch_size = 1,
            "decode.cudagraph_batch_size is 1, must be at least 2",
        ),
        (
            |m| decode(m).cudagraph_batch_size = 3,
            "decode.cudagraph_batch_size is 3, must be at most 2",
        ),
        (
            |m| prefill(m).cudagraph_batch_size = 2,
            "prefill.cudagraph_batch_size is 2, must be at most 0",
        ),
        (
            |m| decode(m).disable_split_kv = true,
            "decode.work.split_kv is 1, must be 0",
        ),
    ];
    let batch = fixed_batch(fixed_config());
    for (change, expected) in cases {
        let mut record = good(&batch);
        change(&mut record);
        assert_eq!(verdict(&batch, &record, Grant::Exact), *expected);
    }
}

#[test]
fn every_field_of_a_work_list_has_a_rule() {
    // Decodes of 40 and 17 keys in chunks of 16: items (row, tile, chunk) below, 3 and 2 partial results.
    let batch = fixed_batch(fixed_config());
    let mut base = good(&batch);
    let work = &mut decode(&mut base).work;
    work.request_indices = vec![0, 0, 0, 1, 1];
    work.qo_tile_indices = vec![0; 5];
    work.kv_tile_indices = vec![0, 1, 2, 0, 1];
    work.worker_indptr = vec![0, 2, 3, 5, 5];
    assert_eq!(
        (work.kv_chunk_size, &work.merge_indptr),
        (16, &vec![0, 3, 5])
    );
    assert_eq!(verdict(&batch, &base, Grant::Exact), "accepted");
    let cases: &[Break] = &[
        (
            |m| decode(m).work.kv_chunk_size = 0,
            "kv_chunk_size is 0, must be a positive multiple of 16",
        ),
        (
            |m| decode(m).work.kv_chunk_size = 24,
            "kv_chunk_size is 24, must be a positive multiple of 16",
        ),
        (
            |m| decode(m).work.kv_chunk_size = 32,
            "kv_tile_indices[2] is 2, must be below 2",
        ),
        (
            |m| decode(m).work.cta_tile_q = 0,
            "cta_tile_q is 0, must be one of 16, 64, 128",
        ),
        (
            |m| decode(m).work.cta_tile_q = 1 << 17,
            "cta_tile_q is 131072, must be one of 16, 64, 128",
        ),
        (
            |m| decode(m).work.kv_chunk_size = 1 << 31,
            "kv_chunk_size is 2147483648, must be at most 1073741824",
        ),
        (
            |m| decode(m).work.cta_tile_q -= 1,
            "cta_tile_q is 15, must be one of 16, 64, 128",
        ),
        (
            |m| decode(m).work.request_indices[4] = 2,
            "request_indices[4] is 2, must be below 2",
        ),
        (
            |m| decode(m).work.request_indices[4] = -1,
            "request_indices[4] is -1, must be at least 0",
        ),
        (
            |m| decode(m).work.request_indices[4] = 0,
            "kv_tile_indices[4] is 1, which occurred before; each may occur once",
        ),
        (
            |m| decode(m).work.request_indices.truncate(4),
            "qo_tile_indices has 5 elements, must have 4",
        ),
        (
            |m| decode(m).work.qo_tile_indices[1] = 1,
            "qo_tile_indices[1] is 1, must be below 1",
        ),
        (
            |m| decode(m).work.qo_tile_indices.truncate(4),
            "qo_tile_indices has 4 elements, must have 5",
        ),
        (
            |m| decode(m).work.kv_tile_indices[2] = 3,
            "kv_tile_indices[2] is 3, must be below 3",
        ),
        (
            |m| decode(m).work.kv_tile_indices[2] = 1,
            "kv_tile_indices[2] is 1, which occurred before; each may occur once",
        ),
        (
            |m| decode(m).work.kv_tile_indices.truncate(4),
            "kv_tile_indices has 4 elements, must have 5",
        ),
        (
            |m| decode(m).work.worker_indptr = vec![],
            "worker_indptr has 0 elements, must have 1",
        ),
        (
            |m| decode(m).work.worker_indptr = vec![0, 3, 2, 5],
            "worker_indptr[2] is 2, must be at least 3",
        ),
        (
            |m| decode(m).work.worker_indptr = vec![0, 3, 4],
            "worker_indptr[2] is 4, must be 5",
        ),
        (
            |m| decode(m).work.worker_indptr = vec![1, 5],
            "worker_indptr[0] is 1, must be 0",
        ),
        (
            |m| decode(m).work.worker_indptr = vec![0, 1, 2, 3, 4, 5],
            "workers is 5, must be at most 4",
        ),
        (
            |m| decode(m).work.merge_indptr = vec![0, 2, 5],
            "merge_indptr[0] is 2, must be below 2",
        ),
        (
            |m| decode(m).work.merge_indptr = vec![0, 3],
            "merge_indptr has 2 elements, must have 3",
        ),
        (
            |m| decode(m).work.merge_indptr = vec![0, 3, 6],
            "merge_indptr[2] is 6, must be 5",
        ),
        (
            |m| decode(m).work.split_kv = false,
            "split_kv is 0, must be 1",
        ),
        // The last chunk of row 0 left out: its newest keys are unread.
        (
            |m| {
                let work = &mut decode(m).work;
                work.request_indices.remove(2);
                work.qo_tile_indices.remove(2);
                work.kv_tile_indices.remove(2);
                work.worker_indptr = vec![0, 4];
                work.merge_indptr = vec![0, 2, 4];
            },
            "kv_tile_indices[0] is 1, must be at least 2",
        ),
        // The first chunk of row 1 left out: without a window its oldest keys are unread.
        (
            |m| {
                let work = &mut decode(m).work;
                work.request_indices.remove(3);
                work.qo_tile_indices.remove(3);
                work.kv_tile_indices.remove(3);
                work.worker_indptr = vec![0, 4];
                work.merge_indptr = vec![0, 3, 4];
            },
            "kv_tile_indices[1] is 1, must be at most 0",
        ),
    ];
    for (change, expected) in cases {
        let mut record = base.clone();
        change(&mut record);
        assert_eq!(
            verdict(&batch, &record, Grant::Exact),
            format!("decode.work.{expected}")
        );
    }
    let mut few = fixed_batch(fixed_config());
    few.config.max_num_splits = 2;
    assert_eq!(
        verdict(&few, &base, Grant::Exact),
        "decode.work.merge_indptr[0] is 3, must be at most 2"
    );
}

#[test]
fn a_captured_graph_bounds_items_and_splits() {
    let batch = fixed_batch(fixed_config());
    let metadata = Metadata::Flashinfer(good(&batch));
    let with = |promise: &LaunchPromise| {
        batch.with(Grant::Exact, |ctx| {
            let captured = VerifyContext {
                promise: Some(promise),
                ..*ctx
            };
            verify(&metadata, &captured).map_err(|refusal| refusal.to_string())
        })
    };
    let promise = LaunchPromise {
        max_num_splits: 3,
        max_work_items: 100,
        scratch_bytes: 0,
        max_query_len: 20,
        uniform_query_len: None,
    };
    assert_eq!(with(&promise), Ok(()));
    let items = LaunchPromise {
        max_work_items: 4,
        ..promise
    };
    assert_eq!(
        with(&items),
        Err("decode.work.work_items is 5, must be at most 4".to_owned())
    );
    let splits = LaunchPromise {
        max_num_splits: 2,
        ..promise
    };
    assert_eq!(
        with(&splits),
        Err("decode.work.merge_indptr[0] is 3, must be at most 2".to_owned())
    );
}

/// A window lets chunks before it be left out, and no others; rejected speculation moves it down.
#[test]
fn chunks_before_a_window_may_be_left_out() {
    let mut config = fixed_config();
    config.kv_cache_spec.sliding_window = Some(8);
    config.attention.sliding_windows = vec![8];
    let without_first = |config| {
        let batch = fixed_batch(config);
        let mut record = good(&batch);
        let work = &mut decode(&mut record).work;
        // Row 0's query is at 39: it sees keys 32..=39, which are chunk 2.
        work.request_indices = vec![0, 1, 1];
        work.qo_tile_indices = vec![0; 3];
        work.kv_tile_indices = vec![2, 0, 1];
        work.worker_indptr = vec![0, 3];
        work.merge_indptr = vec![0, 1, 3];
        verdict(&batch, &record, Grant::Exact)
    };
    assert_eq!(without_first(config.clone()), "accepted");
    config.scheduler.num_speculative_tokens = 1;
    assert_eq!(
        without_first(config),
        "decode.work.kv_tile_indices[0] is 2, must be at most 1"
    );
}

/// Pages may be chosen only with the grant; then rising, of the row's own, with every block that this step writes.
#[test]
fn selected_pages_need_the_grant_and_the_current_block() {
    let batch = fixed_batch(fixed_config());
    let select = |columns: Vec<u32>, indptr: Vec<i32>, lens: Vec<i32>| {
        let mut record = good(&batch);
        let plan = decode(&mut record);
        plan.paged_kv_indices = Tensor::SelectPages(PageSelection {
            rows: RowRange { start: 0, end: 2 },
            columns,
        });
        plan.paged_kv_indptr = indptr;
        plan.seq_lens = lens;
        clever::split(plan, &[0, 1, 2], 4, &mut Random(3));
        record
    };
    let subset =
        |columns, indptr, lens| verdict(&batch, &select(columns, indptr, lens), Grant::Subset);
    // Row 0 has columns 0, 1, 2 (its token writes column 2), row 1 columns 0 and 1 (it writes 1).
    assert_eq!(
        subset(vec![0, 2, 1], vec![0, 2, 3], vec![24, 1]),
        "accepted"
    );
    assert_eq!(
        verdict(
            &batch,
            &select(vec![0, 2, 1], vec![0, 2, 3], vec![24, 1]),
            Grant::Exact
        ),
        "decode.paged_kv_indices selects blocks without the grant `subset`; ask the operator to grant it"
    );
    let cases: [Selection; 8] = [
        (
            &[0, 1, 1],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices[0] is 1, must be 2",
        ),
        (
            &[2, 0, 1],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices[0] is 0, must be at least 3",
        ),
        (
            &[2, 2, 1],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices[0] is 2, must be at least 3",
        ),
        (
            &[0, 3, 1],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices[0] is 3, must be below 3",
        ),
        (
            &[0, 2],
            &[0, 2, 2],
            &[24, 0],
            "paged_kv_indices[1] is -1, must be 1",
        ),
        (
            &[0, 2, 1],
            &[0, 2, 3],
            &[40, 1],
            "seq_lens[0] is 40, must be 24",
        ),
        (
            &[0, 2],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices is 2, must be at least 3",
        ),
        (
            &[0, 2, 1, 1],
            &[0, 2, 3],
            &[24, 1],
            "paged_kv_indices has 4 elements, must have 3",
        ),
    ];
    for (columns, indptr, lens, expected) in cases {
        let found = subset(columns.to_vec(), indptr.to_vec(), lens.to_vec());
        assert_eq!(found, format!("decode.{expected}"));
    }
}

/// A block that the window has passed may be another request's by now.
#[test]
fn blocks_before_a_window_cannot_be_selected_back() {
    let mut config = fixed_config();
    config.kv_cache_spec.sliding_window = Some(17);
    config.attention.sliding_windows = vec![17];
    let batch = fixed_batch(config);
    // Row 0's query is at 39 and sees keys from 23 on, in columns 1 and 2; row 1's is at 16 and sees all its 17 keys.
    let select = |columns: &[u32], counts: [i32; 2], lens: [i32; 2]| {
        let mut record = good(&batch);
        let plan = decode(&mut record);
        plan.paged_kv_indices = Tensor::SelectPages(PageSelection {
            rows: RowRange { start: 0, end: 2 },
            columns: columns.to_vec(),
        });
        plan.paged_kv_indptr = vec![0, counts[0], counts[0] + counts[1]];
        plan.seq_lens = lens.to_vec();
        clever::split(plan, &[0, 1, 2], 4, &mut Random(3));
        verdict(&batch, &record, Grant::Subset)
    };
    assert_eq!(select(&[1, 2, 0, 1], [2, 2], [24, 17]), "accepted");
    assert_eq!(
        select(&[0, 2, 0, 1], [2, 2], [24, 17]),
        "decode.paged_kv_indices[0] is 0, must be at least 1"
    );
}

#[test]
fn context_parallel_plans_are_of_this_ranks_share() {
    let mut config = fixed_config();
    config.parallel.dcp_world_size = 2;
    config.kv_cache_spec.dcp_sharded = true;
    let batch = fixed_batch(config);
    let record = good(&batch);
    assert_eq!(verdict(&batch, &record, Grant::Exact), "accepted");
    // Decodes hold 20 and 9 of their keys here; the prefill's context of 12 has 6.
    let mut global = record.clone();
    decode(&mut global).seq_lens[0] = 40;
    assert_eq!(
        verdict(&batch, &global, Grant::Exact),
        "decode.seq_lens[0] is 40, must be 20"
    );
    let mut whole = record.clone();
    prefill(&mut whole).seq_lens[0] = 16;
    assert_eq!(
        verdict(&batch, &whole, Grant::Exact),
        "prefill.seq_lens[0] is 16, must be 6"
    );
    let mut plain = record.clone();
    prefill(&mut plain).function = PlanFunction::BatchPrefillPlan;
    assert_eq!(
        verdict(&batch, &plain, Grant::Exact),
        "prefill.function is 2, must be as configured (2)"
    );
    let mut heads = record.clone();
    decode(&mut heads).num_qo_heads = 8;
    assert_eq!(
        verdict(&batch, &heads, Grant::Exact),
        "decode.num_qo_heads is 8, must be 16"
    );
    // The rank's own lengths, by reference, for the kernels that read them on the device.
    let mut trtllm = record;
    let mut sharded = fixed_batch(batch.config);
    sharded.config.device.trtllm_attention = true;
    let rows = RowRange { start: 0, end: 2 };
    let mut decode = TrtllmDecode {
        kernel: TrtllmKernel::TrtllmGen,
        block_tables: Tensor::Slice(TensorSlice {
            source: Input::BlockTable,
            start: 0,
            end: 2,
        }),
        seq_lens: Tensor::DcpLocal(DcpLocal {
            source: DcpSource::SeqLens,
            rows,
        }),
        max_seq_len: 40,
        q_len_per_req: 1,
        q_cu_seq_lens: None,
        mask: None,
        dcp_query_start_loc: Some(Tensor::Slice(TensorSlice {
            source: Input::QueryStartLoc,
            start: 0,
            end: 3,
        })),
    };
    trtllm.decode = Some(Decode::Trtllm(decode.clone()));
    assert_eq!(verdict(&sharded, &trtllm, Grant::Exact), "accepted");
    decode.seq_lens = Tensor::Slice(TensorSlice {
        source: Input::SeqLens,
        start: 0,
        end: 2,
    });
    trtllm.decode = Some(Decode::Trtllm(decode));
    assert_eq!(
        verdict(&sharded, &trtllm, Grant::Exact),
        "decode.seq_lens must refer to the step's own dcp_local_seq_lens of its rows"
    );
}

/// Field cases: page counts and last pages, of full pages and of padding.
#[test]
fn page_pointers_are_the_fields() {
    let mut batch = fixed_batch(fixed_config());
    for (lens, indptr, last) in [
        ([17, 16, 1, 33], [0, 2, 3, 4, 7], [1, 16, 1, 1]),
        ([17, 16, 0, 0], [0, 2, 3, 3, 3], [1, 16, 0, 0]),
    ] {
        let live = lens.iter().filter(|&&len| len > 0).count() as i32;
        let starts: Vec<i32> = (0..=4).map(|row| live.min(row)).collect();
        batch.step.tensors.query_start_loc = starts.clone();
        batch.step.cam.query_start_loc_cpu = starts;
        batch.step.tensors.seq_lens = lens.to_vec();
        batch.step.cam.seq_lens_cpu_upper_bound = lens.to_vec();
        batch.step.cam.num_actual_tokens = 4;
        batch.step.cam.max_query_len = 1;
        let mut record = good(&batch);
        assert_eq!(decode(&mut record).paged_kv_indptr, indptr);
        assert_eq!(decode(&mut record).paged_kv_last_page_len, last);
        assert_eq!(verdict(&batch, &record, Grant::Exact), "accepted");
    }
}
