//! Metadata that are not the step's: they are executed as they stand, or refused, and harm nothing.

use rand::Rng;
use timetable_attention::plain_builder;
use timetable_device::cpu::{
    AttentionConfig, CacheDtype, ImplError, PrepareError, StepMetadata,
    mamba::{MambaConfig, MambaImpl, MambaStates, MambaStepMetadata},
    new_impl,
};
use timetable_types::{
    Family, MambaCacheMode, MambaType, Metadata, PaddedTensor, Tensor,
    mamba::{BaseMetadata, CausalConv1d, Metadata as Record},
};

use super::{BOUND, next_step};
use crate::{
    support::{pick, rng},
    world::{BY_HAND, Kind, Made, Row, World, builder_config},
};

fn error(actual: &[f32], expected: &[f64], width: usize) -> f64 {
    timetable_device::reference::max_relative_error(actual, expected, width)
}

/// Two requests of 9 tokens, and a step that goes on with both.
fn two(mamba_type: MambaType, kind: Kind, tokens: usize) -> (World, Vec<Row>, Made) {
    let drafts = if kind == Kind::Verify { tokens - 1 } else { 0 };
    let mut world = World::new(mamba_type, 31, drafts, MambaCacheMode::None);
    world.padding = &[(0, 0)];
    let first: Vec<Row> = (0..2).map(|r| world.row(r, Kind::Prefill, 9, 0)).collect();
    world.run(&first);
    let rows: Vec<Row> = (0..2).map(|r| world.row(r, kind, tokens, 1)).collect();
    let by_hand = world.make(&rows).remove(BY_HAND);
    (world, rows, by_hand)
}

fn base(metadata: &mut Metadata) -> &mut BaseMetadata {
    match metadata {
        Metadata::Mamba(Record::Mamba2(metadata)) => &mut metadata.base,
        Metadata::Mamba(Record::Mamba1(base) | Record::ShortConv(base)) => base,
        _ => panic!("no common part"),
    }
}

fn values(tensor: &mut Tensor) -> &mut Vec<i32> {
    match tensor {
        Tensor::Values(values) => values,
        Tensor::Matrix(matrix) => &mut matrix.values,
        _ => panic!("not by value"),
    }
}

#[test]
fn metadata_are_executed_even_when_they_are_wrong() {
    // Flags that say "no state": the prompt begins again.
    let (world, rows, mut made) = two(MambaType::Mamba2, Kind::Prefill, 20);
    let width = world.layer.config.output_size();
    let fresh: Vec<f64> = rows
        .iter()
        .flat_map(|row| world.layer.reference(&row.tokens).output)
        .collect();
    let has = &mut base(&mut made.metadata).has_initial_states_p;
    *values(has.as_mut().expect("flags")) = vec![0, 0];
    assert!(error(&world.forward(&made).0, &fresh, width) <= BOUND);

    // A block of the convolution that is left out: from its first token on the numbers are others.
    let (world, _, mut made) = two(MambaType::ShortConv, Kind::Prefill, 20);
    let width = world.layer.config.output_size();
    let (right, _) = world.forward(&made);
    let conv = base(&mut made.metadata).conv.as_mut().expect("blocks");
    *conv = CausalConv1d {
        block_m: 8,
        nums: vec![3, 3],
        total: 5,
        batch_ptr: Tensor::Values(vec![0, 0, 0, 1, 1]),
        token_chunk_offset_ptr: Tensor::Values(vec![0, 1, 2, 0, 2]),
    };
    let (left_out, _) = world.forward(&made);
    let block = 28 * width..36 * width;
    assert!(left_out[block.clone()].iter().all(|&x| x == 0.0));
    assert_eq!(left_out[..block.start], right[..block.start]);
    assert_eq!(left_out[block.end..], right[block.end..]);

    // Two rows' states exchanged: each goes on from the other's.
    for mamba_type in [MambaType::Mamba2, MambaType::Mamba1] {
        let (world, rows, mut made) = two(mamba_type, Kind::Decode, 1);
        let width = world.layer.config.output_size();
        let states = &mut base(&mut made.metadata).state_indices_tensor_d.tensor;
        values(states).swap(0, 1);
        let exchanged: Vec<f64> = (0..2)
            .flat_map(|row| {
                let all = world.history(1 - row).iter().chain(&rows[row].tokens);
                let output = world.layer.reference(all).output;
                output[output.len() - width..].to_vec()
            })
            .collect();
        assert!(error(&world.forward(&made).0, &exchanged, width) <= BOUND);
    }
}

