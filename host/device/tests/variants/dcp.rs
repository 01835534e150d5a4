//! The ranks of decode context parallelism, simulated one after the other: each has a builder, a table, slots and a cache of its
//! own; what they find merges to attention over all keys.

use rand::Rng;
use rand_pcg::Pcg64Mcg;
use timetable_attention::{
    Grant, StepInputs,
    batch::{ContextParallel, GroupStep, SlotRule, slot_mapping_into},
    plain_builder,
};
use timetable_device::cpu::{
    AttentionConfig, ContextParallelImpl, ContextParallelMetadata, ImplError, KvCache, Partial,
    PrepareError, StepMetadata, new_impl,
};
use timetable_reference::native_twin;
use timetable_types::{
    BuilderConfig, Causal, DcpInputs, Family, Metadata, batch::dcp_local_seq_lens_into,
};

use crate::{
    scenario::{Scenario, assert_close, build, builder_config, family, verified},
    support::{config, pick, random_rows, rng},
};

/// One rank's side of the step.
struct Rank {
    config: BuilderConfig,
    step: GroupStep,
    cache: KvCache,
    num_blocks: u32,
    parallel: ContextParallel,
}

/// What a pass wrote.
struct Found {
    output: Vec<f32>,
    lse: Vec<f32>,
}

impl Found {
    fn of(rows: usize, size: usize) -> Self {
        Self {
            output: vec![f32::NAN; rows * size],
            lse: vec![f32::NAN; rows],
        }
    }

    fn partial(&self) -> Partial<'_> {
        Partial {
            output: &self.output,
            lse: &self.lse,
        }
    }
}

/// The whole step of a model with `layer.num_heads` query heads on all ranks together.
fn rank(whole: &Scenario, parallel: ContextParallel) -> Rank {
    let (size, block_size) = (parallel.size as usize, whole.layer.block_size);
    let mut step = whole.step.clone();
    let tensors = &mut step.tensors;
    // A block of this rank has room for its share of `size` blocks' tokens.
    let virtual_block = block_size * size;
    let pages = |len: i32| (len as usize).div_ceil(virtual_block);
    let width = tensors
        .seq_lens
        .iter()
        .map(|&len| pages(len))
        .max()
        .unwrap_or(0)
        + 1;
    let mut next = 1;
    tensors.block_table = vec![0; tensors.seq_lens.len() * width];
    tensors.block_table_width = width;
    for (row, &len) in tensors.seq_lens.iter().enumerate() {
        for column in 0..pages(len) {
            tensors.block_table[row * width + column] = next;
            next += 1;
        }
    }
    step.cam.block_table_width = width as u32;
    let rule = SlotRule {
        block_size: block_size as u32,
        context_parallel: Some(parallel),
    };
    let table = &tensors.block_table;
    let row_of = |row: usize| table.get(row * width..(row + 1) * width);
    let beyond = slot_mapping_into(
        rule,
        row_of,
        &tensors.query_start_loc,
        &tensors.positions,
        &mut tensors.slot_mapping,
    );
    assert_eq!(beyond, 0);
    let mut local = Vec::new();
    dcp_local_seq_lens_into(
        &tensors.seq_lens,
        parallel.size,
        parallel.rank,
        parallel.interleave,
        &mut local,
    );
    tensors.dcp_local_seq_lens = Some(local.clone());
    step.cam.dcp = Some(DcpInputs {
        dcp_local_seq_lens_cpu_upper_bound: local.clone(),
    });

    let mut config = whole.config.clone();
    config.attention.num_heads /= parallel.size;
    config.kv_cache_spec.dcp_sharded = true;
    config.parallel.dcp_world_size = parallel.size;
    config.parallel.dcp_rank = parallel.rank;
    config.parallel.cp_kv_cache_interleave_size = parallel.interleave;

    // Keys by this rank's own slots; what it does not own, and all else, is NaN.
    let layer = &whole.layer;
    let mut cache = KvCache::new(
        next as usize,
        1,
        block_size,
        layer.head_size,
        layer.kv_cache_dtype,
    );
    cache.fill(f32::NAN);
    let writer = new_impl(Family::FlashAttn, *layer).expect("an impl");
    for (row, (keys, values)) in whole.keys.iter().zip(&whole.values).enumerate() {
        let count = keys.len() / layer.head_size;
        let positions: Vec<i64> = (0..count as i64).collect();
        let mut slots = vec![0; count];
        let blocks = step.tensors.table().row(row);
        assert_eq!(rule.slots_of_request(blocks, &positions, &mut slots), 0);
        assert_eq!(
            slots.iter().filter(|&&slot| slot >= 0).count(),
            local[row] as usize
        );
        writer.do_kv_cache_update(keys, values, &mut cache, &slots);
    }
    Rank {
        config,
        step,
        cache,
        num_blocks: next as u32,
        parallel,
    }
}

