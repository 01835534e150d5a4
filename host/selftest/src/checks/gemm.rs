//! Matrix products of every dtype, dense and strided, with and without bias, against sums in f64.

use rayon::prelude::*;
use timetable_device_cuda::{
    CudaError,
    blas::{GemmDtype, GemmOperands, GemmOut, GemmShape},
};
use timetable_types::Dtype;

use super::{CheckError, Context};
use crate::{compare::row_error, element, gpu::Gpu, report::Group};

/// Tokens, columns of the output, columns of the input.
const SIZES: [(usize, usize, usize); 6] = [
    (1, 576, 192),
    (3, 192, 576),
    (17, 1_536, 576),
    (64, 960, 64),
    (200, 576, 1_536),
    (257, 136, 72),
];

/// The largest relative error, over a row, of a sum that tensor cores accumulate in f32 from exact 16-bit inputs.
const TENSOR_CORE_SUM: f64 = 1e-5;

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut groups = Vec::new();
    for (dtype, gemm_dtype) in [
        (Dtype::Bfloat16, GemmDtype::Bf16),
        (Dtype::Float16, GemmDtype::F16),
        (Dtype::Float32, GemmDtype::F32),
    ] {
        for out in [GemmOut::Same, GemmOut::F32] {
            if dtype == Dtype::Float32 && out == GemmOut::F32 {
                continue;
            }
            let out_dtype = if out == GemmOut::F32 {
                Dtype::Float32
            } else {
                dtype
            };
            // 16-bit inputs are held to their own bar; an f32 result of them is not rounded to it, but summed by tensor cores,
            // which truncate where f32 arithmetic rounds.
            let bar = match out {
                GemmOut::F32 => TENSOR_CORE_SUM,
                GemmOut::Same => element::bar(dtype),
            };
            let name = format!(
                "gemm {} to {}",
                element::name(dtype),
                element::name(out_dtype)
            );
            let mut group = Group::with_bar(name, bar);
            for &(m, n, k) in &SIZES {
                for strided in [false, true] {
                    let mut shape = GemmShape::new(m, n, k, gemm_dtype);
                    shape.out = out;
                    if strided {
                        shape.x_stride += 64;
                        shape.out_stride += 32;
                    }
                    one(context, &mut group, shape, dtype, out_dtype, strided)?;
                }
            }
            groups.push(group);
        }
    }
    Ok(groups)
}

fn one(
    context: &mut Context<'_>,
    group: &mut Group,
    shape: GemmShape,
    dtype: Dtype,
    out_dtype: Dtype,
    bias: bool,
) -> Result<(), CudaError> {
    let Gpu { stream, gemm, .. } = context.gpu;
    let mut draw = |count: usize, dtype| {
        let values = context.random.normal(count, 1.0);
        element::rounded(dtype, &values)
    };
    let x = draw(shape.m * shape.x_stride, dtype);
    let weight = draw(shape.n * shape.k, dtype);
    let bias = bias.then(|| draw(shape.n, out_dtype));
    let gpu = context.gpu;
    let (d_x, d_weight) = (gpu.upload_as(dtype, &x)?, gpu.upload_as(dtype, &weight)?);
    let d_bias = bias
        .as_ref()
        .map(|bias| gpu.upload_as(out_dtype, bias))
        .transpose()?;
    let out = gpu.poisoned(out_dtype, shape.m * shape.out_stride)?;
    let operands = GemmOperands {
        x: d_x.ptr(),
        weight: d_weight.ptr(),
        bias: d_bias.as_ref().map(|bias| bias.ptr()),
        out: out.buffer.ptr(),
    };
    // SAFETY: every operand has what the shape says, and lives until the stream has been waited for.
    unsafe { gemm.gemm(stream, shape, operands) }?;
    stream.synchronize()?;
    let (got, guarded) = out.values()?;
    let want: Vec<f64> = (0..shape.m * shape.n)
        .into_par_iter()
        .map(|index| {
            let (row, column) = (index / shape.n, index % shape.n);
            let x = &x[row * shape.x_stride..][..shape.k];
            let weight = &weight[column * shape.k..][..shape.k];
            let sum: f64 = x
                .iter()
                .zip(weight)
                .map(|(&x, &w)| f64::from(x) * f64::from(w))
                .sum();
            sum + bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]))
        })
        .collect();
    let mut dense = Vec::with_capacity(want.len());
    let mut untouched = guarded;
    for row in got.chunks(shape.out_stride) {
        dense.extend_from_slice(&row[..shape.n]);
        // Between rows nothing is written.
        untouched &= row[shape.n..].iter().all(|x| x.is_nan());
    }
    let what = || format!("{shape}{}", if bias.is_some() { " with bias" } else { "" });
    group.error(row_error(&dense, &want, shape.n), what);
    group.check(untouched, || format!("{}: wrote outside its rows", what()));
    Ok(())
}
