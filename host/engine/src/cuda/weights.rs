//! The model's weights on the device: one allocation, filled through two pinned buffers.
//!
//! Knows where each weight lies; must never know what is computed with it.

use std::path::Path;

use timetable_device_cuda::{
    CudaError,
    driver::{Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream},
    kernels::Element,
};

use crate::model::{
    ModelConfig, ModelError,
    layout::{DecoderLayout, Opened},
    rope::Rope,
    weights::Checkpoint,
};

use super::{
    error::CudaStartError,
    spans::{ProjectionSpans, Sink, Span, WeightSpans},
    tensors::name,
};

/// Bytes of one of the two buffers that weights pass through.
const STAGING_BYTES: usize = 64 << 20;
/// What to do where the weights do not fit.
const REMEDY: &str = "choose a smaller model, --dtype bfloat16 or float16 instead of float32, or a device with more memory free";

/// A projection's addresses: weight `[n, k]`, bias `[n]` or none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Projection {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) weight: DevicePtr,
    pub(super) bias: Option<DevicePtr>,
}

/// One layer's addresses.
#[derive(Clone, Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: DevicePtr,
    pub(super) qkv: Projection,
    /// Of the queries and of the keys.
    pub(super) head_norms: Option<(DevicePtr, DevicePtr)>,
    pub(super) output: Projection,
    pub(super) feed_forward_norm: DevicePtr,
    pub(super) gate_up: Projection,
    pub(super) down: Projection,
}

/// All weights, and the memory that holds them.
pub(super) struct Weights {
    pub(super) element: Element,
    /// `[vocab, hidden]`
    pub(super) embedding: DevicePtr,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: DevicePtr,
    /// `[vocab, hidden]`; the embedding where they are tied.
    pub(super) head: Projection,
    memory: DeviceBuffer,
}

impl Weights {
    /// Reads a model's weights, converts them and copies them to the device; ends when they are there. Also the decoder's
    /// sizes and its rotations.
    ///
    /// # Errors
    /// What is wrong with the file; a width that the kernels do not take; no room on the device.
    pub(super) fn load(
        device: &Device,
        path: &Path,
        dtype: Option<Element>,
    ) -> Result<(ModelConfig, Rope, Self), CudaStartError> {
        let Opened {
            config,
            checkpoint,
            layout,
        } = Opened::open(path)?;
        check_family(&config)?;
        let element = dtype.unwrap_or(Element::Bf16);
        check_widths(&config, element)?;
        let rope = rope(&config, &*checkpoint, &layout)?;
        let spans = WeightSpans::new(&config, &layout, element);
        let begun = std::time::Instant::now();
        let memory = DeviceBuffer::alloc(device, spans.bytes as usize, "the model's weights")
            .map_err(|error| error.with_remedy(REMEDY))?;
        let mut staging = Staging::new(device, &memory)?;
        spans.load(&layout, &*checkpoint, &mut staging)?;
        staging.finish()?;
        tracing::info!(
            bytes = spans.bytes,
            dtype = name(element),
            seconds = begun.elapsed().as_secs_f64(),
            "loaded the model's weights onto the device"
        );
        Ok((config, rope, Self::at(&spans, memory)))
    }

    fn at(spans: &WeightSpans, memory: DeviceBuffer) -> Self {
        let base = memory.ptr();
        let at = |span: Span| base.offset(span.offset as usize);
        let projection = |spans: &ProjectionSpans| Projection {
            n: spans.n,
            k: spans.k,
            weight: at(spans.weight),
            bias: spans.bias.map(at),
        };
        Self {
            element: spans.element,
            embedding: at(spans.embedding),
            layers: spans
                .layers
                .iter()
                .map(|layer| LayerWeights {
                    attention_norm: at(layer.attention_norm),
                    qkv: projection(&layer.qkv),
                    head_norms: layer.head_norms.map(|(q, k)| (at(q), at(k))),
                    output: projection(&layer.output),
                    feed_forward_norm: at(layer.feed_forward_norm),
                    gate_up: projection(&layer.gate_up),
                    down: projection(&layer.down),
                })
                .collect(),
            final_norm: at(spans.final_norm),
            head: projection(&spans.head),
            memory,
        }
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }
}

