//! Elements of device tensors on the host: f32 to bf16, f16, f32 and fp8 e4m3 and back, rounded to nearest, ties to even.
//! Written here and not taken from the device, so that it can judge it. It must never know a kernel.

use std::sync::OnceLock;

use half::{bf16, f16};
use timetable_types::Dtype;

/// Bytes of one element; 0 for a type that no kernel here has.
pub fn bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Float32 | Dtype::Int32 => 4,
        Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Float8E4m3 | Dtype::Float8E5m2 | Dtype::Uint8 => 1,
    }
}

/// The name in kernels and reports.
pub fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "f32",
        Dtype::Float16 => "f16",
        Dtype::Bfloat16 => "bf16",
        Dtype::Float8E4m3 => "fp8",
        Dtype::Float8E5m2 => "fp8_e5m2",
        Dtype::Uint8 => "u8",
        Dtype::Int32 => "s32",
    }
}

/// The largest relative error of one element that was rounded once.
pub fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 1.0 / 256.0,
        Dtype::Float16 => 1.0 / 2048.0,
        _ => 1e-6,
    }
}

/// The largest relative error, over a row or a tensor, that a kernel of this type may have.
pub fn bar(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bfloat16 => 1e-2,
        Dtype::Float16 => 2e-3,
        _ => 2e-6,
    }
}

/// `values` as `dtype`, little-endian, as they lie in device memory. fp8 saturates.
///
/// # Panics
/// For a type that is not a float of the kernels.
pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::Float32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::Bfloat16 => values
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        Dtype::Float16 => values
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
        Dtype::Float8E4m3 => values.iter().map(|&x| e4m3(x)).collect(),
        _ => panic!("no kernel here has elements of {dtype:?}"),
    }
}

/// The values of `bytes`, exactly.
///
/// # Panics
/// For a type that is not a float of the kernels.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::Float32 => bytes
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]))
            .collect(),
        Dtype::Bfloat16 => pairs().map(|x| bf16::from_le_bytes(x).to_f32()).collect(),
        Dtype::Float16 => pairs().map(|x| f16::from_le_bytes(x).to_f32()).collect(),
        Dtype::Float8E4m3 => bytes.iter().map(|&x| e4m3_value(x)).collect(),
        _ => panic!("no kernel here has elements of {dtype:?}"),
    }
}

/// `values` rounded to `dtype`.
pub fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    decode(dtype, &encode(dtype, values))
}

/// The value of an e4m3 code: 4 exponent bits of bias 7, 3 mantissa bits, no infinities, NaN where all seven are set.
fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The nearest e4m3 code, the even one of two, ±448 beyond the range.
fn e4m3(x: f32) -> u8 {
    static VALUES: OnceLock<[f32; 127]> = OnceLock::new();
    let values = VALUES.get_or_init(|| std::array::from_fn(|code| e4m3_value(code as u8)));
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    // Positive codes rise with their values: the last one that is not larger, and the one after it.
    let low = values.partition_point(|&value| value <= magnitude) - 1;
    let code = if low + 1 == values.len() {
        low
    } else {
        let middle = (f64::from(values[low]) + f64::from(values[low + 1])) / 2.0;
        let magnitude = f64::from(magnitude);
        if magnitude > middle || (magnitude == middle && low % 2 == 1) {
            low + 1
        } else {
            low
        }
    };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp8_code_survives_a_round_trip() {
        for code in 0..=255u8 {
            let value = e4m3_value(code);
            if value.is_nan() {
                assert_eq!(code & 0x7f, 0x7f);
            } else {
                assert_eq!(e4m3(value), code, "{value}");
            }
        }
        assert_eq!(e4m3_value(0x7e), 448.0);
        assert_eq!(e4m3_value(0x01), 2f32.powi(-9));
    }

    #[test]
    fn fp8_rounds_to_even_and_saturates() {
        // 1.0625 lies between 1.0 (even) and 1.125; 1.1875 between 1.125 and 1.25 (even).
        for (x, rounded) in [
            (1.0625, 1.0),
            (1.1875, 1.25),
            (1.07, 1.125),
            (-1.0625, -1.0),
            (1e9, 448.0),
            (-f32::INFINITY, -448.0),
            (460.0, 448.0),
            (0.0009, 0.0),
            (0.00098, 2f32.powi(-9)),
        ] {
            assert_eq!(e4m3_value(e4m3(x)), rounded, "{x}");
        }
        assert!(e4m3_value(e4m3(f32::NAN)).is_nan());
    }

    #[test]
    fn encoded_values_come_back_rounded() {
        let values = [0.1f32, -3.7, 65_000.0, 1e-3];
        for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
            assert_eq!(encode(dtype, &values).len(), values.len() * bytes(dtype));
            for (x, y) in values.iter().zip(rounded(dtype, &values)) {
                let error = f64::from((x - y).abs() / x.abs());
                assert!(error <= rounding(dtype), "{x} became {y}");
            }
        }
    }
}
