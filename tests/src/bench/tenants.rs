//! Two tenants, one with a builder that misbehaves: what the other's steps cost, and that its tokens stay.
//!
//! Two engines step in turn with the same requests: in one both tenants have the reference builder, in the other one tenant has the
//! chaos builder, under the default limits and policy. So whatever else the machine does is in both.

use std::{path::PathBuf, time::Instant};

use timetable_engine::{
    BuilderSource, Builders, CacheSize, Engine, EngineConfig, GenerationRequest, RequestId,
    SlotConfig, TenantConfig,
    model::{LoadOptions, Model},
};
use timetable_sandbox::{BuilderStatus, TenantName};
use timetable_types::Family;

use super::Row;
use crate::{candle_reference::default_model, drive};

/// Steps of each engine for each kind of mischief.
const STEPS: usize = 400;
/// Requests of each tenant.
const REQUESTS: usize = 16;
const MOST: f64 = 1.2;
const UNIT: &str = "ms";

/// Misbehaves in every step; the tenant's builder until its limits, and then its policy, end that.
const KINDS: [&str; 5] = [
    "just-under-fuel",
    "spin-loads",
    "spin-divisions",
    "huge-list",
    "random",
];

pub(super) fn measure() -> Vec<Row> {
    let path = std::env::var_os("TIMETABLE_MODEL")
        .map(PathBuf::from)
        .or_else(default_model);
    let Some(path) = path else {
        let why = "the default model is not there; `cargo xtask model` fetches it";
        return vec![Row::missing("tenants/p99 step", UNIT, why)];
    };
    KINDS.iter().map(|kind| beside(&path, kind)).collect()
}

fn name(name: &str) -> TenantName {
    name.parse().expect("a tenant's name")
}

/// An engine whose tenant `a` misbehaves in this way; `behave` is the reference builder.
fn engine(path: &std::path::Path, kind: &str) -> Engine {
    let slot = SlotConfig {
        options: match kind {
            "behave" => Vec::new(),
            _ => vec![
                ("chaos".to_owned(), kind.to_owned()),
                ("chaos-min-rows".to_owned(), "9".to_owned()),
            ],
        },
        ..SlotConfig::default()
    };
    let tenant = |of: &str, slot| TenantConfig {
        slot: Some(slot),
        ..TenantConfig::new(name(of))
    };
    let config = EngineConfig {
        max_num_seqs: 2 * REQUESTS,
        max_num_batched_tokens: 2048,
        max_model_len: Some(1024),
        cache_size: CacheSize::Blocks(2 * REQUESTS * 64 + 1),
        tenants: vec![tenant("a", slot), tenant("b", SlotConfig::default())],
        ..EngineConfig::default()
    };
    let a = match kind {
        "behave" => drive::component("flash-attn"),
        _ => {
            let bytes = timetable_reference::chaos(Family::FlashAttn).expect("a chaos builder");
            BuilderSource::Component {
                component: drive::sandbox().load(bytes).expect("it loads"),
                origin: "chaos".to_owned(),
            }
        }
    };
    let default = drive::component("flash-attn");
    let builders = Builders {
        default: &default,
        tenants: &[(name("a"), a), (name("b"), drive::component("flash-attn"))],
    };
    let model = Model::load(path, LoadOptions::default()).expect("the default model loads");
    Engine::new(&config, Box::new(model), None, drive::sandbox(), builders)
        .expect("the engine starts")
}

/// One of the engines, its steps' times, and the tokens of tenant `b`.
struct Side {
    engine: Engine,
    of_b: Vec<RequestId>,
    tokens: Vec<(RequestId, u32)>,
    times_ms: Vec<f64>,
}

impl Side {
    fn new(engine: Engine) -> Self {
        let mut side = Self {
            engine,
            of_b: Vec::new(),
            tokens: Vec::new(),
            times_ms: Vec::new(),
        };
        for index in 0..2 * REQUESTS as u32 {
            let of = if index % 2 == 0 { "a" } else { "b" };
            let prompt: Vec<u32> = (0..40 + index)
                .map(|at| 300 + at * 37 + index * 11)
                .collect();
            let request = GenerationRequest {
                tenant: Some(name(of)),
                ..drive::greedy(&prompt, STEPS + 10)
            };
            let id = side.engine.add_request(request).expect("it is taken");
            if of == "b" {
                side.of_b.push(id);
            }
        }
        // The prompts.
        side.step();
        side.times_ms.clear();
        side
    }

    fn step(&mut self) {
        let start = Instant::now();
        self.engine.step();
        self.times_ms.push(start.elapsed().as_secs_f64() * 1e3);
        for update in self.engine.take_updates() {
            if self.of_b.contains(&update.id) {
                let token = update.token.expect("its requests get tokens");
                self.tokens.push((update.id, token));
            }
        }
    }

    fn quantile(&mut self, of: f64) -> f64 {
        self.times_ms.sort_by(f64::total_cmp);
        self.times_ms[((self.times_ms.len() - 1) as f64 * of).round() as usize]
    }

    fn status_of_a(&self) -> BuilderStatus {
        self.engine.tenant_handles()[0].1.status()
    }
}

fn beside(path: &std::path::Path, kind: &str) -> Row {
    let mut good = Side::new(engine(path, "behave"));
    let mut bad = Side::new(engine(path, kind));
    for _ in 0..STEPS {
        good.step();
        bad.step();
    }
    assert_eq!(good.tokens, bad.tokens, "{kind}: the other tenant's tokens");
    assert!(good.tokens.len() >= STEPS * REQUESTS);
    let status = bad.status_of_a();
    let build_us = |side: &Side| side.engine.stats().total.build_ns as f64 / 1e3;
    let extra_us = (build_us(&bad) - build_us(&good)) / STEPS as f64;
    let (medians, p99s) = (
        [good.quantile(0.5), bad.quantile(0.5)],
        [good.quantile(0.99), bad.quantile(0.99)],
    );
    Row::new(format!("tenants/p99 step beside {kind}"), p99s[1], UNIT)
        .against(p99s[0], format!("both good: {:.1} {UNIT}; bar: at most {MOST} ×", p99s[0]))
        .note(format!(
            "medians {:.1} and {:.1}; {STEPS} steps of 2 × {REQUESTS} decodes in turn; builds took {extra_us:.0} µs more a step; the \
             builder served {} steps, faults {:?}, then {}; the other's {} tokens equal",
            medians[0],
            medians[1],
            status.steps,
            status.all_faults,
            status.state.name(),
            good.tokens.len(),
        ))
}
