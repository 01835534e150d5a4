//! Executes prepared metadata for one layer: partial results item by item, then their merge. It must never know which
//! backend the metadata came from.
//!
//! Work is divided along the metadata: a *leaf* is one group of items (a FLASH_ATTN split of a query tile, or a FLASHINFER
//! worker's list) for one KV head. Leaves are halved by cost until they are small, then run in order, each writing its own
//! part of a scratch buffer. The merge runs over tokens. Which thread ran what cannot change a result.

use std::{cell::RefCell, ops::Range};

use rayon::prelude::*;

use super::{
    AttentionConfig, KvCache, StepMetadata,
    kernel::{self, Content, Task, Workspace},
    kv_cache::Storage,
    math::Element,
    step::NONE,
};

/// Below this many multiply-adds (some tens of microseconds) a second thread costs more than it saves.
pub(super) const SEQUENTIAL_COST: u64 = 1 << 20;
/// Output elements that one thread merges at a time.
const MERGE_GRAIN: usize = 1 << 16;

/// Partial results of one forward call: kept by the calling thread from layer to layer.
#[derive(Default)]
struct Scratch {
    output: Vec<f32>,
    lse: Vec<f64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// `query` and `output` hold `num_actual_tokens` rows; shapes, block ids and hyperparameters have been checked. `lse`: f32
/// [num_actual_tokens, num_heads], if wanted.
pub(super) fn execute(
    config: &AttentionConfig,
    step: &StepMetadata,
    query: &[f32],
    kv_cache: &KvCache,
    output: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let content = Content::key_then_value(config.head_size);
    match &kv_cache.storage {
        Storage::F32(cache) => {
            execute_over(config, step, query, cache, content, output, lse);
        }
        Storage::Bf16(cache) => {
            execute_over(config, step, query, cache, content, output, lse);
        }
    }
}

/// As `execute`, over elements that lie as `content` says.
pub(super) fn execute_over<E: Element>(
    config: &AttentionConfig,
    step: &StepMetadata,
    query: &[f32],
    cache: &[E],
    content: Content,
    output: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let forward = Forward {
        config,
        step,
        query,
        cache,
        content,
    };
    forward.run(output, lse);
}

struct Forward<'a, E> {
    config: &'a AttentionConfig,
    step: &'a StepMetadata,
    query: &'a [f32],
    cache: &'a [E],
    content: Content,
}

