//! Linear projections: one or several weight matrices that read the same input, and the form in which each is kept.

use super::Weights;
use super::dense::DenseTiles;
use super::error::ModelError;
use super::pool::Pool;
use super::tiles::{QuantActs, QuantTiles};
use super::weights::{Checkpoint, RawTensor};
use candle_core::quantized::{GgmlDType, QuantizedType};
use std::borrow::Cow;

/// One weight matrix `[n, k]`, or several of one type stacked.
enum Matrix {
    Dense(DenseTiles),
    Tiles(QuantTiles),
    /// Types without a tile form (the K-quants): candle's blocks and kernels.
    Candle {
        n: usize,
        blocks: Box<dyn QuantizedType>,
    },
}

impl Matrix {
    fn rows(&self) -> usize {
        match self {
            Self::Dense(m) => m.rows(),
            Self::Tiles(m) => m.rows(),
            Self::Candle { n, .. } => *n,
        }
    }

    /// Stacks `parts`, all `[n_i, k]` of one dtype.
    fn stack(weights: Weights, k: usize, parts: &[RawTensor<'_>]) -> Self {
        let dtype = parts[0].dtype;
        if weights == Weights::F32
            || matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
        {
            let parts: Vec<Vec<f32>> = parts.iter().map(|p| p.to_f32()).collect();
            return Self::Dense(DenseTiles::pack(k, &parts));
        }
        if QuantTiles::supports(dtype) {
            let parts: Vec<_> = parts.iter().map(|p| (p.shape[0], p.bytes)).collect();
            return Self::Tiles(QuantTiles::pack(dtype, k, &parts));
        }
        let mut bytes = Vec::with_capacity(parts.iter().map(|p| p.bytes.len()).sum());
        for part in parts {
            bytes.extend_from_slice(part.bytes);
        }
        Self::Candle {
            n: parts.iter().map(|p| p.shape[0]).sum(),
            // The blocks hold nothing wider than f16, and an allocation is aligned to more than that.
            blocks: dtype.from_data(Cow::Owned(bytes)),
        }
    }
}

/// Matrices `[n_i, k]` applied to one input; the outputs lie side by side.
pub(super) struct Projection {
    matrices: Vec<Matrix>,
    /// Sum of the `n_i`.
    n: usize,
    k: usize,
    /// Length `n`, if the model has biases here.
    bias: Option<Vec<f32>>,
}

/// Buffers that projections share, reused from step to step.
#[derive(Default)]
pub(super) struct ProjectionScratch {
    acts: QuantActs,
    candle_out: Vec<f32>,
}

/// Name and rows of one matrix to be loaded, and its bias's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) weight: String,
    pub(crate) bias: Option<String>,
    pub(crate) n: usize,
}

impl Projection {
    /// Loads and stacks `parts`; neighbours of one dtype become one matrix.
    pub(super) fn load(
        checkpoint: &dyn Checkpoint,
        weights: Weights,
        k: usize,
        parts: &[Part],
    ) -> Result<Self, ModelError> {
        let mut tensors = Vec::with_capacity(parts.len());
        let mut bias = Vec::new();
        for part in parts {
            tensors.push(checkpoint.expect(&part.weight, &[part.n, k])?);
            match &part.bias {
                Some(name) => bias.extend(checkpoint.expect(name, &[part.n])?.to_f32()),
                None => bias.resize(bias.len() + part.n, 0.0),
            }
        }
        let matrices = tensors
            .chunk_by(|a, b| a.dtype == b.dtype)
            .map(|group| Matrix::stack(weights, k, group))
            .collect();
        Ok(Self {
            matrices,
            n: parts.iter().map(|p| p.n).sum(),
            k,
            bias: parts.iter().any(|p| p.bias.is_some()).then_some(bias),
        })
    }

    /// One matrix of the rows, of `k` values each, in f32.
    pub(super) fn of_rows(k: usize, rows: Vec<f32>) -> Self {
        Self {
            n: rows.len() / k,
            k,
            matrices: vec![Matrix::Dense(DenseTiles::pack(k, &[rows]))],
            bias: None,
        }
    }

    /// Output features.
    pub(super) fn rows(&self) -> usize {
        self.n
    }

    /// `out[m, n] = x[m, k] · Wᵀ + bias`; `out` is resized.
    pub(super) fn forward(
        &self,
        pool: &Pool,
        m: usize,
        x: &[f32],
        scratch: &mut ProjectionScratch,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        out.resize(m * self.n, 0.0);
        if self.matrices.iter().any(|w| matches!(w, Matrix::Tiles(_))) {
            scratch.acts.quantise(pool, m, self.k, x);
        }
        let mut column = 0;
        for matrix in &self.matrices {
            match matrix {
                Matrix::Dense(w) => w.matmul(pool, m, x, out, self.n, column),
                Matrix::Tiles(w) => w.matmul(pool, m, &scratch.acts, out, self.n, column),
                Matrix::Candle { n, blocks } => {
                    let product = &mut scratch.candle_out;
                    product.resize(m * n, 0.0);
                    blocks.matmul_t((m, self.k, *n), x, product).map_err(|e| {
                        ModelError::Batch(format!("candle's quantised product: {e}"))
                    })?;
                    for (out, product) in out.chunks_exact_mut(self.n).zip(product.chunks_exact(*n))
                    {
                        out[column..column + n].copy_from_slice(product);
                    }
                }
            }
            column += matrix.rows();
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.n) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
        Ok(())
    }

    /// Writes weight row `row` as f32 into `out`, of length `k`; this is how an embedding table is read.
    pub(super) fn weight_row(&self, row: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let mut row = row;
        for matrix in &self.matrices {
            if row >= matrix.rows() {
                row -= matrix.rows();
                continue;
            }
            match matrix {
                Matrix::Dense(w) => w.row(row, out),
                Matrix::Tiles(w) => w.dequantise_row(row, out),
                Matrix::Candle { n, blocks } => {
                    let id = u32::try_from(row).unwrap_or(u32::MAX);
                    match blocks.embedding(&[id], *n, self.k) {
                        Ok(candle_core::CpuStorage::F32(values)) => out.copy_from_slice(&values),
                        Ok(_) => unreachable!("candle dequantises to f32"),
                        Err(e) => {
                            return Err(ModelError::Batch(format!("embedding row {row}: {e}")));
                        }
                    }
                }
            }
            return Ok(());
        }
        Err(ModelError::Batch(format!(
            "row {row} past the end of a table of {}",
            self.n
        )))
    }
}

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
