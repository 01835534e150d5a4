//! What fails in a step ends that step's requests with an error; if the device is gone, everybody's. This module must never know why
//! anything fails.

use super::{Engine, Flight, FlightRow};
use crate::{
    attention::BuildOutcome,
    executor::StepFailure,
    output::{RequestError, RequestId},
    scheduler::Scheduler,
};

impl Engine {
    /// Ends every request of a step. What the step should have written is not in the cache, so its blocks lose the names
    /// under which others would find them. If the device is gone, every other request ends too.
    pub(super) fn fail(&mut self, failure: &StepFailure, flight: &Flight) {
        tracing::error!(error = ?failure, "a step failed; its requests end with an error");
        self.stats.failed_steps += 1;
        self.end_rows(failure, &flight.rows);
        if let StepFailure::Device {
            message,
            fatal: true,
        } = failure
        {
            self.die(message);
        }
    }

    /// Ends the requests of a step's segments that have no metadata. The others' rows run; these run beside them and nobody looks
    /// at what they come to.
    pub(super) fn fail_segments(&mut self, outcome: &BuildOutcome, flight: &Flight) {
        self.stats.failed_steps += u64::from(!outcome.failed.is_empty());
        for (index, error) in &outcome.failed {
            tracing::error!(%error, "a segment of a step failed; its requests end with an error");
            let segment = self.batch.segment(*index);
            let rows = segment.first_row..segment.first_row + segment.common.num_reqs as usize;
            self.end_rows(&error.clone().into(), &flight.rows[rows]);
        }
    }

    fn end_rows(&mut self, failure: &StepFailure, rows: &[FlightRow]) {
        let current = |scheduler: &Scheduler, row: &FlightRow| {
            scheduler.is_current(row.key, row.epoch).then_some(row.key)
        };
        for row in rows {
            if let Some(key) = current(&self.scheduler, row) {
                self.scheduler.withdraw(key, row.start);
            }
        }
        for row in rows {
            if let Some(key) = current(&self.scheduler, row) {
                self.end_with(key, failure.for_request());
            }
        }
    }

    /// Ends the requests of everything in flight; the steps themselves are still collected.
    pub(super) fn fail_flights(&mut self, failure: &StepFailure) {
        let mut flights = std::mem::take(&mut self.flights);
        for flight in &mut flights {
            self.end_rows(failure, &flight.rows);
            (flight.dropped, flight.failed) = (true, true);
        }
        self.flights = flights;
    }

    /// The device is gone: every request ends, nothing that is in flight will be waited for, and no request is taken.
    fn die(&mut self, message: &str) {
        tracing::error!(
            message,
            "the device is gone; the engine takes no further requests"
        );
        self.dead = Some(message.to_owned());
        self.flights.clear();
        let mut ids: Vec<RequestId> = self.keys.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            if let Some(&key) = self.keys.get(&id) {
                self.end_with(key, RequestError::Device(message.to_owned()));
            }
        }
    }
}
