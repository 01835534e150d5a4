//! Faults that users of attention backends reported, as named regressions: the whole kind, not only the one input. The number
//! is the case's in the project's list of field cases.

#[path = "../verifier/support.rs"]
#[expect(
    dead_code,
    reason = "of a verifier's step only the configuration is wanted"
)]
mod verifier_support;

use timetable_attention::PAD_SLOT_ID;
use timetable_attention::batch::{
    self, CaptureBatchError, ContextParallel, GroupStep, PaddingValues, ReorderRequest, SlotRule,
    StepTensors,
};
use timetable_attention::graphs::{
    CapturedGraph, CudagraphDispatcher, RuntimeMode, promise_fits, round_capture_sizes,
};
use timetable_attention::types::batch::{
    BatchRows, DecodeRule, dcp_local_seq_lens_all_ranks, last_page_lens_into, paged_kv_indptr_into,
    split_decodes_and_prefills,
};
use timetable_attention::types::flash_mla::{DecodeSchedule, TileSchedule};
use timetable_attention::types::{
    CaptureShape, CudagraphMode, DcpInputs, Family, LaunchPromise, Matrix, Metadata, Tensor,
};
use timetable_attention::{Grant, VerifyContext, plain_builder, verify};

const P: i64 = PAD_SLOT_ID;

fn starts(query_lens: &[i32]) -> Vec<i32> {
    let mut starts = vec![0];
    for &len in query_lens {
        starts.push(starts[starts.len() - 1] + len);
    }
    starts
}

/// A step of these query and key lengths; row i's table is [10 i, 10 i + 1, …].
fn step(query_lens: &[i32], seq_lens: &[i32], width: usize) -> GroupStep {
    let query_start_loc = starts(query_lens);
    let tokens = query_start_loc[query_lens.len()];
    let tensors = StepTensors {
        block_table: (0..query_lens.len())
            .flat_map(|row| (0..width).map(move |c| (10 * row + c) as i32))
            .collect(),
        block_table_width: width,
        slot_mapping: (0..i64::from(tokens)).collect(),
        positions: vec![0; tokens as usize],
        query_start_loc,
        seq_lens: seq_lens.to_vec(),
        ..StepTensors::default()
    };
    let max_query_len = query_lens.iter().copied().max().unwrap_or(0) as u32;
    let max_seq_len = seq_lens.iter().copied().max().unwrap_or(0) as u32;
    GroupStep::new(
        tensors,
        seq_lens.to_vec(),
        tokens as u32,
        max_query_len,
        max_seq_len,
    )
}

fn split(query_lens: &[i32], seq_lens: &[i32], is_prefilling: &[u8], rule: DecodeRule) -> [u32; 4] {
    let query_start_loc = starts(query_lens);
    let rows = BatchRows {
        query_start_loc: &query_start_loc,
        seq_lens,
        is_prefilling,
        num_actual_tokens: query_start_loc[query_lens.len()] as u32,
        max_query_len: query_lens.iter().copied().max().unwrap_or(0) as u32,
    };
    let split = split_decodes_and_prefills(&rows, rule).expect("a split");
    [
        split.num_decodes,
        split.num_prefills,
        split.num_decode_tokens,
        split.num_prefill_tokens,
    ]
}

#[test]
fn field_case_01_stale_flags_in_padded_rows_make_no_prefills() {
    let stateful = DecodeRule {
        treat_short_extends_as_decodes: false,
        ..DecodeRule::default()
    };
    let query_lens = [1, 1, 0, 0];
    let [_, prefills, decode_tokens, prefill_tokens] =
        split(&query_lens, &[33, 48, 0, 0], &[0, 0, 1, 1], stateful);
    assert_eq!((prefills, prefill_tokens, decode_tokens), (0, 0, 2));
    // Nor under any other rule, nor with padding that was counted into the tokens.
    for require_uniform in [false, true] {
        for decode_threshold in [1, 2, 4] {
            let rule = DecodeRule {
                decode_threshold,
                require_uniform,
                treat_short_extends_as_decodes: false,
            };
            assert_eq!(
                split(&query_lens, &[33, 48, 0, 0], &[0, 0, 1, 1], rule)[1],
                0
            );
        }
    }
    // The runner does not leave them there either.
    let mut live = step(&[1, 1], &[33, 48], 4);
    live.cam.is_prefilling = vec![0, 0, 1, 1];
    let padded = batch::pad_step(&live, 4, 4, PaddingValues::default()).expect("it fits");
    assert_eq!(padded.cam.is_prefilling, [0, 0, 0, 0]);
}

