//! The Mamba family's layers against the f64 reference: requests that prefill in chunks, decode and verify drafts, several in a
//! step and padded, by metadata that the plain builder and the reference builder made and by random metadata made here.
//!
//! The relative error is max |a − b| / max |b| over one output row (one token), the largest over all rows; of a state, over the
//! state.

#[path = "support/mamba.rs"]
mod layers;
mod support;
#[path = "mamba/ubatch.rs"]
mod ubatch;
#[path = "mamba/world.rs"]
mod world;
#[path = "mamba/wrong.rs"]
mod wrong;

use support::bits;
use timetable_types::{MambaCacheMode, MambaType, Metadata, Tensor, mamba::Metadata as Record};
use world::{Kind, Made, PLAIN, Row, World, state_bits};

const BOUND: f64 = 2e-6;

/// `count` worlds of one type, some steps each.
fn random_worlds(mamba_type: MambaType, seed: u64, count: usize) {
    let mut worst = (0.0f64, 0.0f64);
    let mut rows = [0usize; 3];
    for index in 0..count as u64 {
        let mut world = World::random(mamba_type, seed + index);
        for _ in 0..8 {
            let step = world.random_step();
            for row in &step {
                rows[row.kind as usize] += 1;
            }
            let (output, state) = world.run(&step);
            worst = (worst.0.max(output), worst.1.max(state));
            assert!(
                output <= BOUND && state <= BOUND,
                "seed {}: output {output:e}, state {state:e}; {:?}",
                seed + index,
                world.layer.config
            );
        }
    }
    println!(
        "{mamba_type:?}: {count} worlds; rows that decoded {}, verified {}, prefilled {}: output {:.1e}, states {:.1e}",
        rows[0], rows[1], rows[2], worst.0, worst.1
    );
    assert!(rows[2] > count && (mamba_type == MambaType::Gdn || rows[0] > count));
}

#[test]
fn random_steps_of_mamba2() {
    random_worlds(MambaType::Mamba2, 1_000, 150);
}

#[test]
fn random_steps_of_gdn() {
    random_worlds(MambaType::Gdn, 2_000, 150);
}

#[test]
fn random_steps_of_mamba1() {
    random_worlds(MambaType::Mamba1, 3_000, 80);
}

#[test]
fn random_steps_of_short_convolutions() {
    random_worlds(MambaType::ShortConv, 4_000, 80);
}

#[test]
fn random_steps_of_linear_attention() {
    random_worlds(MambaType::Linear, 5_000, 80);
}

#[test]
fn every_number_of_accepted_drafts_goes_on_from_its_own_state() {
    let mut worst = 0.0f64;
    for mamba_type in [MambaType::Mamba2, MambaType::Gdn, MambaType::ShortConv] {
        for drafts in 1..=4 {
            let mut world =
                World::new(mamba_type, 77 + drafts as u64, drafts, MambaCacheMode::None);
            let requests = drafts + 1;
            let prompts: Vec<Row> = (0..requests)
                .map(|request| world.row(request, Kind::Prefill, 3 + 5 * request, 0))
                .collect();
            world.run(&prompts);
            // Every request once with each number, all in one step.
            for round in 0..=drafts {
                let rows: Vec<Row> = (0..requests)
                    .map(|request| {
                        let accepted = 1 + (request + round) % (drafts + 1);
                        world.row(request, Kind::Verify, 1 + drafts, accepted)
                    })
                    .collect();
                let (output, state) = world.run(&rows);
                worst = worst.max(output).max(state);
            }
        }
    }
    println!("verifications of 1 to 4 drafts, all accepted counts: {worst:.1e}");
    assert!(worst <= BOUND, "{worst:e}");
}

