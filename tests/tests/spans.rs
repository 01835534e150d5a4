//! A step's spans, as a subscriber sees them. A program of its own: who listens is a matter of the whole process.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use timetable_engine::{CacheSize, EngineConfig};
use timetable_tests::drive;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Name, parent and numbers of each span, by id from 1, and which are entered.
#[derive(Default)]
struct Seen {
    spans: Vec<(&'static str, Option<u64>, BTreeMap<&'static str, u64>)>,
    entered: Vec<u64>,
    closed: usize,
}

#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Seen>>);

struct Numbers<'a>(&'a mut BTreeMap<&'static str, u64>);

impl Visit for Numbers<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        panic!("{field} is no number: {value:?}");
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "timetable::step"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut seen = self.0.lock().unwrap();
        let parent = seen.entered.last().copied();
        let mut numbers = BTreeMap::new();
        span.record(&mut Numbers(&mut numbers));
        seen.spans.push((span.metadata().name(), parent, numbers));
        Id::from_u64(seen.spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let mut seen = self.0.lock().unwrap();
        let index = span.into_u64() as usize - 1;
        values.record(&mut Numbers(&mut seen.spans[index].2));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, span: &Id) {
        self.0.lock().unwrap().entered.push(span.into_u64());
    }

    fn exit(&self, span: &Id) {
        let popped = self.0.lock().unwrap().entered.pop();
        assert_eq!(popped, Some(span.into_u64()), "spans are nested");
    }

    fn try_close(&self, _: Id) -> bool {
        self.0.lock().unwrap().closed += 1;
        true
    }
}

#[test]
fn a_step_is_a_span_with_its_parts_in_it() {
    let config = EngineConfig {
        cache_size: CacheSize::Blocks(64),
        ..EngineConfig::default()
    };
    let listener = Listener::default();
    tracing::subscriber::set_global_default(listener.clone()).expect("nobody else listens");
    let mut engine = drive::engine(
        &config,
        drive::tiny_llama(),
        &drive::component("flash-attn"),
    );
    engine
        .add_request(drive::greedy(&[40, 41, 42], 4))
        .expect("the request is taken");
    while !engine.is_idle() {
        engine.step();
    }
    let stats = engine.stats();
    let seen = listener.0.lock().unwrap();
    assert!(seen.entered.is_empty(), "every span was left");
    assert_eq!(seen.closed, seen.spans.len(), "every span was closed");
    let steps: Vec<usize> = (0..seen.spans.len())
        .filter(|index| seen.spans[*index].0 == "step")
        .filter(|index| seen.spans[*index].2.contains_key("num_reqs"))
        .collect();
    assert_eq!(steps.len() as u64, stats.steps);
    for (number, index) in steps.iter().enumerate() {
        let (_, parent, numbers) = &seen.spans[*index];
        assert_eq!(*parent, None);
        let tokens = if number == 0 { 3 } else { 1 };
        let expected = [
            ("num_reqs", 1),
            ("num_tokens", tokens),
            ("step", number as u64),
        ];
        assert_eq!(*numbers, BTreeMap::from(expected));
        let children = |of: usize| -> Vec<(&str, usize)> {
            let of = Some(of as u64 + 1);
            let all = seen.spans.iter().enumerate();
            all.filter(|(_, span)| span.1 == of)
                .map(|(index, span)| (span.0, index))
                .collect()
        };
        let parts = children(*index);
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["schedule", "batch", "build", "submit", "collect"]);
        let (_, build) = parts[2];
        let expected = [("group", 0), ("segment", 0)];
        assert_eq!(seen.spans[build].2, BTreeMap::from(expected));
        let names: Vec<&str> = children(build).iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["verify", "prepare"]);
    }
}
