//! From a row of logits to a token, and from a stream of text to its end.
//!
//! Everything here is per request: the random numbers of one request depend on its seed and on how many tokens it has
//! drawn, never on the batch. Knows no model and no tokenizer.

mod adjust;
mod logprobs;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;

pub use self::{
    adjust::Adjustment,
    logprobs::{MAX_LOGPROBS, TokenLogprobs},
};

/// How one request's tokens are chosen, and when it stops.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Only the k likeliest tokens are drawn from; 0: all.
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability are drawn from, within (0, 1].
    pub top_p: f32,
    /// Only tokens at least so likely as this part of the likeliest one's probability are drawn from, within [0, 1]; 0: all.
    pub min_p: f32,
    /// Subtracted from the logit of each token of the output, within [−2, 2].
    pub presence_penalty: f32,
    /// Subtracted from the logit of each token of the output for each time that it is there, within [−2, 2].
    pub frequency_penalty: f32,
    /// Divides the positive and multiplies the other logits of each token of the prompt and the output; above 0, 1 for none.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits, within [−100, 100]; each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// With each token, its log-probability and those of so many of the likeliest, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// Seed of the request's random numbers; `None`: a random one.
    pub seed: Option<u64>,
    /// Tokens generated at most; at least 1.
    pub max_tokens: usize,
    /// The text ends before the first of these that occurs.
    pub stop: Vec<String>,
    /// Tokens that end the request, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's end-of-text tokens are ordinary tokens.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    /// Greedy, 128 tokens, no stops.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            logprobs: None,
            seed: None,
            max_tokens: 128,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// A sampling parameter out of range, or logits that cannot be sampled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// Negative, infinite or not a number.
    #[error("temperature is {0}; give 0 for greedy decoding or a positive number")]
    Temperature(f32),
    /// Not within (0, 1].
    #[error("top_p is {0}; give a number above 0 and at most 1")]
    TopP(f32),
    /// Not within [0, 1].
    #[error("min_p is {0}; give a number from 0 to 1")]
    MinP(f32),
    /// Not within [−2, 2].
    #[error("{name} is {value}; give a number from -2 to 2")]
    Penalty {
        /// The parameter.
        name: &'static str,
        /// As given.
        value: f32,
    },
    /// Not above 0, or not finite.
    #[error("repetition_penalty is {0}; give a number above 0, 1 for none")]
    RepetitionPenalty(f32),
    /// Not within [−100, 100].
    #[error("logit_bias of token {token} is {bias}; give a number from -100 to 100")]
    LogitBias {
        /// The token.
        token: u32,
        /// As given.
        bias: f32,
    },
    /// A token that the model does not have.
    #[error(
        "logit_bias names token {token}, which is not in the model's vocabulary of {vocab_size}: name tokens of this model"
    )]
    LogitBiasToken {
        /// The token.
        token: u32,
        /// Tokens that the model has.
        vocab_size: usize,
    },
    /// A token that is named twice.
    #[error("logit_bias names token {0} twice; give each token one bias")]
    LogitBiasTwice(u32),
    /// More than are given.
    #[error("logprobs is {0}; ask for at most {MAX_LOGPROBS}")]
    Logprobs(u32),
    /// Zero.
    #[error("max_tokens is 0; give at least 1")]
    MaxTokens,
    /// A stop string without characters.
    #[error("stop string {0} is empty; leave it out")]
    EmptyStop(usize),
    /// A row without a single number.
    #[error("none of {0} logits is a number; the model's weights or its input are damaged")]
    Logits(usize),
}

