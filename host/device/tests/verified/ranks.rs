//! A rank of decode context parallelism, alone: what it finds in its share of the keys for the heads of all ranks, and what merges
//! from that and the step's own tokens for its own heads, against float64; all that is not the request's own is NaN. It must never
//! know how metadata was built or broken.

use timetable_attention::batch::{ContextParallel, SlotRule};
use timetable_device::cpu::{
    AttentionConfig, ContextParallelImpl, ContextParallelMetadata, ImplError, KvCache, Partial,
    new_impl,
};
use timetable_types::{Family, Metadata};

use super::{BOUND, Case, Ran, UNWRITTEN};

impl Case {
    /// Runs metadata of this case's rank.
    pub(super) fn run_rank(&self, metadata: &Metadata) -> Ran {
        let ranks = self.config.parallel.dcp_world_size as usize;
        let own = AttentionConfig {
            num_heads: self.layer.num_heads / ranks,
            ..self.layer
        };
        let attention = match ContextParallelImpl::new(metadata.family(), own, ranks) {
            Ok(attention) => attention,
            Err(error) => return Ran::NotHere(error.to_string()),
        };
        let mut step = ContextParallelMetadata::new();
        let (inputs, block_size) = (self.step.tensors.inputs(), self.layer.block_size as u32);
        if let Err(error) = step.prepare(metadata, &inputs, block_size, self.rank()) {
            return Ran::NotHere(error.to_string());
        }
        let rows = (0..self.keys.len()).filter(|&row| self.query_len(row) > 0);
        for row in rows {
            match self.run_row(row, &attention, &step, metadata.family()) {
                Ok(None) => {}
                Ok(Some(problem)) => return Ran::Wrong(format!("row {row}, {problem}")),
                Err(error) => return Ran::Wrong(format!("row {row}: {error}")),
            }
        }
        Ran::Right
    }

    fn rank(&self) -> ContextParallel {
        let parallel = &self.config.parallel;
        ContextParallel {
            size: parallel.dcp_world_size,
            rank: parallel.dcp_rank,
            interleave: parallel.cp_kv_cache_interleave_size,
        }
    }

    /// Does the pass over the cache take this step's keys too? FLASHINFER's does for its decodes.
    fn is_decode(&self, family: Family, row: usize) -> bool {
        family == Family::Flashinfer && (0..=row).all(|row| self.query_len(row) <= 1)
    }

    /// What is wrong with one request's results, its keys alone being no NaN.
    fn run_row(
        &self,
        row: usize,
        attention: &ContextParallelImpl,
        step: &ContextParallelMetadata,
        family: Family,
    ) -> Result<Option<String>, ImplError> {
        let ContextParallel { size, rank, .. } = self.rank();
        let (size, rank, head_size) = (size as usize, rank as usize, self.layer.head_size);
        let count = self.keys[row].len() / head_size;
        let positions: Vec<i64> = (0..count as i64).collect();
        let mut slots = vec![-1; count];
        let rule = SlotRule {
            block_size: self.layer.block_size as u32,
            context_parallel: Some(self.rank()),
        };
        rule.slots_of_request(self.step.tensors.table().row(row), &positions, &mut slots);
        let blocks = self.num_blocks as usize;
        let dtype = self.layer.kv_cache_dtype;
        let mut cache = KvCache::new(blocks, 1, self.layer.block_size, head_size, dtype);
        cache.fill(f32::NAN);
        let writer = new_impl(Family::FlashAttn, self.layer)?;
        writer.do_kv_cache_update(&self.keys[row], &self.values[row], &mut cache, &slots);

        let tokens = self.step.cam.num_actual_tokens as usize;
        let heads = self.layer.num_heads;
        let mut output = vec![UNWRITTEN; tokens * heads * head_size];
        let mut lse = vec![UNWRITTEN; tokens * heads];
        attention.forward_shard(&self.query, &cache, step, &mut output, &mut lse)?;

        // This request's own tokens, where they stand in the step.
        let (query, first) = (
            self.query_len(row),
            self.step.tensors.query_start_loc[row] as usize,
        );
        let context = count - query;
        let (mut key, mut value) = (
            vec![f32::NAN; tokens * head_size],
            vec![f32::NAN; tokens * head_size],
        );
        let own = first * head_size..(first + query) * head_size;
        key[own.clone()].copy_from_slice(&self.keys[row][context * head_size..]);
        value[own].copy_from_slice(&self.values[row][context * head_size..]);
        let width = heads / size * head_size;
        let part: Vec<f32> = self
            .query
            .chunks(heads * head_size)
            .flat_map(|token| &token[rank * width..(rank + 1) * width])
            .copied()
            .collect();
        let mut new_output = vec![UNWRITTEN; tokens * width];
        let mut new_lse = vec![UNWRITTEN; tokens * heads / size];
        attention.forward_new_tokens(&part, (&key, &value), step, &mut new_output, &mut new_lse)?;
        let nothing = (vec![0.0; output.len()], vec![f32::NEG_INFINITY; lse.len()]);
        let partial = |output, lse| Partial { output, lse };
        let shards: Vec<Partial<'_>> = (0..size)
            .map(|other| match other == rank {
                true => partial(&output, &lse),
                false => partial(&nothing.0, &nothing.1),
            })
            .collect();
        let mut merged = vec![UNWRITTEN; tokens * width];
        let new_tokens = partial(&new_output, &new_lse);
        attention.combine(rank, &shards, new_tokens, &mut merged)?;

        let decode = self.is_decode(family, row);
        let in_cache = |key: usize| slots[key] >= 0 && (decode || key < context);
        let share = self.attention(|other, key| other == row && in_cache(key));
        let all = self
            .attention(|other, key| other == row && (in_cache(key) || (!decode && key >= context)));
        let all: Vec<f64> = all
            .chunks(heads * head_size)
            .flat_map(|token| &token[rank * width..(rank + 1) * width])
            .copied()
            .collect();
        for (what, found, wanted, width) in [
            ("its share", &output, &share, heads * head_size),
            ("all of it", &merged, &all, width),
        ] {
            let own = first * width..(first + query) * width;
            let pairs = found[own.clone()]
                .chunks(head_size)
                .zip(wanted[own].chunks(head_size));
            for (index, (found, wanted)) in pairs.enumerate() {
                let scale = wanted.iter().fold(1e-3f64, |scale, x| scale.max(x.abs()));
                let close = |(&found, wanted): (&f32, &f64)| {
                    (f64::from(found) - wanted).abs() <= BOUND * scale
                };
                if !found.iter().zip(wanted).all(close) {
                    return Ok(Some(format!(
                        "{what}: row {index} of heads: {} where {} was right",
                        found[0], wanted[0]
                    )));
                }
            }
        }
        let starts = &self.step.tensors.query_start_loc;
        let covered = starts[starts.len() - 1] as usize * heads * head_size;
        if output[covered..].iter().any(|&x| x != 0.0) {
            return Ok(Some("a token of no request is not zeros".to_owned()));
        }
        Ok(None)
    }
}
