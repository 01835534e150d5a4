//! Paged attention in f64, plain: what every device's attention is compared with. It must never share code with what it
//! judges.
//!
//! For query token t (0-based) of a request with q query tokens and n keys, at position p = n − q + t, head h, KV head
//! g = h / (num_heads / num_kv_heads):
//!
//! - visible keys j < n; causal: j ≤ p; with a window of w: j > p − w and, where not causal, j < p + w;
//! - s_j = scale · (q · k_j), and with a soft cap c: s_j ← c · tanh(s_j / c);
//! - output = Σ e^(s_j) v_j / Σ e^(s_j), lse = ln Σ e^(s_j); without keys: zeros, −∞.

pub mod latent;
pub mod mamba;

/// The layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a query, key or value.
    pub head_size: usize,
    /// Multiplies q·k.
    pub scale: f64,
    /// Keys that a token sees, itself included.
    pub sliding_window: Option<usize>,
    /// Soft cap of the scores.
    pub logits_soft_cap: Option<f64>,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Index of its first token in the step's query.
    pub first_token: usize,
    /// Query tokens.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Is attention causal?
    pub causal: bool,
}

/// The result.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// f64 [num_tokens, num_heads, head_size]; zeros for a token of no request.
    pub output: Vec<f64>,
    /// f64 [num_tokens, num_heads], natural log; −∞ for a token of no request.
    pub lse: Vec<f64>,
}

/// Attention of all requests. `query`: f32 [num_tokens, num_heads, head_size]. `key_value(request, position, kv_head)` gives
/// a key and a value.
///
/// # Panics
/// If a token or head lies outside `query`, or a key or value is too short.
pub fn attention(
    layer: &Layer,
    requests: &[Request],
    num_tokens: usize,
    query: &[f32],
    mut key_value: impl FnMut(usize, usize, usize) -> (Vec<f32>, Vec<f32>),
) -> Attention {
    let Layer {
        num_heads,
        num_kv_heads,
        head_size,
        ..
    } = *layer;
    let mut output = vec![0.0; num_tokens * num_heads * head_size];
    let mut lse = vec![f64::NEG_INFINITY; num_tokens * num_heads];
    for (index, request) in requests.iter().enumerate() {
        for kv_head in 0..num_kv_heads {
            let content: Vec<_> = (0..request.kv_len)
                .map(|key| key_value(index, key, kv_head))
                .collect();
            let group = num_heads / num_kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                for token in 0..request.q_len {
                    let row = (request.first_token + token) * num_heads + head;
                    let query = &query[row * head_size..(row + 1) * head_size];
                    lse[row] = one_row(
                        layer,
                        request,
                        token,
                        query,
                        &content,
                        &mut output[row * head_size..(row + 1) * head_size],
                    );
                }
            }
        }
    }
    Attention { output, lse }
}

fn one_row(
    layer: &Layer,
    request: &Request,
    token: usize,
    query: &[f32],
    content: &[(Vec<f32>, Vec<f32>)],
    output: &mut [f64],
) -> f64 {
    let position = request.kv_len as i64 - request.q_len as i64 + token as i64;
    let visible = |key: usize| {
        let key = key as i64;
        let window = layer
            .sliding_window
            .map_or(i64::MAX / 2, |window| window as i64);
        let ahead = if request.causal { 1 } else { window };
        key > position - window && key < position + ahead
    };
    let mut scores = Vec::new();
    for (key, (k, _)) in content.iter().enumerate().filter(|&(key, _)| visible(key)) {
        let dot: f64 = query
            .iter()
            .zip(k)
            .map(|(&q, &k)| f64::from(q) * f64::from(k))
            .sum();
        let score = layer.scale * dot;
        scores.push((
            key,
            layer
                .logits_soft_cap
                .map_or(score, |cap| cap * (score / cap).tanh()),
        ));
    }
    let max = scores
        .iter()
        .fold(f64::NEG_INFINITY, |max, &(_, score)| max.max(score));
    if max == f64::NEG_INFINITY {
        return max;
    }
    let sum: f64 = scores.iter().map(|&(_, score)| (score - max).exp()).sum();
    for (key, score) in scores {
        let weight = (score - max).exp() / sum;
        for (output, &v) in output.iter_mut().zip(&content[key].1) {
            *output += weight * f64::from(v);
        }
    }
    max + sum.ln()
}

/// The largest relative error over rows of `width` elements: max |actual − expected| / max |expected| within a row, the
/// largest over all rows. A row that should be all zeros counts |actual| itself. NaN counts as infinite.
///
/// # Panics
/// If the lengths differ.
pub fn max_relative_error(actual: &[f32], expected: &[f64], width: usize) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let mut worst = 0.0f64;
    for (actual, expected) in actual.chunks(width).zip(expected.chunks(width)) {
        let size = expected.iter().fold(0.0f64, |size, x| size.max(x.abs()));
        for (&actual, expected) in actual.iter().zip(expected) {
            let error = (f64::from(actual) - expected).abs();
            let relative = if size > 0.0 { error / size } else { error };
            worst = worst.max(if relative.is_nan() {
                f64::INFINITY
            } else {
                relative
            });
        }
    }
    worst
}
