//! The cache dtype `fp8_ds_mla`: one token in 656 bytes. It must never know a cache's blocks.
//!
//! | bytes | what |
//! |---|---|
//! | 0 .. 512 | the latent's 512 elements, e4m3 (S.EEEE.MMM, bias 7, no infinity, NaN 0x7f and 0xff) |
//! | 512 .. 528 | 4 scales, f32, little-endian: scale t is of elements 128·t .. 128·(t + 1) |
//! | 528 .. 656 | the rotated key's 64 elements, bf16, little-endian |
//!
//! Writing: scale = max(max |x| / 448, 2^−126), byte = e4m3(x / scale), to nearest, ties to even, saturating at ±448; the
//! rotated key is rounded to bf16, and is not scaled. Reading: e4m3 · scale in f32. (vLLM 0.33 `concat_and_cache_ds_mla`; its
//! kernels go on to round what they read to bf16, which this device, computing in f32, does not.)

use half::bf16;

use crate::cpu::{kernel::Simd, math::Element};

/// Elements of the latent, each a byte.
pub(super) const LATENT: usize = 512;
/// Elements of the rotated key, each of two bytes.
pub(super) const ROTATED: usize = 64;
/// Elements that share a scale.
const TILE: usize = 128;
/// Where the scales begin.
const SCALES: usize = LATENT;
/// Where the rotated key begins.
const KEY: usize = SCALES + 4 * (LATENT / TILE);
/// Bytes of a token.
pub(super) const ENTRY: usize = KEY + 2 * ROTATED;
/// The largest e4m3 number.
const LARGEST: f32 = 448.0;

/// Packs a token: `latent` `f32 [512]`, `key` `f32 [64]` into `entry` `[656]`.
pub(super) fn pack(latent: &[f32], key: &[f32], entry: &mut [u8]) {
    for (tile, latent) in latent.chunks(TILE).enumerate() {
        let largest = latent
            .iter()
            .fold(0.0f32, |largest, x| largest.max(x.abs()));
        let scale = (largest / LARGEST).max(f32::MIN_POSITIVE);
        entry[SCALES + 4 * tile..][..4].copy_from_slice(&scale.to_le_bytes());
        for (byte, x) in entry[tile * TILE..].iter_mut().zip(latent) {
            *byte = encode(x / scale);
        }
    }
    for (bytes, &x) in entry[KEY..].chunks_exact_mut(2).zip(key) {
        bytes.copy_from_slice(&<bf16 as Element>::narrow(x).to_le_bytes());
    }
}

/// A byte of such a token. By itself, an e4m3 number.
impl Element for u8 {
    const AS_F32: Option<crate::cpu::math::AsF32<u8>> = None;
    const IN_PLACE: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        decode(self)
    }

    #[inline(always)]
    fn load<S: Simd>(from: &[u8; 16]) -> S::Vector {
        S::load(&from.map(decode))
    }

    fn narrow(x: f32) -> Self {
        encode(x)
    }

    fn unpack(content: &[u8], to: &mut [f32]) {
        let (latent, key) = to.split_at_mut(LATENT);
        for (tile, latent) in latent.chunks_mut(TILE).enumerate() {
            let bytes = &content[SCALES + 4 * tile..];
            let scale = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            for (x, &byte) in latent.iter_mut().zip(&content[tile * TILE..]) {
                *x = decode(byte) * scale;
            }
        }
        for (x, bytes) in key.iter_mut().zip(content[KEY..].chunks_exact(2)) {
            *x = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        }
    }
}

/// The number of an e4m3 byte.
#[inline(always)]
fn decode(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    // 2^(exponent − 10): the mantissa counts eighths, and the bias is 7.
    let unit = |exponent: i32| f32::from_bits(((exponent + 117) as u32) << 23);
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * unit(1),
        _ => (8.0 + mantissa) * unit(exponent),
    };
    if byte & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// The e4m3 byte nearest to `x`, ties to even; ±448 beyond, infinity included; NaN for NaN.
