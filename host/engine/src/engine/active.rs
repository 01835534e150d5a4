//! What the engine keeps of a request besides the scheduler's state: how its tokens are chosen, and its text.
//!
//! This module must never know a step.

use crate::{
    executor::RowSampling,
    output::RequestId,
    sampling::{Sampler, SamplingParams, StopMatcher},
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
    pub(super) forced: Vec<u32>,
    pub(super) text: Option<Text>,
}

impl Active {
    /// How the token at `index` of the output is chosen.
    pub(super) fn sampling(&mut self, index: usize) -> RowSampling {
        let choice = self.sampler.choice();
        let forced = self.forced.get(index).copied();
        RowSampling {
            temperature: choice.temperature,
            top_p: choice.top_p,
            top_k: u32::try_from(choice.top_k).unwrap_or(u32::MAX),
            uniform: match forced {
                Some(_) => 0.0,
                None => self.sampler.draw(),
            },
            forced,
        }
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
