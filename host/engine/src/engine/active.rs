//! What the engine keeps of a request besides the scheduler's state: how its tokens are chosen, and its text.
//!
//! This module must never know a step.

use crate::{
    executor::RowSampling,
    output::RequestId,
    sampling::{Adjustment, Sampler, SamplingError, SamplingParams, StopMatcher, TokenLogprobs},
    speculation::TokenIndex,
    tokenizer::{TextStream, Tokenizer},
};

/// The text of one request.
pub(super) struct Text {
    pub(super) stream: TextStream,
    pub(super) stops: StopMatcher,
}

/// What the engine keeps of a request besides the scheduler's state.
pub(super) struct Active {
    pub(super) id: RequestId,
    pub(super) params: SamplingParams,
    pub(super) sampler: Sampler,
    /// Changes the logits from which the host chooses.
    pub(super) adjustment: Option<Adjustment>,
    pub(super) forced: Vec<u32>,
    pub(super) text: Option<Text>,
    /// Where its n-grams are, with speculation.
    pub(super) index: Option<TokenIndex>,
}

impl Active {
    /// How the token at `index` of the output is chosen. Where the host does it, the device reads the row greedily and nobody
    /// looks at the result.
    pub(super) fn sampling(&self, index: usize) -> RowSampling {
        let forced = self.forced.get(index).copied();
        let needs_host = self.params.needs_host();
        let logits = needs_host || self.params.logprobs.is_some();
        if forced.is_some() || needs_host {
            return RowSampling {
                top_p: 1.0,
                forced,
                logits,
                ..RowSampling::default()
            };
        }
        let choice = self.sampler.choice();
        RowSampling {
            temperature: choice.temperature,
            top_p: choice.top_p,
            top_k: u32::try_from(choice.top_k).unwrap_or(u32::MAX),
            uniform: self.sampler.uniform(index),
            forced,
            logits,
        }
    }

    /// The token at `index` of the output, and its log-probabilities if they are wanted, from its row of logits where it has
    /// one. `token` is the device's; `scratch` is memory.
    pub(super) fn choose(
        &mut self,
        index: usize,
        token: u32,
        logits: Option<&[f32]>,
        scratch: &mut Vec<f32>,
    ) -> Result<(u32, Option<Box<TokenLogprobs>>), SamplingError> {
        let Some(logits) = logits else {
            return Ok((token, None));
        };
        let mut token = token;
        if self.params.needs_host() && self.forced.len() <= index {
            scratch.clear();
            scratch.extend_from_slice(logits);
            if let Some(adjustment) = &self.adjustment {
                adjustment.apply(scratch);
            }
            token = self.sampler.sample(scratch)?;
        }
        if let Some(adjustment) = &mut self.adjustment {
            adjustment.push(token);
        }
        let wanted = self.params.logprobs;
        let logprobs = wanted.map(|count| TokenLogprobs::new(logits, token, count as usize));
        Ok((token, logprobs.map(Box::new)))
    }
}

impl Text {
    /// The text that became certain, and whether a stop string ended it. A stop token's own text is not shown; at the end
    /// everything held back is.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        is_stop: bool,
        is_last: bool,
    ) -> (String, bool) {
        let mut text = String::new();
        if !is_stop {
            let piece = self.stream.push(tokenizer, token);
            let outcome = self.stops.push(&piece);
            text = outcome.text;
            if outcome.stopped.is_some() {
                return (text, true);
            }
        }
        if is_stop || is_last {
            let outcome = self.stops.push(&self.stream.finish(tokenizer));
            text.push_str(&outcome.text);
            if outcome.stopped.is_some() {
                return (text, true);
            }
            text.push_str(&self.stops.finish());
        }
        (text, false)
    }
}
