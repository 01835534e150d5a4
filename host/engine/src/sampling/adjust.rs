//! What a request changes in its logits before a token is chosen: a bias for named tokens, and penalties for tokens that it has
//! seen. In the field's order: bias, repetition, frequency and presence.
//!
//! It needs the request's tokens, so only the host can do it: see [`Adjustment::new`]. Knows no model and no step.

use std::collections::HashMap;

use super::SamplingParams;

/// One request's.
#[derive(Debug, Clone)]
pub struct Adjustment {
    bias: Vec<(u32, f32)>,
    repetition: f32,
    frequency: f32,
    presence: f32,
    /// Tokens of prompt and output, and how often each is in the output.
    seen: HashMap<u32, u32>,
}

impl Adjustment {
    /// For a request with this prompt. None if its parameters change nothing.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Option<Self> {
        let penalises = params.repetition_penalty != 1.0
            || params.frequency_penalty != 0.0
            || params.presence_penalty != 0.0;
        if !penalises && params.logit_bias.is_empty() {
            return None;
        }
        // The prompt counts for repetition alone.
        let prompt = prompt
            .iter()
            .filter(|_| params.repetition_penalty != 1.0)
            .map(|&token| (token, 0));
        Some(Self {
            bias: params.logit_bias.clone(),
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            seen: prompt.collect(),
        })
    }

    /// Changes a row of `vocab_size` logits.
    pub fn apply(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for (&token, &count) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            *logit = if *logit > 0.0 {
                *logit / self.repetition
            } else {
                *logit * self.repetition
            };
            if count > 0 {
                *logit -= self.frequency * count as f32 + self.presence;
            }
        }
    }

    /// The request's next token.
    pub fn push(&mut self, token: u32) {
        *self.seen.entry(token).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(params: &SamplingParams, output: &[u32]) -> Vec<f32> {
        let mut adjustment = Adjustment::new(params, &[0, 1, 1]).expect("it changes something");
        output.iter().for_each(|&token| adjustment.push(token));
        let mut logits = [2.0, -2.0, 4.0, -4.0, 1.0];
        adjustment.apply(&mut logits);
        logits.to_vec()
    }

    /// The field's formulas, by hand: repetition divides what is positive and multiplies what is not, of prompt and output;
    /// frequency counts the output, presence asks whether there is any.
    #[test]
    fn penalties_and_biases_change_the_tokens_that_they_name() {
        let default = SamplingParams::default();
        let repetition = SamplingParams {
            repetition_penalty: 2.0,
            ..default.clone()
        };
        assert_eq!(adjusted(&repetition, &[]), [1.0, -4.0, 4.0, -4.0, 1.0]);
        assert_eq!(
            adjusted(&repetition, &[2, 3, 3]),
            [1.0, -4.0, 2.0, -8.0, 1.0]
        );
        let frequency = SamplingParams {
            frequency_penalty: 0.5,
            ..default.clone()
        };
        assert_eq!(
            adjusted(&frequency, &[2, 3, 3]),
            [2.0, -2.0, 3.5, -5.0, 1.0]
        );
        let presence = SamplingParams {
            presence_penalty: -0.5,
            ..default.clone()
        };
        assert_eq!(adjusted(&presence, &[2, 3, 3]), [2.0, -2.0, 4.5, -3.5, 1.0]);
        let all = SamplingParams {
            logit_bias: vec![(4, -100.0), (2, 4.0)],
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 1.0,
            ..default.clone()
        };
        // Token 2: (4 + 4) / 2 − 0.5 − 1.
        assert_eq!(adjusted(&all, &[2]), [1.0, -4.0, 2.5, -4.0, -99.0]);
        assert!(Adjustment::new(&default, &[0, 1]).is_none());
    }
}
