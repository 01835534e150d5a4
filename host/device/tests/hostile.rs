//! Metadata that no verifier let through: it may be refused, or give wrong numbers, and nothing else.

mod support;

use proptest::prelude::*;
use support::{Batch, config, rng};
use timetable_device::cpu::{StepMetadata, new_impl};
use timetable_types::{Causal, Metadata, Tensor, flash_attn, flashinfer};

/// Integers near every edge.
fn wild() -> impl Strategy<Value = i32> {
    prop_oneof![
        Just(i32::MIN),
        Just(i32::MAX),
        -3..6i32,
        -200..200i32,
        any::<i32>()
    ]
}

/// No attention over standard normal values gives this.
const UNWRITTEN: f32 = 1e30;

fn write(values: &mut [i32], at: usize, value: i32) {
    if !values.is_empty() {
        let at = at % values.len();
        values[at] = value;
    }
}

/// Prepares, and runs if it was not refused. Reaching the end is the promise; what is refused must say why.
fn survive(batch: &Batch, metadata: &Metadata) -> Result<(), TestCaseError> {
    let mut step = StepMetadata::new();
    let prepared = step.prepare(metadata, &batch.inputs(), batch.config.block_size as u32);
    if let Err(error) = prepared {
        prop_assert!(!error.to_string().is_empty());
        prop_assert_eq!(step.family(), None);
        return Ok(());
    }
    let layer = new_impl(metadata.family(), batch.config).unwrap();
    let mut output = vec![UNWRITTEN; batch.query.len()];
    match layer.forward(&batch.query, &batch.cache, Some(&step), &mut output, None) {
        Err(error) => prop_assert!(!error.to_string().is_empty()),
        Ok(()) => {
            let rows = step.num_actual_tokens() * 256;
            prop_assert!(output[..rows].iter().all(|&x| x != UNWRITTEN));
        }
    }
    Ok(())
}

fn batch(seed: u64) -> Batch {
    let rows = [(1, 40), (1, 17), (9, 30)];
    Batch::new(
        &mut rng(seed),
        config(4, 2, 64),
        Causal::All(true),
        &rows,
        0,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_wild_schedule_is_harmless(
        seed in 0..50u64,
        changes in prop::collection::vec((0..7usize, any::<prop::sample::Index>(), wild()), 1..4),
    ) {
        let batch = batch(seed);
        let mut metadata = batch.flash_attn();
        metadata.schedule.num_splits = vec![2, 1, 3];
        let mut order = vec![2, 0, 1];
        let mut starts = batch.query_start_loc.clone();
        for (field, at, value) in changes {
            let at = at.index(8);
            match field {
                0 => write(&mut metadata.schedule.num_splits, at, value),
                1 => write(&mut order, at, value),
                2 => metadata.num_actual_tokens = (value as u32).min(11),
                3 => metadata.max_query_len = value as u32,
                4 => metadata.schedule.num_splits.truncate(at),
                5 => order.truncate(at),
                _ => {
                    write(&mut starts, at, value);
                    metadata.query_start_loc = Tensor::Values(starts.clone());
                }
            }
        }
        metadata.schedule.tile_order = flash_attn::TileOrder::Rows(order);
        survive(&batch, &Metadata::FlashAttn(metadata))?;
    }

    #[test]
    fn a_wild_work_list_is_harmless(
        seed in 0..50u64,
        changes in prop::collection::vec((0..12usize, any::<prop::sample::Index>(), wild()), 1..4),
    ) {
        let batch = batch(seed);
        let Metadata::Flashinfer(mut metadata) = batch.random_flashinfer(&mut rng(seed), 2) else {
            unreachable!("it makes FLASHINFER metadata")
        };
        let Some(flashinfer::Prefill::Wrapper(plan)) = &mut metadata.prefill else {
            unreachable!("it plans row 2 as a prefill")
        };
        for (field, at, value) in changes {
            let at = at.index(64);
            match field {
                0 => write(&mut plan.work.request_indices, at, value),
                1 => write(&mut plan.work.qo_tile_indices, at, value),
                2 => write(&mut plan.work.kv_tile_indices, at, value),
                3 => write(&mut plan.work.worker_indptr, at, value),
                4 => write(&mut plan.work.merge_indptr, at, value),
                5 => plan.work.cta_tile_q = value as u32,
                6 => plan.work.kv_chunk_size = value as u32,
                7 => write(&mut plan.paged_kv_indptr, at, value),
                8 => write(&mut plan.paged_kv_last_page_len, at, value),
                9 => plan.num_qo_heads = value as u32,
                10 => metadata.num_decode_tokens = value as u32,
                _ => plan.work.request_indices.truncate(at),
            }
        }
        survive(&batch, &Metadata::Flashinfer(metadata))?;
    }
}
