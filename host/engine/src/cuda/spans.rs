//! Where each weight lies in the device's one allocation, and the order in which they are written into it.
//!
//! Stacked projections follow [`DecoderLayout`], as the CPU's do. This module must never know a device: where bytes go is a
//! [`Sink`]'s matter.

use crate::model::{
    ModelConfig, ModelError,
    layout::{DecoderLayout, LayerLayout, Vector},
    linear::Part,
    weights::Checkpoint,
};

use timetable_device_cuda::kernels::Element;

use super::tensors::convert_rows;

/// Every weight begins at a multiple of it: what cuBLASLt's fastest kernels and 16-byte vectors ask for.
const ALIGNMENT: u64 = 256;

/// A range of the allocation, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A projection: `[n, k]`, and a bias `[n]` where the model has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProjectionSpans {
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) weight: Span,
    pub(crate) bias: Option<Span>,
}

/// One layer's weights.
#[derive(Clone, Debug)]
pub(crate) struct LayerSpans {
    pub(crate) attention_norm: Span,
    pub(crate) qkv: ProjectionSpans,
    /// Of the queries and of the keys.
    pub(crate) head_norms: Option<(Span, Span)>,
    pub(crate) output: ProjectionSpans,
    pub(crate) feed_forward_norm: Span,
    pub(crate) gate_up: ProjectionSpans,
    pub(crate) down: ProjectionSpans,
}

/// All weights.
#[derive(Clone, Debug)]
pub(crate) struct WeightSpans {
    pub(crate) element: Element,
    /// `[vocab, hidden]`
    pub(crate) embedding: Span,
    pub(crate) layers: Vec<LayerSpans>,
    pub(crate) final_norm: Span,
    /// The embedding's where they are tied.
    pub(crate) head: ProjectionSpans,
    /// Bytes of the allocation.
    pub(crate) bytes: u64,
}

/// What takes the bytes of the weights.
pub(crate) trait Sink {
    /// Why it could not.
    type Error: From<ModelError>;

    /// The most bytes of one [`Sink::write`].
    fn room(&self) -> usize;

    /// Lets `fill` write `len` bytes that belong at `offset`. They hold what `fill` leaves there.
    fn write(
        &mut self,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), Self::Error>;
}

/// Hands out consecutive ranges.
struct Cursor {
    element: Element,
    next: u64,
}

impl Cursor {
    fn take(&mut self, elements: usize) -> Span {
        let bytes = elements as u64 * self.element.bytes() as u64;
        let offset = self.next;
        self.next = (offset + bytes).next_multiple_of(ALIGNMENT);
        Span { offset, bytes }
    }

    fn projection(&mut self, k: usize, parts: &[Part]) -> ProjectionSpans {
        let n = parts.iter().map(|part| part.n).sum();
        ProjectionSpans {
            n,
            k,
            weight: self.take(n * k),
            bias: parts
                .iter()
                .any(|part| part.bias.is_some())
                .then(|| self.take(n)),
        }
    }
}

impl WeightSpans {
    /// Lays the decoder out.
    pub(crate) fn new(config: &ModelConfig, layout: &DecoderLayout, element: Element) -> Self {
        let mut at = Cursor { element, next: 0 };
        let hidden = config.hidden_size;
        let table =
            |at: &mut Cursor, part: &Part| at.projection(hidden, std::slice::from_ref(part));
        let embedding = table(&mut at, &layout.embedding);
        // The caller has refused models with other layers.
        let layers = layout
            .layers
            .iter()
            .filter_map(LayerLayout::llama)
            .map(|layer| LayerSpans {
                attention_norm: at.take(layer.attention_norm.len),
                qkv: at.projection(hidden, &layer.attention.qkv),
                head_norms: layer
                    .attention
                    .head_norms
                    .as_ref()
                    .map(|(q, k)| (at.take(q.len), at.take(k.len))),
                output: at.projection(config.q_size(), &layer.attention.output),
                feed_forward_norm: at.take(layer.feed_forward_norm.len),
                gate_up: at.projection(hidden, &layer.feed_forward.gate_up),
                down: at.projection(config.intermediate_size, &layer.feed_forward.down),
            })
            .collect();
        let final_norm = at.take(layout.final_norm.len);
        let head = match &layout.head {
            Some(part) => table(&mut at, part),
            None => embedding,
        };
        Self {
            element,
            embedding: embedding.weight,
            layers,
            final_norm,
            head,
            bytes: at.next,
        }
    }

