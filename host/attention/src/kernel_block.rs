//! Kernel blocks: the block size that a backend's kernels read, which may divide the manager's, and the rewriting of block
//! tables from one to the other.
//!
//! Must never know a tensor: tables are slices of the host's memory. Source: vLLM `vllm/v1/worker/utils.py`
//! (`select_common_block_size`, `AttentionGroup.map_to_kernel_block_table`) @0.32/0.33, as recorded in
//! `tests/vectors/select_common_block_size.json` and `tests/vectors/map_to_kernel_block_table.json`.

use std::fmt;

/// Tokens that a block table's width is rounded up to: `block_table_token_alignment`.
pub const BLOCK_TABLE_TOKEN_ALIGNMENT: u32 = 128;

/// A kernel block size that a backend declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelBlockSize {
    /// Exactly this many tokens.
    Exact(u32),
    /// Any multiple of this many tokens.
    MultipleOf(u32),
}

impl KernelBlockSize {
    /// The size, or the base of the multiples.
    pub const fn base(self) -> u32 {
        match self {
            KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n,
        }
    }

    /// Do kernels read blocks of exactly `block_size` tokens?
    pub const fn accepts(self, block_size: u32) -> bool {
        match self {
            KernelBlockSize::Exact(n) => n == block_size,
            KernelBlockSize::MultipleOf(n) => n != 0 && block_size.is_multiple_of(n),
        }
    }
}

impl fmt::Display for KernelBlockSize {
    /// As the field prints them: `64`, `MultipleOf(16)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelBlockSize::Exact(n) => write!(f, "{n}"),
            KernelBlockSize::MultipleOf(n) => write!(f, "MultipleOf({n})"),
        }
    }
}

/// A backend's name and the kernel block sizes it declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSizes<'a> {
    /// The backend's name, for the error.
    pub name: &'a str,
    /// What it declares; empty: any.
    pub sizes: &'a [KernelBlockSize],
}

/// Why manager blocks cannot be read as kernel blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelBlockError {
    /// No size suits every backend. The field's text.
    #[error("No common block size for {block_size} ({declared}).")]
    NoCommon {
        /// The manager's block size, in tokens.
        block_size: u32,
        /// What each backend declared, as the field prints it.
        declared: String,
    },
    /// Packed blocks cannot be split. The field's text.
    #[error(
        "{backend} needs {kernel_block_size}-token kernel blocks, which packed {block_size}-token KV cache blocks cannot be split into. Reduce --block-size to {kernel_block_size} or set VLLM_KV_CACHE_LAYOUT to a layer-compact layout (e.g. LBNHC)."
    )]
    PackedSplit {
        /// The backend's name.
        backend: String,
        /// The kernel block it needs, in tokens.
        kernel_block_size: u32,
        /// The manager's block size, in tokens.
        block_size: u32,
    },
    /// Blocks are not dense pages. The field's text as far as it is known, and the remedy.
    #[error(
        "The resolved KV cache layout ({layout}) does not store blocks as dense, unpadded pages (block stride {block_stride} != page {page}), so a manager block cannot be split into {ratio} kernel blocks of {kernel_block_size} tokens. Reduce --block-size to {kernel_block_size} or choose a layout whose blocks are dense (e.g. LBNHC) without page padding."
    )]
    NotDense {
        /// The layout's name.
        layout: &'static str,
        /// Bytes from one block of a layer to the next.
        block_stride: u64,
        /// Bytes of a block's content.
        page: u64,
        /// Kernel blocks of a manager block.
        ratio: u32,
        /// The kernel block, in tokens.
        kernel_block_size: u32,
    },
    /// The kernel block does not divide the manager's.
    #[error(
        "kernel_block_size {kernel_block_size} does not divide the KV manager's block_size {block_size}: choose a --block-size that is a multiple of {kernel_block_size}"
    )]
    NotADivisor {
        /// The kernel block, in tokens.
        kernel_block_size: u32,
        /// The manager's block size, in tokens.
        block_size: u32,
    },
    /// Kernel blocks of one manager block would overlap those of the next.
    #[error(
        "kernel_block_stride {stride} is less than the {ratio} kernel blocks of a manager block: neighbouring blocks would overlap"
    )]
    StrideTooSmall {
        /// Kernel pages between two manager blocks.
        stride: u32,
        /// Kernel blocks of a manager block.
        ratio: u32,
    },
    /// A kernel block id would not fit in 32 bits.
    #[error(
        "{num_blocks} manager blocks at a stride of {stride} kernel blocks need ids beyond 2^31 − 1: use fewer blocks or a larger kernel block"
    )]
    TooManyBlocks {
        /// Manager blocks of the cache.
        num_blocks: u32,
        /// Kernel pages between two manager blocks.
        stride: u32,
    },
}

