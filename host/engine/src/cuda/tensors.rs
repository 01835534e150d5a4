//! From a checkpoint's tensors to the elements that the device computes with, on the host.
//!
//! Pure conversion: it must never know a device, nor where the bytes go.

use half::{bf16, f16};
use rayon::prelude::*;

use candle_core::quantized::GgmlDType;

use timetable_device_cuda::kernels::Element;

use crate::model::weights::RawTensor;

/// The name that operators give it.
pub(crate) const fn name(element: Element) -> &'static str {
    match element {
        Element::Bf16 => "bfloat16",
        Element::F16 => "float16",
        Element::F32 => "float32",
    }
}

/// The checkpoint's name of it.
pub(super) fn stored(element: Element) -> GgmlDType {
    match element {
        Element::Bf16 => GgmlDType::BF16,
        Element::F16 => GgmlDType::F16,
        Element::F32 => GgmlDType::F32,
    }
}

/// Writes `values`, each rounded to nearest, as little-endian elements.
fn write(element: Element, values: &[f32], out: &mut [u8]) {
    match element {
        Element::Bf16 => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = bf16::from_f32(*value).to_le_bytes();
            }
        }
        Element::F16 => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = f16::from_f32(*value).to_le_bytes();
            }
        }
        Element::F32 => {
            for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
    }
}

/// Rows that one task converts.
const ROWS_PER_TASK: usize = 32;

/// Rows [first, first + rows) of a matrix `[n, k]`, or of a vector as one row, into `out` of exactly their size. Elements that
/// are right already are copied, others go through f32.
///
/// # Panics
/// If `out` has another size, or the tensor fewer rows.
pub(crate) fn convert_rows(
    tensor: RawTensor<'_>,
    element: Element,
    (first, rows): (usize, usize),
    out: &mut [u8],
) {
    let (n, k) = match *tensor.shape {
        [k] => (1, k),
        [n, k] => (n, k),
        _ => panic!("a weight of {} dimensions", tensor.shape.len()),
    };
    assert_eq!(
        out.len(),
        rows * k * element.bytes(),
        "bytes of {rows} rows"
    );
    // A vector is one row; blocks of a matrix never span rows, as was checked when the file was opened.
    let row_bytes = tensor.bytes.len() / n;
    let bytes = &tensor.bytes[first * row_bytes..(first + rows) * row_bytes];
    if tensor.dtype == stored(element) {
        out.copy_from_slice(bytes);
        return;
    }
    out.par_chunks_mut(ROWS_PER_TASK * k * element.bytes())
        .zip(bytes.par_chunks(ROWS_PER_TASK * row_bytes))
        .for_each(|(out, bytes)| {
            let shape = [bytes.len() / row_bytes, k];
            let values = RawTensor {
                dtype: tensor.dtype,
                shape: &shape,
                bytes,
            }
            .to_f32();
            write(element, &values, out);
        });
}

/// The f32 values of elements: for tests.
#[cfg(test)]
pub(crate) fn values_of(bytes: &[u8], element: Element) -> Vec<f32> {
    let shape = [bytes.len() / element.bytes()];
    RawTensor {
        dtype: stored(element),
        shape: &shape,
        bytes,
    }
    .to_f32()
}
