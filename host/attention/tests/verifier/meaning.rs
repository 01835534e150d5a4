//! What metadata means is told from how its work is divided.

use timetable_attention::{
    Grant,
    meaning::{Difference, compare},
    plain_builder,
    types::{
        Causal, Dtype, Family, Input, KvCacheLayout, Matrix, Metadata, PageSelection, RowRange,
        Tensor,
        flash_attn::{self, TileOrder},
        flash_mla,
        flashinfer::{self, Decode, Plan, Prefill},
        triton_attn,
    },
    verify,
};

use crate::{
    clever,
    support::{Batch, Random, fixed_batch, fixed_config},
};

fn plain(family: Family, batch: &Batch) -> Metadata {
    let mut builder = plain_builder(family, &batch.config).expect("plain");
    builder.build(&batch.step.cam, false).expect("built")
}

#[test]
fn another_division_of_the_work_means_the_same() {
    for seed in 0..2_000 {
        let batch = Batch::random(seed);
        let mut random = Random(seed ^ 0xd1f);
        let mut made = vec![
            (Family::FlashMla, clever::flash_mla(&batch, &mut random)),
            (Family::FlashAttn, clever::flash_attn(&batch, &mut random)),
            (Family::Flashinfer, clever::flashinfer(&batch, &mut random)),
        ];
        if batch.config.parallel.dcp_world_size == 1 {
            made.push((Family::TritonAttn, clever::triton_attn(&batch, &mut random)));
        }
        for (family, clever) in made {
            let plain = plain(family, &batch);
            batch.with(Grant::Exact, |ctx| {
                verify(&clever, ctx).expect("valid");
                assert_eq!(compare(&plain, &clever, ctx), Ok(()), "seed {seed}");
                assert_eq!(compare(&clever, &plain, ctx), Ok(()), "seed {seed}");
            });
        }
    }
}

#[test]
fn families_differ() {
    let batch = fixed_batch(fixed_config());
    let (served, other) = (
        plain(Family::FlashAttn, &batch),
        plain(Family::Flashinfer, &batch),
    );
    let found = batch.with(Grant::Exact, |ctx| compare(&served, &other, ctx));
    assert_eq!(
        found.unwrap_err().to_string(),
        "served was metadata of flash-attn, and this is of flashinfer"
    );
}