    /// Reads every weight, converts it and hands it to `sink`.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape, and the sink's own.
    pub(crate) fn load<S: Sink>(
        &self,
        layout: &DecoderLayout,
        checkpoint: &dyn Checkpoint,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let mut loader = Loader {
            element: self.element,
            checkpoint,
            sink,
        };
        let one = std::slice::from_ref;
        let hidden = self.head.k;
        loader.matrices(self.embedding, hidden, one(&layout.embedding))?;
        let layers = layout.layers.iter().filter_map(LayerLayout::llama);
        for (spans, layer) in self.layers.iter().zip(layers) {
            let attention = layer.attention;
            loader.vector(spans.attention_norm, layer.attention_norm)?;
            loader.projection(&spans.qkv, &attention.qkv)?;
            if let (Some((q, k)), Some(norms)) = (spans.head_norms, &attention.head_norms) {
                loader.vector(q, &norms.0)?;
                loader.vector(k, &norms.1)?;
            }
            loader.projection(&spans.output, &attention.output)?;
            loader.vector(spans.feed_forward_norm, layer.feed_forward_norm)?;
            loader.projection(&spans.gate_up, &layer.feed_forward.gate_up)?;
            loader.projection(&spans.down, &layer.feed_forward.down)?;
        }
        loader.vector(self.final_norm, &layout.final_norm)?;
        if let Some(head) = &layout.head {
            loader.projection(&self.head, one(head))?;
        }
        Ok(())
    }
}

struct Loader<'a, S> {
    element: Element,
    checkpoint: &'a dyn Checkpoint,
    sink: &'a mut S,
}

impl<S: Sink> Loader<'_, S> {
    fn projection(&mut self, spans: &ProjectionSpans, parts: &[Part]) -> Result<(), S::Error> {
        self.matrices(spans.weight, spans.k, parts)?;
        let Some(bias) = spans.bias else {
            return Ok(());
        };
        let mut offset = bias.offset;
        for part in parts {
            let bytes = part.n * self.element.bytes();
            match &part.bias {
                Some(name) => {
                    let vector = Vector {
                        name: name.clone(),
                        len: part.n,
                    };
                    let bytes = bytes as u64;
                    self.vector(Span { offset, bytes }, &vector)?;
                }
                None => self.sink.write(offset, bytes, |out| out.fill(0))?,
            }
            offset += bytes as u64;
        }
        Ok(())
    }

    fn vector(&mut self, span: Span, vector: &Vector) -> Result<(), S::Error> {
        let tensor = self.checkpoint.expect(&vector.name, &[vector.len])?;
        let element = self.element;
        self.sink.write(span.offset, span.bytes as usize, |out| {
            convert_rows(tensor, element, (0, 1), out);
        })
    }

    /// `parts`, `[n_i, k]` each, one after the other from `span` on, in pieces that the sink takes.
    fn matrices(&mut self, span: Span, k: usize, parts: &[Part]) -> Result<(), S::Error> {
        let element = self.element;
        let row_bytes = k * element.bytes();
        let rows_at_once = (self.sink.room() / row_bytes).max(1);
        let mut offset = span.offset;
        for part in parts {
            let tensor = self.checkpoint.expect(&part.weight, &[part.n, k])?;
            let mut first = 0;
            while first < part.n {
                let rows = rows_at_once.min(part.n - first);
                let bytes = rows * row_bytes;
                self.sink.write(offset, bytes, |out| {
                    convert_rows(tensor, element, (first, rows), out);
                })?;
                offset += bytes as u64;
                first += rows;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "spans_tests.rs"]
mod tests;
