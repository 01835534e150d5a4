//! Slots: where in a group's KV cache each token's key and value go. It must never know a builder: slots are
//! the host's.
//!
//! Source: vLLM 0.33 `vllm/v1/worker/block_table.py` and `vllm/v1/worker/gpu/block_table.py`, recorded in
//! `tests/vectors/block_table_compute_slot_mapping.json`.

use crate::step::PAD_SLOT_ID;

/// Context parallelism of the KV cache: tokens are dealt to `size` ranks in runs of `interleave`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextParallel {
    /// Ranks.
    pub size: u32,
    /// This rank.
    pub rank: u32,
    /// `cp_kv_cache_interleave_size`
    pub interleave: u32,
}

/// How a group's positions become slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRule {
    /// Tokens of a block on one rank.
    pub block_size: u32,
    /// `None` without context parallelism, and for a group whose cache is not sharded.
    pub context_parallel: Option<ContextParallel>,
}

impl SlotRule {
    /// Writes the slot of each position of one request; `row` is its blocks. Returns how many positions this rank owns that
    /// lie beyond the row: they get `PAD_SLOT_ID`, and a host that verifies refuses the step.
    ///
    /// Without context parallelism slot = `row[pos / B]` · B + pos mod B. With N ranks and interleave I, block pos / (B·N) and
    /// offset o = pos mod (B·N): the position is this rank's if o / I mod N is its rank, its slot then
    /// `row[block]` · B + o / (I·N) · I + o mod I, else `PAD_SLOT_ID`. (vLLM 0.33's slot mapping kernel.)
    ///
    /// # Panics
    /// If `positions` and `out` differ in length, or a size is 0.
    pub fn slots_of_request(&self, row: &[i32], positions: &[i64], out: &mut [i64]) -> usize {
        assert_eq!(
            positions.len(),
            out.len(),
            "positions and slots differ in length"
        );
        let block_size = i64::from(self.block_size);
        match self.context_parallel.filter(|cp| cp.size > 1) {
            None => plain_slots(row, block_size, positions, out),
            Some(cp) => {
                let (size, interleave) = (i64::from(cp.size), i64::from(cp.interleave));
                let (virtual_block, round) = (block_size * size, interleave * size);
                let mut beyond = 0;
                for (&position, slot) in positions.iter().zip(out) {
                    let (block, offset) = (
                        position.div_euclid(virtual_block),
                        position.rem_euclid(virtual_block),
                    );
                    *slot = PAD_SLOT_ID;
                    if offset / interleave % size == i64::from(cp.rank) {
                        let local = offset / round * interleave + offset % interleave;
                        match usize::try_from(block).ok().and_then(|block| row.get(block)) {
                            Some(&id) => *slot = i64::from(id) * block_size + local,
                            None => beyond += 1,
                        }
                    }
                }
                beyond
            }
        }
    }
}

/// Positions of a request mostly follow one another, so a block's bounds are found once, not by a division per token.
fn plain_slots(row: &[i32], block_size: i64, positions: &[i64], out: &mut [i64]) -> usize {
    let mut beyond = 0;
    // Positions [start, end) have slot position + shift, where there is a block.
    let (mut start, mut end, mut shift) = (0, 0, None);
    for (&position, slot) in positions.iter().zip(out) {
        if position < start || position >= end {
            let block = position.div_euclid(block_size);
            start = block * block_size;
            end = start + block_size;
            shift = usize::try_from(block)
                .ok()
                .and_then(|b| row.get(b))
                .map(|&id| i64::from(id) * block_size - start);
        }
        *slot = match shift {
            Some(shift) => position + shift,
            None => {
                beyond += 1;
                PAD_SLOT_ID
            }
        };
    }
    beyond
}

/// Slots of a batch, `s64 [out.len()]`: `row(r)` gives the blocks of batch row r, or `None` for a row that owns no slots (its
/// tokens get `PAD_SLOT_ID`). Everything behind the last token is `PAD_SLOT_ID` too. Returns how many tokens lie beyond
/// their row.
///
/// # Panics
/// If query starts fall, or end beyond `positions` or `out`.
pub fn slot_mapping_into<'t>(
    rule: SlotRule,
    row: impl Fn(usize) -> Option<&'t [i32]>,
    query_start_loc: &[i32],
    positions: &[i64],
    out: &mut [i64],
) -> usize {
    let mut beyond = 0;
    let mut written = 0;
    for (r, w) in query_start_loc.windows(2).enumerate() {
        let (start, end) = (w[0] as usize, w[1] as usize);
        let slots = &mut out[start..end];
        match row(r) {
            Some(blocks) => beyond += rule.slots_of_request(blocks, &positions[start..end], slots),
            None => slots.fill(PAD_SLOT_ID),
        }
        written = end;
    }
    out[written..].fill(PAD_SLOT_ID);
    beyond
}
