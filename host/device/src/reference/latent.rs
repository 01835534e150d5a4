//! Latent attention in f64, plain: keys and values of every head are made of the latents, and then it is attention. It must
//! never share code with what it judges.
//!
//! For head h with W_UK (`[qk_nope_head_dim, kv_lora_rank]`) and W_UV (`[v_head_dim, kv_lora_rank]`), a token's latent c and
//! rotated key r: key = (W_UK c, r), value = W_UV c. A query at position p sees keys j ≤ p.
//!
//! - s_j = scale · (q · k_j), output = Σ e^(s_j) v_j / Σ e^(s_j), lse = ln Σ e^(s_j); without keys: zeros, −∞.

/// The layer and its weights.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Query heads.
    pub num_heads: usize,
    /// Elements of a latent.
    pub kv_lora_rank: usize,
    /// Elements of a query that nothing rotates.
    pub qk_nope_head_dim: usize,
    /// Elements of a query that are rotated.
    pub qk_rope_head_dim: usize,
    /// Elements of a value.
    pub v_head_dim: usize,
    /// Multiplies q·k.
    pub scale: f64,
    /// f32 [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]
    pub kv_b_proj: &'a [f32],
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of its first token in the step's query.
    pub first_token: usize,
    /// Query tokens.
    pub q_len: usize,
    /// Position of its first query token.
    pub first_position: usize,
    /// The keys that there are, by position: (position, latent, rotated key). Some may be left out.
    pub keys: Vec<(usize, Vec<f32>, Vec<f32>)>,
}

/// The result.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// f64 [num_tokens, num_heads, v_head_dim]; zeros for a token of no request.
    pub output: Vec<f64>,
    /// f64 [num_tokens, num_heads, kv_lora_rank]: Σ e^(s_j) c_j / Σ e^(s_j), of which W_UV makes the output.
    pub latents: Vec<f64>,
    /// f64 [num_tokens, num_heads], natural log; −∞ for a token of no request.
    pub lse: Vec<f64>,
}

/// Attention of all requests. `query`: f32 [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
///
/// # Panics
/// If a token or head lies outside `query`, or a latent, a key or the weights are too short.
pub fn attention(
    layer: &Layer<'_>,
    requests: &[Request],
    num_tokens: usize,
    query: &[f32],
) -> Attention {
    let Layer {
        num_heads,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        ..
    } = *layer;
    let mut of = Attention {
        output: vec![0.0; num_tokens * num_heads * v_head_dim],
        latents: vec![0.0; num_tokens * num_heads * kv_lora_rank],
        lse: vec![f64::NEG_INFINITY; num_tokens * num_heads],
    };
    let weight = |head: usize, row: usize, column: usize| {
        let rows = qk_nope_head_dim + v_head_dim;
        f64::from(layer.kv_b_proj[(head * rows + row) * kv_lora_rank + column])
    };
    // Rows [first, first + count) of a head's weights, times a latent.
    let times = |head: usize, first: usize, count: usize, latent: &[f32]| -> Vec<f64> {
        let row = |row: usize| {
            let products = latent.iter().enumerate();
            products
                .map(|(column, &c)| weight(head, row, column) * f64::from(c))
                .sum()
        };
        (first..first + count).map(row).collect()
    };
    let qk_head_dim = qk_nope_head_dim + qk_rope_head_dim;
    for request in requests {
        for head in 0..num_heads {
            let keys: Vec<(Vec<f64>, Vec<f64>)> = request
                .keys
                .iter()
                .map(|(_, latent, rotated)| {
                    let mut key = times(head, 0, qk_nope_head_dim, latent);
                    key.extend(rotated.iter().map(|&x| f64::from(x)));
                    (key, times(head, qk_nope_head_dim, v_head_dim, latent))
                })
                .collect();
            for token in 0..request.q_len {
                let row = (request.first_token + token) * num_heads + head;
                let q = &query[row * qk_head_dim..(row + 1) * qk_head_dim];
                let seen: Vec<(usize, f64)> = (0..keys.len())
                    .filter(|&key| request.keys[key].0 <= request.first_position + token)
                    .map(|key| {
                        let pairs = q.iter().zip(&keys[key].0);
                        let dot: f64 = pairs.map(|(&q, k)| f64::from(q) * k).sum();
                        (key, layer.scale * dot)
                    })
                    .collect();
                let scores = seen.iter().map(|&(_, score)| score);
                let max = scores.clone().fold(f64::NEG_INFINITY, f64::max);
                if seen.is_empty() {
                    continue;
                }
                let sum: f64 = scores.map(|score| (score - max).exp()).sum();
                of.lse[row] = max + sum.ln();
                for (key, score) in seen {
                    let weight = (score - max).exp() / sum;
                    let output = &mut of.output[row * v_head_dim..(row + 1) * v_head_dim];
                    for (output, v) in output.iter_mut().zip(&keys[key].1) {
                        *output += weight * v;
                    }
                    let latents = &mut of.latents[row * kv_lora_rank..(row + 1) * kv_lora_rank];
                    for (latents, &c) in latents.iter_mut().zip(&request.keys[key].1) {
                        *latents += weight * f64::from(c);
                    }
                }
            }
        }
    }
    of
}
