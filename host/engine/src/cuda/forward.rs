//! The decoder's layers on the device, cut where attention is: what lies between two attentions is one *piece*.
//!
//! Piece 0 ends with the first layer's rotated queries, keys and values; piece i takes layer i − 1's attention to those of layer
//! i; the last one ends with the final norm. A step outside graphs runs the pieces one after the other with attention between
//! them, a piecewise graph holds one piece, a full graph everything. All of it is a function of persistent buffers and of the
//! number of tokens, so a launch may be captured.
//!
//! Shared between the step thread and the thread that captures graphs on a reload: nothing here changes. This module must
//! never know attention, requests, or which graph it is captured into.

use timetable_device_cuda::{
    CudaError,
    blas::{Gemm, GemmDtype, GemmOperands, GemmOut, GemmShape},
    driver::{Device, DeviceBuffer, DevicePtr, Stream},
    kernels::{Element, Kernels},
    ops,
    upload::StepPtrs,
};

use super::{
    activations::{Activations, Buffers},
    weights::{Projection, Weights},
};
use crate::model::{ModelConfig, RopeStyle, rope::Rope};

/// Sizes as kernels take them.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: u32,
    intermediate: u32,
    /// Query heads.
    heads: u32,
    kv_heads: u32,
    head_size: u32,
    vocabulary: u32,
    eps: f32,
}

/// Queries, keys and values of a layer, and where its attention goes. Heads are contiguous within a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttentionOperands {
    /// `[T, heads, head_dim]`
    pub(super) query: ops::Rows,
    /// `[T, kv_heads, head_dim]`
    pub(super) key: ops::Rows,
    /// `[T, kv_heads, head_dim]`
    pub(super) value: ops::Rows,
    /// `[T, heads, head_dim]`
    pub(super) output: ops::Rows,
}

/// (n, k, bias) of a layer's four products.
type Shapes = [(usize, usize, bool); 4];

/// The model on the device.
pub(super) struct Forward {
    pub(super) kernels: Kernels,
    gemm: Gemm,
    weights: Weights,
    sizes: Sizes,
    rope: ops::Rope,
    /// f32 `[positions, rotary]`
    rotations: DeviceBuffer,
    activations: Activations,
    step: StepPtrs,
}

