//! What the server counts: requests by path and status, and how long clients wait.
//!
//! Numbers only; whoever scrapes formats. Must never know: how metrics are written.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use timetable_engine::histogram::Histogram;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

/// Bounds of the time to the first token, in nanoseconds: the field's.
const FIRST_NS: [u64; 22] = [
    MS,
    5 * MS,
    10 * MS,
    20 * MS,
    40 * MS,
    60 * MS,
    80 * MS,
    100 * MS,
    250 * MS,
    500 * MS,
    750 * MS,
    S,
    2500 * MS,
    5 * S,
    7500 * MS,
    10 * S,
    20 * S,
    40 * S,
    80 * S,
    160 * S,
    640 * S,
    2560 * S,
];
/// Bounds of the time from token to token, in nanoseconds: the field's, and finer below.
const BETWEEN_NS: [u64; 22] = [
    MS,
    2 * MS,
    5 * MS,
    10 * MS,
    25 * MS,
    50 * MS,
    75 * MS,
    100 * MS,
    150 * MS,
    200 * MS,
    300 * MS,
    400 * MS,
    500 * MS,
    750 * MS,
    S,
    2500 * MS,
    5 * S,
    7500 * MS,
    10 * S,
    20 * S,
    40 * S,
    80 * S,
];
/// Bounds of the time of a whole request, in nanoseconds: the field's.
const WHOLE_NS: [u64; 20] = [
    300 * MS,
    500 * MS,
    800 * MS,
    S,
    1500 * MS,
    2 * S,
    2500 * MS,
    5 * S,
    10 * S,
    15 * S,
    20 * S,
    30 * S,
    40 * S,
    50 * S,
    60 * S,
    120 * S,
    240 * S,
    480 * S,
    960 * S,
    1920 * S,
];

#[derive(Default)]
struct Figures {
    /// By path, method and status.
    requests: BTreeMap<(&'static str, &'static str, u16), u64>,
    running: usize,
    connections: usize,
    first: Histogram<{ FIRST_NS.len() }>,
    between: Histogram<{ BETWEEN_NS.len() }>,
    whole: Histogram<{ WHOLE_NS.len() }>,
}

/// Everything that is counted.
#[derive(Default)]
pub struct Metrics(Mutex<Figures>);

impl Metrics {
    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an answered request.
    pub(crate) fn answered(&self, handler: &'static str, method: &'static str, status: u16) {
        let mut figures = self.figures();
        *figures
            .requests
            .entry((handler, method, status))
            .or_default() += 1;
    }

    /// A connection is open for as long as what is returned lives.
    pub(crate) fn connected(self: &Arc<Self>) -> Connected {
        self.figures().connections += 1;
        Connected(Arc::clone(self))
    }

    /// All of it, in the shape of the host's table.
    pub fn table(&self) -> Value {
        fn histogram<const N: usize>(figures: &Histogram<N>, bounds: &[u64; N]) -> Value {
            json!({
                "count": figures.count(),
                "sum": figures.sum,
                "at_most": figures.at_most(bounds),
            })
        }
        let figures = self.figures();
        let requests = figures
            .requests
            .iter()
            .map(|((handler, method, status), count)| {
                json!({
                    "handler": handler,
                    "method": method,
                    "status": status.to_string(),
                    "count": count,
                })
            });
        json!({
            "requests": requests.collect::<Vec<_>>(),
            "running": figures.running,
            "connections": figures.connections,
            "first_token_ns": histogram(&figures.first, &FIRST_NS),
            "inter_token_ns": histogram(&figures.between, &BETWEEN_NS),
            "request_ns": histogram(&figures.whole, &WHOLE_NS),
        })
    }
}

/// A connection that is open.
pub struct Connected(Arc<Metrics>);

impl Drop for Connected {
    fn drop(&mut self) {
        let mut figures = self.0.figures();
        figures.connections = figures.connections.saturating_sub(1);
    }
}

/// One request's times.
pub struct Clock {
    metrics: Arc<Metrics>,
    arrived: Instant,
    /// When each answer's newest token came.
    last: Vec<Option<Instant>>,
}

impl Clock {
    pub(crate) fn start(metrics: &Arc<Metrics>, arrived: Instant, choices: usize) -> Self {
        metrics.figures().running += 1;
        Clock {
            metrics: Arc::clone(metrics),
            arrived,
            last: vec![None; choices],
        }
    }

    /// A token of an answer came.
    pub(crate) fn token(&mut self, choice: usize) {
        let now = Instant::now();
        let mut figures = self.metrics.figures();
        match self.last[choice].replace(now) {
            Some(last) => figures.between.record(&BETWEEN_NS, nanoseconds(now - last)),
            None => figures
                .first
                .record(&FIRST_NS, nanoseconds(now - self.arrived)),
        }
    }

    /// An answer ended.
    pub(crate) fn finished(&mut self) {
        let elapsed = nanoseconds(self.arrived.elapsed());
        self.metrics.figures().whole.record(&WHOLE_NS, elapsed);
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let mut figures = self.metrics.figures();
        figures.running = figures.running.saturating_sub(1);
    }
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
