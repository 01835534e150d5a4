//! Launches of the kernels: one method of [`Kernels`] each, asynchronous on the stream that it is given, usable in a capture.
//!
//! Knows each kernel's arguments, grid and block. Must never know a model, a step, or who owns memory.
//!
//! **What every caller promises** (`# Safety` of each method refers to it): addresses are of this device and hold what the
//! shapes say, strides (in elements) keep rows apart and inside their buffers, and all of it is live until the stream has
//! passed the launch; in a capture, at every launch of the graph. Outputs overlap no input but where a kernel works in place.
//! What kernels do with *values* in device memory is said at each: "clamped" values may be anything, "trusted" ones are in range
//! because the verifier, the unpack kernel or the caller made them so.
//!
//! Launches of nothing (no rows, no tokens) return at once. Nothing here allocates, but for the text of an error.

use std::ffi::c_void;
use std::ptr::from_ref;

use crate::driver::{DevicePtr, Launch, Stream};
use crate::error::{CudaError, Result};
use crate::kernels::{AttentionKernel, CacheElement, Element, Kernels};
use crate::params::{
    AttentionParams, PlainAttentionParams, PlanParams, SampleRow, ScatterParams, UnpackParams,
    WorkListParams,
};

/// Threads of a block of the plan kernels, of argmax and of sampling.
const FULL_BLOCK: u32 = 1024;
/// Threads of a block of the attention and merge kernels.
const ATTENTION_THREADS: u32 = 128;
/// Threads of a block of the scatter at most, and of the unpack kernel.
const COPY_THREADS: u32 = 256;

/// Rows of a row-major matrix: row `i` begins `i * stride` elements after `ptr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first row.
    pub ptr: DevicePtr,
    /// Elements from a row to the next.
    pub stride: i64,
}

impl Rows {
    /// From row `first` on; an element has `bytes`.
    #[must_use]
    pub fn from_row(&self, first: usize, bytes: usize) -> Self {
        Self {
            ptr: self.ptr.offset(first * self.stride as usize * bytes),
            stride: self.stride,
        }
    }
}

/// How the first `rotary_size` elements of each head are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// f32 `[positions, rotary_size]`: cosines, then sines.
    pub cos_sin: DevicePtr,
    /// D.
    pub head_size: u32,
    /// Even, at most `head_size`.
    pub rotary_size: u32,
    /// Pairs are neighbours; else `(i, i + rotary_size / 2)` (NeoX).
    pub interleaved: bool,
}

/// Two attention results over disjoint keys; LSE is f32 `[tokens, heads]`, natural, −∞ (or +∞) where there was no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeStates {
    /// `[tokens, heads, head_size]`, written; may be `prefix` or `suffix`.
    pub output: Rows,
    /// Written, neither of the inputs; null: not wanted.
    pub output_lse: DevicePtr,
    /// The first result.
    pub prefix: Rows,
    /// Its LSE.
    pub prefix_lse: DevicePtr,
    /// The second result.
    pub suffix: Rows,
    /// Its LSE.
    pub suffix_lse: DevicePtr,
}

/// Pointers to arguments, each of the type that the kernel declares; they live to the end of the statement.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        &mut [$(from_ref(&$value).cast_mut().cast::<c_void>()),*]
    };
}