#[test]
fn what_is_kept_and_read_is_what_the_accepted_tokens_say() {
    for mamba_type in [MambaType::Mamba2, MambaType::Gdn] {
        let (mut world, rows, _) = two(mamba_type, Kind::Verify, 4);
        let width = world.layer.config.output_size();
        // All four count, then each shorter number is said of the same states.
        world.run(&rows);
        let next: Vec<Row> = (0..2).map(|r| world.row(r, Kind::Verify, 2, 1)).collect();
        for accepted in 1..=4 {
            let mut made = world.make(&next).remove(BY_HAND);
            let found = match &mut made.metadata {
                Metadata::Mamba(Record::Gdn(metadata)) => &mut metadata.num_accepted_tokens,
                metadata => &mut base(metadata).num_accepted_tokens,
            };
            *values(&mut found.as_mut().expect("accepted").tensor) = vec![accepted; 2];
            let expected: Vec<f64> = (0..2)
                .flat_map(|row| {
                    let past = world.history(row)[..9].iter();
                    let accepted = rows[row].tokens.iter().take(accepted as usize);
                    let all = past.chain(accepted).chain(&next[row].tokens);
                    let output = world.layer.reference(all).output;
                    output[output.len() - 2 * width..].to_vec()
                })
                .collect();
            let error = error(&world.forward(&made).0, &expected, width);
            assert!(error <= BOUND, "{mamba_type:?}, {accepted}: {error:e}");
        }
        // A number that no column has: the row is left out.
        for accepted in [0, -1, i32::MIN, 5, i32::MAX] {
            let mut made = world.make(&next).remove(BY_HAND);
            let found = match &mut made.metadata {
                Metadata::Mamba(Record::Gdn(metadata)) => &mut metadata.num_accepted_tokens,
                metadata => &mut base(metadata).num_accepted_tokens,
            };
            *values(&mut found.as_mut().expect("accepted").tensor) = vec![accepted; 2];
            assert!(world.forward(&made).0.iter().all(|&x| x == 0.0));
        }
    }
}