impl Forward {
    /// Of a model that is loaded, for positions below `max_positions`.
    ///
    /// # Errors
    /// No room for the table of rotations.
    #[allow(clippy::too_many_arguments, reason = "its parts")]
    pub(super) fn new(
        device: &Device,
        kernels: Kernels,
        gemm: Gemm,
        config: &ModelConfig,
        weights: Weights,
        rope: &Rope,
        activations: Activations,
        step: StepPtrs,
        max_positions: usize,
    ) -> Result<Self, CudaError> {
        let table = rope.table(max_positions);
        let rotations = DeviceBuffer::from_host(device, &table, "the table of rotations")
            .map_err(|error| error.with_remedy("lower --max-model-len"))?;
        // Every size was range-checked when the model's configuration was read.
        let size = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Self {
            kernels,
            gemm,
            sizes: Sizes {
                hidden: size(config.hidden_size),
                intermediate: size(config.intermediate_size),
                heads: size(config.num_attention_heads),
                kv_heads: size(config.num_key_value_heads),
                head_size: size(config.head_dim),
                vocabulary: size(config.vocab_size),
                eps: config.rms_norm_eps,
            },
            rope: ops::Rope {
                cos_sin: rotations.ptr(),
                head_size: size(config.head_dim),
                rotary_size: size(config.rope.dim),
                interleaved: config.rope.style == RopeStyle::Interleaved,
            },
            rotations,
            weights,
            activations,
            step,
        })
    }

    /// Decoder layers.
    pub(super) fn num_layers(&self) -> usize {
        self.weights.layers.len()
    }

    /// Pieces: one more than layers.
    pub(super) fn num_pieces(&self) -> usize {
        self.num_layers() + 1
    }

    /// Kernels of all pieces together: what a graph without attention holds.
    pub(super) fn num_kernels(&self) -> usize {
        let of_layer = |layer: &super::weights::LayerWeights| {
            // Two norms, four products, rotation, activation; a norm for each kind of head.
            8 + 2 * usize::from(layer.head_norms.is_some())
        };
        self.weights.layers.iter().map(of_layer).sum::<usize>() + 2
    }

    /// Elements of weights and activations.
    pub(super) fn element(&self) -> Element {
        self.weights.element
    }

    /// Bytes of weights and rotations.
    pub(super) fn weight_bytes(&self) -> u64 {
        self.weights.bytes() + self.rotations.len() as u64
    }

    /// Bytes of activations and logits.
    pub(super) fn activation_bytes(&self) -> u64 {
        self.activations.bytes()
    }

    /// f32 `[rows, vocab]`, dense: the logits of the step that ran last.
    pub(super) fn logits(&self) -> DevicePtr {
        self.at().logits
    }

    fn at(&self) -> &Buffers {
        &self.activations.at
    }

    /// What attention reads and writes, the same for every layer.
    pub(super) fn attention_operands(&self) -> AttentionOperands {
        let (q, kv) = (self.q_size(), self.kv_size());
        let stride = self.qkv_size();
        let column = |elements: u32| ops::Rows {
            ptr: self
                .at()
                .qkv
                .offset(elements as usize * self.element().bytes()),
            stride: i64::from(stride),
        };
        AttentionOperands {
            query: column(0),
            key: column(q),
            value: column(q + kv),
            output: rows(self.at().attended, q),
        }
    }

    fn q_size(&self) -> u32 {
        self.sizes.heads * self.sizes.head_size
    }

    fn kv_size(&self) -> u32 {
        self.sizes.kv_heads * self.sizes.head_size
    }

    fn qkv_size(&self) -> u32 {
        self.q_size() + 2 * self.kv_size()
    }

    /// Enqueues piece `piece` of a step of `tokens` tokens, padding included. Attention of layer `piece` − 1 precedes it on the
    /// stream, that of layer `piece` follows it.
    ///
    /// # Errors
    /// What the device says.
    ///
    /// # Safety
    /// `tokens` are no more than the buffers were made for; `stream` is the one on which steps run, or is capturing for it.
    pub(super) unsafe fn piece(
        &self,
        stream: &Stream,
        piece: usize,
        tokens: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise holds for the parts too.
        unsafe {
            match piece.checked_sub(1) {
                None => self.embed(stream, tokens)?,
                Some(layer) => self.after_attention(stream, layer, tokens)?,
            }
            if piece < self.num_layers() {
                self.before_attention(stream, piece, tokens)
            } else {
                // The last layer's projection is still to be added.
                let delta = Some(self.at().delta);
                self.norm(stream, delta, self.weights.final_norm, tokens)
            }
        }
    }

    /// # Safety
    /// As [`Forward::piece`].
    unsafe fn embed(&self, stream: &Stream, tokens: u32) -> Result<(), CudaError> {
        // SAFETY: `hidden` has a row for each of `tokens`, `token_ids` an entry; ids outside the table give zeros.
        unsafe {
            self.kernels.embedding(
                stream,
                self.element(),
                rows(self.at().hidden, self.sizes.hidden),
                self.weights.embedding,
                self.step.token_ids,
                tokens,
                self.sizes.hidden,
                self.sizes.vocabulary,
            )
        }
    }

    /// To `normed`: the norm of the residual stream, to which `delta` is added first.
    ///
    /// # Safety
    /// As [`Forward::piece`].
    unsafe fn norm(
        &self,
        stream: &Stream,
        delta: Option<DevicePtr>,
        weight: DevicePtr,
        tokens: u32,
    ) -> Result<(), CudaError> {
        let dense = |ptr| rows(ptr, self.sizes.hidden);
        let hidden = dense(self.at().hidden);
        let (input, residual) = match delta {
            Some(delta) => (dense(delta), Some(hidden)),
            None => (hidden, None),
        };
        // SAFETY: all four are `[tokens, hidden]` or `[hidden]`, and apart.
        unsafe {
            self.kernels.rms_norm(
                stream,
                self.element(),
                dense(self.at().normed),
                input,
                residual,
                weight,
                tokens,
                self.sizes.hidden,
                self.sizes.eps,
            )
        }
    }

    /// From the residual stream to the rotated queries and keys, and the values, of `layer`.
    ///
    /// # Safety
    /// As [`Forward::piece`].
    unsafe fn before_attention(
        &self,
        stream: &Stream,
        layer: usize,
        tokens: u32,
    ) -> Result<(), CudaError> {
        let weights = &self.weights.layers[layer];
        // Layer 0 reads the embeddings, which have nothing to be added.
        let delta = (layer > 0).then_some(self.at().delta);
        let operands = self.attention_operands();
        // SAFETY: buffers have a row for each of `tokens`; queries, keys and values are columns of `qkv`.
        unsafe {
            self.norm(stream, delta, weights.attention_norm, tokens)?;
            self.project(
                stream,
                &weights.qkv,
                self.at().normed,
                self.at().qkv,
                tokens,
            )?;
            if let Some((query, key)) = weights.head_norms {
                for (heads, weight, count) in [
                    (operands.query, query, self.sizes.heads),
                    (operands.key, key, self.sizes.kv_heads),
                ] {
                    self.kernels.head_norm(
                        stream,
                        self.element(),
                        heads,
                        weight,
                        tokens,
                        count,
                        self.sizes.head_size,
                        self.sizes.eps,
                    )?;
                }
            }
            // The keys' heads follow the queries' in a token: one launch rotates both.
            self.kernels.rope(
                stream,
                self.element(),
                operands.query,
                self.step.positions,
                self.rope,
                tokens,
                self.sizes.heads + self.sizes.kv_heads,
            )
        }
    }

    /// From attention's output to what `layer`'s feed-forward adds to the residual stream, in `delta`.
    ///
    /// # Safety
    /// As [`Forward::piece`].
    unsafe fn after_attention(
        &self,
        stream: &Stream,
        layer: usize,
        tokens: u32,
    ) -> Result<(), CudaError> {
        let weights = &self.weights.layers[layer];
        let at = self.at();
        let intermediate = self.sizes.intermediate;
        // SAFETY: buffers have a row for each of `tokens`, and are apart.
        unsafe {
            self.project(stream, &weights.output, at.attended, at.delta, tokens)?;
            self.norm(stream, Some(at.delta), weights.feed_forward_norm, tokens)?;
            self.project(stream, &weights.gate_up, at.normed, at.gate_up, tokens)?;
            self.kernels.silu_mul(
                stream,
                self.element(),
                rows(at.activated, intermediate),
                rows(at.gate_up, 2 * intermediate),
                tokens,
                intermediate,
            )?;
            self.project(stream, &weights.down, at.activated, at.delta, tokens)
        }
    }

    /// Runs every product of a layer once, over whatever the buffers hold.
    ///
    /// # Errors
    /// What the device says.
    ///
    /// # Safety
    /// As [`Forward::piece`].
    pub(super) unsafe fn products(&self, stream: &Stream, tokens: u32) -> Result<(), CudaError> {
        let at = self.at();
        // A layer may have a bias where another has none: two plans.
        let mut seen: Vec<Shapes> = Vec::new();
        for layer in &self.weights.layers {
            let all = [
                (&layer.qkv, at.normed, at.qkv),
                (&layer.output, at.attended, at.delta),
                (&layer.gate_up, at.normed, at.gate_up),
                (&layer.down, at.activated, at.delta),
            ];
            let shapes =
                all.map(|(projection, ..)| (projection.n, projection.k, projection.bias.is_some()));
            if seen.contains(&shapes) {
                continue;
            }
            seen.push(shapes);
            for (projection, x, out) in all {
                // SAFETY: the caller's promise; these are the operands that steps multiply.
                unsafe { self.project(stream, projection, x, out, tokens) }?;
            }
        }
        Ok(())
    }

    /// The logits of the tokens that the step names, after the last piece: `num_rows` rows of the `tokens` that the step has.
    ///
    /// # Errors
    /// What the device says.
    ///
    /// # Safety
    /// As [`Forward::piece`]; `num_rows` is no more than the buffers were made for.
    pub(super) unsafe fn head(
        &self,
        stream: &Stream,
        num_rows: u32,
        tokens: u32,
    ) -> Result<(), CudaError> {
        let hidden = self.sizes.hidden;
        let at = self.at();
        let head = &self.weights.head;
        let shape = GemmShape {
            out: GemmOut::F32,
            ..self.shape(head, num_rows)
        };
        // SAFETY: `rows` and `logits` have so many rows, `normed` has `tokens`; indices outside it give zeros.
        unsafe {
            self.kernels.gather_rows(
                stream,
                self.element(),
                rows(at.rows, hidden),
                rows(at.normed, hidden),
                self.step.logits_rows,
                num_rows,
                hidden,
                tokens,
            )?;
            self.gemm.gemm(
                stream,
                shape,
                GemmOperands {
                    x: at.rows,
                    weight: head.weight,
                    bias: head.bias,
                    out: at.logits,
                },
            )
        }
    }

    /// A token for each of `num_rows` rows of logits, as the step's sampling rows say.
    ///
    /// # Errors
    /// What the device says.
    ///
    /// # Safety
    /// As [`Forward::head`], which precedes it.
    pub(super) unsafe fn sample(&self, stream: &Stream, num_rows: u32) -> Result<(), CudaError> {
        // SAFETY: all three have so many rows.
        unsafe {
            self.kernels.sample(
                stream,
                self.step.sampled,
                rows(self.at().logits, self.sizes.vocabulary),
                self.step.sample_rows,
                num_rows,
                self.sizes.vocabulary,
            )
        }
    }

    fn shape(&self, projection: &Projection, tokens: u32) -> GemmShape {
        GemmShape::new(
            tokens as usize,
            projection.n,
            projection.k,
            gemm_dtype(self.element()),
        )
    }

    /// `out[tokens, n] = x[tokens, k] · weight[n, k]ᵀ + bias`.
    ///
    /// # Safety
    /// As [`Forward::piece`]; `x` and `out` are dense, apart, and of so many rows.
    unsafe fn project(
        &self,
        stream: &Stream,
        projection: &Projection,
        x: DevicePtr,
        out: DevicePtr,
        tokens: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise; the weight is `[n, k]`.
        unsafe {
            self.gemm.gemm(
                stream,
                self.shape(projection, tokens),
                GemmOperands {
                    x,
                    weight: projection.weight,
                    bias: projection.bias,
                    out,
                },
            )
        }
    }
}

