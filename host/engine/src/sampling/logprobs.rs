//! Log-probabilities of one row of logits: the model's own, before anything that a request asks for changes them (the field's
//! `raw_logprobs`).
//!
//! Costs two passes over the row on the thread that runs steps, for the rows that want it. Knows no request and no text.

/// Likeliest tokens that a request may ask for with each of its tokens.
pub const MAX_LOGPROBS: u32 = 20;

/// One token's log-probability among all tokens, and the likeliest ones'. Natural logarithms; a token that cannot come has −∞.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that came.
    pub logprob: f32,
    /// As many of the likeliest tokens as were asked for, likeliest first, the lower id on ties. The token that came is among
    /// them only if it is one of them.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of `token` and the `count` likeliest tokens, in a row of `vocab_size` logits. What is not a number is not among the
    /// likeliest and has no part in the sum.
    pub fn new(logits: &[f32], token: u32, count: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // An infinite maximum shares all there is among its like: ∞ − ∞ is not a number.
        let above = |logit: f32| if logit == max { 0.0 } else { logit - max };
        let numbers = logits.iter().filter(|logit| !logit.is_nan());
        let sum: f64 = numbers.map(|&logit| f64::from(above(logit).exp())).sum();
        let log_sum = sum.ln();
        let logprob = |logit: f32| (f64::from(above(logit)) - log_sum) as f32;
        let mut top = likeliest(logits, count);
        for (_, value) in &mut top {
            *value = logprob(*value);
        }
        Self {
            logprob: logits
                .get(token as usize)
                .map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
            top,
        }
    }
}

/// The `count` largest logits with their tokens, the largest first, the lower id on ties.
fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, &logit) in (0..).zip(logits) {
        let least = top.last().filter(|_| top.len() == count);
        // The usual case first: one comparison for each token of the vocabulary.
        if least.is_some_and(|least| logit <= least.1) || logit.is_nan() {
            continue;
        }
        let place = top.partition_point(|other| other.1 >= logit);
        top.insert(place, (token, logit));
        top.truncate(count);
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_log_softmax_with_the_likeliest_first() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 8.0).collect();
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let expected = |token: usize| f64::from(logits[token]) - total.ln();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        for count in [0, 1, 5, 20] {
            let found = TokenLogprobs::new(&logits, 123, count);
            assert!((f64::from(found.logprob) - expected(123)).abs() < 1e-5);
            let tokens: Vec<usize> = found.top.iter().map(|top| top.0 as usize).collect();
            assert_eq!(tokens, order[..count]);
            for (token, logprob) in found.top {
                assert!((f64::from(logprob) - expected(token as usize)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn ties_infinities_and_what_is_no_number_have_an_answer() {
        let top = |logits: &[f32], token, count| {
            let found = TokenLogprobs::new(logits, token, count);
            (found.logprob, found.top)
        };
        let half = 0.5f32.ln();
        assert_eq!(
            top(&[2.0, 7.0, 7.0, f32::NEG_INFINITY], 2, 2).1[0].0,
            1,
            "the lower id"
        );
        assert_eq!(
            top(&[f32::INFINITY, 0.0, f32::INFINITY], 1, 2),
            (f32::NEG_INFINITY, vec![(0, half), (2, half)])
        );
        assert_eq!(
            top(&[f32::NAN, 0.0, 0.0], 1, 3),
            (half, vec![(1, half), (2, half)])
        );
        assert_eq!(
            top(&[1e30, -1e30], 1, 1),
            (f32::NEG_INFINITY.max(-2e30), vec![(0, 0.0)])
        );
        // More than there are, and a token beyond the row.
        assert_eq!(top(&[0.0], 9, 20), (f32::NEG_INFINITY, vec![(0, 0.0)]));
    }
}