/// The kernels are those of Llama's layers.
fn check_family(config: &ModelConfig) -> Result<(), CudaStartError> {
    match config.architecture.beyond_llama() {
        None => Ok(()),
        Some(lacks) => Err(CudaStartError::Family {
            architecture: format!("{:?}", config.architecture),
            lacks,
        }),
    }
}

/// The kernels move rows in vectors of 16 bytes.
fn check_widths(config: &ModelConfig, element: Element) -> Result<(), CudaStartError> {
    for (what, width) in [
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_attention_heads x head_dim", config.q_size()),
        ("num_key_value_heads x head_dim", config.kv_size()),
    ] {
        if !(width * element.bytes()).is_multiple_of(16) {
            return Err(CudaStartError::Width {
                what,
                width,
                element: name(element),
                multiple: 16 / element.bytes(),
            });
        }
    }
    Ok(())
}

fn rope(
    config: &ModelConfig,
    checkpoint: &dyn Checkpoint,
    layout: &DecoderLayout,
) -> Result<Rope, ModelError> {
    let factors = match &layout.rope_factors {
        Some(factors) => Some(checkpoint.expect(&factors.name, &[factors.len])?.to_f32()),
        None => None,
    };
    Ok(Rope::new(config.rope, factors.as_deref()))
}

/// Two pinned buffers in turn: one is filled while the other is copied.
struct Staging {
    base: DevicePtr,
    stream: Stream,
    buffers: [(PinnedBuffer, Event); 2],
    next: usize,
}

impl Staging {
    fn new(device: &Device, memory: &DeviceBuffer) -> Result<Self, CudaError> {
        let bytes = STAGING_BYTES.min(memory.len().max(1));
        let buffer = || {
            Ok::<_, CudaError>((
                PinnedBuffer::new(device, bytes, false, "the loader's staging buffer")?,
                Event::new(device, false)?,
            ))
        };
        Ok(Self {
            base: memory.ptr(),
            stream: Stream::new(device)?,
            buffers: [buffer()?, buffer()?],
            next: 0,
        })
    }

    fn finish(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

impl Drop for Staging {
    /// After an error copies may be under way from the buffers that are about to go.
    fn drop(&mut self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::debug!(%error, "the loader's copies did not end");
        }
    }
}

impl Sink for Staging {
    type Error = CudaStartError;

    fn room(&self) -> usize {
        self.buffers[0].0.len()
    }

    fn write(
        &mut self,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), CudaStartError> {
        let (buffer, copied) = &mut self.buffers[self.next];
        self.next = 1 - self.next;
        // One that was never recorded counts as passed.
        copied.synchronize()?;
        let room = buffer.len();
        let Some(bytes) = buffer.as_mut_slice().get_mut(..len) else {
            return Err(CudaStartError::Row { bytes: len, room });
        };
        fill(bytes);
        let to = self.base.offset(offset as usize);
        // SAFETY: the spans lie within the allocation that `base` begins; the buffer lives until `drop` has waited for the
        // stream, and is written again only after `copied` has passed.
        unsafe { self.stream.copy_to_device(to, buffer, 0..len) }?;
        self.stream.record(copied)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::Architecture, simulated::simulated_model};

    #[test]
    fn a_family_beyond_llama_is_sent_to_the_cpu() {
        let of = |architecture| ModelConfig {
            architecture,
            ..simulated_model()
        };
        assert!(check_family(&of(Architecture::Qwen3)).is_ok());
        for (architecture, lacks) in [
            (Architecture::DeepseekV2, "latent attention"),
            (Architecture::Bamba, "Mamba2"),
            (Architecture::Qwen3Next, "gated delta net"),
            (Architecture::Gemma3, "rotations"),
            (Architecture::Llama4, "chunked"),
        ] {
            let refusal = check_family(&of(architecture)).expect_err("refused");
            let refusal = refusal.to_string();
            assert!(refusal.contains(&format!("{architecture:?}")), "{refusal}");
            assert!(refusal.contains(lacks), "{refusal}");
            assert!(refusal.contains("--device cpu"), "{refusal}");
        }
    }
}
