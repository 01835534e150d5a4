//! What replacing a builder costs: the step thread at the boundary that swaps and in the first build after it; off that
//! thread, the compilation and an instance.

use std::{convert::Infallible, hint::black_box, time::Instant};

use timetable_attention::plain_builder;
use timetable_reference::component;
use timetable_sandbox::{
    BuiltBy, Component, GroupBuilder, GroupSetup, Sandbox, WasmBuilder, measure::interleaved,
};
use timetable_types::{Family, Metadata};

use super::{
    Row,
    batches::{PAGE, batch, config},
    median,
};
use crate::drive;

const SWAPS: usize = 201;
const LONGEST: u32 = 32_768;
const NAMES: [&str; 2] = ["flash-attn", "flash-attn-fixed-split"];

pub(super) fn measure() -> Vec<Row> {
    let sandbox = drive::sandbox();
    let config = config(LONGEST);
    let components: Vec<Component> = NAMES.iter().map(|name| load(sandbox, name)).collect();
    let setup = GroupSetup {
        name: "bench".to_owned(),
        plain: plain_builder(Family::FlashAttn, &config).expect("a plain builder"),
        config: config.clone(),
        acceptance: None,
    };
    let mut group = GroupBuilder::new(sandbox, setup, &components[0], NAMES[0]).expect("a group");
    let handle = group.handle();
    let common = batch(256, 0, LONGEST, LONGEST / PAGE).cam;
    let build = |group: &mut GroupBuilder| {
        let accept = |_: &Metadata| Ok::<(), Infallible>(());
        let start = Instant::now();
        let built = group.build(&common, false, accept).expect("it builds");
        let elapsed = start.elapsed().as_nanos() as f64;
        assert_eq!(built.built_by, BuiltBy::Component, "{:?}", built.fault);
        elapsed
    };
    let (mut swaps, mut first, mut later) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=SWAPS {
        for _ in 0..8 {
            later.push(build(&mut group));
        }
        let next = round % components.len();
        handle
            .reload_component(&components[next], NAMES[next])
            .expect("it reloads");
        let start = Instant::now();
        let swapped = black_box(group.step_boundary());
        swaps.push(start.elapsed().as_nanos() as f64);
        assert!(swapped, "the new version takes over");
        first.push(build(&mut group));
    }
    let idle = interleaved(
        301,
        1000,
        &mut [&mut || assert!(!group.step_boundary(), "no news")],
    );
    let instance = interleaved(
        301,
        10,
        &mut [&mut || drop(WasmBuilder::new(&components[0], &config).expect("it starts"))],
    );
    let mut compilations: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            drop(load(sandbox, NAMES[0]));
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    let swap = median(&mut swaps);
    vec![
        Row::new("reload/swap on the step thread", swap, "ns")
            .note(format!("of {SWAPS}, slowest {:.0}", swaps[swaps.len() - 1])),
        Row::new("reload/step boundary without news", idle[0].median_ns, "ns"),
        Row::new(
            "reload/first build after a swap",
            median(&mut first) / 1e3,
            "µs",
        )
        .note(format!(
            "256 decodes; later builds {:.2}",
            median(&mut later) / 1e3
        )),
        Row::new(
            "reload/instance made and dropped",
            instance[0].median_ns / 1e3,
            "µs",
        )
        .note("on the reload thread".to_owned()),
        Row::new("reload/component loaded", median(&mut compilations), "ms")
            .note("on the reload thread; compiled, no cache".to_owned()),
    ]
}

fn load(sandbox: &Sandbox, name: &str) -> Component {
    let embedded = component(name).expect("an embedded component");
    sandbox.load(embedded.bytes).expect("the component loads")
}