#[test]
fn field_case_02_split_table() {
    let rule = |decode_threshold, require_uniform| DecodeRule {
        decode_threshold,
        require_uniform,
        treat_short_extends_as_decodes: true,
    };
    let cases: [(&[i32], DecodeRule, [u32; 4]); 8] = [
        (&[1, 1, 1], rule(1, false), [3, 0, 3, 0]),
        (&[1, 2, 1, 3, 2, 1, 2], rule(3, false), [7, 0, 12, 0]),
        (&[4, 5, 6, 7], rule(3, false), [0, 4, 0, 22]),
        (&[2, 1, 3, 4, 5, 6, 7, 8], rule(4, false), [4, 4, 10, 26]),
        (&[2, 2, 1, 3, 2, 1, 2], rule(3, true), [2, 5, 4, 9]),
        (&[2, 2, 2, 4, 5, 6, 7, 8], rule(4, true), [3, 5, 6, 30]),
        (&[2, 1, 2, 4, 5, 6, 7, 8], rule(4, true), [1, 7, 2, 33]),
        (&[2, 2, 2, 0], rule(3, true), [4, 0, 6, 0]),
    ];
    for (query_lens, rule, want) in cases {
        assert_eq!(
            split(query_lens, query_lens, &[], rule),
            want,
            "{query_lens:?} {rule:?}"
        );
    }
}

#[test]
fn field_case_03_reorder_makes_as_few_swaps_as_it_can() {
    let order = |requests: &[(u32, u32)]| {
        let requests: Vec<ReorderRequest> = requests
            .iter()
            .map(
                |&(num_scheduled_tokens, num_computed_tokens)| ReorderRequest {
                    num_scheduled_tokens,
                    num_computed_tokens,
                    num_prompt_tokens: num_computed_tokens,
                },
            )
            .collect();
        let mut rows: Vec<usize> = (0..requests.len()).collect();
        let reorder = batch::reorder_batch_to_split_decodes_and_prefills(&requests, 1);
        reorder.apply(&mut rows);
        (rows, reorder.swaps.len())
    };
    assert_eq!(
        order(&[(100, 100), (1, 10), (200, 200), (1, 20)]),
        (vec![3, 1, 2, 0], 1)
    );
    assert_eq!(order(&[(100, 0), (10, 50), (1, 10)]), (vec![2, 1, 0], 1));
    assert_eq!(
        order(&[(1, 10), (1, 20), (10, 50), (100, 0)]),
        (vec![0, 1, 2, 3], 0)
    );
}

#[test]
fn field_case_04_uniform_graphs_hold_whole_queries() {
    let shape = |num_tokens, num_reqs| CaptureShape {
        num_tokens,
        num_reqs,
        max_query_len: 3,
        uniform_query_len: Some(3),
    };
    let refused = batch::capture_batch(&shape(8, 3), 4, 1024).expect_err("8 is no multiple of 3");
    assert_eq!(
        refused,
        CaptureBatchError::NotUniform {
            num_tokens: 8,
            num_reqs: 3,
            query_len: 3,
            rounded: 9,
            rounded_reqs: 3
        }
    );
    let CaptureBatchError::NotUniform {
        rounded,
        rounded_reqs,
        ..
    } = refused
    else {
        unreachable!()
    };
    let made = batch::capture_batch(&shape(rounded, rounded_reqs), 4, 1024).expect("whole queries");
    assert_eq!(made.tensors.query_start_loc, [0, 3, 6, 9]);
    // The runner rounds its sizes, and never captures one that is not a multiple.
    assert_eq!(
        round_capture_sizes(&[1, 2, 4, 8, 16], 3, 16),
        Ok((vec![3, 6, 9], 9))
    );
    assert!(CudagraphDispatcher::new(CudagraphMode::FullDecodeOnly, 3, 8, &[3, 8], &[0]).is_err());
    // A graph of mixed batches may hold any lengths: the remainder goes to the last rows.
    let mixed = CaptureShape {
        uniform_query_len: None,
        ..shape(8, 3)
    };
    let made = batch::capture_batch(&mixed, 4, 1024).expect("a mixed graph");
    assert_eq!(made.tensors.query_start_loc, [0, 2, 5, 8]);
    assert_eq!((made.cam.max_query_len, made.cam.max_seq_len), (3, 1024));
}