fn encode(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    sign | if magnitude.is_nan() {
        0x7f
    } else if magnitude >= LARGEST {
        0x7e
    } else if magnitude < 0.015_625 {
        // Below 2^−6 the unit is 2^−9; eight of them are the first normal number.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        // Three bits of the mantissa stay; a carry goes into the exponent.
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All numbers of the format, by its definition.
    fn numbers() -> Vec<(u8, f64)> {
        (0..=0xffu8)
            .filter(|byte| byte & 0x7f != 0x7f)
            .map(|byte| {
                let (sign, exponent, mantissa) = (byte >> 7, byte >> 3 & 15, byte & 7);
                let magnitude = match exponent {
                    0 => f64::from(mantissa) * 2f64.powi(-9),
                    _ => (1.0 + f64::from(mantissa) / 8.0) * 2f64.powi(i32::from(exponent) - 7),
                };
                (byte, if sign == 1 { -magnitude } else { magnitude })
            })
            .collect()
    }

    #[test]
    fn every_byte_is_read_and_written_back() {
        for (byte, number) in numbers() {
            assert_eq!(f64::from(decode(byte)), number, "{byte:#x}");
            assert_eq!(encode(number as f32), byte, "{number}");
        }
        for byte in [0x7f, 0xff] {
            assert!(decode(byte).is_nan());
        }
        assert_eq!(encode(f32::NAN) & 0x7f, 0x7f);
        assert_eq!(encode(f32::INFINITY), 0x7e);
        assert_eq!(encode(-1e30), 0xfe);
        assert_eq!(encode(448.1), 0x7e);
    }

    #[test]
    fn a_number_becomes_the_nearest_and_a_tie_the_even_one() {
        let numbers = numbers();
        let positive: Vec<(u8, f64)> = numbers.iter().copied().filter(|n| n.0 < 0x80).collect();
        for pair in positive.windows(2) {
            let ((low, a), (high, b)) = (pair[0], pair[1]);
            let middle = ((a + b) / 2.0) as f32;
            let even = if low % 2 == 0 { low } else { high };
            assert_eq!(encode(middle), even, "{middle}");
            assert_eq!(encode(-middle), even | 0x80, "{middle}");
            assert_eq!(encode(middle.next_down()), low, "{middle}");
            assert_eq!(encode(middle.next_up()), high, "{middle}");
        }
    }

    #[test]
    fn a_token_has_the_field_s_656_bytes() {
        assert_eq!(ENTRY, 656);
        let latent: Vec<f32> = (0..LATENT)
            .map(|i| match i / TILE {
                // Scales 2, 2^-126, 1/448 · 7, 0.5.
                0 => 896.0 - i as f32,
                1 => 0.0,
                2 => (i % 8) as f32,
                _ => -224.0,
            })
            .collect();
        let key: Vec<f32> = (0..ROTATED).map(|i| i as f32 / 3.0).collect();
        let mut entry = [0xa5; ENTRY];
        pack(&latent, &key, &mut entry);
        let scales = [2.0, f32::MIN_POSITIVE, 7.0 / 448.0, 0.5];
        for (tile, scale) in scales.into_iter().enumerate() {
            assert_eq!(entry[512 + 4 * tile..][..4], f32::to_le_bytes(scale));
        }
        assert_eq!(entry[0], 0x7e);
        assert_eq!(entry[128..256], [0; 128]);
        // 1 of 7 is 64 of 448: 2^6.
        assert_eq!(entry[256 + 1], (6 + 7) << 3);
        assert_eq!(entry[384], 0xfe);
        for (i, &x) in key.iter().enumerate() {
            let bits = bf16::from_f32(x).to_bits();
            assert_eq!(entry[528 + 2 * i..][..2], bits.to_le_bytes());
        }
        let mut back = [f32::NAN; LATENT + ROTATED];
        <u8 as Element>::unpack(&entry, &mut back);
        for (i, (&found, &x)) in back.iter().zip(latent.iter().chain(&key)).enumerate() {
            let wanted = match i < LATENT {
                true => decode(entry[i]) * scales[i / TILE],
                false => bf16::from_f32(x).to_f32(),
            };
            assert_eq!(found.to_bits(), wanted.to_bits());
            // Half a unit of three bits, or of eight.
            let unit = if i < LATENT { 1.0 / 16.0 } else { 1.0 / 256.0 };
            assert!((found - x).abs() <= unit * x.abs() + 2f32.powi(-9) * 7.0 / 448.0);
        }
    }
}
