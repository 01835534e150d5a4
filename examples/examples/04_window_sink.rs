//! 04: attention to a part of the context, as far as the operator grants it.
//!
//! ```text
//! cargo run --release -p timetable-examples --example 04_window_sink
//! ```
//!
//! The builder (`guest-builders/flashinfer-window-sink`, embedded as a component) keeps the first keys of a request and a window
//! of recent ones, in whole pages. It is loaded into the sandbox, and asked for one step twice. Without a grant the verifier refuses what it built and
//! the plain builder serves the step, over every key. Under `subset` the CPU device executes the selection: the output is that of
//! attention in float64 over the kept keys, although every key that was left out is poisoned.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use timetable_attention::{
    Grant, Verifier, VerifyContext, describe::DescribedStep, plain_builder, verify_step,
};
use timetable_device::{
    cpu::{AttentionConfig, CacheDtype, KvCache, StepMetadata, new_impl},
    reference,
};
use timetable_examples::{noise, step};
use timetable_reference::component;
use timetable_sandbox::{BuiltBy, GroupBuilder, GroupSetup, Limits, Sandbox};

/// Options of the builder, in keys.
const SINK: usize = 4;
const WINDOW: usize = 64;
/// Keys of a page, and of a request (query tokens, keys): two decodes, and a prefill that goes on after 300 keys.
const PAGE: usize = 16;
const REQUESTS: [(i32, i32); 3] = [(1, 400), (1, 40), (30, 330)];

/// What one grant makes of the step.
pub struct Served {
    /// Did the component build what was executed?
    pub by_component: bool,
    /// Why not.
    pub fault: Option<String>,
    /// Keys that were read, of all requests.
    pub keys: usize,
    /// The output's error relative to float64 over the keys that should have been read.
    pub error: f64,
}

/// What the example found.
pub struct Outcome {
    /// What it printed.
    pub text: String,
    /// Without a grant.
    pub exact: Served,
    /// With the grant `subset`.
    pub subset: Served,
}

/// The keys that the builder's policy keeps of a request.
fn kept(query: usize, keys: usize) -> Vec<usize> {
    let window = (keys - query + 1).saturating_sub(WINDOW) / PAGE * PAGE;
    let sink = SINK.next_multiple_of(PAGE).min(window);
    (0..sink).chain(window..keys).collect()
}

fn serve(described: &DescribedStep, grant: Grant) -> Result<Served> {
    // The host's side of a builder: the sandbox, the component, the group.
    let sandbox = Sandbox::new(Limits::default())?;
    let embedded = component("flashinfer-window-sink").context("an embedded component")?;
    let component = sandbox.load(embedded.bytes)?;
    let mut config = described.config.clone();
    config.options = vec![
        ("sink".to_owned(), SINK.to_string()),
        ("window".to_owned(), WINDOW.to_string()),
    ];
    let plain = plain_builder(component.family(), &config);
    let setup = GroupSetup {
        name: "layers.0".to_owned(),
        config: config.clone(),
        plain: plain.map_err(|error| anyhow::anyhow!(error.message))?,
        acceptance: None,
    };
    let mut group = GroupBuilder::new(&sandbox, setup, &component, embedded.name)?;

    // One step, verified under the grant.
    let inputs = described.inputs(&[]);
    let context = VerifyContext {
        config: &config,
        grant,
        ..described.context(&inputs)
    };
    verify_step(&context)?;
    let built = group.build_in_context(&context, false, |metadata| {
        Verifier::new().verify(metadata, &context)
    })?;

    // Its attention on the CPU device, 4 query heads on 2 KV heads of 64.
    let by_component = built.built_by == BuiltBy::Component;
    let layer = AttentionConfig {
        num_heads: 4,
        head_size: 64,
        scale: config.attention.scale as f32,
        num_kv_heads: 2,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: CacheDtype::F32,
        block_size: PAGE,
        batch_invariant: false,
    };
    let attention = new_impl(component.family(), layer)?;
    let mut prepared = StepMetadata::new();
    prepared.prepare(&built.metadata, &inputs, PAGE as u32)?;

    // Every key that should be read has a value; all else in the cache is not a number.
    let wanted: Vec<Vec<usize>> = REQUESTS
        .iter()
        .map(|&(query, keys)| match by_component {
            true => kept(query as usize, keys as usize),
            false => (0..keys as usize).collect(),
        })
        .collect();
    let slot = |row: usize, key: usize| {
        let block = inputs.block_table.row(row)[key / PAGE];
        block as usize * PAGE + key % PAGE
    };
    let mut cache = KvCache::new(described.num_blocks as usize, 2, PAGE, 64, CacheDtype::F32);
    cache.fill(f32::NAN);
    for (row, keys) in wanted.iter().enumerate() {
        let slots: Vec<i64> = keys.iter().map(|&key| slot(row, key) as i64).collect();
        let (seed, count) = (10 * row as u64, slots.len() * 128);
        attention.do_kv_cache_update(
            &noise(seed + 1, count),
            &noise(seed + 2, count),
            &mut cache,
            &slots,
        );
    }
    let tokens = prepared.num_actual_tokens();
    let query = noise(5, tokens * 256);
    let mut output = vec![f32::NAN; query.len()];
    attention.forward(&query, &cache, Some(&prepared), &mut output, None)?;

    // The same in float64. What is kept ends with the step's own keys, so that causality is that of the kept keys in order.
    let starts = inputs.query_start_loc;
    let requests: Vec<reference::Request> = wanted
        .iter()
        .enumerate()
        .map(|(row, keys)| reference::Request {
            first_token: starts[row] as usize,
            q_len: (starts[row + 1] - starts[row]) as usize,
            kv_len: keys.len(),
            causal: true,
        })
        .collect();
    let layer = reference::Layer {
        num_heads: 4,
        num_kv_heads: 2,
        head_size: 64,
        scale: config.attention.scale,
        sliding_window: None,
        logits_soft_cap: None,
    };
    let expected = reference::attention(&layer, &requests, tokens, &query, |row, key, head| {
        let slot = slot(row, wanted[row][key]);
        (cache.key(slot, head), cache.value(slot, head))
    });
    Ok(Served {
        by_component,
        fault: built.fault.map(|fault| fault.to_string()),
        keys: prepared.requests().map(|request| request.num_keys).sum(),
        error: reference::max_relative_error(&output, &expected.output, 64),
    })
}

/// Serves the step twice.
pub fn run() -> Result<Outcome> {
    let described = step(&REQUESTS)?;
    let exact = serve(&described, Grant::Exact)?;
    let subset = serve(&described, Grant::Subset)?;
    ensure!(
        subset.by_component,
        "under the grant the component serves: {:?}",
        subset.fault
    );

    let mut text = String::new();
    for (grant, served) in [("exact", &exact), ("subset", &subset)] {
        let by = if served.by_component {
            "component"
        } else {
            "plain builder"
        };
        writeln!(
            text,
            "grant {grant}: built by the {by}, {} keys read, relative error {:.1e}",
            served.keys, served.error
        )?;
        if let Some(fault) = &served.fault {
            writeln!(text, "  the component: {fault}")?;
        }
    }
    Ok(Outcome {
        text,
        exact,
        subset,
    })
}

#[allow(dead_code, reason = "the test runs `run`")]
fn main() -> Result<()> {
    print!("{}", run()?.text);
    Ok(())
}