#[test]
fn states_go_along_where_each_block_has_its_own() {
    let mut worst = 0.0f64;
    for mamba_type in [MambaType::Mamba2, MambaType::Gdn] {
        for drafts in [0, 2] {
            let mut world =
                World::new(mamba_type, 5 + drafts as u64, drafts, MambaCacheMode::Align);
            let first = [
                world.row(0, Kind::Prefill, 16, 0),
                world.row(1, Kind::Prefill, 29, 0),
            ];
            world.run(&first);
            let second = [
                world.row(0, Kind::Prefill, 40, 0),
                world.row(1, Kind::Prefill, 3, 0),
            ];
            world.run(&second);
            for step in 0..24 {
                let rows: Vec<Row> = (0..2)
                    .map(|request| match drafts {
                        0 => world.row(request, Kind::Decode, 1, 0),
                        _ => world.row(request, Kind::Verify, 3, 1 + (step + request) % 3),
                    })
                    .collect();
                let (output, state) = world.run(&rows);
                worst = worst.max(output).max(state);
            }
        }
    }
    println!("states aligned to blocks: {worst:.1e}");
    assert!(worst <= BOUND, "{worst:e}");
}

#[test]
fn long_prompts_keep_their_accuracy() {
    for &mamba_type in MambaType::ALL {
        let mut world = World::new(mamba_type, 9, 0, MambaCacheMode::None);
        let mut worst = 0.0f64;
        for tokens in [700, 1, 299, 1, 1] {
            let kind = if tokens == 1 {
                Kind::Decode
            } else {
                Kind::Prefill
            };
            let rows = [world.row(0, kind, tokens, 0)];
            let (output, state) = world.run(&rows);
            worst = worst.max(output).max(state);
        }
        println!("{mamba_type:?}: a prompt of 1,000 tokens: {worst:.1e}");
        assert!(worst <= BOUND, "{mamba_type:?}: {worst:e}");
    }
}

/// A world some steps on, and its next step.
fn next_step(mamba_type: MambaType, seed: u64) -> (World, Vec<Row>) {
    let mut world = World::random(mamba_type, seed);
    for _ in 0..4 {
        let step = world.random_step();
        world.run(&step);
    }
    let step = world.random_step();
    (world, step)
}