#[test]
fn field_case_05_a_first_chunk_of_one_token_is_a_prefill_to_a_stateful_backend() {
    let (query_lens, seq_lens) = ([1, 1], [50, 1]);
    let stateful = DecodeRule {
        treat_short_extends_as_decodes: false,
        ..DecodeRule::default()
    };
    assert_eq!(
        split(&query_lens, &seq_lens, &[0, 1], stateful),
        [1, 1, 1, 1]
    );
    assert_eq!(
        split(&query_lens, &seq_lens, &[0, 1], DecodeRule::default()),
        [2, 0, 2, 0]
    );
    let has_initial_state: Vec<bool> = step(&query_lens, &seq_lens, 4)
        .compute_num_computed_tokens()
        .iter()
        .map(|&n| n > 0)
        .collect();
    assert_eq!(has_initial_state, [true, false]);
}

#[test]
fn field_case_06_a_narrow_row_gives_no_slots_and_is_counted() {
    let rule = SlotRule {
        block_size: 4,
        context_parallel: None,
    };
    let mut slots = [0; 4];
    assert_eq!(rule.slots_of_request(&[7, 3], &[6, 7, 8, 9], &mut slots), 2);
    assert_eq!(slots, [14, 15, P, P]);
    let mut slots = [0; 5];
    assert_eq!(
        rule.slots_of_request(&[7, 3], &[3, 4, 5, 6, 7], &mut slots),
        0
    );
    assert_eq!(slots, [31, 12, 13, 14, 15]);
}

#[test]
fn field_case_10_local_lengths_under_decode_context_parallelism() {
    let cases: [(i32, u32, u32, &[i32]); 6] = [
        (7, 2, 1, &[4, 3]),
        (17, 4, 1, &[5, 4, 4, 4]),
        (1, 4, 1, &[1, 0, 0, 0]),
        (130, 4, 64, &[64, 64, 2, 0]),
        (33, 2, 16, &[17, 16]),
        (0, 2, 1, &[0, 0]),
    ];
    for (seq_len, world, interleave, want) in cases {
        assert_eq!(
            dcp_local_seq_lens_all_ranks(&[seq_len], world, interleave),
            want
        );
    }
    // Global lengths survive beside local ones, through padding and back.
    let mut global = step(&[1, 1], &[130, 33], 4);
    global.tensors.dcp_local_seq_lens = Some(vec![64, 17]);
    global.cam.dcp = Some(DcpInputs {
        dcp_local_seq_lens_cpu_upper_bound: vec![64, 17],
    });
    let padded = batch::pad_step(&global, 4, 4, PaddingValues::default()).expect("it fits");
    assert_eq!(padded.tensors.seq_lens, [130, 33, 0, 0]);
    assert_eq!(padded.tensors.dcp_local_seq_lens, Some(vec![64, 17, 0, 0]));
    let back = padded.unpadded(2, 2);
    assert_eq!(
        (back.tensors.seq_lens, back.tensors.dcp_local_seq_lens),
        (vec![130, 33], Some(vec![64, 17]))
    );
    assert_eq!(back.cam.dcp, global.cam.dcp);
}

#[test]
fn field_case_11_slots_under_decode_context_parallelism() {
    let slots = |rank, interleave| {
        let context_parallel = Some(ContextParallel {
            size: 2,
            rank,
            interleave,
        });
        let positions: Vec<i64> = (0..10).collect();
        let mut slots = vec![0; 10];
        let rule = SlotRule {
            block_size: 4,
            context_parallel,
        };
        assert_eq!(rule.slots_of_request(&[7, 3], &positions, &mut slots), 0);
        slots
    };
    assert_eq!(slots(0, 1), [28, P, 29, P, 30, P, 31, P, 12, P]);
    assert_eq!(slots(1, 2), [P, P, 28, 29, P, P, 30, 31, P, P]);
}

#[test]
fn field_case_13_padded_query_starts_repeat_the_last() {
    assert_eq!(
        batch::pad_query_start_loc(&[0, 1, 2, 3], 8),
        [0, 1, 2, 3, 3, 3, 3, 3, 3]
    );
    assert_eq!(batch::pad_query_start_loc(&[0], 2), [0, 0, 0]);
    let padded = batch::pad_step(
        &step(&[1, 1, 1], &[5, 6, 7], 4),
        8,
        8,
        PaddingValues::default(),
    )
    .expect("it fits");
    for query_start_loc in [
        &padded.tensors.query_start_loc,
        &padded.cam.query_start_loc_cpu,
    ] {
        assert!(
            query_start_loc
                .windows(2)
                .all(|w| 0 <= w[0] && w[0] <= w[1]),
            "{query_start_loc:?}"
        );
    }
}