/// Runs the step on `size` ranks; checks each rank's merged heads against float64, and ranks that hold nothing. The error.
fn check(whole: &Scenario, name: &str, size: u32, interleave: u32) -> f64 {
    check_by(whole, name, size, interleave, |rank| {
        build(name, &rank.config, &rank.step, rank.num_blocks)
    })
}

/// The same with metadata that `build` makes for each rank, of the family of the builder called `name`.
fn check_by(
    whole: &Scenario,
    name: &str,
    size: u32,
    interleave: u32,
    build: impl Fn(&Rank) -> Metadata,
) -> f64 {
    let layer = whole.layer;
    let (heads, head_size) = (layer.num_heads / size as usize, layer.head_size);
    let tokens = whole.step.cam.num_actual_tokens as usize;
    let own = AttentionConfig {
        num_heads: heads,
        ..layer
    };
    let attention = ContextParallelImpl::new(family(name), own, size as usize).expect("an impl");
    let what = format!(
        "{name}, {size} ranks of runs of {interleave}, {:?}",
        whole.step.naive_query_lens()
    );

    // This step's keys and values by token.
    let (mut key, mut value) = (Vec::new(), Vec::new());
    for row in 0..whole.keys.len() {
        let (query, keys) = whole.lengths(row);
        let range = (keys - query) * head_size..keys * head_size;
        key.extend_from_slice(&whole.keys[row][range.clone()]);
        value.extend_from_slice(&whole.values[row][range]);
    }
    let mut shards = Vec::new();
    let mut prepared = Vec::new();
    for index in 0..size {
        let parallel = ContextParallel {
            size,
            rank: index,
            interleave,
        };
        let rank = rank(whole, parallel);
        let metadata = build(&rank);
        let inputs = rank.step.tensors.inputs();
        let mut step = ContextParallelMetadata::new();
        step.prepare(&metadata, &inputs, layer.block_size as u32, rank.parallel)
            .expect("the device takes it");
        let mut found = Found::of(tokens * layer.num_heads, head_size);
        attention
            .forward_shard(
                &whole.query,
                &rank.cache,
                &step,
                &mut found.output,
                &mut found.lse,
            )
            .expect("the device runs it");
        assert_empty_ranks(whole, &rank, &found, &metadata, &what);
        // Without ranks the metadata are refused, not misread.
        let alone = StepMetadata::new().prepare(&metadata, &inputs, layer.block_size as u32);
        assert!(
            matches!(alone, Err(PrepareError::Unsupported { .. })),
            "{what}: {alone:?}"
        );
        shards.push(found);
        prepared.push(step);
    }
    let partials: Vec<Partial<'_>> = shards.iter().map(Found::partial).collect();
    let width = heads * head_size;
    let mut merged = vec![f32::NAN; tokens * layer.num_heads * head_size];
    for (index, step) in prepared.iter().enumerate() {
        let part: Vec<f32> = whole
            .query
            .chunks(layer.num_heads * head_size)
            .flat_map(|token| &token[index * width..(index + 1) * width])
            .copied()
            .collect();
        let mut new_tokens = Found::of(tokens * heads, head_size);
        attention
            .forward_new_tokens(
                &part,
                (&key, &value),
                step,
                &mut new_tokens.output,
                &mut new_tokens.lse,
            )
            .expect("the device runs it");
        let mut output = vec![f32::NAN; tokens * width];
        attention
            .combine(index, &partials, new_tokens.partial(), &mut output)
            .expect("as many as ranks");
        for (token, output) in output.chunks(width).enumerate() {
            merged[(token * size as usize + index) * width..][..width].copy_from_slice(output);
        }
    }
    assert_close(&what, &merged, &[], &whole.expected_whole(), head_size)
}

/// A rank with no key of a request: zeros and −∞ for its tokens, where the pass covers what the metadata say.
fn assert_empty_ranks(
    whole: &Scenario,
    rank: &Rank,
    found: &Found,
    metadata: &Metadata,
    what: &str,
) {
    let (heads, size) = (whole.layer.num_heads, whole.layer.head_size);
    let starts = &whole.step.tensors.query_start_loc;
    for row in 0..whole.keys.len() {
        let (query, keys) = whole.lengths(row);
        let covered = match metadata {
            Metadata::Flashinfer(record) if row < record.num_decodes as usize => keys,
            _ => keys - query,
        };
        let mut local = Vec::new();
        let ContextParallel {
            size: world,
            rank,
            interleave,
        } = rank.parallel;
        dcp_local_seq_lens_into(&[covered as i32], world, rank, interleave, &mut local);
        let of = starts[row] as usize * heads..starts[row + 1] as usize * heads;
        for at in of {
            let empty = found.lse[at] == f32::NEG_INFINITY;
            assert_eq!(empty, local[0] == 0, "{what}: rank {rank}, request {row}");
            if empty {
                let output = &found.output[at * size..(at + 1) * size];
                assert!(
                    output.iter().all(|&x| x == 0.0),
                    "{what}: rank {rank}, request {row}"
                );
            }
        }
    }
}

