//! What is refused, and what is chosen instead.

use rand::SeedableRng;
use rand_pcg::Pcg64;
use timetable_attention::plain_builder;
use timetable_types::{
    Family, Metadata, Tensor,
    flash_attn::{Metadata as FlashAttn, TileOrder},
    flashinfer::{Decode, Plan, Prefill},
};

use crate::attention::PrepareError;
use crate::kernels::{AttentionKind, Element};
use crate::upload::testing as batches;

use super::support::*;

/// What makes metadata wrong, and what the error then says.
type Edit<'e, M> = (&'e str, &'e dyn Fn(&mut M));

#[test]
fn what_this_device_does_not_run_is_refused_by_name() {
    let mut rng = Pcg64::seed_from_u64(8);
    let config = batches::config(BLOCK as u32, 8, 2, 64);
    let machine = machine();
    let step = step(&mut rng, 2, 2);
    let inputs = step.tensors.inputs();
    let context = context(&config, &step, &inputs);
    let plain = |family| {
        plain_builder(family, &config)
            .unwrap()
            .build(&step.cam, false)
            .unwrap()
    };
    let group_of = |family| group(&config, family, Element::Bf16, &machine);

    let mut flash = group_of(Family::FlashAttn);
    let Metadata::FlashAttn(good) = plain(Family::FlashAttn) else {
        panic!("not FLASH_ATTN's");
    };
    let rows = step.tensors.seq_lens.len();
    let edits: [Edit<'_, FlashAttn>; 7] = [
        ("mm_prefix_query_range", &|m| {
            m.mm_prefix_query_range = Some(Tensor::Values(Vec::new()));
        }),
        ("rswa_prefix_lens", &|m| {
            m.rswa_prefix_lens = Some(Tensor::Values(Vec::new()));
        }),
        ("dcp_context_kv_lens", &|m| m.max_dcp_context_kv_len = 3),
        ("block_table", &|m| {
            m.block_table = Tensor::Values(Vec::new());
        }),
        ("max_query_len", &|m| m.max_query_len = 1),
        ("tile_order: row 0", &|m| {
            m.schedule.tile_order = TileOrder::Rows(vec![0; rows]);
        }),
        ("num_splits: 0", &|m| m.schedule.num_splits = vec![0; rows]),
    ];
    for (text, edit) in edits {
        let mut bad = good.clone();
        edit(&mut bad);
        let error = flash
            .prepare(&Metadata::FlashAttn(bad), &context, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{text}: {error}");
        assert!(flash.eager().is_none() && flash.counts().is_none());
    }
    let error = flash
        .prepare(&plain(Family::Flashinfer), &context, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("FLASH_ATTN"), "{error}");

    let mut infer = group_of(Family::Flashinfer);
    let Metadata::Flashinfer(good) = plain(Family::Flashinfer) else {
        panic!("not FLASHINFER's");
    };
    let edits: [Edit<'_, Plan>; 12] = [
        ("dcp_world_size", &|p| p.dcp_world_size = 2),
        ("page_size: 32", &|p| p.page_size = 32),
        ("num_qo_heads is 16", &|p| p.num_qo_heads = 16),
        ("head_dim is 128", &|p| p.head_dim = 128),
        ("window_left is 7", &|p| p.window_left = 7),
        ("logits_soft_cap is 30", &|p| p.logits_soft_cap = Some(30.0)),
        ("sm_scale is NaN", &|p| p.sm_scale = f64::NAN),
        ("kv_chunk_size: 16, 24", &|p| {
            p.work.kv_chunk_size = 24;
            p.work.cta_tile_q = 16;
        }),
        ("no place of its own", &|p| {
            let last = p.work.kv_tile_indices.len() - 1;
            p.work.request_indices[last] = 0;
            p.work.qo_tile_indices[last] = 0;
        }),
        ("there is none", &|p| p.work.kv_tile_indices[0] = -1),
        ("merge_indptr", &|p| p.work.merge_indptr.push(9)),
        ("worker_indptr", &|p| p.work.worker_indptr.clear()),
    ];
    for (text, edit) in edits {
        let mut bad = good.clone();
        let Some(Decode::Wrapper(plan)) = &mut bad.decode else {
            panic!("no decodes");
        };
        edit(plan);
        let error = infer
            .prepare(&Metadata::Flashinfer(bad), &context, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{text}: {error}");
    }
    let mut large = good;
    let Some(Prefill::Wrapper(plan)) = &mut large.prefill else {
        panic!("no prefills");
    };
    random_work(&mut rng, plan, &step.tensors.query_start_loc[2..], &[256]);
    let error = infer
        .prepare(&Metadata::Flashinfer(large), &context, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("128 packed rows"), "{error}");
}

#[test]
fn a_step_that_splits_more_than_the_workspace_holds_is_refused_with_the_numbers() {
    let mut rng = Pcg64::seed_from_u64(9);
    let config = batches::config(BLOCK as u32, 8, 2, 64);
    let machine = machine();
    let mut group = group(&config, Family::FlashAttn, Element::Bf16, &machine);
    let mut step = step(&mut rng, 0, 4);
    step.tensors
        .seq_lens
        .iter_mut()
        .for_each(|len| *len = (*len).max(400));
    let inputs = step.tensors.inputs();
    let context = context(&config, &step, &inputs);
    let mut metadata = plain_builder(Family::FlashAttn, &config)
        .unwrap()
        .build(&step.cam, false)
        .unwrap();
    let Metadata::FlashAttn(record) = &mut metadata else {
        panic!("not FLASH_ATTN's");
    };
    let mut large = record.clone();
    large.schedule.max_num_splits = 32;
    large.schedule.num_splits = vec![32; step.tensors.seq_lens.len()];
    match group.prepare(&Metadata::FlashAttn(large), &context, None) {
        Err(PrepareError::Room {
            what, needed, room, ..
        }) => {
            assert_eq!(what, "packed rows of partial results");
            assert_eq!(room, (MAX_PARTIAL_BYTES / (65 * 4)) as u64);
            assert!(needed > room);
        }
        other => panic!("{other:?}"),
    }
    group.prepare(&metadata, &context, None).unwrap();
}

#[test]
fn short_queries_take_the_small_tile_unless_results_must_not_depend_on_the_batch() {
    let mut rng = Pcg64::seed_from_u64(10);
    let machine = machine();
    let mut config = batches::config(BLOCK as u32, 8, 2, 64);
    let mut step = step(&mut rng, 1, 0);
    // One row of 12 tokens: 48 packed rows.
    step.tensors.query_start_loc = vec![0, 12];
    step.tensors.seq_lens = vec![100];
    step.tensors.block_table.truncate(WIDTH);
    step.tensors.slot_mapping = (0..12).collect();
    step.tensors.positions = vec![0; 12];
    step.cam = batches::common(&step.tensors, 12);
    for (invariant, kind) in [
        (false, AttentionKind::Prefill64),
        (true, AttentionKind::Prefill),
    ] {
        config.batch_invariant = invariant;
        let inputs = step.tensors.inputs();
        let context = context(&config, &step, &inputs);
        let mut group = group(&config, Family::FlashAttn, Element::Bf16, &machine);
        let metadata = plain_builder(Family::FlashAttn, &config)
            .unwrap()
            .build(&step.cam, false)
            .unwrap();
        group.prepare(&metadata, &context, None).unwrap();
        let launches = group.eager().unwrap();
        let kinds: Vec<AttentionKind> = launches.lists().map(|(_, list)| list.kind).collect();
        assert_eq!(kinds, [kind]);
    }
}
