//! Everything at fixed addresses that a step runs over, and a whole step as one sequence of launches.
//!
//! Shared between the step thread and the thread that captures graphs on a reload: nothing here changes after the start. It
//! must never know a batch, nor which graph it is captured into.

use timetable_device_cuda::{
    CudaError,
    attention::{AttentionIo, GroupConfig, GroupLaunch},
    cache::{KvCache, KvCaches},
    driver::{DevicePtr, Stream},
    upload::{StepBuffers, StepPtrs},
};

use super::forward::{Forward, warm_up_rows};

/// A segment's and a group's launches of the step, or of the graph that is captured; none for what was not prepared.
pub(super) type Launches<'a, 'l> = &'a dyn Fn(usize, usize) -> Option<GroupLaunch<'l>>;

/// A part of the step's tokens that attention is launched for apart: a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) first_token: usize,
    /// Of a span that is left out.
    pub(super) num_tokens: usize,
    /// It has no launches: its attention is zero, and its keys and values are nobody's.
    pub(super) left_out: bool,
}

/// The whole step as one.
pub(super) const WHOLE: &[Span] = &[Span {
    first_token: 0,
    num_tokens: 0,
    left_out: false,
}];

fn of_group<'l>(
    launches: Launches<'_, 'l>,
    span: usize,
    group: usize,
) -> Result<GroupLaunch<'l>, CudaError> {
    launches(span, group).ok_or_else(|| CudaError::Invalid {
        what: "an attention group's step",
        value: format!("not prepared for group {group}"),
        remedy: "prepare every group before a step is submitted: this is a defect of the engine",
    })
}

/// The model, its caches and the step's tensors.
pub(super) struct Core {
    pub(super) forward: Forward,
    /// What the layers of each attention group share.
    pub(super) groups: Vec<GroupConfig>,
    layers: Vec<Layer>,
    step: StepBuffers,
    caches: KvCaches,
}

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
struct Layer {
    group: usize,
    cache: KvCache,
}

impl Core {
    /// Of parts that fit: `layer_groups` names each layer's group.
    ///
    /// # Errors
    /// A layer without a cache.
    pub(super) fn new(
        forward: Forward,
        groups: Vec<GroupConfig>,
        layer_groups: &[usize],
        step: StepBuffers,
        caches: KvCaches,
    ) -> Result<Self, CudaError> {
        let layer = |(index, &group): (usize, &usize)| {
            let cache = caches.layer(index).ok_or_else(|| CudaError::Invalid {
                what: "the layers of the KV cache",
                value: caches.shape().num_layers.to_string(),
                remedy: "give every layer of the model a cache",
            })?;
            Ok(Layer { group, cache })
        };
        let layers = layer_groups
            .iter()
            .enumerate()
            .map(layer)
            .collect::<Result<_, CudaError>>()?;
        Ok(Self {
            forward,
            groups,
            layers,
            step,
            caches,
        })
    }

    /// Addresses of the step's tensors.
    pub(super) fn ptrs(&self) -> StepPtrs {
        self.step.ptrs()
    }

    /// Bytes of the KV cache.
    pub(super) fn cache_bytes(&self) -> u64 {
        self.caches.bytes() as u64
    }

    /// Enqueues the plans of every group's attention, for each span of the step.
    ///
    /// # Safety
    /// The step that was prepared for `launches` is unpacked by now on `stream`, or will be whenever a graph that is being captured
    /// runs; one launch for each group and each span that is not left out.
    pub(super) unsafe fn plan(
        &self,
        stream: &Stream,
        spans: &[Span],
        launches: Launches<'_, '_>,
    ) -> Result<(), CudaError> {
        for (index, _) in launched(spans) {
            for group in 0..self.groups.len() {
                let launch = of_group(launches, index, group)?;
                // SAFETY: the caller's; workspaces and step's tensors outlive the work on `stream`.
                unsafe { launch.plan(stream, &self.forward.kernels) }?;
            }
        }
        Ok(())
    }