fn random_step(rng: &mut Pcg64Mcg, heads: usize) -> Scenario {
    let mut layer = config(heads, 1, *pick(rng, &[32, 64]));
    layer.block_size = *pick(rng, &[4, 16]);
    layer.logits_soft_cap = *pick(rng, &[None, Some(30.0)]);
    // Decodes, then what extends a context, then whole prompts: the order that a runner keeps under context parallelism.
    let (mut rows, decodes) = random_rows(rng, 200);
    rows[decodes..].sort_by_key(|&(query, keys)| query == keys);
    let padding = *pick(rng, &[(0, 0), (1, 2)]);
    let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
    scenario.config = builder_config(&layer, rng.random());
    scenario
}

#[test]
fn ranks_of_two_four_and_eight_merge_to_the_whole() {
    for name in ["flash-attn", "flash-attn-fixed-split", "flashinfer"] {
        let mut worst = 0.0f64;
        for seed in 0..20 {
            for size in [2, 4, 8] {
                let rng = &mut rng(20_000 + seed * 10 + u64::from(size));
                let scenario = random_step(rng, 8);
                let interleave = *pick(rng, &[1, 2, scenario.layer.block_size as u32]);
                worst = worst.max(check(&scenario, name, size, interleave));
            }
        }
        println!("{name}: 60 steps on 2, 4 and 8 ranks: {worst:.1e}");
    }
}

/// Field case 10: the lengths of the list, of which some ranks have nothing, as contexts and as whole requests.
#[test]
fn field_case_10_ranks_with_nothing_take_no_part() {
    for (keys, size, interleave) in [(7, 2, 1), (17, 4, 1), (1, 4, 1), (130, 4, 64), (33, 2, 16)] {
        for name in ["flash-attn", "flashinfer"] {
            let mut layer = config(8, 1, 32);
            layer.block_size = 64;
            let rows = [(1, keys), (1, keys + 1), (5, keys + 5), (3, 3)];
            let mut scenario = Scenario::new(&mut rng(10), layer, Causal::All(true), &rows, (0, 0));
            scenario.config = builder_config(&layer, true);
            check(&scenario, name, size, interleave);
        }
    }
}

/// FLASH_ATTN has its own tokens apart from the context, so speculation and causality of a group or a request go through too.
#[test]
fn flash_attn_verifies_drafts_and_takes_flags_on_ranks() {
    for (seed, causal) in [Causal::All(true), Causal::All(false), Causal::PerRequest]
        .into_iter()
        .enumerate()
    {
        let mut layer = config(4, 1, 32);
        layer.block_size = 4;
        let rows = [(4, 40), (4, 101), (4, 23), (4, 4)];
        let scenario = Scenario::new(&mut rng(30 + seed as u64), layer, causal, &rows, (1, 1));
        for size in [2, 4] {
            check(&scenario, "flash-attn", size, 1);
        }
    }
}

