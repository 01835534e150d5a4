//! A part of the context under the grant `subset`: the builder that keeps the first keys and a window, against float64 over what it
//! keeps, whole and with its choice damaged.

use rand::Rng;
use timetable_attention::Grant;
use timetable_types::{
    Causal, Metadata, Tensor,
    flashinfer::{Decode, Plan, Prefill},
};

use crate::{
    scenario::{Scenario, assert_close, build, builder_config, random_layer, run, verified},
    support::{config, pick, random_rows, rng},
};

const NAME: &str = "flashinfer-window-sink";

/// The first page that the window reaches, and the pages before it that are kept, by the builder's policy.
fn kept_pages(scenario: &Scenario, row: usize, sink: usize, window: usize) -> (usize, usize) {
    let (query, keys) = scenario.lengths(row);
    let page = scenario.layer.block_size;
    let first = (keys - query + 1).saturating_sub(window) / page;
    (first, sink.div_ceil(page).min(first))
}

fn options(scenario: &mut Scenario, sink: usize, window: usize) {
    scenario.config.options = vec![
        ("sink".to_owned(), sink.to_string()),
        ("window".to_owned(), window.to_string()),
    ];
}

#[test]
fn sinks_and_window_are_what_is_attended_to() {
    let (mut worst, mut left_out) = (0.0f64, 0);
    for seed in 0..60 {
        let rng = &mut rng(30_000 + seed);
        let layer = random_layer(rng);
        let (rows, _) = random_rows(rng, 300);
        let padding = *pick(rng, &[(0, 0), (1, 2)]);
        let mut scenario = Scenario::new(rng, layer, Causal::All(true), &rows, padding);
        scenario.config = builder_config(&layer, rng.random());
        let (sink, window) = (*pick(rng, &[0, 4, 20]), *pick(rng, &[1, 16, 50, 1_000]));
        options(&mut scenario, sink, window);
        let page = layer.block_size;
        let keeps = |row: usize, key: usize| {
            let (first, sinks) = kept_pages(&scenario, row, sink, window);
            key / page < sinks || key / page >= first
        };
        for (row, &(_, keys)) in rows.iter().enumerate() {
            left_out += (0..keys).filter(|&key| !keeps(row, key)).count();
        }
        let expected = scenario.expected(|row, position, key| keeps(row, key) && key <= position);
        let served = scenario.attend(NAME, &scenario.cache(keeps));
        let what = format!("sink {sink}, window {window}, {rows:?}");
        let error = assert_close(
            &what,
            &served.output,
            &served.lse,
            &expected,
            layer.head_size,
        );
        worst = worst.max(error);
        let exact = verified(
            &scenario.config,
            &scenario.step,
            scenario.num_blocks,
            Grant::Exact,
            &served.metadata,
        );
        let refusal = exact.expect_err("a selection needs the grant").to_string();
        assert!(refusal.contains("paged_kv_indices"), "{refusal}");
    }
    println!("60 steps, {left_out} keys left out: {worst:.1e}");
    assert!(left_out > 1_000, "{left_out}");
}

/// The two parts of a record, with the first row of each.
fn parts(metadata: &mut Metadata) -> Vec<(usize, &mut Plan)> {
    let Metadata::Flashinfer(record) = metadata else {
        panic!("a record of FLASHINFER");
    };
    let first = record.num_decodes as usize;
    let mut parts = Vec::new();
    if let Some(Decode::Wrapper(plan)) = &mut record.decode {
        parts.push((0, plan));
    }
    if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
        parts.push((first, plan));
    }
    parts
}

fn columns(plan: &mut Plan) -> &mut Vec<u32> {
    match &mut plan.paged_kv_indices {
        Tensor::SelectPages(selection) => &mut selection.columns,
        other => panic!("a selection, not {other:?}"),
    }
}

/// Every way of damaging one number of the choice, or its length.
fn mutants(metadata: &Metadata) -> Vec<Metadata> {
    let mut all = Vec::new();
    let mut add = |part: usize, damage: &dyn Fn(&mut Plan)| {
        let mut mutant = metadata.clone();
        damage(parts(&mut mutant)[part].1);
        all.push(mutant);
    };
    let mut whole = metadata.clone();
    for (part, (_, plan)) in parts(&mut whole).into_iter().enumerate() {
        let rows = plan.seq_lens.len();
        for place in 0..columns(plan).len() {
            for by in [1, u32::MAX, 1 << 20] {
                add(part, &|plan| {
                    columns(plan)[place] = columns(plan)[place].wrapping_add(by);
                });
            }
            add(part, &|plan| columns(plan)[place] = 0);
            // Left out, with and without its count.
            add(part, &|plan| {
                columns(plan).remove(place);
            });
            add(part, &|plan| {
                columns(plan).remove(place);
                for end in &mut plan.paged_kv_indptr {
                    *end -= i32::from(*end as usize > place);
                }
            });
        }
        for row in 0..rows {
            for by in [-1, 1, 16, -16] {
                add(part, &|plan| plan.seq_lens[row] += by);
                add(part, &|plan| plan.paged_kv_last_page_len[row] += by);
                add(part, &|plan| plan.paged_kv_indptr[row + 1] += by);
            }
        }
        add(part, &|plan| columns(plan).push(0));
        add(part, &|plan| columns(plan).clear());
    }
    all
}

/// A damaged choice is refused, or it is another choice within the grant: then exactly that is attended to.
#[test]
fn a_damaged_choice_is_refused_or_another_choice() {
    let layer = config(4, 2, 32);
    let rows = [(1, 200), (1, 40), (30, 230), (20, 20)];
    let mut scenario = Scenario::new(&mut rng(31), layer, Causal::All(true), &rows, (0, 0));
    options(&mut scenario, 20, 40);
    let metadata = build(NAME, &scenario.config, &scenario.step, scenario.num_blocks);
    let (mut refused, mut other) = (0, 0);
    for mut mutant in mutants(&metadata) {
        let step = &scenario.step;
        let grant = Grant::Subset;
        if verified(&scenario.config, step, scenario.num_blocks, grant, &mutant).is_err() {
            refused += 1;
            continue;
        }
        other += 1;
        let mut pages: Vec<Vec<u32>> = Vec::new();
        for (_, plan) in parts(&mut mutant) {
            let bounds = plan.paged_kv_indptr.clone();
            let columns = columns(plan);
            let of = bounds.windows(2);
            pages.extend(of.map(|pair| columns[pair[0] as usize..pair[1] as usize].to_vec()));
        }
        let keeps = |row: usize, key: usize| pages[row].contains(&((key / 16) as u32));
        let expected = scenario.expected(|row, position, key| keeps(row, key) && key <= position);
        let what = format!("{pages:?}");
        let served = run(
            mutant,
            step,
            &layer,
            &scenario.query,
            &scenario.cache(keeps),
        );
        assert_close(&what, &served.output, &served.lse, &expected, 32);
    }
    println!("{refused} refused, {other} other choices");
    assert!(refused > 100 && other > 5, "{refused} and {other}");
}
