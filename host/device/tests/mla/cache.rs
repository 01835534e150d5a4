//! The latent cache: what is written where, bit for bit.

use half::bf16;
use timetable_device::cpu::mla::{LatentCache, LatentDtype, MlaAttentionImpl};

use crate::batch::{Layout, layout, sizes};

const DTYPES: [LatentDtype; 3] = [LatentDtype::F32, LatentDtype::Bf16, LatentDtype::Fp8DsMla];

fn of(dtype: LatentDtype) -> Layout {
    Layout {
        dtype,
        ..layout(sizes(2, 512, 16, 64, 24), 4)
    }
}

/// Eight tokens' latents and rotated keys.
fn tokens() -> (Vec<f32>, Vec<f32>) {
    let value = |at: usize| ((at * 7919 + 3) % 2003) as f32 / 77.0 - 13.0;
    (
        (0..8 * 512).map(value).collect(),
        (0..8 * 64).map(|at| value(at + 11)).collect(),
    )
}

fn new(dtype: LatentDtype) -> LatentCache {
    LatentCache::new(3, 4, 512, 64, dtype).expect("a cache")
}

#[test]
fn a_token_s_latent_and_rotated_key_stand_one_behind_the_other() {
    let (kv_c, k_pe) = tokens();
    for dtype in DTYPES {
        let mut cache = new(dtype);
        assert_eq!(cache.bytes().len(), 12 * dtype.entry_size(512, 64));
        let slots = [5, -1, 11, 0];
        of(dtype)
            .attention()
            .do_kv_cache_update(&kv_c, &k_pe, &mut cache, &slots);
        let bytes = cache.bytes();
        let size = dtype.entry_size(512, 64);
        for slot in 0..12 {
            let found = &bytes[slot * size..(slot + 1) * size];
            let Some(row) = slots.iter().position(|&of| of == slot as i64) else {
                assert!(
                    found.iter().all(|&byte| byte == 0),
                    "slot {slot} was written"
                );
                continue;
            };
            let latent = &kv_c[row * 512..(row + 1) * 512];
            let rotated = &k_pe[row * 64..(row + 1) * 64];
            let all = || latent.iter().chain(rotated);
            match dtype {
                LatentDtype::F32 => {
                    let wanted: Vec<u8> = all().flat_map(|x| x.to_ne_bytes()).collect();
                    assert_eq!(found, wanted);
                }
                LatentDtype::Bf16 => {
                    let wanted = all().flat_map(|&x| bf16::from_f32(x).to_ne_bytes());
                    assert_eq!(found, wanted.collect::<Vec<u8>>());
                }
                LatentDtype::Fp8DsMla => ds_mla(found, latent, rotated),
            }
            let entry = cache.entry(slot);
            for (index, (found, x)) in entry.iter().zip(all()).enumerate() {
                let unit = match dtype {
                    LatentDtype::F32 => 0.0,
                    LatentDtype::Fp8DsMla if index < 512 => 1.0 / 16.0,
                    _ => 1.0 / 256.0,
                };
                assert!((found - x).abs() <= unit * x.abs() + 2e-4, "{found} of {x}");
            }
        }
    }
}

/// 656 bytes, as the field has them: each scale is the largest of 128 over 448, each byte the e4m3 number nearest to the
/// quotient, and the rotated key is bf16.
fn ds_mla(entry: &[u8], latent: &[f32], rotated: &[f32]) {
    assert_eq!(entry.len(), 656);
    let number = |byte: u8| -> f64 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        let magnitude = match exponent {
            0 => mantissa / 512.0,
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    };
    for tile in 0..4 {
        let of = &latent[tile * 128..(tile + 1) * 128];
        let largest = of.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let scale = largest / 448.0;
        assert_eq!(entry[512 + 4 * tile..516 + 4 * tile], scale.to_le_bytes());
        for (x, &byte) in of.iter().zip(&entry[tile * 128..]) {
            let quotient = f64::from(x / scale);
            let best = (0..=255u8)
                .filter(|byte| byte & 0x7f != 0x7f)
                .map(|byte| (number(byte) - quotient).abs())
                .fold(f64::INFINITY, f64::min);
            assert_eq!((number(byte) - quotient).abs(), best, "{x}: {byte:#x}");
        }
    }
    for (x, bytes) in rotated.iter().zip(entry[528..].chunks(2)) {
        assert_eq!(bytes, bf16::from_f32(*x).to_bits().to_le_bytes());
    }
}

#[test]
fn padding_writes_nothing() {
    let (kv_c, k_pe) = tokens();
    for dtype in DTYPES {
        let attention = of(dtype).attention();
        let mut cache = new(dtype);
        cache.fill(f32::NAN);
        let before = cache.bytes().to_vec();
        attention.do_kv_cache_update(&kv_c, &k_pe, &mut cache, &[-1; 8]);
        assert_eq!(cache.bytes(), before);
        // The loop is over slots: rows beyond them are padding, whatever they hold.
        attention.do_kv_cache_update(&kv_c, &k_pe, &mut cache, &[3, 4]);
        let written: Vec<usize> = (0..12)
            .filter(|&slot| cache.entry(slot).iter().all(|x| x.is_finite()))
            .collect();
        assert_eq!(written, [3, 4]);
        let mut none = LatentCache::new(0, 4, 512, 64, dtype).expect("a cache");
        attention.do_kv_cache_update(&kv_c, &k_pe, &mut none, &[0]);
        assert!(none.bytes().is_empty());
    }
}

#[test]
fn sizes_that_no_cache_has_are_refused() {
    for (result, text) in [
        (
            LatentCache::new(1, 0, 512, 64, LatentDtype::F32),
            "block_size is 0: it must be at least 1",
        ),
        (
            LatentCache::new(1, 64, 512, 0, LatentDtype::Bf16),
            "qk_rope_head_dim is 0",
        ),
        (
            LatentCache::new(1, 64, 256, 64, LatentDtype::Fp8DsMla),
            "kv_cache_dtype is fp8_ds_mla with kv_lora_rank 256 and qk_rope_head_dim 64: it holds 512 and 64 elements",
        ),
        (
            LatentCache::new(usize::MAX / 1000, 64, 512, 64, LatentDtype::F32),
            "choose fewer blocks",
        ),
    ] {
        let error = result.expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    }
}
