//! Outcomes, added up. Must never know: how requests were sent.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{End, FailureKind, Latency, Outcome, Quantiles};

/// Adds outcomes up, in memory that does not grow with them.
#[derive(Debug, Default)]
pub struct Recorder {
    completed: u64,
    hung_up: u64,
    retries: u64,
    prompt_tokens: u64,
    output_tokens: u64,
    failures: BTreeMap<FailureKind, (u64, String)>,
    ttft: Latency,
    tpot: Latency,
    itl: Latency,
    e2e: Latency,
}

/// What a run showed. Latencies are those of whole answers, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Seconds from the first request until the last answer.
    pub duration: f64,
    /// Requests with a whole answer.
    pub completed: u64,
    /// Requests without.
    pub failed: u64,
    /// Requests whose client went away, as it was told to.
    pub hung_up: u64,
    /// Attempts that were repeated because the server was busy.
    pub retries: u64,
    /// Failed requests by kind.
    pub errors: BTreeMap<String, u64>,
    /// The first message of each kind.
    pub error_examples: BTreeMap<String, String>,
    /// Prompts' tokens of whole answers.
    pub total_input_tokens: u64,
    /// Tokens of all answers, as far as they got.
    pub total_output_tokens: u64,
    /// Whole answers a second.
    pub request_throughput: f64,
    /// Tokens of answers a second.
    pub output_throughput: f64,
    /// Time to the first token.
    pub ttft_ms: Quantiles,
    /// Mean time of a token after the first, of each answer.
    pub tpot_ms: Quantiles,
    /// Time between two pieces of an answer.
    pub itl_ms: Quantiles,
    /// Time of a whole answer.
    pub e2e_ms: Quantiles,
}

impl Recorder {
    /// Counts one.
    pub fn add(&mut self, outcome: &Outcome) {
        self.retries += u64::from(outcome.retries);
        self.output_tokens += outcome.output_tokens;
        match &outcome.end {
            End::HungUp => self.hung_up += 1,
            End::Failed(failure) => {
                let message = || failure.message.clone();
                let entry = self.failures.entry(failure.kind);
                entry.or_insert_with(|| (0, message())).0 += 1;
            }
            End::Complete => {
                self.completed += 1;
                self.prompt_tokens += outcome.prompt_tokens;
                self.e2e.add(outcome.elapsed);
                if let Some(time) = outcome.first_token {
                    self.ttft.add(time);
                }
                if let Some(time) = outcome.time_per_output_token() {
                    self.tpot.add(time);
                }
                for &gap in &outcome.gaps {
                    self.itl.add(gap);
                }
            }
        }
    }

    /// Requests that have ended: with a whole answer, without, and hung up on.
    pub fn ended(&self) -> (u64, u64, u64) {
        let failed = self.failures.values().map(|(count, _)| count).sum();
        (self.completed, failed, self.hung_up)
    }

    /// What they show, over the time that the run took.
    pub fn report(&self, elapsed: Duration) -> Report {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let (completed, failed, hung_up) = self.ended();
        let failures = || {
            let named = |(kind, of): (&FailureKind, &(u64, String))| (kind.to_string(), of.clone());
            self.failures.iter().map(named)
        };
        Report {
            duration: seconds,
            completed,
            failed,
            hung_up,
            retries: self.retries,
            errors: failures().map(|(kind, (count, _))| (kind, count)).collect(),
            error_examples: failures().map(|(kind, (_, text))| (kind, text)).collect(),
            total_input_tokens: self.prompt_tokens,
            total_output_tokens: self.output_tokens,
            request_throughput: completed as f64 / seconds,
            output_throughput: self.output_tokens as f64 / seconds,
            ttft_ms: self.ttft.quantiles(),
            tpot_ms: self.tpot.quantiles(),
            itl_ms: self.itl.quantiles(),
            e2e_ms: self.e2e.quantiles(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Recorder;
    use crate::{End, Failure, FailureKind, Outcome};

    fn outcome(end: End, tokens: u64) -> Outcome {
        let ms = Duration::from_millis;
        Outcome {
            end,
            prompt_tokens: 7,
            output_tokens: tokens,
            first_token: Some(ms(20)),
            // Two tokens came in one piece.
            gaps: vec![ms(10); tokens.saturating_sub(2) as usize],
            elapsed: ms(20 + 10 * tokens),
            ..Outcome::begin()
        }
    }

    #[test]
    fn rates_latencies_and_failures_are_added_up() {
        let mut recorder = Recorder::default();
        for _ in 0..3 {
            recorder.add(&outcome(End::Complete, 11));
        }
        recorder.add(&outcome(End::HungUp, 4));
        for message in ["first", "second"] {
            recorder.add(&outcome(
                End::Failed(Failure {
                    kind: FailureKind::Status(429),
                    message: message.to_owned(),
                }),
                0,
            ));
        }
        let report = recorder.report(Duration::from_secs(2));
        assert_eq!((report.completed, report.failed, report.hung_up), (3, 2, 1));
        assert_eq!(report.errors["http_429"], 2);
        assert_eq!(report.error_examples["http_429"], "first");
        assert_eq!(
            (report.total_input_tokens, report.total_output_tokens),
            (21, 37)
        );
        assert_eq!(
            (report.request_throughput, report.output_throughput),
            (1.5, 18.5)
        );
        // Nine gaps of 10 ms are the time of ten tokens after the first.
        for (found, ms, count) in [
            (report.ttft_ms, 20.0, 3),
            (report.tpot_ms, 9.0, 3),
            (report.itl_ms, 10.0, 27),
            (report.e2e_ms, 130.0, 3),
        ] {
            assert!((found.p50 / ms - 1.0).abs() < 0.006, "{found:?}, not {ms}");
            assert_eq!((found.count, found.max), (count, ms));
        }
    }
}