/// Changes one field, and says whether that changes the meaning.
type Change<M> = (&'static str, bool, fn(&mut M));

fn changes<M>(family: Family, changes: &[Change<M>], record: fn(&mut Metadata) -> Option<&mut M>) {
    let batch = fixed_batch(fixed_config());
    let served = plain(family, &batch);
    for (field, means, change) in changes {
        let mut other = served.clone();
        change(record(&mut other).expect("of the family"));
        assert_ne!(served, other, "{field} changed");
        let found = batch.with(Grant::Exact, |ctx| compare(&served, &other, ctx));
        match found {
            Ok(()) => assert!(!means, "{field} has a meaning"),
            Err(Difference::Value { field: named, .. }) => {
                assert_eq!((named, true), (*field, *means));
            }
            Err(other) => panic!("{field}: {other}"),
        }
    }
}

#[test]
fn each_field_of_flash_attn_has_a_meaning_or_none() {
    use flash_attn::Metadata as M;
    let table: [Change<M>; 20] = [
        ("num_actual_tokens", true, |m| m.num_actual_tokens += 1),
        ("query_start_loc", true, |m| {
            m.query_start_loc = Tensor::Input(Input::SeqLens);
        }),
        ("seq_lens", true, |m| m.seq_lens = Tensor::Values(vec![1])),
        ("block_table", true, |m| {
            m.block_table = Tensor::Input(Input::SeqLens);
        }),
        ("slot_mapping", true, |m| {
            m.slot_mapping = Tensor::Input(Input::Positions);
        }),
        ("causal", true, |m| m.causal = Causal::All(false)),
        ("dcp_context_kv_lens", true, |m| {
            m.dcp_context_kv_lens = Some(Tensor::ContextLens(RowRange { start: 0, end: 4 }));
        }),
        ("mm_prefix_query_range", true, |m| {
            m.mm_prefix_query_range = spans(vec![3, 5]);
        }),
        ("mm_prefix_query_range", false, |m| {
            m.mm_prefix_query_range = spans(vec![-1, -1]);
        }),
        ("rswa_prefix_lens", true, |m| {
            m.rswa_prefix_lens = Some(Tensor::Input(Input::RswaPrefixLens));
        }),
        // Not used without prefix lengths.
        ("rswa_window", false, |m| m.rswa_window += 1),
        ("max_query_len", false, |m| m.max_query_len += 1),
        ("max_seq_len", false, |m| m.max_seq_len += 1),
        ("max_dcp_context_kv_len", false, |m| {
            m.max_dcp_context_kv_len += 1;
        }),
        ("num_decode_reqs", false, |m| m.num_decode_reqs += 1),
        ("num_prefill_tokens", false, |m| m.num_prefill_tokens += 1),
        ("max_num_splits", false, |m| m.max_num_splits += 1),
        ("schedule.max_num_splits", false, |m| {
            m.schedule.max_num_splits += 1;
        }),
        ("schedule.num_splits", false, |m| {
            m.schedule.num_splits = vec![2, 1, 1, 1];
        }),
        ("schedule.tile_order", false, |m| {
            m.schedule.tile_order = TileOrder::Rows(vec![3, 2, 1, 0]);
        }),
    ];
    changes(Family::FlashAttn, &table, |metadata| match metadata {
        Metadata::FlashAttn(record) => Some(record),
        _ => None,
    });
}

#[test]
fn each_field_of_triton_attn_has_a_meaning_or_none() {
    use triton_attn::Metadata as M;
    let table: [Change<M>; 16] = [
        ("num_actual_tokens", true, |m| m.num_actual_tokens += 1),
        ("query_start_loc", true, |m| {
            m.query_start_loc = Tensor::Input(Input::SeqLens);
        }),
        ("seq_lens", true, |m| m.seq_lens = Tensor::Values(vec![1])),
        ("block_table", true, |m| {
            m.block_table = Tensor::Input(Input::SeqLens);
        }),
        ("slot_mapping", true, |m| {
            m.slot_mapping = Tensor::Input(Input::Positions);
        }),
        ("causal", true, |m| m.causal = Causal::All(false)),
        ("mm_prefix_range", true, |m| {
            m.mm_prefix_range = spans(vec![3, 5]);
        }),
        ("rswa_prefix_lens", true, |m| {
            m.rswa_prefix_lens = Some(Tensor::Input(Input::RswaPrefixLens));
        }),
        // Not used without prefix lengths.
        ("rswa_window", false, |m| m.rswa_window += 1),
        ("max_query_len", false, |m| m.max_query_len += 1),
        ("max_seq_len", false, |m| m.max_seq_len += 1),
        ("seq_threshold_3d", false, |m| m.seq_threshold_3d += 1),
        ("num_par_softmax_segments", false, |m| {
            m.num_par_softmax_segments *= 2;
        }),
        ("softmax_segm_output", false, |m| {
            m.softmax_segm_output.shape[0] += 1;
        }),
        ("softmax_segm_max", false, |m| {
            m.softmax_segm_max.shape[0] += 1;
        }),
        ("softmax_segm_expsum", false, |m| {
            m.softmax_segm_expsum.shape[0] += 1;
        }),
    ];
    changes(Family::TritonAttn, &table, |metadata| match metadata {
        Metadata::TritonAttn(record) => Some(record),
        _ => None,
    });
}

#[test]
fn each_field_of_flash_mla_has_a_meaning_or_none() {
    use flash_mla::Metadata as M;
    let table: [Change<M>; 12] = [
        ("num_actual_tokens", true, |m| m.num_actual_tokens += 1),
        ("query_start_loc", true, |m| {
            m.query_start_loc = Tensor::Input(Input::SeqLens);
        }),
        ("slot_mapping", true, |m| {
            m.slot_mapping = Tensor::Input(Input::Positions);
        }),
        ("causal", true, |m| m.causal = false),
        ("q_data_type", true, |m| {
            m.prefill.as_mut().unwrap().q_data_type = Dtype::Float8E4m3;
        }),
        ("output_dtype", true, |m| {
            m.prefill.as_mut().unwrap().output_dtype = Dtype::Float16;
        }),
        // Who runs a row, in which pieces of context, and how its keys are divided.
        ("prefill", false, |m| m.prefill = None),
        ("decode", false, |m| m.decode = None),
        ("num_decodes", false, |m| m.num_decodes += 1),
        ("max_query_len", false, |m| m.max_query_len += 1),
        ("max_seq_len", false, |m| m.max_seq_len += 1),
        ("chunked_context", false, |m| {
            m.prefill.as_mut().unwrap().chunked_context = None;
        }),
    ];
    changes(Family::FlashMla, &table, |metadata| match metadata {
        Metadata::FlashMla(record) => Some(record),
        _ => None,
    });
}

fn spans(values: Vec<i32>) -> Option<Tensor> {
    Some(Tensor::Matrix(Matrix {
        rows: 1,
        columns: 2,
        values,
    }))
}

fn decode(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.decode {
        Some(Decode::Wrapper(plan)) => plan,
        _ => panic!("decodes without a plan"),
    }
}

fn prefill(record: &mut flashinfer::Metadata) -> &mut Plan {
    match &mut record.prefill {
        Some(Prefill::Wrapper(plan)) => plan,
        _ => panic!("prefills without a plan"),
    }
}

#[test]
fn each_field_of_flashinfer_has_a_meaning_or_none() {
    use flashinfer::Metadata as M;
    let table: [Change<M>; 18] = [
        ("kv_cache_layout", true, |m| {
            m.kv_cache_layout = match m.kv_cache_layout {
                KvCacheLayout::Lbnhc => KvCacheLayout::Lbhnc,
                _ => KvCacheLayout::Lbnhc,
            };
        }),
        ("num_actual_tokens", true, |m| m.num_actual_tokens += 1),
        ("slot_mapping", true, |m| {
            m.slot_mapping = Tensor::Input(Input::Positions);
        }),
        ("causal", true, |m| m.causal = false),
        ("q_data_type", true, |m| {
            m.q_data_type_prefill = Dtype::Float8E4m3;
        }),
        ("plan's q_data_type", true, |m| {
            decode(m).q_data_type = Dtype::Float8E4m3;
        }),
        ("kv_data_type", true, |m| {
            prefill(m).kv_data_type = Dtype::Float8E5m2;
        }),
        ("o_data_type", true, |m| {
            decode(m).o_data_type = Dtype::Float32;
        }),
        ("sm_scale", true, |m| prefill(m).sm_scale = 0.25),
        ("logits_soft_cap", true, |m| {
            decode(m).logits_soft_cap = Some(1.0);
        }),
        ("window_left", true, |m| decode(m).window_left = 7),
        ("plan's causal", true, |m| prefill(m).causal = false),
        ("num_decode_tokens", false, |m| m.num_decode_tokens += 1),
        ("fixed_split_size", false, |m| {
            decode(m).fixed_split_size = 16;
        }),
        ("disable_split_kv", false, |m| {
            prefill(m).disable_split_kv ^= true;
        }),
        ("cudagraph_batch_size", false, |m| {
            decode(m).cudagraph_batch_size = 2;
        }),
        ("work.kv_chunk_size", false, |m| {
            decode(m).work.kv_chunk_size += 16;
        }),
        ("work.worker_indptr", false, |m| {
            prefill(m).work.worker_indptr.push(1);
        }),
    ];
    changes(Family::Flashinfer, &table, |metadata| match metadata {
        Metadata::Flashinfer(record) => Some(record),
        _ => None,
    });
}

/// The fixed batch's decodes (3 pages and 2) with these columns.
fn chosen(served: &Metadata, first: &[u32], second: &[u32]) -> Metadata {
    let mut other = served.clone();
    let Metadata::Flashinfer(record) = &mut other else {
        panic!("FLASHINFER");
    };
    let plan = decode(record);
    plan.paged_kv_indptr = vec![0, first.len() as i32, (first.len() + second.len()) as i32];
    plan.paged_kv_indices = Tensor::SelectPages(PageSelection {
        rows: RowRange { start: 0, end: 2 },
        columns: [first, second].concat(),
    });
    let key_len = |columns: &[u32], last: i32| (columns.len() as i32 - 1) * 16 + last;
    plan.seq_lens = vec![key_len(first, 8), key_len(second, 1)];
    let starts = [0, 1, 2];
    clever::split(plan, &starts, 4, &mut Random(1));
    other
}

#[test]
fn rows_that_attend_to_other_keys_are_named() {
    let batch = fixed_batch(fixed_config());
    let served = plain(Family::Flashinfer, &batch);
    batch.with(Grant::Subset, |ctx| {
        let check = |first: &[u32], second: &[u32]| {
            let other = chosen(&served, first, second);
            verify(&other, ctx).expect("granted");
            compare(&served, &other, ctx)
        };
        // All pages, one by one, are all pages.
        assert_eq!(check(&[0, 1, 2], &[0, 1]), Ok(()));
        let keys = |rows, row, left_out, added, column| Difference::Keys {
            rows,
            row,
            left_out,
            added,
            column,
        };
        assert_eq!(check(&[0, 2], &[0, 1]), Err(keys(1, 0, 1, 0, 1)));
        assert_eq!(check(&[0, 1, 2], &[1]), Err(keys(1, 1, 1, 0, 0)));
        assert_eq!(check(&[2], &[1]), Err(keys(2, 0, 2, 0, 0)));
        let (a, b) = (
            chosen(&served, &[0, 2], &[0, 1]),
            chosen(&served, &[1, 2], &[0, 1]),
        );
        assert_eq!(compare(&a, &b, ctx), Err(keys(1, 0, 1, 1, 0)));
        assert_eq!(compare(&a, &a, ctx), Ok(()));
        assert_eq!(compare(&a, &served, ctx), Err(keys(1, 0, 0, 1, 1)));
        let text = compare(&served, &a, ctx).unwrap_err().to_string();
        assert!(
            text.starts_with(
                "1 of the step's rows attend to other keys; the first is row 0: 1 blocks"
            ),
            "{text}"
        );
    });
}

#[test]
fn pages_that_a_window_has_left_behind_are_nobodys() {
    let mut config = fixed_config();
    config.kv_cache_spec.sliding_window = Some(9);
    config.attention.sliding_windows = vec![9];
    let batch = fixed_batch(config);
    let served = plain(Family::Flashinfer, &batch);
    batch.with(Grant::Subset, |ctx| {
        // Keys 31 to 39 of 40: pages 1 and 2; keys 8 to 16 of 17: both.
        let same = chosen(&served, &[1, 2], &[0, 1]);
        verify(&same, ctx).expect("granted");
        assert_eq!(compare(&served, &same, ctx), Ok(()));
        let less = chosen(&served, &[2], &[0, 1]);
        verify(&less, ctx).expect("granted");
        let found = compare(&served, &less, ctx);
        assert!(
            matches!(
                found,
                Err(Difference::Keys {
                    row: 0,
                    left_out: 1,
                    column: 1,
                    ..
                })
            ),
            "{found:?}"
        );
    });
}

#[test]
fn metadata_that_no_verifier_saw_is_no_panic() {
    let batch = fixed_batch(fixed_config());
    let served = plain(Family::Flashinfer, &batch);
    for (indptr, columns) in [
        (vec![], vec![]),
        (vec![0, -5, i32::MAX], vec![9]),
        (vec![3, 1, 0], vec![u32::MAX, 0]),
    ] {
        let mut other = chosen(&served, &[0], &[0]);
        let Metadata::Flashinfer(record) = &mut other else {
            panic!("FLASHINFER");
        };
        record.num_decodes = 3;
        let plan = decode(record);
        plan.paged_kv_indptr = indptr;
        if let Tensor::SelectPages(selection) = &mut plan.paged_kv_indices {
            selection.columns = columns;
        }
        let found = batch.with(Grant::Subset, |ctx| compare(&served, &other, ctx));
        assert!(matches!(found, Err(Difference::Keys { .. })), "{found:?}");
    }
}