#[test]
fn rows_at_the_null_state_are_zeros() {
    for kind in [Kind::Decode, Kind::Prefill] {
        let (world, rows, mut made) = two(
            MambaType::Mamba2,
            kind,
            if kind == Kind::Decode { 1 } else { 7 },
        );
        let base = base(&mut made.metadata);
        let states = match kind {
            Kind::Decode => &mut base.state_indices_tensor_d.tensor,
            _ => &mut base.state_indices_tensor_p,
        };
        // The null state holds NaN.
        values(states)[0] = 0;
        let (output, states) = world.forward(&made);
        let first = rows[0].tokens.len() * world.layer.config.output_size();
        assert!(output[..first].iter().all(|&x| x == 0.0));
        assert!(output[first..].iter().all(|x| x.is_finite() && *x != 0.0));
        assert!(states.recurrent(0).iter().all(|x| x.is_nan()));
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_field() {
    let prepare = |world: &World, made: &Made| {
        let mut step = MambaStepMetadata::new();
        let prepared = step.prepare(&made.metadata, &made.inputs(&[]), world.spec());
        assert_eq!(step.mamba_type().is_some(), prepared.is_ok());
        prepared.map_err(|error| error.to_string())
    };
    let refused = |metadata: fn(&mut Metadata), field: &str| {
        let (world, _, mut made) = two(MambaType::Mamba2, Kind::Prefill, 20);
        metadata(&mut made.metadata);
        let error = prepare(&world, &made).expect_err(field);
        assert!(error.contains(field), "{error}");
    };
    refused(|m| base(m).num_prefills = 1 << 31, "query_start_loc_p");
    refused(|m| base(m).num_decodes = u32::MAX, "state_indices_tensor_d");
    refused(|m| base(m).conv = None, "conv");
    refused(|m| base(m).num_decode_tokens = 5, "query_start_loc_p");
    refused(
        |m| {
            let conv = base(m).conv.as_mut().expect("blocks");
            conv.block_m = 0;
        },
        "block_m",
    );
    refused(
        |m| {
            let Metadata::Mamba(Record::Mamba2(metadata)) = m else {
                return;
            };
            *metadata.cu_chunk_seqlen_p.last_mut().expect("ends") = i32::MAX;
        },
        "cu_chunk_seqlen_p",
    );
    // A chunk that comes again would be work without a bound.
    let (world, _, mut made) = two(MambaType::Gdn, Kind::Prefill, 20);
    let Metadata::Mamba(Record::Gdn(metadata)) = &mut made.metadata else {
        panic!("no GDN");
    };
    metadata.chunk_indices = [0, 0].repeat(1000);
    metadata.chunk_offsets = vec![0, 1000, 1000];
    let error = prepare(&world, &made).expect_err("chunks");
    assert!(error.contains("chunk_indices: chunk 0 of row 0"), "{error}");
    // Another family's.
    let mut config = builder_config::config();
    config.kv_cache_spec.block_size = 16;
    let mut builder = plain_builder(Family::TritonAttn, &config).expect("a plain builder");
    let other = builder.build(&made.step.cam, false).expect("metadata");
    let error = MambaStepMetadata::new()
        .prepare(&other, &made.inputs(&[]), world.spec())
        .expect_err("another family");
    assert!(matches!(error, PrepareError::Unsupported { .. }), "{error}");
}

#[test]
fn attention_over_keys_says_which_type_runs_a_recurrent_or_latent_layer() {
    let (_, _, made) = two(MambaType::Mamba2, Kind::Prefill, 20);
    let error = StepMetadata::new()
        .prepare(&made.metadata, &made.inputs(&[]), 16)
        .expect_err("states");
    assert!(error.to_string().contains("MambaStepMetadata"), "{error}");
    let config = AttentionConfig {
        num_heads: 1,
        head_size: 8,
        scale: 1.0,
        num_kv_heads: 1,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: CacheDtype::F32,
        block_size: 16,
        batch_invariant: false,
    };
    for (family, says) in [
        (Family::Mamba, "make a `MambaImpl`"),
        (Family::FlashMla, "make an `MlaImpl`"),
    ] {
        let error = new_impl(family, config).err().expect("it is refused");
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn a_layer_refuses_what_is_not_its_own() {
    let (world, _, made) = two(MambaType::Mamba2, Kind::Prefill, 20);
    let mut step = MambaStepMetadata::new();
    step.prepare(&made.metadata, &made.inputs(&[]), world.spec())
        .expect("prepared");
    let config = world.layer.config;
    let layer = MambaImpl::new(config).expect("an impl");
    let inputs = world.layer.inputs(&made.tensors);
    let mut output = vec![0.0; 40 * config.output_size()];
    let run = |states: &mut MambaStates, step: &MambaStepMetadata, output: &mut [f32]| {
        let ran = layer.forward(&inputs, states, Some(step), output);
        ran.expect_err("refused").to_string()
    };
    let mut states = MambaStates::new(50, &config);
    assert_eq!(
        run(&mut states, &MambaStepMetadata::new(), &mut output),
        "mamba2 was given metadata of no type (unprepared): prepare this group's metadata first"
    );
    assert!(
        run(&mut MambaStates::new(2, &config), &step, &mut output).contains("states: 2, expected")
    );
    let short = output.len() - 1;
    assert!(run(&mut states, &step, &mut output[..short]).contains("elements of output"));
    let other = World::new(MambaType::Gdn, 1, 0, MambaCacheMode::None)
        .layer
        .config;
    assert!(
        run(&mut MambaStates::new(50, &other), &step, &mut output)
            .contains("states is another layer's")
    );
    // No metadata: a profile run.
    output.fill(f32::NAN);
    layer
        .forward(&inputs, &mut states, None, &mut output)
        .expect("a profile run");
    assert!(output.iter().all(|&x| x == 0.0));
    let MambaConfig::Mamba2(mut sizes) = config else {
        panic!("no Mamba2");
    };
    sizes.n_groups = sizes.num_heads + 1;
    let refused = MambaImpl::new(MambaConfig::Mamba2(sizes)).expect_err("groups");
    assert!(
        matches!(
            refused,
            ImplError::Config {
                name: "num_heads",
                ..
            }
        ),
        "{refused}"
    );
}

/// What may be in a record by value.
#[derive(Default)]
struct Numbers<'m> {
    lists: Vec<&'m mut Vec<i32>>,
    counts: Vec<&'m mut u32>,
}

impl<'m> Numbers<'m> {
    fn tensors(&mut self, tensors: impl IntoIterator<Item = &'m mut Tensor>) {
        for tensor in tensors {
            match tensor {
                Tensor::Values(values) => self.lists.push(values),
                Tensor::Matrix(matrix) => self.lists.push(&mut matrix.values),
                _ => {}
            }
        }
    }

    fn padded(&mut self, padded: impl IntoIterator<Item = &'m mut PaddedTensor>) {
        for padded in padded {
            self.counts.push(&mut padded.rows);
            self.tensors([&mut padded.tensor]);
        }
    }

    fn conv(&mut self, conv: &'m mut Option<CausalConv1d>) {
        if let Some(conv) = conv {
            self.counts.extend([&mut conv.block_m, &mut conv.total]);
            self.lists.push(&mut conv.nums);
            self.tensors([&mut conv.batch_ptr, &mut conv.token_chunk_offset_ptr]);
        }
    }

    fn base(&mut self, base: &'m mut BaseMetadata) {
        self.counts.extend([
            &mut base.num_prefills,
            &mut base.num_prefill_tokens,
            &mut base.num_decodes,
            &mut base.num_decode_tokens,
        ]);
        self.tensors(&mut base.has_initial_states_p);
        self.tensors(&mut base.query_start_loc_p);
        self.tensors([&mut base.state_indices_tensor_p]);
        self.padded([&mut base.state_indices_tensor_d]);
        self.padded(&mut base.query_start_loc_d);
        self.padded(&mut base.num_accepted_tokens);
        self.conv(&mut base.conv);
    }

    fn of(metadata: &'m mut Metadata) -> Self {
        let mut found = Numbers::default();
        let Metadata::Mamba(record) = metadata else {
            return found;
        };
        match record {
            Record::Mamba1(base) | Record::ShortConv(base) => found.base(base),
            Record::Mamba2(m) => {
                found.base(&mut m.base);
                found.counts.push(&mut m.chunk_size);
                found.lists.extend([
                    &mut m.seq_idx_p,
                    &mut m.cu_chunk_seqlen_p,
                    &mut m.last_chunk_indices_p,
                ]);
            }
            Record::Linear(m) => {
                found.counts.extend([
                    &mut m.num_prefills,
                    &mut m.num_decodes,
                    &mut m.num_decode_tokens,
                ]);
                found.tensors([
                    &mut m.query_start_loc,
                    &mut m.seq_lens,
                    &mut m.state_indices_tensor,
                ]);
            }
            Record::Gdn(m) => {
                found.counts.extend([
                    &mut m.num_prefills,
                    &mut m.num_decodes,
                    &mut m.num_decode_tokens,
                    &mut m.num_spec_decodes,
                    &mut m.num_spec_decode_tokens,
                ]);
                found.padded(&mut m.spec_query_start_loc);
                found.padded(&mut m.non_spec_query_start_loc);
                found.padded(&mut m.spec_state_indices_tensor);
                found.padded(&mut m.non_spec_state_indices_tensor);
                found.padded(&mut m.num_accepted_tokens);
                found.tensors(&mut m.has_initial_state);
                found.tensors(&mut m.spec_token_indx);
                found.tensors(&mut m.non_spec_token_indx);
                found.tensors(&mut m.prefill_query_start_loc);
                found.tensors(&mut m.prefill_state_indices);
                found.tensors(&mut m.prefill_has_initial_state);
                found
                    .lists
                    .extend([&mut m.chunk_indices, &mut m.chunk_offsets]);
                found.conv(&mut m.conv);
            }
        }
        found
    }
}

/// Prepares and runs: reaching the end is the promise.
#[test]
fn wild_numbers_are_harmless() {
    let random = &mut rng(55);
    let mut ran = 0;
    for &mamba_type in MambaType::ALL {
        for seed in 0..12 {
            let (mut world, rows) = next_step(mamba_type, 800 + seed);
            let made = world.make(&rows).remove(BY_HAND);
            for _ in 0..120 {
                let mut metadata = made.metadata.clone();
                let mut numbers = Numbers::of(&mut metadata);
                for _ in 0..random.random_range(1..4) {
                    let near = random.random_range(-3..40);
                    let wild = *pick(random, &[i32::MIN, i32::MAX, -1, 0, 1, near, near, 1 << 20]);
                    if random.random_bool(0.25) {
                        let at = random.random_range(0..numbers.counts.len());
                        *numbers.counts[at] = wild as u32;
                        continue;
                    }
                    let at = random.random_range(0..numbers.lists.len());
                    let list = &mut numbers.lists[at];
                    let place = random.random_range(0..=list.len());
                    match random.random_range(0..8) {
                        0 => list.push(wild),
                        1 if place < list.len() => drop(list.remove(place)),
                        2 if place < list.len() => list.swap(0, place),
                        _ if place < list.len() => list[place] = wild,
                        _ => {}
                    }
                }
                if let Ok(output) = world.try_forward(&made, &metadata) {
                    assert!(output.iter().all(|&x| x != 1e30), "something is unwritten");
                    ran += 1;
                }
            }
        }
    }
    println!("{ran} of 7,200 ran");
    assert!((500..7_200).contains(&ran), "{ran}");
}
