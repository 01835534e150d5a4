//! The forward pass's own buffers, at fixed addresses that graphs read: one allocation, sized by the largest step.
//!
//! Knows sizes only; must never know what is computed into them.

use timetable_device_cuda::{
    CudaError,
    driver::{Device, DeviceBuffer, DevicePtr},
    kernels::Element,
};

use crate::model::ModelConfig;

/// Every buffer begins at a multiple of it.
const ALIGNMENT: usize = 256;
/// What to do where they do not fit.
const REMEDY: &str = "lower --max-num-batched-tokens or --max-num-seqs";

/// Addresses. T: tokens of the largest step; R: its rows of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Buffers {
    /// `[T, hidden]`: the residual stream.
    pub(super) hidden: DevicePtr,
    /// `[T, hidden]`: what a norm gives.
    pub(super) normed: DevicePtr,
    /// `[T, (heads + 2 kv_heads) * head_dim]`: queries, keys, values side by side.
    pub(super) qkv: DevicePtr,
    /// `[T, heads * head_dim]`: attention's output.
    pub(super) attended: DevicePtr,
    /// `[T, 2 * intermediate]`: gate and up side by side.
    pub(super) gate_up: DevicePtr,
    /// `[T, intermediate]`
    pub(super) activated: DevicePtr,
    /// `[T, hidden]`: what a projection adds to the residual stream.
    pub(super) delta: DevicePtr,
    /// `[R, hidden]`: the rows whose logits are wanted.
    pub(super) rows: DevicePtr,
    /// f32 `[R, vocab]`
    pub(super) logits: DevicePtr,
}

/// What the buffers are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LargestStep {
    /// T
    pub(super) tokens: usize,
    /// R
    pub(super) rows: usize,
}

/// The memory behind [`Buffers`].
pub(super) struct Activations {
    pub(super) at: Buffers,
    memory: DeviceBuffer,
}

impl Activations {
    /// Zeroed: no step reads what another process left.
    pub(super) fn new(
        device: &Device,
        config: &ModelConfig,
        element: Element,
        largest: LargestStep,
    ) -> Result<Self, CudaError> {
        let (offsets, bytes) = offsets(config, element, largest);
        let memory = DeviceBuffer::alloc_zeroed(device, bytes, "activations and logits")
            .map_err(|error| error.with_remedy(REMEDY))?;
        let [
            hidden,
            normed,
            qkv,
            attended,
            gate_up,
            activated,
            delta,
            rows,
            logits,
        ] = offsets.map(|offset| memory.ptr().offset(offset));
        Ok(Self {
            at: Buffers {
                hidden,
                normed,
                qkv,
                attended,
                gate_up,
                activated,
                delta,
                rows,
                logits,
            },
            memory,
        })
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }
}

/// Offsets in the order of [`Buffers`], and the bytes of all.
fn offsets(config: &ModelConfig, element: Element, largest: LargestStep) -> ([usize; 9], usize) {
    let LargestStep { tokens, rows } = largest;
    let of_tokens = |width: usize| tokens * width * element.bytes();
    let sizes = [
        of_tokens(config.hidden_size),
        of_tokens(config.hidden_size),
        of_tokens(config.q_size() + 2 * config.kv_size()),
        of_tokens(config.q_size()),
        of_tokens(2 * config.intermediate_size),
        of_tokens(config.intermediate_size),
        of_tokens(config.hidden_size),
        rows * config.hidden_size * element.bytes(),
        rows * config.vocab_size * size_of::<f32>(),
    ];
    let mut next = 0;
    let offsets = sizes.map(|bytes| {
        let offset = next;
        next = (offset + bytes).next_multiple_of(ALIGNMENT);
        offset
    });
    (offsets, next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{layout::Opened, testing::tiny_model};

    #[test]
    fn buffers_are_apart_and_hold_the_largest_step() {
        let file = tiny_model("llama").write();
        let config = Opened::open(file.path()).expect("valid").config;
        let largest = LargestStep { tokens: 7, rows: 3 };
        let (at, bytes) = offsets(&config, Element::Bf16, largest);
        // hidden 32, heads 4 and 2 of 8, intermediate 64, vocabulary 40.
        let sizes = [
            7 * 64,
            7 * 64,
            7 * 128,
            7 * 64,
            7 * 256,
            7 * 128,
            7 * 64,
            3 * 64,
            3 * 160,
        ];
        let ends = at[1..].iter().copied().chain([bytes]);
        for ((offset, size), end) in at.iter().zip(sizes).zip(ends) {
            assert!(offset + size <= end, "{offset} + {size} of {end}");
            assert!(end - (offset + size) < ALIGNMENT, "no more than padding");
            assert!(offset.is_multiple_of(ALIGNMENT));
        }
    }
}
