//! Chunked-local attention: virtual rows, run by builders that never hear of chunks. A query at position p sees keys j ≤ p with
//! j / chunk = p / chunk.

use rand::Rng;
use timetable_attention::batch::{
    LocalAttentionError, make_local_attention_virtual_batches, max_virtual_rows,
};
use timetable_types::{BuilderConfig, Causal, KvCacheSpecKind};

use crate::{
    scenario::{BUILDERS, Scenario, assert_close, random_layer, serve},
    support::{bits, config, pick, random_rows, rng},
};

/// What a builder of virtual rows is made of: room for as many as any batch makes, and a table as wide as a chunk.
fn local_config(config: &BuilderConfig, chunk: u32) -> BuilderConfig {
    let mut local = config.clone();
    let scheduler = &mut local.scheduler;
    let (rows, tokens) = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens);
    scheduler.max_num_seqs = max_virtual_rows(rows as usize, tokens as usize, chunk) as u32;
    scheduler.max_num_blocks_per_req = chunk / config.kv_cache_spec.block_size;
    local
}

/// Runs the step's virtual rows through every builder, with every key before a request's first visible chunk poisoned.
fn check(scenario: &Scenario, chunk: u32) -> f64 {
    let c = chunk as usize;
    let first_seen = |row: usize| {
        let (query, keys) = scenario.lengths(row);
        (keys - query) / c * c
    };
    let cache = scenario.cache(|row, key| key >= first_seen(row));
    let expected = scenario.expected(|_, position, key| key <= position && key / c == position / c);
    let block_size = scenario.config.kv_cache_spec.block_size;
    let (step, columns) = make_local_attention_virtual_batches(chunk, &scenario.step, block_size)
        .expect("it divides");
    let config = local_config(&scenario.config, chunk);
    assert!(step.cam.num_reqs <= config.scheduler.max_num_seqs);
    assert_eq!(
        columns.blocks_per_chunk,
        config.scheduler.max_num_blocks_per_req as usize
    );
    let mut worst = 0.0f64;
    for name in BUILDERS {
        let layer = &scenario.layer;
        let served = serve(
            name,
            &config,
            &step,
            scenario.num_blocks,
            layer,
            &scenario.query,
            &cache,
        );
        let what = format!(
            "{name}, chunk {chunk}, {:?}",
            scenario.step.naive_query_lens()
        );
        let error = assert_close(
            &what,
            &served.output,
            &served.lse,
            &expected,
            layer.head_size,
        );
        worst = worst.max(error);
    }
    worst
}

#[test]
fn virtual_rows_give_chunked_local_attention() {
    let mut worst = 0.0f64;
    for seed in 0..60 {
        let rng = &mut rng(3_000 + seed);
        let layer = random_layer(rng);
        let chunk = layer.block_size as u32 * pick(rng, &[1, 2, 3, 8]);
        let (rows, _) = random_rows(rng, 200);
        let padding = *pick(rng, &[(0, 0), (0, 3), (2, 0), (2, 5)]);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
        scenario.config = crate::scenario::builder_config(&layer, rng.random());
        scenario.config.kv_cache_spec.kind = KvCacheSpecKind::ChunkedLocalAttention;
        scenario.config.kv_cache_spec.attention_chunk_size = Some(chunk);
        worst = worst.max(check(&scenario, chunk));
    }
    println!("60 steps, {} builders: {worst:.1e}", BUILDERS.len());
}

/// Field cases 20 and 21, executed: more virtual rows than requests, in buffers that are sized by them.
#[test]
fn field_case_21_a_request_of_four_chunks_has_four_rows_everywhere() {
    let mut layer = config(4, 2, 32);
    layer.block_size = 16;
    let mut scenario = Scenario::new(
        &mut rng(21),
        layer,
        Causal::All(true),
        &[(1_000, 1_000)],
        (0, 0),
    );
    // One request at a time: by requests every buffer would have one row.
    scenario.config.scheduler.max_num_seqs = 1;
    scenario.config.scheduler.max_num_batched_tokens = 1_000;
    let (step, _) =
        make_local_attention_virtual_batches(256, &scenario.step, 16).expect("it divides");
    assert_eq!(step.cam.num_reqs, 4);
    let config = local_config(&scenario.config, 256);
    assert_eq!(
        config.scheduler.max_num_seqs as usize,
        max_virtual_rows(1, 1_000, 256)
    );
    assert!(config.scheduler.max_num_seqs >= 4);
    check(&scenario, 256);

    layer.block_size = 2;
    let scenario = Scenario::new(
        &mut rng(20),
        layer,
        Causal::All(true),
        &[(4, 6), (10, 17), (5, 9), (1, 5), (7, 10)],
        (0, 0),
    );
    check(&scenario, 4);

    assert_eq!(
        make_local_attention_virtual_batches(5, &scenario.step, 2).expect_err("blocks of 2"),
        LocalAttentionError::ChunkNotDivisible {
            chunk: 5,
            block_size: 2
        }
    );
}

/// A table that another group has is gathered again without planning again: the metadata stay as they are.
#[test]
fn another_groups_table_is_gathered_by_the_same_columns() {
    let mut layer = config(4, 2, 32);
    layer.block_size = 4;
    let rows = [(1, 30), (9, 25), (3, 3)];
    let [first, second] =
        [41, 42].map(|seed| Scenario::new(&mut rng(seed), layer, Causal::All(true), &rows, (0, 0)));
    let virtual_of = |scenario: &Scenario| {
        make_local_attention_virtual_batches(8, &scenario.step, 4).expect("it divides")
    };
    let ((mut step, columns), (planned, _)) = (virtual_of(&first), virtual_of(&second));
    assert_ne!(step.tensors.block_table, planned.tensors.block_table);
    step.tensors.block_table = columns.gather(second.step.tensors.table());
    assert_eq!(step.tensors.block_table, planned.tensors.block_table);
    let cache = second.cache(|_, _| true);
    let config = local_config(&second.config, 8);
    let run = |step| {
        serve(
            "flash-attn",
            &config,
            step,
            second.num_blocks,
            &layer,
            &second.query,
            &cache,
        )
    };
    assert_eq!(bits(&run(&step).output), bits(&run(&planned).output));
}
