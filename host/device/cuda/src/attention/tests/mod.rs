//! Prepared steps, unpacked and planned on a host-side machine: every query row sees each of its keys once, through its own
//! blocks, within the bounds that were launched with.

mod refusals;
mod support;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use timetable_attention::batch::{PaddingValues, pad_step};
use timetable_attention::{Verifier, plain_builder, verify_step};
use timetable_types::{
    CaptureShape, Causal, Family, LaunchPromise, Metadata,
    flashinfer::{Decode, Prefill},
};

use crate::attention::{Launch, PrepareError, Replay};
use crate::kernels::Element;

use support::*;

#[test]
fn flash_attn_covers_every_key_once_with_any_schedule() {
    let mut rng = Pcg64::seed_from_u64(3);
    let (mut verifier, mut ran) = (Verifier::new(), 0);
    for case in 0..300 {
        let config = config(&mut rng);
        let mut machine = machine();
        let mut group = group(&config, Family::FlashAttn, Element::Bf16, &machine);
        let mut step = {
            let (decodes, prefills) = (rng.random_range(0..9), rng.random_range(0..5));
            step(&mut rng, decodes, prefills)
        };
        let rows = step.tensors.seq_lens.len();
        if rng.random_bool(0.3) {
            step.cam.causal = Causal::PerRequest;
            step.tensors.causal = Some((0..rows).map(|_| rng.random_range(0..2)).collect());
        } else if rng.random_bool(0.3) {
            step.cam.causal = Causal::All(false);
        }
        let inputs = step.tensors.inputs();
        let context = context(&config, &step, &inputs);
        verify_step(&context).unwrap();
        let plain = plain_builder(Family::FlashAttn, &config)
            .unwrap()
            .build(&step.cam, false)
            .unwrap();
        let mut metadata = plain.clone();
        random_schedule(&mut rng, &mut metadata, rows);
        verifier.verify(&metadata, &context).unwrap();
        let prepared = group.prepare(&metadata, &context, None);
        // The pool of partial results is small here: what it does not hold is refused, and the plain builder serves.
        if let Err(PrepareError::Room { needed, room, .. }) = &prepared {
            assert!(needed > room);
        } else {
            prepared.unwrap_or_else(|error| panic!("case {case}: {error}"));
            ran += 1;
            unpack(&mut machine, &step, &group);
            check_items(
                &machine,
                &group,
                &group.eager().unwrap(),
                &step,
                &all_blocks(&step),
                &step.tensors.seq_lens,
            );
        }
        group.prepare(&plain, &context, None).unwrap();
        assert_eq!(group.counts().unwrap().max_splits, 1);
        unpack(&mut machine, &step, &group);
        check_items(
            &machine,
            &group,
            &group.eager().unwrap(),
            &step,
            &all_blocks(&step),
            &step.tensors.seq_lens,
        );
    }
    assert!(ran > 200, "{ran} of 300 ran");
}

#[test]
fn flashinfer_covers_every_key_once_with_any_work_list_and_any_pages() {
    let mut rng = Pcg64::seed_from_u64(4);
    let mut verifier = Verifier::new();
    let (mut refused, mut ran) = (0, 0);
    for case in 0..300 {
        let config = config(&mut rng);
        let mut machine = machine();
        let mut group = group(&config, Family::Flashinfer, Element::Bf16, &machine);
        let step = {
            let (decodes, prefills) = (rng.random_range(0..9), rng.random_range(0..4));
            step(&mut rng, decodes, prefills)
        };
        let inputs = step.tensors.inputs();
        let context = context(&config, &step, &inputs);
        verify_step(&context).unwrap();
        let plain = plain_builder(Family::Flashinfer, &config)
            .unwrap()
            .build(&step.cam, false)
            .unwrap();
        let mut metadata = plain.clone();
        let (mut blocks, mut keys) = (all_blocks(&step), step.tensors.seq_lens.clone());
        let Metadata::Flashinfer(record) = &mut metadata else {
            panic!("not FLASHINFER's");
        };
        let first = record.num_decodes as usize;
        let starts = &step.tensors.query_start_loc;
        let select = rng.random_bool(0.3);
        if let Some(Decode::Wrapper(plan)) = &mut record.decode {
            if select {
                select_pages(&mut rng, plan, 0, &step, &mut blocks, &mut keys);
            }
            random_work(&mut rng, plan, &starts[..=first], &[16, 64]);
        }
        if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
            if select {
                select_pages(&mut rng, plan, first, &step, &mut blocks, &mut keys);
            }
            random_work(&mut rng, plan, &starts[first..], &[16, 64, 128]);
        }
        match verifier.verify(&metadata, &context) {
            Ok(()) => match group.prepare(&metadata, &context, None) {
                Ok(replay) => {
                    assert_eq!(replay, Replay::Fits);
                    ran += 1;
                    unpack(&mut machine, &step, &group);
                    check_items(
                        &machine,
                        &group,
                        &group.eager().unwrap(),
                        &step,
                        &blocks,
                        &keys,
                    );
                }
                Err(PrepareError::Room { needed, room, .. }) => assert!(needed > room),
                Err(error) => panic!("case {case}: {error}"),
            },
            // A chunk that leaves out keys: a list of this test's that is none.
            Err(_) => refused += 1,
        }
        group.prepare(&plain, &context, None).unwrap();
        unpack(&mut machine, &step, &group);
        check_items(
            &machine,
            &group,
            &group.eager().unwrap(),
            &step,
            &all_blocks(&step),
            &step.tensors.seq_lens,
        );
    }
    assert!(
        ran > 120 && refused < 150,
        "{ran} ran, {refused} of 300 were no lists"
    );
}