#[test]
fn field_case_14_padding_values_are_merged_by_maximum() {
    let values = |seq_len, index| PaddingValues { seq_len, index };
    let merged = PaddingValues::merge([values(0, -1), values(1, 0), values(0, -1)]);
    assert_eq!(merged, Some(values(1, 0)));
    assert_eq!(PaddingValues::merge([]), None);
    let padded = batch::pad_step(&step(&[1], &[9], 4), 2, 2, values(1, 0)).expect("it fits");
    assert_eq!(padded.tensors.seq_lens, [9, 1]);
    assert_eq!(padded.cam.seq_lens_cpu_upper_bound, [9, 1]);
}

#[test]
fn field_case_16_pages_of_padded_rows() {
    let (mut indptr, mut last) = (Vec::new(), Vec::new());
    assert_eq!(paged_kv_indptr_into(&[17, 16, 1, 33], 16, &mut indptr), 7);
    last_page_lens_into(&[17, 16, 1, 33], 16, &mut last);
    assert_eq!(
        (indptr.as_slice(), last.as_slice()),
        ([0, 2, 3, 4, 7].as_slice(), [1, 16, 1, 1].as_slice())
    );
    paged_kv_indptr_into(&[17, 16, 0, 0], 16, &mut indptr);
    assert_eq!(indptr, [0, 2, 3, 3, 3]);
}

#[test]
fn field_case_17_running_sums_repeat_the_last() {
    // Split counts as a running sum, 3 rows, in the buffers of a graph of 6.
    assert_eq!(
        batch::pad_query_start_loc(&[0, 1, 3, 4], 6),
        [0, 1, 3, 4, 4, 4, 4]
    );
    // Of MLA's tile schedule: 1, 11 and 1 pages in 3 parts. No other sums of the padded step are let through.
    let mut config = verifier_support::fixed_config();
    config.kv_cache_spec.block_size = 64;
    let live = step(&[1, 1, 1], &[64, 700, 64], 11);
    let padded = batch::pad_step(&live, 6, 6, PaddingValues::default()).expect("it fits");
    let verdict = |num_splits: &[i32], rows: i32| {
        let mut builder = plain_builder(Family::FlashMla, &config).expect("a plain builder");
        let mut metadata = builder.build(&padded.cam, false).expect("metadata");
        let Metadata::FlashMla(record) = &mut metadata else {
            panic!("another family");
        };
        let decode = record.decode.as_mut().expect("decodes");
        decode.max_num_splits = 2;
        decode.schedule = DecodeSchedule::Tiles(TileSchedule {
            tile_scheduler_metadata: Tensor::Matrix(Matrix {
                rows: 4,
                columns: 8,
                values: [
                    [0, 0, 1, 4, 0, 0, 0, 0],
                    [1, 4, 1, 11, 1, 0, 0, 0],
                    [2, 0, 2, 1, 0, 0, 0, 0],
                    [rows, 0, rows, 0, 0, 0, 0, 0],
                ]
                .concat(),
            }),
            num_splits: Tensor::Values(num_splits.to_vec()),
        });
        let inputs = padded.tensors.inputs();
        let ctx = VerifyContext {
            config: &config,
            common: &padded.cam,
            inputs: &inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: 100,
        };
        verify(&metadata, &ctx).map_err(|refusal| refusal.to_string())
    };
    assert_eq!(verdict(&[0, 1, 3, 4, 4, 4, 4], 6), Ok(()));
    let refused = verdict(&[0, 1, 3, 4, 5, 6, 7], 6).expect_err("padding has no splits");
    assert!(
        refused.ends_with("schedule.num_splits[4] is 5, must be 4"),
        "{refused}"
    );
    let refused = verdict(&[0, 1, 3, 4, 4, 4, 4], 3).expect_err("padding has no parts");
    assert!(
        refused.ends_with("schedule.tile_scheduler_metadata[3] is 3, must be 6"),
        "{refused}"
    );
}