impl SamplingParams {
    /// Checks every range.
    ///
    /// # Errors
    /// The first parameter that is out of range, with its value.
    pub fn validate(&self) -> Result<(), SamplingError> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(SamplingError::Temperature(self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplingError::TopP(self.top_p));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(SamplingError::MinP(self.min_p));
        }
        for (name, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            if !(-2.0..=2.0).contains(&value) {
                return Err(SamplingError::Penalty { name, value });
            }
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return Err(SamplingError::RepetitionPenalty(self.repetition_penalty));
        }
        self.validate_bias()?;
        if let Some(count) = self.logprobs.filter(|&count| count > MAX_LOGPROBS) {
            return Err(SamplingError::Logprobs(count));
        }
        if self.max_tokens == 0 {
            return Err(SamplingError::MaxTokens);
        }
        match self.stop.iter().position(String::is_empty) {
            Some(i) => Err(SamplingError::EmptyStop(i)),
            None => Ok(()),
        }
    }

    fn validate_bias(&self) -> Result<(), SamplingError> {
        for &(token, bias) in &self.logit_bias {
            if !(-100.0..=100.0).contains(&bias) {
                return Err(SamplingError::LogitBias { token, bias });
            }
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|bias| bias.0).collect();
        tokens.sort_unstable();
        match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(SamplingError::LogitBiasTwice(pair[0])),
            None => Ok(()),
        }
    }

    /// Must its tokens be chosen on the host, from logits that its tokens or its bias change, or by a rule that devices do not
    /// have?
    pub fn needs_host(&self) -> bool {
        let draws_by_min_p = self.min_p > 0.0 && self.temperature > 0.0;
        draws_by_min_p
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
            || !self.logit_bias.is_empty()
    }

    /// Whether `token` ends the request, given the model's end-of-text tokens.
    pub fn is_stop_token(&self, token: u32, eos_token_ids: &[u32]) -> bool {
        self.stop_token_ids.contains(&token) || (!self.ignore_eos && eos_token_ids.contains(&token))
    }
}

/// Draws one request's tokens.
///
/// The random number and the choice are apart: the number is drawn where the step is made, so that the request's numbers do
/// not depend on the device that chooses.
#[derive(Debug, Clone)]
pub struct Sampler {
    choice: Choice,
    rng: Pcg64,
    chooser: Chooser,
}

/// How one token is chosen: parameters in the ranges of [`SamplingParams::validate`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Choice {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// 0: all.
    pub top_k: usize,
    /// Within (0, 1].
    pub top_p: f32,
    /// Within [0, 1]; 0: all.
    pub min_p: f32,
}

/// Chooses tokens; holds only memory that is reused.
#[derive(Debug, Clone, Default)]
pub struct Chooser {
    /// Token and, in turn, logit and weight.
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// As `SamplingParams::validate`.
    pub fn new(params: &SamplingParams) -> Result<Self, SamplingError> {
        params.validate()?;
        Ok(Self {
            choice: Choice {
                temperature: params.temperature,
                top_k: params.top_k,
                top_p: params.top_p,
                min_p: params.min_p,
            },
            rng: Pcg64::seed_from_u64(params.seed.unwrap_or_else(rand::random)),
            chooser: Chooser::default(),
        })
    }

    /// How this request's tokens are chosen.
    pub fn choice(&self) -> Choice {
        self.choice
    }

    /// The next token's random number, within [0, 1): greedy decoding uses none, and this is 0.
    pub fn draw(&mut self) -> f64 {
        if self.choice.temperature == 0.0 {
            0.0
        } else {
            self.rng.random::<f64>()
        }
    }

    /// The number of the token at `index` of the output: what the draw after `index` others of a new sampler gives. Steps may ask for
    /// it again, and in any order: a draft that was refused has taken nothing.
    pub fn uniform(&self, index: usize) -> f64 {
        if self.choice.temperature == 0.0 {
            return 0.0;
        }
        let mut rng = self.rng.clone();
        rng.advance(index as u128);
        rng.random()
    }

    /// The next token for a row of `vocab_size` logits: [`Sampler::draw`], then [`Sampler::sample_with`].
    ///
    /// # Errors
    /// `Logits` if no entry is a number.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let uniform = self.draw();
        self.sample_with(logits, uniform)
    }

    /// The token that `uniform` picks; see [`Chooser::choose`].
    ///
    /// # Errors
    /// `Logits` if no entry is a number.
    pub fn sample_with(&mut self, logits: &[f32], uniform: f64) -> Result<u32, SamplingError> {
        self.chooser.choose(logits, self.choice, uniform)
    }
}