fn bits_on(threads: usize, world: &World, made: &Made) -> (Vec<u32>, Vec<u32>) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.build().expect("a pool");
    let (output, states) = pool.install(|| world.forward(made));
    (bits(&output), state_bits(&states))
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for &mamba_type in MambaType::ALL {
        let mut world = World::new(mamba_type, 60, 0, MambaCacheMode::None);
        // Enough work for several threads.
        let rows: Vec<Row> = (0..4)
            .map(|request| world.row(request, Kind::Prefill, 200, 0))
            .collect();
        for made in &world.make(&rows) {
            let one = bits_on(1, &world, made);
            for threads in [2, 5] {
                let many = bits_on(threads, &world, made);
                assert!(one == many, "{mamba_type:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_what_else_is_in_the_batch() {
    for &mamba_type in MambaType::ALL {
        for seed in 0..20 {
            let (mut world, rows) = next_step(mamba_type, 700 + seed);
            let together = world.make(&rows).remove(PLAIN);
            let (output, states) = world.forward(&together);
            let width = world.layer.config.output_size();
            let mut first = 0;
            for row in &rows {
                let alone = world.make(std::slice::from_ref(row)).remove(PLAIN);
                let (own, own_states) = world.forward(&alone);
                let count = row.tokens.len() * width;
                let expected = &output[first..first + count];
                assert_eq!(
                    bits(&own[..count]),
                    bits(expected),
                    "{mamba_type:?}, {seed}"
                );
                for state in world.states_of(row) {
                    let of = |states: &timetable_device::cpu::mamba::MambaStates| {
                        (bits(&states.window(state)), bits(&states.recurrent(state)))
                    };
                    assert!(of(&own_states) == of(&states), "{mamba_type:?}, {seed}");
                }
                first += count;
            }
        }
    }
}

/// Field case 5: a prompt's first chunk of one token, beside a decode, is a prefill, and begins without a state.
#[test]
fn case_05_a_first_chunk_of_one_token_begins_without_a_state() {
    for &mamba_type in MambaType::ALL {
        let mut world = World::new(mamba_type, 5, 0, MambaCacheMode::None);
        world.padding = &[(0, 0)];
        let prompt = [world.row(0, Kind::Prefill, 49, 0)];
        world.run(&prompt);
        // The second request's block holds NaN, as any that was another's.
        let step = [
            world.row(0, Kind::Decode, 1, 0),
            world.row(1, Kind::Prefill, 1, 0),
        ];
        let plain = world.make(&step).remove(PLAIN);
        assert_eq!(plain.step.tensors.seq_lens, [50, 1]);
        let Metadata::Mamba(record) = &plain.metadata else {
            panic!("another family");
        };
        let counts = match record {
            Record::Mamba1(base) | Record::ShortConv(base) => (base.num_decodes, base.num_prefills),
            Record::Mamba2(m) => (m.base.num_decodes, m.base.num_prefills),
            Record::Linear(m) => (m.num_decodes, m.num_prefills),
            Record::Gdn(m) => {
                let flags = Tensor::Values(vec![1, 0]);
                assert_eq!(m.has_initial_state.as_ref(), Some(&flags));
                (m.num_decodes, m.num_prefills)
            }
        };
        assert_eq!(counts, (1, 1));
        let (output, state) = world.run(&step);
        assert!(output <= BOUND && state <= BOUND, "{output:e}, {state:e}");
    }
}

/// Field case 23: what a verification rejected shortens the lengths on the device; the host's are bounds. Results, and the states
/// that are kept, go on from the token that was accepted last, in the block where the device's length ends.
#[test]
fn case_23_lengths_after_rejection_are_the_devices() {
    for mamba_type in [MambaType::Mamba2, MambaType::Gdn, MambaType::ShortConv] {
        let (mut worst, mut bounds, mut blocks) = (0.0f64, 0, 0);
        for (seed, &mode) in MambaCacheMode::ALL.iter().enumerate() {
            for drafts in 1..=3 {
                let seed = 230 + 10 * seed as u64 + drafts as u64;
                let mut world = World::new(mamba_type, seed, drafts, mode);
                world.lengths_are_bounds = true;
                let rows: Vec<Row> = [13, 16, 30]
                    .into_iter()
                    .enumerate()
                    .map(|(request, tokens)| world.row(request, Kind::Prefill, tokens, 0))
                    .collect();
                world.run(&rows);
                for round in 0..16 {
                    let mut rows: Vec<Row> = (0..3)
                        .map(|request| {
                            let accepted = 1 + (request + round) % (drafts + 1);
                            world.row(request, Kind::Verify, 1 + drafts, accepted)
                        })
                        .collect();
                    if round == 5 {
                        rows.push(world.row(3, Kind::Prefill, 21, 0));
                    }
                    let plain = world.make(&rows).remove(PLAIN);
                    let lens = &plain.step.tensors.seq_lens;
                    for (&len, &bound) in lens.iter().zip(&plain.step.cam.seq_lens_cpu_upper_bound)
                    {
                        assert!(len <= bound);
                        bounds += usize::from(len < bound);
                        // A builder that took the bound would name another block's state.
                        blocks += usize::from((len - 1) / 16 < (bound - 1) / 16);
                    }
                    let (output, state) = world.run(&rows);
                    worst = worst.max(output).max(state);
                    assert!(output <= BOUND && state <= BOUND, "{output:e}, {state:e}");
                }
            }
        }
        println!(
            "{mamba_type:?}: {bounds} lengths below their bounds, {blocks} in a block before: {worst:.1e}"
        );
        assert!(bounds > 100 && blocks > 10, "{bounds}, {blocks}");
    }
}