fn gemm_dtype(element: Element) -> GemmDtype {
    match element {
        Element::Bf16 => GemmDtype::Bf16,
        Element::F16 => GemmDtype::F16,
        Element::F32 => GemmDtype::F32,
    }
}

/// A dense matrix whose rows have `width` elements.
fn rows(ptr: DevicePtr, width: u32) -> ops::Rows {
    ops::Rows {
        ptr,
        stride: i64::from(width),
    }
}

/// Row counts whose products are run before the first step, so that none chooses an algorithm or loads a kernel in a step: one of
/// each class of cuBLASLt plans (powers of two to 16, then eighths of the next power of two, 16 at least), to `max`.
pub(super) fn warm_up_rows(max: u32) -> Vec<u32> {
    let mut all = vec![1, 2, 4, 8, 16];
    let mut next = 16_u32;
    while next < max {
        let step = ((next + 1).next_power_of_two() / 8).max(16);
        next = (next + step).min(max);
        all.push(next);
    }
    all.retain(|rows| *rows <= max);
    if all.last() != Some(&max) {
        all.push(max);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_meets_every_class_up_to_the_largest_step() {
        assert_eq!(warm_up_rows(1), [1]);
        assert_eq!(warm_up_rows(3), [1, 2, 3]);
        assert_eq!(warm_up_rows(40), [1, 2, 4, 8, 16, 32, 40]);
        let all = warm_up_rows(2048);
        assert_eq!(
            all[5..14],
            [32, 48, 64, 80, 96, 112, 128, 160, 192],
            "sixteenths, then eighths of the next power of two"
        );
        assert_eq!(all.last(), Some(&2048));
        assert!(all.is_sorted() && all.len() < 40, "{}", all.len());
    }
}
