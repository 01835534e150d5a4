//! What is measured: the shapes of the peers' figures. It must never know a result.

/// Query heads and KV heads.
pub const HEADS: (usize, usize) = (32, 8);
/// Elements of a head.
pub const HEAD_SIZE: usize = 128;
/// Tokens of a page.
pub const PAGE: usize = 16;
/// Decodes: requests, keys of each.
pub const DECODE: [(usize, usize); 7] = [
    (1, 8_192),
    (1, 131_072),
    (16, 8_192),
    (64, 1_024),
    (64, 8_192),
    (256, 1_024),
    (256, 4_096),
];
/// Causal prefills without context: requests, tokens of each.
pub const PREFILL: [(usize, usize); 3] = [(1, 8_192), (4, 2_048), (16, 512)];
/// Tokens that are written to the cache at once.
pub const SCATTER_TOKENS: usize = 8_192;

/// Bytes that a decode reads: every key and value once, bf16.
pub fn decode_bytes(batch: usize, context: usize) -> f64 {
    (batch * context * HEADS.1 * HEAD_SIZE * 2 * 2) as f64
}

/// Floating-point operations of a causal prefill: two products over the visible keys.
pub fn prefill_flop(batch: usize, tokens: usize) -> f64 {
    let visible = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
    4.0 * batch as f64 * visible * (HEADS.0 * HEAD_SIZE) as f64
}

/// Bytes that a scatter reads and writes, bf16.
pub fn scatter_bytes(tokens: usize) -> f64 {
    (2 * 2 * tokens * HEADS.1 * HEAD_SIZE * 2) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_moves_and_computes_what_it_should() {
        assert_eq!(decode_bytes(64, 8_192), 2_147_483_648.0);
        assert_eq!(scatter_bytes(8_192), 67_108_864.0);
        assert!((prefill_flop(1, 8_192) - 5.4983e11).abs() < 1e8);
    }
}