/// A whole prompt before what extends a context: the builder's counts, as the field makes them, miss the context and are refused;
/// the plain builder counts nothing, and every row attends to its context.
#[test]
fn rows_in_another_order_are_the_plain_builders() {
    let layer = config(4, 1, 32);
    let rows = [(1, 20), (10, 10), (10, 40)];
    let scenario = Scenario::new(&mut rng(40), layer, Causal::All(true), &rows, (0, 0));
    check_by(&scenario, "flash-attn", 2, 1, |rank| {
        let common = &rank.step.cam;
        let verified = |metadata: &Metadata| {
            let (config, step) = (&rank.config, &rank.step);
            verified(config, step, rank.num_blocks, Grant::Exact, metadata)
        };
        let mut builder = native_twin("flash-attn", &rank.config).expect("a builder");
        let counted = builder.build(common, false).expect("metadata");
        let refusal = verified(&counted).expect_err("it misses a context");
        assert!(
            refusal.to_string().contains("num_prefill_reqs"),
            "{refusal}"
        );
        let mut plain = plain_builder(Family::FlashAttn, &rank.config).expect("a builder");
        let plain = plain.build(common, false).expect("metadata");
        verified(&plain).expect("it covers every context");
        plain
    });
}

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let layer = config(4, 1, 32);
    let refused = |family, layer, size| {
        ContextParallelImpl::new(family, layer, size)
            .err()
            .expect("refused")
    };
    let windowed = AttentionConfig {
        sliding_window: Some(9),
        ..layer
    };
    let kv_heads = AttentionConfig {
        num_kv_heads: 2,
        ..layer
    };
    for (error, name) in [
        (
            refused(Family::FlashAttn, windowed, 2),
            "sliding_window is 9",
        ),
        (
            refused(Family::Flashinfer, kv_heads, 2),
            "num_kv_heads is 2",
        ),
        (refused(Family::FlashAttn, layer, 0), "dcp_world_size is 0"),
        (
            refused(Family::TritonAttn, layer, 2),
            "does not run on the CPU device",
        ),
    ] {
        assert!(error.to_string().contains(name), "{error}");
    }
    // Metadata of two ranks on four; nothing prepared.
    let attention = ContextParallelImpl::new(Family::FlashAttn, layer, 4).expect("an impl");
    let cache = KvCache::new(1, 1, 16, 32, layer.kv_cache_dtype);
    let unprepared = ContextParallelMetadata::new();
    let error = attention.forward_shard(&[], &cache, &unprepared, &mut [], &mut []);
    assert!(matches!(error, Err(ImplError::Shape { .. })), "{error:?}");
    // Metadata of no rank.
    let scenario = Scenario::new(&mut rng(2), layer, Causal::All(true), &[(1, 20)], (0, 0));
    let metadata = build(
        "flash-attn",
        &scenario.config,
        &scenario.step,
        scenario.num_blocks,
    );
    for (rank, field) in [
        (
            ContextParallel {
                size: 2,
                rank: 0,
                interleave: 1,
            },
            "dcp_context_kv_lens",
        ),
        (
            ContextParallel {
                size: 2,
                rank: 2,
                interleave: 1,
            },
            "dcp_rank",
        ),
        (
            ContextParallel {
                size: 2,
                rank: 0,
                interleave: 0,
            },
            "dcp_rank",
        ),
    ] {
        let error = ContextParallelMetadata::new()
            .prepare(&metadata, &scenario.step.tensors.inputs(), 16, rank)
            .expect_err("refused");
        assert!(
            matches!(&error, PrepareError::Inconsistent { field: found, .. } if *found == field),
            "{error}"
        );
    }
}

#[test]
fn after_an_error_the_metadata_are_unprepared() {
    let mut layer = config(4, 1, 32);
    layer.block_size = 16;
    let scenario = Scenario::new(
        &mut rng(3),
        layer,
        Causal::All(true),
        &[(1, 20), (3, 9)],
        (0, 0),
    );
    let parallel = ContextParallel {
        size: 2,
        rank: 1,
        interleave: 1,
    };
    let no_rank = ContextParallel {
        rank: 2,
        ..parallel
    };
    let own = AttentionConfig {
        num_heads: 2,
        ..layer
    };
    let tokens = scenario.step.cam.num_actual_tokens as usize;
    let (key, query) = (vec![0.5; tokens * 32], vec![0.5; tokens * 2 * 32]);
    for name in ["flash-attn", "flashinfer"] {
        let attention = ContextParallelImpl::new(family(name), own, 2).expect("an impl");
        let rank = rank(&scenario, parallel);
        let metadata = build(name, &rank.config, &rank.step, rank.num_blocks);
        let inputs = rank.step.tensors.inputs();
        // Does the step run: over the cache, over its own tokens?
        let runs = |step: &ContextParallelMetadata| {
            let mut of_all = Found::of(tokens * 4, 32);
            let mut of_own = Found::of(tokens * 2, 32);
            let (output, lse) = (&mut of_all.output, &mut of_all.lse);
            let shard = attention.forward_shard(&scenario.query, &rank.cache, step, output, lse);
            let (output, lse) = (&mut of_own.output, &mut of_own.lse);
            let new = attention.forward_new_tokens(&query, (&key, &key), step, output, lse);
            [shard.is_ok(), new.is_ok()]
        };
        let mut step = ContextParallelMetadata::new();
        let short = StepInputs {
            query_start_loc: &inputs.query_start_loc[..1],
            ..inputs
        };
        for (what, inputs, block_size, of) in [
            ("a rank that is none", &inputs, 16, no_rank),
            ("blocks without tokens", &inputs, 0, parallel),
            ("too few query starts", &short, 16, parallel),
        ] {
            step.prepare(&metadata, &rank.step.tensors.inputs(), 16, parallel)
                .expect("the device takes it");
            assert_eq!(runs(&step), [true, true], "{name}");
            step.prepare(&metadata, inputs, block_size, of)
                .expect_err(what);
            assert_eq!(runs(&step), [false, false], "{name}: {what}");
        }
    }
}