impl Chooser {
    /// The token for a row of `vocab_size` logits. Greedy takes the largest, the lowest id on ties. Otherwise top-k,
    /// temperature, min-p and top-p in this order, then `uniform`, within [0, 1), picks among what is left by its running sum: in the order
    /// of the ids or, below a top-p of 1, likeliest first, as the nucleus was taken. `kernels/src/sampling.cu` runs in the same
    /// order, so that one seed gives the same tokens on every device.
    ///
    /// # Errors
    /// `Logits` if no entry is a number.
    pub fn choose(
        &mut self,
        logits: &[f32],
        choice: Choice,
        uniform: f64,
    ) -> Result<u32, SamplingError> {
        let best = greedy(logits).ok_or(SamplingError::Logits(logits.len()))?;
        if choice.temperature == 0.0 {
            return Ok(best);
        }
        let max = logits[best as usize];
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(
            (0..)
                .zip(logits.iter().copied())
                .filter(|(_, logit)| !logit.is_nan()),
        );
        if choice.top_k > 0 && choice.top_k < candidates.len() {
            candidates.select_nth_unstable_by(choice.top_k - 1, |a, b| {
                b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
            });
            candidates.truncate(choice.top_k);
            // The selection leaves them in no order; the draw needs one.
            candidates.sort_unstable_by_key(|c| c.0);
        }
        let mut total = 0f64;
        for (_, weight) in candidates.iter_mut() {
            // An infinite maximum leaves only itself: ∞ − ∞ is not a number.
            *weight = if *weight == max {
                1.0
            } else {
                ((*weight - max) / choice.temperature).exp()
            };
            total += f64::from(*weight);
        }
        if choice.min_p > 0.0 {
            // Weights are parts of the likeliest one's, which is 1.
            candidates.retain(|candidate| candidate.1 >= choice.min_p);
            total = candidates.iter().map(|c| f64::from(c.1)).sum();
        }
        if choice.top_p < 1.0 {
            total = nucleus(candidates, total, f64::from(choice.top_p));
        }
        let mut left = uniform * total;
        for (token, weight) in candidates.iter() {
            left -= f64::from(*weight);
            if left < 0.0 {
                return Ok(*token);
            }
        }
        // Rounding may leave a sliver past the last weight.
        Ok(candidates
            .iter()
            .rev()
            .find(|c| c.1 > 0.0)
            .map_or(best, |c| c.0))
    }
}

/// The largest logit's token, the lowest id on ties; NaN is smaller than everything.
fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (token, logit) in (0..).zip(logits) {
        if !logit.is_nan() && best.is_none_or(|(_, max)| *logit > max) {
            best = Some((token, *logit));
        }
    }
    best.map(|(token, _)| token)
}

/// Keeps the likeliest candidates that together reach `p` of `total`, likeliest first; returns their weight.
fn nucleus(candidates: &mut Vec<(u32, f32)>, total: f64, p: f64) -> f64 {
    // Tokens below this weight together cannot reach 1 − p, so the nucleus has none of them: sorting stays short.
    let negligible = (1.0 - p) * total / candidates.len() as f64;
    candidates.retain(|c| f64::from(c.1) >= negligible);
    candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut reached = 0f64;
    let mut count = 0;
    for (_, weight) in candidates.iter() {
        reached += f64::from(*weight);
        count += 1;
        if reached >= p * total {
            break;
        }
    }
    candidates.truncate(count);
    reached
}

/// Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may be shown; ends before the stop string if one was found.
    pub text: String,
    /// Index of the stop string that was found.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// A matcher of `stops`, none of which is empty.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.to_vec(),
            held: String::new(),
        }
    }

    /// Adds a piece. After a stop was found nothing more may be added.
    pub fn push(&mut self, piece: &str) -> StopOutcome {
        self.held.push_str(piece);
        let found = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(i, stop)| Some((self.held.find(stop)?, i)))
            .min();
        if let Some((at, index)) = found {
            let text = self.held[..at].to_owned();
            self.held.clear();
            return StopOutcome {
                text,
                stopped: Some(index),
            };
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| open_prefix(&self.held, stop))
            .max()
            .unwrap_or(0);
        let text: String = self.held.drain(..self.held.len() - keep).collect();
        StopOutcome {
            text,
            stopped: None,
        }
    }

    /// The text that was held back and turned out to be no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop`.
fn open_prefix(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).rev();
    ends.into_iter()
        .find(|len| text.ends_with(&stop[..*len]))
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