#[test]
fn a_captured_graph_replays_every_decode_step_within_its_promise() {
    let mut rng = Pcg64::seed_from_u64(5);
    for family in [Family::FlashAttn, Family::Flashinfer] {
        let mut fitted = 0;
        for _ in 0..100 {
            let config = config(&mut rng);
            let mut machine = machine();
            let mut group = group(&config, family, Element::Bf16, &machine);
            let decodes = rng.random_range(1..8);
            let real = step(&mut rng, decodes, 0);
            let mut step = pad_step(&real, 16, 16, PaddingValues::default()).unwrap();
            step.cam.max_query_len = 1;
            let shape = CaptureShape {
                num_tokens: 16,
                num_reqs: 16,
                max_query_len: 1,
                uniform_query_len: Some(1),
            };
            let promise = LaunchPromise {
                max_num_splits: 6,
                max_work_items: 60,
                scratch_bytes: 0,
                max_query_len: 1,
                uniform_query_len: Some(1),
            };
            let launch = Launch::captured(group.config(), &shape, &promise);
            let inputs = step.tensors.inputs();
            let context = context(&config, &step, &inputs);
            let mut metadata = plain_builder(family, &config)
                .unwrap()
                .build(&step.cam, false)
                .unwrap();
            match &mut metadata {
                Metadata::Flashinfer(record) => {
                    if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                        random_work(&mut rng, plan, &step.tensors.query_start_loc, &[16, 64]);
                    }
                }
                _ => random_schedule(&mut rng, &mut metadata, 16),
            }
            match group.prepare(&metadata, &context, Some(&launch)) {
                Ok(Replay::Fits) => {
                    fitted += 1;
                    unpack(&mut machine, &step, &group);
                    let (blocks, keys) = (all_blocks(&step), &step.tensors.seq_lens);
                    check_items(
                        &machine,
                        &group,
                        &group.launches(&launch),
                        &step,
                        &blocks,
                        keys,
                    );
                    check_items(
                        &machine,
                        &group,
                        &group.eager().unwrap(),
                        &step,
                        &blocks,
                        keys,
                    );
                }
                Ok(Replay::Eager(why)) => assert!(!why.is_empty()),
                Err(PrepareError::Room { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            // Another size than the graph's is never replayed.
            let small = Launch {
                num_tokens: 15,
                ..launch
            };
            let plain = plain_builder(family, &config)
                .unwrap()
                .build(&step.cam, false)
                .unwrap();
            assert!(matches!(
                group.prepare(&plain, &context, Some(&small)),
                Ok(Replay::Eager(_))
            ));
            assert_eq!(
                group.prepare(&plain, &context, Some(&launch)),
                Ok(Replay::Fits)
            );
        }
        assert!(fitted > 30, "{family:?}: {fitted} of 100");
    }
}

#[test]
fn f32_attends_to_the_same_keys_by_rows() {
    let mut rng = Pcg64::seed_from_u64(6);
    for family in [Family::FlashAttn, Family::Flashinfer] {
        for _ in 0..60 {
            let config = config(&mut rng);
            let mut machine = machine();
            let mut group = group(&config, family, Element::F32, &machine);
            let step = {
                let (decodes, prefills) = (rng.random_range(0..6), rng.random_range(0..4));
                step(&mut rng, decodes, prefills)
            };
            let inputs = step.tensors.inputs();
            let context = context(&config, &step, &inputs);
            let mut metadata = plain_builder(family, &config)
                .unwrap()
                .build(&step.cam, false)
                .unwrap();
            let (mut blocks, mut keys) = (all_blocks(&step), step.tensors.seq_lens.clone());
            if let Metadata::Flashinfer(record) = &mut metadata
                && rng.random_bool(0.5)
            {
                let first = record.num_decodes as usize;
                let starts = &step.tensors.query_start_loc;
                if let Some(Decode::Wrapper(plan)) = &mut record.decode {
                    select_pages(&mut rng, plan, 0, &step, &mut blocks, &mut keys);
                    random_work(&mut rng, plan, &starts[..=first], &[16]);
                }
            }
            assert_eq!(group.prepare(&metadata, &context, None), Ok(Replay::Fits));
            unpack(&mut machine, &step, &group);
            let launches = group.eager().unwrap();
            assert_eq!(launches.lists().count(), 0);
            let p = launches.plain_params(&cache(group.config()), &io());
            assert_eq!(
                (p.num_reqs as usize, p.num_tokens as u32),
                (keys.len(), step.cam.num_actual_tokens)
            );
            let starts = machine.read_i32(p.query_start_loc, keys.len() + 1);
            assert_eq!(starts, step.tensors.query_start_loc);
            assert_eq!(machine.read_i32(p.seq_lens, keys.len()), keys);
            let causal = machine.read_i32(p.causal, keys.len());
            assert!(causal.iter().all(|&flag| flag == 1));
            for (row, blocks) in blocks.iter().enumerate() {
                let at = p
                    .block_table
                    .offset(4 * row * p.block_table_stride as usize);
                assert_eq!(machine.read_i32(at, blocks.len()), *blocks);
            }
        }
    }
}
