//! Speculation in the step loop: which tokens a row comes to, and what may follow them. With drafts one step is in flight at a
//! time, because they follow from tokens.
//!
//! A draft counts only if it is the very token that its position comes to, greedy or by the request's own random number for it, so
//! a request has the same tokens with speculation and without. This module must never know a device.

use super::{Engine, Flight, FlightRow};
use crate::{
    executor::StepResults,
    sampling::{SamplingError, TokenLogprobs},
    speculation::SpeculativeMethod,
};

/// A token of a row, and its log-probabilities where they are wanted.
pub(super) type Chosen = (u32, Option<Box<TokenLogprobs>>);

impl Engine {
    /// Gives the tokens of a step to its requests.
    pub(super) fn emit(&mut self, flight: &Flight, results: &StepResults) {
        let vocab_size = self.executor.model_config().vocab_size;
        let (mut tokens, mut logits) = (&results.tokens[..], &results.logits[..]);
        let mut chosen = std::mem::take(&mut self.chosen);
        for row in flight.rows.iter().filter(|row| row.samples) {
            let num_logits = row.num_logits() * usize::from(row.logits) * vocab_size;
            let (of_row, logits_of_row);
            (of_row, tokens) = tokens.split_at(row.num_logits());
            (logits_of_row, logits) = logits.split_at(num_logits);
            // The request ended while the step ran: a token before this one was its last, or somebody aborted it.
            if !self.scheduler.is_current(row.key, row.epoch) {
                continue;
            }
            let outcome = self.choose(row, of_row, logits_of_row, &mut chosen);
            let mut rows = logits_of_row.chunks_exact(vocab_size);
            for (token, logprobs) in chosen.drain(..) {
                if let (Some(observer), Some(logits)) = (&mut self.observer, rows.next())
                    && let Some(active) = &self.active[row.key.index()]
                {
                    let index = self.scheduler.request(row.key).output().len();
                    observer(active.id, index, logits);
                }
                self.emit_token(row.key, token, logprobs);
                // Those after its last are nobody's.
                if !self.scheduler.is_current(row.key, row.epoch) {
                    break;
                }
            }
            if let Err(error) = outcome
                && self.scheduler.is_current(row.key, row.epoch)
            {
                self.end_with(row.key, error.into());
            }
        }
        self.chosen = chosen;
    }

    /// Sets `chosen` to the tokens of a row: the device's `tokens`, or the host's own from `logits`, up to the first that is not the
    /// draft in its place. The row's other drafts count as not computed from here on.
    ///
    /// # Errors
    /// Logits without a number, behind what was chosen.
    fn choose(
        &mut self,
        row: &FlightRow,
        tokens: &[Result<u32, SamplingError>],
        logits: &[f32],
        chosen: &mut Vec<Chosen>,
    ) -> Result<(), SamplingError> {
        chosen.clear();
        let Some(active) = &mut self.active[row.key.index()] else {
            return Ok(());
        };
        let request = self.scheduler.request(row.key);
        let first = request.output().len();
        let drafts = &request.drafts()[..row.num_drafts];
        let mut logits = logits.chunks_exact(self.executor.model_config().vocab_size);
        let mut outcome = Ok(());
        for (place, token) in tokens.iter().enumerate() {
            let (index, logits) = (first + place, logits.next());
            let scratch = &mut self.adjusted;
            let token = token.clone();
            match token.and_then(|token| active.choose(index, token, logits, scratch)) {
                Ok(token) => chosen.push(token),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
            if drafts.get(place) != chosen.last().map(|(token, _)| token) {
                break;
            }
        }
        if row.num_drafts > 0 {
            let num_accepted = chosen.len() - usize::from(outcome.is_ok());
            self.stats.speculation.count(row.num_drafts, num_accepted);
            self.scheduler
                .settle_drafts(row.key, row.num_drafts, num_accepted);
        }
        outcome
    }

    /// Proposes drafts for the rows of a step that go on.
    pub(super) fn draft(&mut self, flight: &Flight) {
        let Some(speculative) = self.speculative else {
            return;
        };
        let max_model_len = self.scheduler.limits().max_model_len;
        for row in &flight.rows {
            if !self.scheduler.is_current(row.key, row.epoch) {
                continue;
            }
            let active = self.active[row.key.index()].as_mut();
            let Some(index) = active.and_then(|active| active.index.as_mut()) else {
                continue;
            };
            let request = self.scheduler.request(row.key);
            if !row.samples {
                // A prompt is taken in chunk by chunk, as it is computed.
                index.extend(&request.tokens()[..request.num_computed()]);
                continue;
            }
            // A row gives a token more than it has drafts.
            let most = match speculative.method {
                SpeculativeMethod::Ngram => request.max_total_tokens() - 1,
                SpeculativeMethod::NgramGpu => max_model_len,
            };
            let tokens = request.tokens();
            let most = most.saturating_sub(tokens.len());
            speculative.propose(index, tokens, most, &mut self.drafts);
            self.scheduler.set_drafts(row.key, &self.drafts);
        }
    }
}