/// The kernel block size that every backend of a KV cache group can read, out of manager blocks of `block_size` tokens.
///
/// `block_size` itself if all accept it; else the largest exactly declared size that divides it and that all accept.
///
/// # Errors
/// [`KernelBlockError::NoCommon`], with the field's text.
pub fn select_common_block_size(
    block_size: u32,
    backends: &[BlockSizes<'_>],
) -> Result<u32, KernelBlockError> {
    let all_accept = |b: u32| {
        backends
            .iter()
            .all(|backend| backend.sizes.is_empty() || backend.sizes.iter().any(|s| s.accepts(b)))
    };
    if all_accept(block_size) {
        return Ok(block_size);
    }
    let mut candidates: Vec<u32> = backends
        .iter()
        .flat_map(|backend| backend.sizes)
        .filter_map(|s| match *s {
            KernelBlockSize::Exact(n) if n != 0 && block_size.is_multiple_of(n) => Some(n),
            _ => None,
        })
        .collect();
    candidates.sort_unstable_by(|a, b| b.cmp(a));
    candidates
        .into_iter()
        .find(|b| all_accept(*b))
        .ok_or_else(|| KernelBlockError::NoCommon {
            block_size,
            declared: declared(backends),
        })
}

/// `NAME: [64]; OTHER: [MultipleOf(16)]`
fn declared(backends: &[BlockSizes<'_>]) -> String {
    let one = |backend: &BlockSizes<'_>| {
        let sizes: Vec<String> = backend.sizes.iter().map(ToString::to_string).collect();
        format!("{}: [{}]", backend.name, sizes.join(", "))
    };
    backends.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Columns of a block table for `max_num_blocks` blocks of `block_size` tokens: rounded up to a multiple of
/// `128 / gcd(128, block_size)` blocks, so that rows start at aligned token counts.
///
/// Source: vLLM `get_block_table_width`; max blocks 10 at block 16 give 16.
pub fn block_table_width(max_num_blocks: u32, block_size: u32) -> u32 {
    let step =
        BLOCK_TABLE_TOKEN_ALIGNMENT / gcd(BLOCK_TABLE_TOKEN_ALIGNMENT, block_size.max(1)).max(1);
    max_num_blocks.div_ceil(step).saturating_mul(step)
}

const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The rewriting of one group's block table into kernel blocks. Made once, at start-up; it cannot fail afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelBlockMap {
    block_size: u32,
    kernel_block_size: u32,
    stride: u32,
}

impl KernelBlockMap {
    /// Checks a split of `block_size`-token manager blocks into `kernel_block_size`-token kernel blocks, for block ids below
    /// `num_blocks`.
    ///
    /// `kernel_block_stride`: kernel pages between the starts of two manager blocks; 0 where blocks are dense. It is larger
    /// than the ratio only in a packed cache (blocks outermost, several layers inside).
    ///
    /// # Errors
    /// [`KernelBlockError::NotADivisor`], [`KernelBlockError::StrideTooSmall`], [`KernelBlockError::TooManyBlocks`].
    pub fn new(
        block_size: u32,
        kernel_block_size: u32,
        kernel_block_stride: u32,
        num_blocks: u32,
    ) -> Result<KernelBlockMap, KernelBlockError> {
        if kernel_block_size == 0
            || block_size == 0
            || !block_size.is_multiple_of(kernel_block_size)
        {
            return Err(KernelBlockError::NotADivisor {
                kernel_block_size,
                block_size,
            });
        }
        let ratio = block_size / kernel_block_size;
        let stride = if kernel_block_stride == 0 {
            ratio
        } else {
            kernel_block_stride
        };
        if stride < ratio {
            return Err(KernelBlockError::StrideTooSmall { stride, ratio });
        }
        // The largest id is (num_blocks − 1) · stride + ratio − 1.
        let end = u64::from(num_blocks.saturating_sub(1)) * u64::from(stride) + u64::from(ratio);
        if end > 1 << 31 {
            return Err(KernelBlockError::TooManyBlocks { num_blocks, stride });
        }
        Ok(KernelBlockMap {
            block_size,
            kernel_block_size,
            stride,
        })
    }

    /// Kernel blocks of one manager block: r.
    pub const fn ratio(&self) -> u32 {
        self.block_size / self.kernel_block_size
    }

    /// Kernel pages between the starts of two manager blocks.
    pub const fn stride(&self) -> u32 {
        self.stride
    }

    /// Is there nothing to rewrite?
    pub const fn is_identity(&self) -> bool {
        self.ratio() == 1 && self.stride == 1
    }

    /// Columns of the rewritten table: `block_table_width(max_num_blocks, block_size) · r`.
    pub fn kernel_width(&self, max_num_blocks: u32) -> u32 {
        block_table_width(max_num_blocks, self.block_size).saturating_mul(self.ratio())
    }

    /// Kernel blocks that exist for `num_blocks` manager blocks, gaps of a strided cache included: ids are below this.
    pub const fn num_kernel_blocks(&self, num_blocks: u32) -> u64 {
        num_blocks as u64 * self.stride as u64
    }

    /// `out[c · r + j] = row[c] · stride + j` for j in 0..r. s32; `row` is a request's row (or a whole row-major table),
    /// `out` r times as long. Linear time, no allocation.
    ///
    /// Ids at or beyond `num_blocks` are the caller's error: they stay wrong, and wrap rather than panic.
    ///
    /// # Panics
    /// If `out.len() != row.len() · r`.
    pub fn rewrite(&self, row: &[i32], out: &mut [i32]) {
        let ratio = self.ratio() as usize;
        assert_eq!(
            out.len(),
            row.len() * ratio,
            "a rewritten block table holds {ratio} kernel blocks for each of its {} blocks",
            row.len()
        );
        let stride = self.stride as i32;
        for (block, kernel_blocks) in row.iter().zip(out.chunks_exact_mut(ratio)) {
            let first = block.wrapping_mul(stride);
            for (j, kernel_block) in kernel_blocks.iter_mut().enumerate() {
                *kernel_block = first.wrapping_add(j as i32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn width_is_rounded_to_128_tokens() {
        assert_eq!(block_table_width(10, 16), 16);
        assert_eq!(block_table_width(10, 128), 10);
        assert_eq!(block_table_width(10, 256), 10);
        assert_eq!(block_table_width(1, 48), 8);
        assert_eq!(block_table_width(0, 16), 0);
    }

    #[test]
    fn a_kernel_block_that_does_not_divide_is_refused() {
        let error = KernelBlockMap::new(96, 64, 0, 8).unwrap_err();
        assert_eq!(
            error,
            KernelBlockError::NotADivisor {
                kernel_block_size: 64,
                block_size: 96
            }
        );
        assert!(
            error
                .to_string()
                .contains("--block-size that is a multiple of 64")
        );
        assert_eq!(
            KernelBlockMap::new(256, 64, 3, 8),
            Err(KernelBlockError::StrideTooSmall {
                stride: 3,
                ratio: 4
            })
        );
        assert!(matches!(
            KernelBlockMap::new(256, 16, 0, 1 << 28),
            Err(KernelBlockError::TooManyBlocks { .. })
        ));
        assert!(KernelBlockMap::new(256, 16, 0, 1 << 27).is_ok());
    }

    #[test]
    fn packed_split_text_is_the_fields() {
        let error = KernelBlockError::PackedSplit {
            backend: "FLASHMLA".to_owned(),
            kernel_block_size: 64,
            block_size: 256,
        };
        assert_eq!(
            error.to_string(),
            "FLASHMLA needs 64-token kernel blocks, which packed 256-token KV cache blocks cannot be split into. Reduce \
             --block-size to 64 or set VLLM_KV_CACHE_LAYOUT to a layer-compact layout (e.g. LBNHC)."
        );
    }
}