#[test]
fn field_case_19_every_buffer_has_the_captured_size() {
    let sizes: Vec<u32> = (1..=17).map(|n| 8 * n).collect();
    let dispatcher = CudagraphDispatcher::new(CudagraphMode::FullDecodeOnly, 4, 64, &sizes, &[0])
        .expect("whole queries");
    let live = step(&[4; 33], &[100; 33], 8);
    assert_eq!(live.cam.num_actual_tokens, 132);
    let (mode, graph) = dispatcher
        .dispatch(132, true, 0, |_| true)
        .expect("rounded sizes");
    assert_eq!(
        (mode, graph.num_tokens, graph.num_reqs),
        (RuntimeMode::Full, 136, Some(34))
    );
    let num_reqs = graph.num_reqs.expect("a decode graph has rows");
    let padded = batch::pad_step(&live, graph.num_tokens, num_reqs, PaddingValues::default())
        .expect("it fits");
    let (rows, tokens) = (34, 136);
    let t = &padded.tensors;
    assert_eq!((t.slot_mapping.len(), t.positions.len()), (tokens, tokens));
    assert_eq!(
        (
            t.query_start_loc.len(),
            t.seq_lens.len(),
            t.block_table.len()
        ),
        (rows + 1, rows, rows * 8)
    );
    let c = &padded.cam;
    assert_eq!(
        (c.num_actual_tokens, c.num_reqs, c.slot_mapping_len),
        (136, 34, 136)
    );
    assert_eq!(
        (
            c.query_start_loc_cpu.len(),
            c.seq_lens_cpu_upper_bound.len()
        ),
        (rows + 1, rows)
    );
    assert!(t.slot_mapping[132..].iter().all(|&slot| slot == P));
    // A graph that is too small is refused, not overrun.
    assert!(batch::pad_step(&live, 128, 32, PaddingValues::default()).is_err());
}

#[test]
fn field_case_20_chunked_local_attention() {
    let virtual_rows = |query_lens: &[i32], seq_lens: &[i32], chunk, block, width| {
        let (made, columns) = batch::make_local_attention_virtual_batches(
            chunk,
            &step(query_lens, seq_lens, width),
            block,
        )
        .expect("the block divides the chunk");
        let table: Vec<Vec<i32>> = made
            .tensors
            .block_table
            .chunks(columns.blocks_per_chunk)
            .map(<[i32]>::to_vec)
            .collect();
        (made.naive_query_lens(), made.tensors.seq_lens, table)
    };
    let (q, k, table) = virtual_rows(&[4, 10, 5], &[6, 17, 9], 4, 2, 10);
    assert_eq!(q, [2, 2, 1, 4, 4, 1, 4, 1]);
    assert_eq!(k, [4, 2, 4, 4, 4, 1, 4, 1]);
    assert_eq!(table[..2], [vec![0, 1], vec![2, 3]]);
    let (q, k, table) = virtual_rows(&[1], &[5], 4, 2, 3);
    assert_eq!((q, k, table), (vec![1], vec![1], vec![vec![2, 2]]));
    let (q, k, _) = virtual_rows(&[7], &[10], 4, 2, 5);
    assert_eq!((q, k), (vec![1, 4, 2], vec![4, 4, 2]));
}

#[test]
fn field_case_21_virtual_rows_are_counted_not_requests() {
    let long = step(&[1000], &[1000], 63);
    let (made, _) = batch::make_local_attention_virtual_batches(256, &long, 16)
        .expect("the block divides the chunk");
    assert_eq!(made.batch_size(), 4);
    assert!(batch::max_virtual_rows(1, 1000, 256) >= 4);
    // Padded rows stay rows, and stay inert.
    let padded =
        batch::pad_step(&step(&[5], &[9], 4), 8, 3, PaddingValues::default()).expect("it fits");
    let (made, _) = batch::make_local_attention_virtual_batches(4, &padded, 2)
        .expect("the block divides the chunk");
    assert_eq!(made.naive_query_lens()[2..], [0, 0]);
    assert_eq!(made.tensors.seq_lens[2..], [0, 0]);
}

#[test]
fn field_case_24_one_split_count_at_capture_at_schedule_and_in_the_kernel() {
    let promise = |max_num_splits| LaunchPromise {
        max_num_splits,
        max_work_items: 64,
        scratch_bytes: 1 << 20,
        max_query_len: 1,
        uniform_query_len: Some(1),
    };
    let graph = CapturedGraph {
        descriptor: "8 decodes",
        promise: promise(4),
    };
    // A builder that would split further than the graph was captured for does not get to use it.
    assert_eq!(promise_fits(&graph.promise, &promise(4)), Ok(()));
    assert_eq!(promise_fits(&graph.promise, &promise(1)), Ok(()));
    let refused = promise_fits(&graph.promise, &promise(5)).expect_err("5 splits in a graph of 4");
    assert_eq!(
        (refused.what, refused.offered, refused.captured),
        ("max_num_splits", 5, 4)
    );
    // Every other number that a graph freezes counts as well.
    for offered in [
        LaunchPromise {
            max_work_items: 65,
            ..promise(4)
        },
        LaunchPromise {
            scratch_bytes: (1 << 20) + 1,
            ..promise(4)
        },
        LaunchPromise {
            max_query_len: 2,
            ..promise(4)
        },
        LaunchPromise {
            uniform_query_len: None,
            ..promise(4)
        },
    ] {
        assert!(
            promise_fits(&graph.promise, &offered).is_err(),
            "{offered:?}"
        );
    }
}
