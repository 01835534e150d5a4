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
        let mut top = likeliest(logits, count.max(1));
        let max = top.first().map_or(f32::NEG_INFINITY, |top| top.1);
        // An infinite maximum shares all there is among its like: ∞ − ∞ is not a number.
        let above = |logit: f32| if logit == max { 0.0 } else { logit - max };
        let log_sum = sum_of_exponentials(logits, above).ln();
        let logprob = |logit: f32| (f64::from(above(logit)) - log_sum) as f32;
        top.truncate(count);
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

/// Σ eˣ over `above` of each logit, at most 0; what is not a number adds nothing. In lanes of f32 and blocks of f64, so that the
/// compiler has vectors for it: a vocabulary has many tokens, and steps wait.
fn sum_of_exponentials(logits: &[f32], above: impl Fn(f32) -> f32) -> f64 {
    const LANES: usize = 8;
    let mut sum = 0.0;
    for block in logits.chunks(32 * LANES) {
        let mut lanes = [0f32; LANES];
        let (rows, rest) = block.as_chunks::<LANES>();
        for row in rows {
            for (lane, &logit) in lanes.iter_mut().zip(row) {
                *lane += exp(above(logit));
            }
        }
        for (lane, &logit) in lanes.iter_mut().zip(rest) {
            *lane += exp(above(logit));
        }
        sum += lanes.iter().copied().map(f64::from).sum::<f64>();
    }
    sum
}

/// eˣ for x ≤ 0, to about 2⁻²²; below e⁻⁸⁷ that. eˣ = 2ⁿ eᶠ with n whole and |f| ≤ ln 2 / 2, eᶠ by its series.
fn exp(x: f32) -> f32 {
    // Adding it leaves the nearest whole number in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has so few digits that n times it is exact.
    const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
    // Not a number: the bound.
    let x = x.max(-87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let f = x - n * LN_2.0 - n * LN_2.1;
    let tail = 1.0 / 6.0 + f * (1.0 / 24.0 + f * (1.0 / 120.0 + f * (1.0 / 720.0)));
    let series = 1.0 + f * (1.0 + f * (0.5 + f * tail));
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    f32::from_bits(series.to_bits().wrapping_add(exponent))
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
    fn the_exponential_is_the_exponential() {
        assert_eq!(exp(0.0), 1.0);
        for i in 0..=80_000 {
            let x = -(i as f32) / 1000.0;
            let relative = f64::from(exp(x)) / f64::from(x).exp() - 1.0;
            assert!(relative.abs() < 2.4e-7, "{x}: {relative:e}");
        }
        for x in [-87.0, -1e9, f32::NEG_INFINITY, f32::NAN] {
            assert!((0.0..1e-37).contains(&exp(x)), "{x}: {}", exp(x));
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