#[allow(clippy::too_many_arguments, reason = "they are the kernels' own")]
impl Kernels {
    /// `output[t] = table[ids[t]]`: token embeddings. `ids` s32 `[tokens]`, clamped: zeros for an id outside
    /// `[0, vocabulary)`. `table` `[vocabulary, hidden]`, contiguous. Rows are multiples of 16 bytes. Grid: tokens.
    ///
    /// # Errors
    /// A row that is no multiple of 16 bytes, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn embedding(
        &self,
        stream: &Stream,
        element: Element,
        output: Rows,
        table: DevicePtr,
        ids: DevicePtr,
        tokens: u32,
        hidden: u32,
        vocabulary: u32,
    ) -> Result<()> {
        let bytes = u64::from(hidden) * element.bytes() as u64;
        if !bytes.is_multiple_of(16) {
            return Err(invalid(
                "the embedding's row in bytes",
                bytes,
                "rows are multiples of 16 bytes",
            ));
        }
        let grid = line(tokens, threads(hidden, vector(element)));
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).embedding,
                grid,
                arguments![
                    output.ptr,
                    table,
                    ids,
                    output.stride,
                    int("the hidden size", hidden)?,
                    int("the vocabulary", vocabulary)?,
                ],
            )
        }
    }

    /// `output = x / sqrt(mean(x²) + eps) · weight` a row, where x is the input or, with a residual, input + residual, which is
    /// written back to the residual, rounded, before it is normalised. `weight` `[hidden]`. The output may be the input.
    /// Grid: rows. The sum's order depends on `hidden` alone, so a row's result does not depend on the batch.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn rms_norm(
        &self,
        stream: &Stream,
        element: Element,
        output: Rows,
        input: Rows,
        residual: Option<Rows>,
        weight: DevicePtr,
        rows: u32,
        hidden: u32,
        eps: f32,
    ) -> Result<()> {
        let residual = residual.unwrap_or(Rows {
            ptr: DevicePtr::NULL,
            stride: 0,
        });
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).rms_norm,
                line(rows, threads(hidden, vector(element))),
                arguments![
                    output.ptr,
                    input.ptr,
                    residual.ptr,
                    weight,
                    output.stride,
                    input.stride,
                    residual.stride,
                    int("the hidden size", hidden)?,
                    eps,
                ],
            )
        }
    }

    /// RMSNorm of each of `num_heads` heads of a token in place (Qwen3's query and key norms). `x` `[tokens, num_heads,
    /// head_size]` by token stride, `weight` `[head_size]`. Grid: tokens, a warp a head.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn head_norm(
        &self,
        stream: &Stream,
        element: Element,
        x: Rows,
        weight: DevicePtr,
        tokens: u32,
        num_heads: u32,
        head_size: u32,
        eps: f32,
    ) -> Result<()> {
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).head_norm,
                line(tokens, 32 * num_heads.clamp(1, 32)),
                arguments![
                    x.ptr,
                    weight,
                    x.stride,
                    int("the number of heads", num_heads)?,
                    int("the head size", head_size)?,
                    eps,
                ],
            )
        }
    }

    /// Rotary embedding of `num_heads` heads of a token in place: `x` `[tokens, num_heads, head_size]` by token stride, so that
    /// queries and keys that lie side by side take one launch. `positions` s64 `[tokens]`, trusted: rows of the table. Grid: tokens.
    ///
    /// # Errors
    /// A rotary size that is odd or above the head size, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says; every position, of padded tokens too, is a row of `rope.cos_sin`.
    pub unsafe fn rope(
        &self,
        stream: &Stream,
        element: Element,
        x: Rows,
        positions: DevicePtr,
        rope: Rope,
        tokens: u32,
        num_heads: u32,
    ) -> Result<()> {
        if !rope.rotary_size.is_multiple_of(2) || rope.rotary_size > rope.head_size {
            return Err(invalid(
                "the rotary size",
                u64::from(rope.rotary_size),
                "it is even and at most the head size",
            ));
        }
        let pairs = num_heads.saturating_mul(rope.rotary_size / 2);
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).rope,
                line(tokens, threads(pairs, vector(element))),
                arguments![
                    x.ptr,
                    positions,
                    rope.cos_sin,
                    x.stride,
                    int("the number of heads", num_heads)?,
                    int("the head size", rope.head_size)?,
                    int("the rotary size", rope.rotary_size)?,
                    i32::from(rope.interleaved),
                ],
            )
        }
    }

    /// `output[r, i] = silu(input[r, i]) · input[r, size + i]`: `input` `[rows, 2 size]`, gates first; `output` `[rows, size]`.
    /// Grid: rows.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn silu_mul(
        &self,
        stream: &Stream,
        element: Element,
        output: Rows,
        input: Rows,
        rows: u32,
        size: u32,
    ) -> Result<()> {
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).silu_mul,
                line(rows, threads(size, vector(element))),
                arguments![
                    output.ptr,
                    input.ptr,
                    output.stride,
                    input.stride,
                    int("the size of the gate", size)?,
                ],
            )
        }
    }

    /// `output[r] = input[indices[r]]`, rows of `size` elements: those whose logits are wanted. `indices` s32 `[rows]`, clamped:
    /// zeros for an index outside `[0, num_rows)`. Grid: rows.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says; `input` has `num_rows` rows.
    pub unsafe fn gather_rows(
        &self,
        stream: &Stream,
        element: Element,
        output: Rows,
        input: Rows,
        indices: DevicePtr,
        rows: u32,
        size: u32,
        num_rows: u32,
    ) -> Result<()> {
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).gather_rows,
                line(rows, threads(size, vector(element))),
                arguments![
                    output.ptr,
                    input.ptr,
                    indices,
                    output.stride,
                    input.stride,
                    int("the size of a row", size)?,
                    int("the number of rows", num_rows)?,
                ],
            )
        }
    }

    /// The index of each row's largest logit, the lowest of equals; NaN never wins, and a row of nothing else gives 0. `tokens`
    /// s32 `[rows]`, written. Grid: rows.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn argmax(
        &self,
        stream: &Stream,
        element: Element,
        tokens: DevicePtr,
        logits: Rows,
        rows: u32,
        vocabulary: u32,
    ) -> Result<()> {
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).argmax,
                line(rows, FULL_BLOCK),
                arguments![
                    tokens,
                    logits.ptr,
                    logits.stride,
                    int("the vocabulary", vocabulary)?,
                ],
            )
        }
    }

    /// A token for each row of f32 logits, as its [`SampleRow`] says: `how` `[rows]`, `tokens` s32 `[rows]`, written; −1 where no
    /// logit of the row is a number. Equal inputs give equal tokens. Grid: rows.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn sample(
        &self,
        stream: &Stream,
        tokens: DevicePtr,
        logits: Rows,
        how: DevicePtr,
        rows: u32,
        vocabulary: u32,
    ) -> Result<()> {
        const { assert!(size_of::<SampleRow>() == 24) }
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.sample,
                line(rows, FULL_BLOCK),
                arguments![
                    tokens,
                    logits.ptr,
                    logits.stride,
                    int("the vocabulary", vocabulary)?,
                    how,
                ],
            )
        }
    }

    /// This step's keys and values into their slots. Slots are the host's, trusted: negative ones are skipped, others lie in the
    /// cache. `params.key` and `params.value` have `num_slots` rows, those of skipped slots too. `element` is theirs. Grid: tokens by
    /// the block's second dimension.
    ///
    /// # Errors
    /// f32 into an fp8 cache, a head size that is no multiple of 16, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says; every slot is negative or one of the cache's.
    pub unsafe fn reshape_and_cache(
        &self,
        stream: &Stream,
        element: Element,
        cache: CacheElement,
        params: &ScatterParams,
    ) -> Result<()> {
        let function = self.scatter(element, cache)?;
        let size = u64::try_from(params.head_size).unwrap_or(0);
        if size == 0 || !size.is_multiple_of(16) {
            return Err(invalid(
                "the head size of the KV cache",
                i64::from(params.head_size),
                "it is a multiple of 16",
            ));
        }
        let tokens = u32::try_from(params.num_slots).map_err(|_| {
            invalid(
                "the number of slots",
                params.num_slots,
                "give 0 or more, below 2^32",
            )
        })?;
        let heads = u64::try_from(params.num_kv_heads).unwrap_or(0);
        let launch_of = scatter_launch(tokens, 2 * heads * size * cache.bytes(element) as u64 / 16);
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe { launch(stream, function, launch_of, arguments![*params]) }
    }

    /// FLASH_ATTN's schedule to work items, once a step. `num_splits` is clamped to the promise and items beyond it are dropped;
    /// query starts, lengths and `row_order` (a permutation) are trusted, as the verifier leaves them. Grid: 1.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn plan_flash_attn(&self, stream: &Stream, params: &PlanParams) -> Result<()> {
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe {
            launch(
                stream,
                &self.plan_flash_attn,
                line(1, FULL_BLOCK),
                arguments![*params],
            )
        }
    }

    /// FLASHINFER's work list of one part to work items, once a step. What exceeds the launch's limits is cut to them; page
    /// indptr are trusted, as the verifier leaves them. Grid: 1.
    ///
    /// # Errors
    /// Limits whose shared memory a block does not have, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn plan_flashinfer(&self, stream: &Stream, params: &WorkListParams) -> Result<()> {
        let entries = i64::from(params.max_reqs) + 1 + i64::from(params.max_tiles);
        let shared = u32::try_from(4 * entries)
            .ok()
            .filter(|&bytes| bytes <= self.max_plan_shared && params.max_reqs >= 0)
            .ok_or_else(|| {
                invalid(
                    "the number of requests and query tiles of a work list",
                    entries,
                    "a block's shared memory has 4 bytes for each: lower the largest number of requests or tokens of a step",
                )
            })?;
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe {
            launch(
                stream,
                &self.plan_flashinfer,
                Launch {
                    shared,
                    ..line(1, FULL_BLOCK)
                },
                arguments![*params],
            )
        }
    }

    /// Paged attention of one layer over the items of `params.items`: `kernel` is
    /// [`attention`](Self::attention)'s for the list's tile. Blocks beyond the list leave at once. Items and header are a plan
    /// kernel's; block-table entries of keys that an item covers are trusted to be blocks of the cache. Grid:
    /// `num_kv_heads * max_work_items`, or `max_blocks` if those are fewer; blocks then share the list, and results are the same
    /// bit for bit.
    ///
    /// # Errors
    /// A grid of 2³¹ blocks or more, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says; the list was planned with `kernel`'s tile.
    pub unsafe fn paged_attention(
        &self,
        stream: &Stream,
        kernel: &AttentionKernel,
        params: &AttentionParams,
        max_blocks: Option<u32>,
    ) -> Result<()> {
        let blocks = i64::from(params.num_kv_heads) * i64::from(params.max_work_items);
        let blocks = u32::try_from(blocks)
            .ok()
            .filter(|&blocks| i32::try_from(blocks).is_ok())
            .ok_or_else(|| {
                invalid(
                    "the number of KV heads times work items",
                    blocks,
                    "a grid has fewer than 2^31 blocks: promise fewer work items",
                )
            })?;
        let blocks = max_blocks.map_or(blocks, |most| blocks.min(most.max(1)));
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe {
            launch(
                stream,
                &kernel.function,
                Launch {
                    shared: kernel.shared,
                    ..line(blocks, ATTENTION_THREADS)
                },
                arguments![*params],
            )
        }
    }

    /// Paged attention in f32, straight from query starts and lengths: the device's own reference. Block-table entries of keys
    /// that a token sees are trusted to be blocks of the cache. Grid: (tokens, query heads).
    ///
    /// # Errors
    /// A head above 256 elements, or what the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn plain_attention(
        &self,
        stream: &Stream,
        params: &PlainAttentionParams,
    ) -> Result<()> {
        if !(1..=256).contains(&params.head_size) {
            return Err(invalid(
                "the head size of plain attention",
                i64::from(params.head_size),
                "it is 1 to 256",
            ));
        }
        let tokens = count("the number of tokens", params.num_tokens)?;
        let heads = count("the number of heads", params.num_heads)?;
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe {
            launch(
                stream,
                &self.attention_plain,
                plane(tokens, heads, ATTENTION_THREADS),
                arguments![*params],
            )
        }
    }

    /// Merges two attention results over disjoint keys: `(p·wp + s·ws) / (wp + ws)`, `w = e^(lse − max)`. Where neither had a key
    /// the output is 0 and its LSE −∞. Grid: (tokens, heads).
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says.
    pub unsafe fn merge_states(
        &self,
        stream: &Stream,
        element: Element,
        states: &MergeStates,
        tokens: u32,
        heads: u32,
        head_size: u32,
    ) -> Result<()> {
        // SAFETY: the caller's; the arguments are the kernel's, in order.
        unsafe {
            launch(
                stream,
                &self.layer(element).merge_states,
                plane(tokens, heads, ATTENTION_THREADS),
                arguments![
                    states.output.ptr,
                    states.output_lse,
                    states.prefix.ptr,
                    states.prefix_lse,
                    states.suffix.ptr,
                    states.suffix_lse,
                    states.output.stride,
                    states.prefix.stride,
                    states.suffix.stride,
                    int("the head size", head_size)?,
                ],
            )
        }
    }

    /// The step's packed bytes into persistent buffers: operations `[0, num_first_ops)`, a barrier over the grid, then the rest.
    /// Rows and columns that do not exist give `fill`; sizes are the operations' own, trusted. One cooperative launch, not to be
    /// captured: the slot changes from step to step. Grid: one block a multiprocessor.
    ///
    /// # Errors
    /// What the driver says of the launch.
    ///
    /// # Safety
    /// As [the module](self) says; every operation's destination has `room` elements, its source and lists what its kind reads.
    pub unsafe fn unpack(&self, stream: &Stream, params: &UnpackParams) -> Result<()> {
        if params.num_ops <= 0 {
            return Ok(());
        }
        let launch_of = Launch {
            cooperative: true,
            ..line(self.device().num_multiprocessors(), COPY_THREADS)
        };
        // SAFETY: the caller's; the kernel takes the struct by value.
        unsafe { launch(stream, &self.unpack, launch_of, arguments![*params]) }
    }
}