    /// Enqueues one layer's scatter and attention, between two pieces of the forward pass.
    ///
    /// # Safety
    /// As [`Core::plan`], which comes before; the piece before this layer's attention has been enqueued; spans lie within the step.
    pub(super) unsafe fn attend(
        &self,
        stream: &Stream,
        layer: usize,
        spans: &[Span],
        launches: Launches<'_, '_>,
    ) -> Result<(), CudaError> {
        let Layer { group, cache } = &self.layers[layer];
        let operands = self.forward.attention_operands();
        let kernels = &self.forward.kernels;
        let bytes = self.forward.element().bytes();
        // Everything is written before anything is read.
        for (index, span) in launched(spans) {
            let launch = of_group(launches, index, *group)?;
            let key = operands.key.from_row(span.first_token, bytes);
            let value = operands.value.from_row(span.first_token, bytes);
            // SAFETY: the caller's; the operands have a row for every token of the step, and slots are the host's.
            unsafe { launch.update_cache(stream, kernels, cache, key, value) }?;
        }
        for (index, span) in launched(spans) {
            let launch = of_group(launches, index, *group)?;
            let io = AttentionIo {
                query: operands.query.from_row(span.first_token, bytes),
                output: operands.output.from_row(span.first_token, bytes),
                lse: DevicePtr::NULL,
            };
            // SAFETY: as above.
            unsafe { launch.attend(stream, kernels, cache, &io) }?;
        }
        for span in spans.iter().filter(|span| span.left_out) {
            let output = operands.output.from_row(span.first_token, bytes);
            let size = span.num_tokens * output.stride as usize * bytes;
            // SAFETY: as above; the output's rows stand one after the other.
            unsafe { stream.fill(output.ptr, 0, size) }?;
        }
        Ok(())
    }

    /// Enqueues everything from the embedding to the final norm, attention included.
    ///
    /// # Safety
    /// As [`Core::plan`] and [`Core::attend`]; `tokens` is the spans' number of tokens, or more (padding that attention does not
    /// see).
    pub(super) unsafe fn whole(
        &self,
        stream: &Stream,
        spans: &[Span],
        launches: Launches<'_, '_>,
        tokens: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's; each layer's attention stands between its pieces.
        unsafe {
            self.plan(stream, spans, launches)?;
            for piece in 0..self.forward.num_pieces() {
                self.forward.piece(stream, piece, tokens)?;
                if piece < self.layers.len() {
                    self.attend(stream, piece, spans, launches)?;
                }
            }
        }
        Ok(())
    }

    /// Runs every product once for each class of row counts, and waits: no step, and no capture, then chooses an algorithm or
    /// loads a kernel. Leaves the step's tensors without slots, so that nothing reaches the cache.
    ///
    /// # Errors
    /// What the device says; a kernel that does not run shows here.
    ///
    /// # Safety
    /// Nothing else runs on the device's buffers.
    pub(super) unsafe fn warm_up(&self, stream: &Stream) -> Result<(), CudaError> {
        let ptrs = self.ptrs();
        let limits = ptrs.limits;
        let tokens = limits.max_num_tokens as u32;
        // SAFETY: the slots have 8 bytes for each token; −1 is none. Counts are within the buffers'.
        unsafe {
            stream.fill(ptrs.slot_mapping, 0xff, 8 * limits.max_num_tokens)?;
            for rows in warm_up_rows(tokens) {
                self.forward.products(stream, rows)?;
            }
            for rows in warm_up_rows(limits.max_num_logits as u32) {
                self.forward.head(stream, rows, tokens)?;
                self.forward.sample(stream, rows)?;
            }
        }
        stream.synchronize()
    }
}

/// The spans that have launches, with their numbers.
fn launched(spans: &[Span]) -> impl Iterator<Item = (usize, &Span)> {
    let spans = spans.iter().enumerate();
    spans.filter(|(_, span)| !span.left_out)
}