impl<E: Element> Forward<'_, E> {
    fn run(&self, output: &mut [f32], lse: Option<&mut [f32]>) {
        let groups = self.step.groups.len() - 1;
        let leaves = groups * self.config.num_kv_heads;
        let mut scratch = SCRATCH.take();
        let rows = self.partial_row(leaves);
        let size = self.content.value_size;
        if scratch.lse.len() < rows {
            scratch.lse.resize(rows, 0.0);
        }
        if scratch.output.len() < rows * size {
            scratch.output.resize(rows * size, 0.0);
        }
        Leaves {
            cost: &|leaf| self.cost(leaf),
            row: &|leaf| self.partial_row(leaf),
            width: size,
            run: &|leaf, output, lse| {
                WORKSPACE.with_borrow_mut(|workspace| {
                    self.run_leaf(leaf, workspace, output, lse);
                });
            },
        }
        .run(
            leaves,
            self.config.head_size as u64,
            &mut scratch.output[..rows * size],
            &mut scratch.lse[..rows],
        );
        self.merge(&scratch, output, lse);
        SCRATCH.set(scratch);
    }

    /// Packed rows per unit of the metadata.
    fn rows_per_unit(&self) -> usize {
        if self.step.packed {
            1
        } else {
            self.heads_per_kv_head()
        }
    }

    fn heads_per_kv_head(&self) -> usize {
        self.config.num_heads / self.config.num_kv_heads
    }

    /// Partial rows of all leaves before `leaf`.
    fn partial_row(&self, leaf: usize) -> usize {
        let (group, head) = (
            leaf / self.config.num_kv_heads,
            leaf % self.config.num_kv_heads,
        );
        let units = &self.step.group_units;
        let mut before = units[group] * self.config.num_kv_heads;
        if head > 0 {
            before += head * (units[group + 1] - units[group]);
        }
        before * self.rows_per_unit()
    }

    /// Query rows × keys of all leaves before `leaf`.
    fn cost(&self, leaf: usize) -> u64 {
        let heads = self.config.num_kv_heads;
        let (group, head) = (leaf / heads, leaf % heads);
        let cost = &self.step.group_cost;
        let mut before = cost[group] * heads as u64;
        if head > 0 {
            before += head as u64 * (cost[group + 1] - cost[group]);
        }
        before * self.rows_per_unit() as u64
    }

    fn run_leaf(
        &self,
        leaf: usize,
        workspace: &mut Workspace,
        output: &mut [f32],
        lse: &mut [f64],
    ) {
        let (group, kv_head) = (
            leaf / self.config.num_kv_heads,
            leaf % self.config.num_kv_heads,
        );
        let items = self.step.groups[group] as usize..self.step.groups[group + 1] as usize;
        let per_unit = self.rows_per_unit();
        let size = self.content.value_size;
        let mut first = 0;
        for item in &self.step.items[items] {
            let row = self.step.rows[item.row as usize];
            let packed = item.q0 as usize * per_unit..item.q1 as usize * per_unit;
            let end = first + packed.len();
            let task = Task {
                query: self.query,
                cache: self.cache,
                content: self.content,
                pages: &self.step.pages[row.page as usize..],
                config: self.config,
                token: row.token as usize,
                q_len: row.q_len as usize,
                kv_len: row.kv_len as usize,
                causal: row.causal,
                kv_head,
                keys: item.k0 as usize..item.k1 as usize,
            };
            kernel::attend(
                &task,
                packed,
                workspace,
                &mut output[first * size..end * size],
                &mut lse[first..end],
            );
            first = end;
        }
    }

    fn merge(&self, scratch: &Scratch, output: &mut [f32], lse: Option<&mut [f32]>) {
        let width = self.config.num_heads * self.content.value_size;
        let tokens = self.step.num_actual_tokens;
        if tokens == 0 {
            return;
        }
        if let Some(lse) = lse {
            let rows = output
                .chunks_mut(width)
                .zip(lse.chunks_mut(self.config.num_heads));
            for (token, (output, lse)) in rows.enumerate() {
                self.merge_token(token, scratch, output, Some(lse));
            }
        } else if output.len() <= MERGE_GRAIN {
            for (token, output) in output.chunks_mut(width).enumerate() {
                self.merge_token(token, scratch, output, None);
            }
        } else {
            let chunk = (MERGE_GRAIN / width).max(1);
            output
                .par_chunks_mut(chunk * width)
                .enumerate()
                .for_each(|(index, output)| {
                    for (offset, output) in output.chunks_mut(width).enumerate() {
                        self.merge_token(index * chunk + offset, scratch, output, None);
                    }
                });
        }
    }

    fn merge_token(
        &self,
        token: usize,
        scratch: &Scratch,
        output: &mut [f32],
        mut lse: Option<&mut [f32]>,
    ) {
        let step = self.step;
        let size = self.content.value_size;
        let group_size = self.heads_per_kv_head();
        let row_index = step.token_rows.get(token).copied().unwrap_or(NONE);
        for (head, output) in output.chunks_mut(size).enumerate() {
            let mut merged = f64::NEG_INFINITY;
            if row_index == NONE {
                output.fill(0.0);
            } else {
                let row = step.rows[row_index as usize];
                let (kv_head, member) = (head / group_size, head % group_size);
                let packed = (token - row.token as usize) * group_size + member;
                let unit = packed / self.rows_per_unit();
                let tile = row.tile as usize + unit / row.tile_units as usize;
                let slots = step.slot_indptr[tile] as usize..step.slot_indptr[tile + 1] as usize;
                let partials = step.slot_items[slots].iter().filter_map(|&item| {
                    let partial = self.find_partial(item, row_index, kv_head, packed)?;
                    Some((
                        &scratch.output[partial * size..(partial + 1) * size],
                        scratch.lse[partial],
                    ))
                });
                merged = merge_states(partials, output);
            }
            if let Some(lse) = &mut lse {
                lse[head] = merged as f32;
            }
        }
    }

    /// Where in scratch the partial result of `packed` for `kv_head` stands, if the item is one of this row's.
    fn find_partial(&self, item: u32, row: u32, kv_head: usize, packed: usize) -> Option<usize> {
        let step = self.step;
        let of = step.items.get(item as usize)?;
        let per_unit = self.rows_per_unit();
        let (q0, q1) = (of.q0 as usize * per_unit, of.q1 as usize * per_unit);
        if of.row != row || packed < q0 || packed >= q1 {
            return None;
        }
        let group = step.item_groups[item as usize] as usize;
        let in_group = step.item_units[item as usize] - step.group_units[group];
        let leaf = group * self.config.num_kv_heads + kv_head;
        Some(self.partial_row(leaf) + in_group * per_unit + (packed - q0))
    }
}

/// Runs one leaf: its index, its rows `f32 [rows, width]`, and a number for each row.
type RunLeaf<'a> = dyn Fn(usize, &mut [f32], &mut [f64]) + Sync + 'a;

/// Leaves of work, each with rows of its own in a buffer, one leaf's behind the other's.
pub(super) struct Leaves<'a> {
    /// Of all leaves before one.
    pub cost: &'a (dyn Fn(usize) -> u64 + Sync),
    /// Rows of all leaves before one.
    pub row: &'a (dyn Fn(usize) -> usize + Sync),
    /// Elements of a row.
    pub width: usize,
    pub run: &'a RunLeaf<'a>,
}