/// Launches, unless there is nothing to do.
///
/// # Safety
/// As [`Stream::launch`].
unsafe fn launch(
    stream: &Stream,
    function: &crate::driver::Function,
    launch: Launch,
    arguments: &mut [*mut c_void],
) -> Result<()> {
    if launch.grid.0 == 0 || launch.grid.1 == 0 {
        return Ok(());
    }
    // SAFETY: the caller's.
    unsafe { stream.launch(function, launch, arguments) }
}

/// `blocks` blocks of `threads` threads.
fn line(blocks: u32, threads: u32) -> Launch {
    plane(blocks, 1, threads)
}

fn plane(x: u32, y: u32, threads: u32) -> Launch {
    Launch {
        grid: (x, y, 1),
        block: (threads, 1, 1),
        shared: 0,
        cooperative: false,
    }
}

/// Threads of a block that shares `size` elements, about `each` a thread: a multiple of 32 up to 1,024. Never a function of
/// the batch, so that neither is the order of a sum.
fn threads(size: u32, each: u32) -> u32 {
    size.div_ceil(each)
        .min(FULL_BLOCK)
        .next_multiple_of(32)
        .max(32)
}

/// Elements of a vector of 16 bytes, the most that a thread moves at once.
fn vector(element: Element) -> u32 {
    match element {
        Element::Bf16 | Element::F16 => 8,
        Element::F32 => 4,
    }
}

/// Blocks of (x, y) threads: x over the `vectors` of a token, y over tokens.
fn scatter_launch(tokens: u32, vectors: u64) -> Launch {
    let x = u32::try_from(vectors.min(u64::from(COPY_THREADS)))
        .unwrap_or(COPY_THREADS)
        .next_multiple_of(32)
        .max(32);
    let y = COPY_THREADS / x;
    Launch {
        grid: (tokens.div_ceil(y), 1, 1),
        block: (x, y, 1),
        shared: 0,
        cooperative: false,
    }
}

fn int(what: &'static str, value: u32) -> Result<i32> {
    i32::try_from(value).map_err(|_| invalid(what, u64::from(value), "kernels count in 31 bits"))
}

fn count(what: &'static str, value: i32) -> Result<u32> {
    u32::try_from(value).map_err(|_| invalid(what, i64::from(value), "give 0 or more"))
}

fn invalid(what: &'static str, value: impl std::fmt::Display, remedy: &'static str) -> CudaError {
    CudaError::Invalid {
        what,
        value: value.to_string(),
        remedy,
    }
}

#[cfg(test)]
#[path = "ops_tests.rs"]
mod tests;
