//! FLASHINFER on TensorRT-LLM's kernels and XQA: each field of their records, broken once.

use timetable_attention::{
    Grant,
    types::{
        Input, Matrix, RowRange, Tensor, TensorSlice,
        flashinfer::{self, Decode, Prefill, TrtllmDecode, TrtllmKernel, TrtllmPrefill},
    },
};

use crate::{
    flashinfer_fields::{good, verdict},
    support::{Batch, fixed_batch, fixed_config},
};

type Break = (fn(&mut flashinfer::Metadata), &'static str);

/// The configuration of a device with TensorRT-LLM's kernels, or XQA, and a record that uses them.
fn trtllm(kernel: TrtllmKernel) -> (Batch, flashinfer::Metadata) {
    let mut config = fixed_config();
    config.device.trtllm_attention = true;
    config.device.xqa = kernel == TrtllmKernel::Xqa;
    let batch = fixed_batch(config);
    let mut record = good(&batch);
    let slice = |source, start, end| Tensor::Slice(TensorSlice { source, start, end });
    record.decode = Some(Decode::Trtllm(TrtllmDecode {
        kernel,
        block_tables: slice(Input::BlockTable, 0, 2),
        seq_lens: slice(Input::SeqLens, 0, 2),
        max_seq_len: 40,
        q_len_per_req: 1,
        q_cu_seq_lens: None,
        mask: None,
        dcp_query_start_loc: None,
    }));
    record.prefill = Some(Prefill::Trtllm(TrtllmPrefill {
        block_tables: slice(Input::BlockTable, 2, 4),
        seq_lens: slice(Input::SeqLens, 2, 4),
        cum_seq_lens_q: Tensor::RebasedQueryStartLoc(RowRange { start: 2, end: 4 }),
        cum_seq_lens_kv: Tensor::CuPageCounts(RowRange { start: 2, end: 4 }),
        max_q_len: 20,
        max_seq_len: 40,
    }));
    (batch, record)
}

fn trtllm_decode(record: &mut flashinfer::Metadata) -> &mut TrtllmDecode {
    match &mut record.decode {
        Some(Decode::Trtllm(decode)) => decode,
        _ => panic!("no decode"),
    }
}

fn trtllm_prefill(record: &mut flashinfer::Metadata) -> &mut TrtllmPrefill {
    match &mut record.prefill {
        Some(Prefill::Trtllm(prefill)) => prefill,
        _ => panic!("no prefill"),
    }
}

#[test]
fn every_field_of_the_trtllm_records_has_a_rule() {
    let cases: &[Break] = &[
        (
            |m| trtllm_decode(m).kernel = TrtllmKernel::Xqa,
            "decode.kernel is 0, must be as configured (1)",
        ),
        (
            |m| trtllm_decode(m).block_tables = Tensor::Input(Input::BlockTable),
            "decode.block_tables must refer to the step's own block_table of its rows",
        ),
        (
            |m| trtllm_decode(m).seq_lens = Tensor::Values(vec![40, 17]),
            "decode.seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| trtllm_decode(m).max_seq_len = 39,
            "decode.max_seq_len is 39, must be at least 40",
        ),
        (
            |m| trtllm_decode(m).q_len_per_req = 0,
            "decode.q_len_per_req is 0, must be at least 1",
        ),
        (
            |m| trtllm_decode(m).q_len_per_req = 2,
            "decode.q_len_per_req[0] is 2, must be 1",
        ),
        (
            |m| trtllm_decode(m).q_cu_seq_lens = Some(Tensor::Values(vec![0, 1, 2])),
            "decode.q_cu_seq_lens must refer to the step's own query_start_loc of its rows",
        ),
        (
            |m| {
                trtllm_decode(m).mask = Some(Matrix {
                    rows: 0,
                    columns: 0,
                    values: vec![],
                });
            },
            "decode.mask is given, must be absent",
        ),
        (
            |m| trtllm_decode(m).dcp_query_start_loc = Some(Tensor::Input(Input::QueryStartLoc)),
            "decode.dcp_query_start_loc is given, must be absent",
        ),
        (
            |m| trtllm_prefill(m).block_tables = Tensor::Input(Input::BlockTable),
            "prefill.block_tables must refer to the step's own block_table of its rows",
        ),
        (
            |m| trtllm_prefill(m).seq_lens = Tensor::Input(Input::SeqLens),
            "prefill.seq_lens must refer to the step's own seq_lens of its rows",
        ),
        (
            |m| trtllm_prefill(m).cum_seq_lens_q = Tensor::Input(Input::QueryStartLoc),
            "prefill.cum_seq_lens_q must refer to the step's own query_start_loc of its rows, rebased",
        ),
        (
            |m| {
                trtllm_prefill(m).cum_seq_lens_kv =
                    Tensor::CuPageCounts(RowRange { start: 0, end: 4 });
            },
            "prefill.cum_seq_lens_kv must refer to the step's own cu-page-counts of its rows",
        ),
        (
            |m| trtllm_prefill(m).max_q_len = 19,
            "prefill.max_q_len is 19, must be at least 20",
        ),
        (
            |m| trtllm_prefill(m).max_seq_len = 31,
            "prefill.max_seq_len is 31, must be at least 32",
        ),
        (
            |m| trtllm_prefill(m).max_seq_len = 5_000,
            "prefill.max_seq_len is 5000, must be at most 4096",
        ),
    ];
    let (batch, record) = trtllm(TrtllmKernel::TrtllmGen);
    assert_eq!(verdict(&batch, &record, Grant::Exact), "accepted");
    for (change, expected) in cases {
        let mut record = record.clone();
        change(&mut record);
        assert_eq!(verdict(&batch, &record, Grant::Exact), *expected);
    }
}

/// Without query starts the kernel finds a row's tokens by its number: a row without queries may only stand behind all others.
#[test]
fn rows_without_queries_stand_last_where_no_query_starts_are_given() {
    let (mut batch, mut record) = trtllm(TrtllmKernel::TrtllmGen);
    let mut starts = |starts: Vec<i32>| {
        batch.step.tensors.query_start_loc = starts.clone();
        batch.step.cam.query_start_loc_cpu = starts;
        record.num_decode_tokens = 1;
        record.num_prefill_tokens = 23;
        verdict(&batch, &record, Grant::Exact)
    };
    assert_eq!(starts(vec![0, 1, 1, 21, 21]), "accepted");
    assert_eq!(
        starts(vec![0, 0, 1, 21, 21]),
        "decode.q_len_per_req[0] is 1, must be 0"
    );
}

/// XQA's mask: token t of a row sees the row's query tokens up to t.
#[test]
fn draft_masks_have_a_rule() {
    let (mut batch, mut record) = trtllm(TrtllmKernel::Xqa);
    // Rows of 3 and 2 query tokens decode; the prefill is as before.
    batch.step.tensors.query_start_loc = vec![0, 3, 5, 22, 22];
    batch.step.cam.query_start_loc_cpu = vec![0, 3, 5, 22, 22];
    record.num_decode_tokens = 5;
    record.num_prefill_tokens = 19;
    let decode = trtllm_decode(&mut record);
    decode.q_len_per_req = 3;
    decode.q_cu_seq_lens = Some(Tensor::RebasedQueryStartLoc(RowRange { start: 0, end: 2 }));
    assert_eq!(
        verdict(&batch, &record, Grant::Exact),
        "decode.mask is missing"
    );
    trtllm_decode(&mut record).mask = Some(Matrix {
        rows: 5,
        columns: 2,
        values: vec![1, 0, 3, 0, 7, 0, 1, 0, 3, 0],
    });
    assert_eq!(verdict(&batch, &record, Grant::Exact), "accepted");
    let edit = |change: &dyn Fn(&mut Matrix)| {
        let mut record = record.clone();
        change(trtllm_decode(&mut record).mask.as_mut().expect("given"));
        verdict(&batch, &record, Grant::Exact)
    };
    // A draft token that sees the one after it; one that does not see itself; a row short.
    assert_eq!(edit(&|m| m.values[0] = 3), "decode.mask[0] is 3, must be 1");
    assert_eq!(edit(&|m| m.values[8] = 1), "decode.mask[4] is 1, must be 3");
    assert_eq!(edit(&|m| m.values[9] = 1), "decode.mask[4] is 1, must be 0");
    assert_eq!(
        edit(&|m| m.rows = 4),
        "decode.mask is 4, must be at least 5"
    );
    assert_eq!(
        edit(&|m| m.columns = 1),
        "decode.mask has 10 elements, must have 5"
    );
}