impl Leaves<'_> {
    /// Runs leaves [0, count). `scale`: multiply-adds per unit of cost.
    pub fn run(&self, count: usize, scale: u64, output: &mut [f32], lse: &mut [f64]) {
        let total = (self.cost)(count);
        let threads = rayon::current_num_threads() as u64;
        // Eight pieces a thread, so that a slow one can be helped.
        let grain = match total.saturating_mul(scale) <= SEQUENTIAL_COST || threads == 1 {
            true => u64::MAX,
            false => (total / (8 * threads)).max(1),
        };
        self.run_range(0..count, grain, output, lse);
    }

    fn run_range(&self, leaves: Range<usize>, grain: u64, output: &mut [f32], lse: &mut [f64]) {
        let (cost_of, row_of) = (self.cost, self.row);
        let cost = cost_of(leaves.end) - cost_of(leaves.start);
        let first = row_of(leaves.start);
        if leaves.len() <= 1 || cost <= grain {
            for leaf in leaves {
                let rows = row_of(leaf) - first..row_of(leaf + 1) - first;
                (self.run)(
                    leaf,
                    &mut output[rows.start * self.width..rows.end * self.width],
                    &mut lse[rows],
                );
            }
            return;
        }
        let half = cost_of(leaves.start) + cost / 2;
        let (mut low, mut high) = (leaves.start + 1, leaves.end - 1);
        while low < high {
            let middle = low.midpoint(high);
            if cost_of(middle) < half {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let rows = row_of(low) - first;
        let (left, right) = output.split_at_mut(rows * self.width);
        let (left_lse, right_lse) = lse.split_at_mut(rows);
        rayon::join(
            || self.run_range(leaves.start..low, grain, left, left_lse),
            || self.run_range(low..leaves.end, grain, right, right_lse),
        );
    }
}

/// Merges partial attention results (output `f32 [D]`, log-sum-exp) of one query row, in order, into `output`. Returns the
/// log-sum-exp of the whole, −∞ if there is nothing.
///
/// The field's merge of two states, out = (p·wp + s·ws) / (wp + ws) with w = e^(lse − max), extended to n: an LSE of +∞
/// counts as −∞, and where all are −∞ the output is 0. Sums are f64.
pub fn merge_states<'a>(
    partials: impl Iterator<Item = (&'a [f32], f64)> + Clone,
    output: &mut [f32],
) -> f64 {
    const LANES: usize = 32;
    let partials = partials.map(|(partial, lse)| {
        (
            partial,
            if lse == f64::INFINITY {
                f64::NEG_INFINITY
            } else {
                lse
            },
        )
    });
    let mut count = 0;
    let mut max = f64::NEG_INFINITY;
    let mut only: &[f32] = &[];
    for (partial, lse) in partials.clone() {
        count += 1;
        only = partial;
        // A NaN stays: it must not be merged away.
        if lse > max || lse.is_nan() {
            max = lse;
        }
    }
    if max == f64::NEG_INFINITY {
        output.fill(0.0);
        return max;
    }
    if count == 1 {
        output.copy_from_slice(only);
        return max;
    }
    let sum: f64 = partials.clone().map(|(_, lse)| (lse - max).exp()).sum();
    for (index, output) in output.chunks_mut(LANES).enumerate() {
        let mut total = [0.0f64; LANES];
        for (partial, lse) in partials.clone() {
            let weight = (lse - max).exp();
            // A weight of 0 belongs to a partial that nothing wrote.
            if weight == 0.0 {
                continue;
            }
            let part = &partial[index * LANES..];
            for (total, &x) in total.iter_mut().zip(part).take(output.len()) {
                *total += weight * f64::from(x);
            }
        }
        for (output, total) in output.iter_mut().zip(total) {
            *output = (total / sum) as f32;
        }
    }
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::merge_states;

    fn merge(partials: &[(&[f32], f64)]) -> (Vec<f32>, f64) {
        let mut output = vec![f32::NAN; partials[0].0.len()];
        let lse = merge_states(partials.iter().copied(), &mut output);
        (output, lse)
    }

    #[test]
    fn merge_follows_the_field() {
        let (a, b): (&[f32], &[f32]) = (&[1.0, 2.0], &[3.0, 6.0]);
        let (output, lse) = merge(&[(a, 0.0), (b, 3f64.ln())]);
        assert_eq!(output, [2.5, 5.0]);
        assert!((lse - 4f64.ln()).abs() < 1e-15);

        // +∞ counts as −∞.
        assert_eq!(merge(&[(a, f64::INFINITY), (b, 1.0)]), (b.to_vec(), 1.0));
        // Nothing at all.
        let nothing = f64::NEG_INFINITY;
        assert_eq!(
            merge(&[(a, nothing), (b, f64::INFINITY)]),
            (vec![0.0, 0.0], nothing)
        );
        assert_eq!(merge(&[(a, nothing)]), (vec![0.0, 0.0], nothing));
        // A NaN is not hidden.
        assert!(merge(&[(a, 0.0), (b, f64::NAN)]).0[0].is_nan());
        assert!(merge(&[(a, f64::NAN), (b, 0.0)]).0[0].is_nan());
    }
}
