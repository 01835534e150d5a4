//! The tensors of one step that builders refer to by name (`types::Input`), as the host holds them.
//!
//! On the CPU device these are the tensors themselves. With a GPU they are the host's mirror, from which the packed copy is
//! made; lengths may then be upper bounds of the device's.

/// A slot that no token owns: the scatter skips it. The field's PAD_SLOT_ID.
pub const PAD_SLOT_ID: i64 = -1;

/// One KV cache group's tensors of one step. R rows (requests), T tokens, W columns.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// `s32 [R + 1]`: starts at 0, never falls.
    pub query_start_loc: &'a [i32],
    /// `s32 [R]`: keys of each request, this step's included; 0 in padded rows.
    pub seq_lens: &'a [i32],
    /// `s32 [R, W]`, in kernel blocks.
    pub block_table: BlockTable<'a>,
    /// `s64 [T]`: the cache slot of each token, `PAD_SLOT_ID` where none.
    pub slot_mapping: &'a [i64],
    /// `s64 [T]`
    pub positions: &'a [i64],
    /// `s32 [R]`, where `causal` is per request.
    pub causal: Option<&'a [i32]>,
    /// `s32 [R]`, under decode context parallelism.
    pub dcp_local_seq_lens: Option<&'a [i32]>,
    /// `s32 [R]`, for cross attention.
    pub encoder_seq_lens: Option<&'a [i32]>,
    /// `s32 [n]`, where fast prefill is armed.
    pub logits_indices_padded: Option<&'a [i32]>,
    /// `s32 [R]`, where the model uses R-SWA.
    pub rswa_prefix_lens: Option<&'a [i32]>,
    /// A model state's own device fields.
    pub extras: &'a [(&'a str, &'a [i32])],
}

/// A row-major table of block ids.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    /// `s32 [rows * width]`
    pub data: &'a [i32],
    /// Columns of a row.
    pub width: usize,
}

impl<'a> BlockTable<'a> {
    /// Row `row`: `width` block ids.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &'a [i32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    /// Number of rows; 0 for a table without columns.
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.width).unwrap_or(0)
    }
}
