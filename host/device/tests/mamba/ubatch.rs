//! Micro-batches: a step that is cut in two, each part by a builder of its own and from the states that the part before it left,
//! gives what the whole gives.

use rand::Rng;
use timetable_attention::batch::{
    GroupStep, maybe_create_ubatch_slices, pad_ubatch_slices, slice_input_batch,
    split_attn_metadata,
};
use timetable_types::{MambaCacheMode, MambaType};

use crate::{
    BOUND,
    support::{bits, pick, rng},
    world::{PLAIN, REFERENCE, World},
};

#[derive(Debug, Default)]
struct Seen {
    /// Steps.
    steps: usize,
    /// Steps with a request in both parts.
    inside: usize,
    /// Parts of which the reference builder's metadata were refused.
    refused: usize,
    worst: f64,
}

/// A step of a world some steps on, cut at a place that `seed` draws.
fn cut_a_step(mamba_type: MambaType, seed: u64, seen: &mut Seen) {
    let mut world = World::new(mamba_type, seed, 0, MambaCacheMode::None);
    for _ in 0..3 {
        let step = world.random_step();
        world.run(&step);
    }
    let rows = world.random_step();
    let scheduled: Vec<u32> = rows.iter().map(|row| row.tokens.len() as u32).collect();
    let tokens: usize = rows.iter().map(|row| row.tokens.len()).sum();
    if tokens < 2 {
        return;
    }
    let rng = &mut rng(seed);
    // Anywhere; behind the last row's first token; before its last.
    let first = tokens - rows[rows.len() - 1].tokens.len();
    let anywhere = rng.random_range(1..tokens);
    let split_point = *pick(rng, &[anywhere, anywhere, first + 1, tokens - 1]).min(&(tokens - 1));

    let whole = world.make(&rows).remove(PLAIN);
    let (whole_output, whole_states) = world.forward(&whole);
    let expected = world.expected(&rows);
    let slices = maybe_create_ubatch_slices(&scheduled, tokens, 2, Some(split_point));
    let (padded_tokens, padded_rows) = (
        whole.step.cam.num_actual_tokens as usize,
        whole.step.batch_size(),
    );
    let slices = pad_ubatch_slices(&slices, padded_tokens, padded_rows);
    let in_both =
        (slices[0].requests.end > slices[1].requests.start).then_some(slices[1].requests.start);
    seen.steps += 1;
    seen.inside += usize::from(in_both.is_some());
    let sliced = |slice| slice_input_batch(slice, &whole.step);
    let by_metadata = split_attn_metadata(&slices, &whole.step).expect("two parts");
    let by_batch: Vec<GroupStep> = slices.iter().map(sliced).collect();
    for (generation, parts) in [(1, &by_metadata), (2, &by_batch)] {
        for builder in [PLAIN, REFERENCE] {
            let what = format!(
                "{mamba_type:?}, seed {seed}, runner {generation}, builder {builder}: {scheduled:?} at {split_point}"
            );
            let mut output = Vec::new();
            let mut states = world.states().clone();
            for (slice, part) in slices.iter().zip(parts) {
                let range = slice.tokens.clone();
                let mut made = world.part(&whole, range.clone(), part, builder);
                if let Err(error) = world.verify(&made) {
                    // A prompt's first token that stands alone looks like a decode where its flag is lost: the field's first
                    // runner loses it. It is refused, and the plain builder serves.
                    let alone = (part.tensors.seq_lens.iter().zip(part.naive_query_lens()))
                        .any(|(&len, query)| len == 1 && query == 1);
                    assert!(
                        generation == 1 && builder == REFERENCE && alone,
                        "{what}: {error}"
                    );
                    seen.refused += 1;
                    made = world.part(&whole, range, part, PLAIN);
                    world.verify(&made).expect("what builders make passes");
                }
                let (of_part, left) = world.forward_from(states, &made);
                output.extend(of_part);
                states = left;
            }
            let (of_output, of_states) = world.errors(&expected, &output, &states);
            assert!(
                of_output <= BOUND && of_states <= BOUND,
                "{what}: output {of_output:e}, states {of_states:e}"
            );
            seen.worst = seen.worst.max(of_output).max(of_states);
            // A request that is not cut keeps every bit.
            let width = world.layer.config.output_size();
            let mut first = 0;
            for (index, row) in rows.iter().enumerate() {
                let own = first * width..(first + row.tokens.len()) * width;
                first += row.tokens.len();
                if in_both == Some(index) {
                    continue;
                }
                assert_eq!(
                    bits(&output[own.clone()]),
                    bits(&whole_output[own]),
                    "{what}"
                );
                for state in world.states_of(row) {
                    assert_eq!(
                        bits(&states.recurrent(state)),
                        bits(&whole_states.recurrent(state)),
                        "{what}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_request_cut_in_two_goes_on_from_its_own_state() {
    let mut refused = 0;
    for &mamba_type in MambaType::ALL {
        let mut seen = Seen::default();
        for seed in 0..60 {
            cut_a_step(mamba_type, 8_000 + seed, &mut seen);
        }
        println!("{mamba_type:?}: {seen:?}");
        assert!(seen.steps > 40 && seen.inside > 20, "{seen:?}");
        refused += seen.refused;
    }
    assert!(refused > 0, "no first token stood alone");
}
