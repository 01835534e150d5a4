//! The MLA backends' records, read: a token's own step is −1 − t for each token t that it sees of it, its context slots, whether
//! the row decodes or prefills. Under context parallelism slots are this rank's.

use timetable_types::{
    Input, Tensor,
    flash_mla::{ChunkedContext, DecodeSchedule, Metadata, MlaDecode, MlaPrefill, TileSchedule},
};

use super::Reader;

impl Reader<'_> {
    pub(super) fn flash_mla(&mut self, record: &Metadata) -> Result<(), String> {
        if record.slot_mapping != Tensor::Input(Input::SlotMapping) || !record.causal {
            return Err("other slots, or not causal".to_owned());
        }
        let starts = self.vector(&record.query_start_loc)?;
        let rows = starts.len() - 1;
        let decodes = record.num_decodes as usize;
        if decodes + record.num_prefills as usize != rows || record.num_reqs as usize != rows {
            return Err("rows that are neither".to_owned());
        }
        // The decodes' queries are taken from the front, the prefills' from there on.
        if decodes < rows && record.num_decode_tokens as i32 != starts[decodes] {
            return Err("tokens of another row".to_owned());
        }
        if let Some(decode) = &record.decode {
            self.mla_decode(decode, &starts[..=decodes])?;
        } else if decodes > 0 {
            return Err("decodes without a record".to_owned());
        }
        match &record.prefill {
            Some(prefill) => self.mla_prefill(prefill, &starts[decodes..]),
            None if decodes < rows => Err("prefills without a record".to_owned()),
            None => Ok(()),
        }
    }

    fn mla_decode(&mut self, decode: &MlaDecode, starts: &[i32]) -> Result<(), String> {
        let lens = self.vector(&decode.seq_lens)?;
        let table = self.vector(&decode.block_table)?;
        let width = self.case.step.tensors.block_table_width;
        let rows = starts.len() - 1;
        if lens.len() != rows || table.len() != rows * width {
            return Err("rows of others".to_owned());
        }
        let own = match &decode.query_start_loc {
            Some(tensor) => self.vector(tensor)?,
            None => (0..=rows as i32)
                .map(|row| (row * decode.max_query_len as i32).min(starts[rows]))
                .collect(),
        };
        if own != starts {
            return Err("queries of others".to_owned());
        }
        if let DecodeSchedule::Tiles(tiles) = &decode.schedule {
            self.tiles(tiles, &lens, starts, decode.max_num_splits)?;
        }
        let whole = match &decode.dcp_tot_seq_lens {
            Some(tensor) => self.vector(tensor)?,
            None if self.sharded() => return Err("no whole lengths".to_owned()),
            None => lens.clone(),
        };
        for row in 0..rows {
            let (start, query) = (
                starts[row] as usize,
                (starts[row + 1] - starts[row]) as usize,
            );
            let pages = &table[row * width..(row + 1) * width];
            let context = whole[row] as usize - query;
            for token in 0..query.min(decode.max_query_len as usize) {
                let mut keys = Vec::new();
                for key in 0..(lens[row] as usize).min(decode.max_seq_len as usize) {
                    // A rank's keys are those of its share; the last ones may be this step's.
                    let slot = self.slot(pages, key)?;
                    match key.checked_sub(context).filter(|_| !self.sharded()) {
                        Some(own) if own > token => {}
                        Some(own) => keys.push(-1 - (start + own) as i64),
                        None => keys.push(slot),
                    }
                }
                self.give(start + token, &keys)?;
            }
        }
        Ok(())
    }

    /// Every page of every row once, and partial results counted; a row without queries has no pages.
    fn tiles(
        &self,
        tiles: &TileSchedule,
        lens: &[i32],
        starts: &[i32],
        most: u32,
    ) -> Result<(), String> {
        let (Tensor::Matrix(parts), Tensor::Values(splits)) =
            (&tiles.tile_scheduler_metadata, &tiles.num_splits)
        else {
            return Err("tiles of another form".to_owned());
        };
        let size = self.case.config.kv_cache_spec.block_size as i32;
        let pages: Vec<i32> = lens
            .iter()
            .zip(starts.windows(2))
            .map(|(len, pair)| match pair[1] > pair[0] {
                true => (len + size - 1) / size,
                false => 0,
            })
            .collect();
        let mut seen: Vec<Vec<u32>> = pages.iter().map(|&count| vec![0; count as usize]).collect();
        let mut counts = vec![0; lens.len()];
        for part in parts.values.chunks(parts.columns as usize) {
            let [first, from, last, to, split] = part[..5] else {
                return Err("a short part".to_owned());
            };
            for row in first..=last.min(lens.len() as i32 - 1) {
                let begin = if row == first { from } else { 0 };
                let end = if row == last { to } else { pages[row as usize] };
                if begin >= end {
                    continue;
                }
                // A request's partial results stand one behind the other.
                let at = if row == first { split } else { 0 };
                if at != counts[row as usize] {
                    return Err("a partial result in another's place".to_owned());
                }
                counts[row as usize] += 1;
                for page in begin..end {
                    let page = seen[row as usize].get_mut(page as usize);
                    *page.ok_or("a page beyond the row")? += 1;
                }
            }
        }
        if seen.iter().flatten().any(|&times| times != 1) {
            return Err("a page not once".to_owned());
        }
        let sums = splits.windows(2).map(|pair| pair[1] - pair[0]);
        if splits[0] != 0 || !sums.eq(counts.iter().copied()) {
            return Err("other splits than counted".to_owned());
        }
        match counts.iter().all(|&count| count as u32 <= most) {
            true => Ok(()),
            false => Err("more splits than room".to_owned()),
        }
    }

    fn mla_prefill(&mut self, prefill: &MlaPrefill, starts: &[i32]) -> Result<(), String> {
        let rows = starts.len() - 1;
        let own = self.vector(&prefill.query_start_loc)?;
        let table = self.vector(&prefill.block_table)?;
        let width = self.case.step.tensors.block_table_width;
        if own.len() != rows + 1 || table.len() != rows * width {
            return Err("rows of others".to_owned());
        }
        if (0..rows).any(|row| prefill.query_lens_cpu.get(row) != Some(&(own[row + 1] - own[row])))
        {
            return Err("other query lengths".to_owned());
        }
        // What the kernel calls of the context write, row by row; and rows without any, which are cleared.
        let mut contexts: Vec<Vec<i64>> = vec![Vec::new(); rows];
        let mut cleared = vec![prefill.chunked_context.is_none(); rows];
        if let Some(context) = &prefill.chunked_context {
            self.chunks(context, &own, &table, &mut contexts)?;
            for slice in &context.empty_token_slices {
                let mut rows = (0..rows).filter(|&row| {
                    (slice.start as i32, slice.end as i32) == (own[row], own[row + 1])
                        && !cleared[row]
                });
                let row = rows.next().ok_or("an empty slice of no row")?;
                cleared[row] = true;
            }
        }
        let first = starts[0];
        for row in 0..rows {
            if cleared[row] != contexts[row].is_empty() {
                return Err(format!("row {row} is neither cleared nor written"));
            }
            let start = (first + own[row]) as usize;
            let query = (own[row + 1] - own[row]) as usize;
            for token in 0..query.min(prefill.max_query_len as usize) {
                let mut keys = contexts[row].clone();
                keys.extend((0..=token).map(|key| -1 - (start + key) as i64));
                self.give(start + token, &keys)?;
            }
        }
        Ok(())
    }

    /// The slots of each row's context that the chunks gather. Under context parallelism a rank gathers its own share, padded.
    fn chunks(
        &self,
        context: &ChunkedContext,
        own: &[i32],
        table: &[i32],
        found: &mut [Vec<i64>],
    ) -> Result<(), String> {
        let width = self.case.step.tensors.block_table_width;
        let parallel = &self.case.config.parallel;
        let (ranks, rank) = (parallel.dcp_world_size as i32, parallel.dcp_rank as usize);
        for (index, chunk) in context.chunks.iter().enumerate() {
            let rows = chunk.request_slice.start as usize..chunk.request_slice.end as usize;
            let (Some(&begin), Some(&end)) = (own.get(rows.start), own.get(rows.end)) else {
                return Err("rows beyond".to_owned());
            };
            let local = match &chunk.dcp {
                Some(dcp) => &dcp.padded_local_seq_lens,
                None => &chunk.seq_lens,
            };
            let sum: i32 = local.iter().sum();
            let room = match ranks {
                1 => context.workspace.shape[0] as i32,
                ranks => context.workspace.shape[0] as i32 / (ranks + 1),
            };
            let continues = chunk.is_continuation != found[rows.start].is_empty();
            if chunk.index as usize != index
                || (chunk.token_slice.start as i32, chunk.token_slice.end as i32) != (begin, end)
                || chunk.continuation_token_end as i32 != own[rows.start + 1]
                || !continues
                || !chunk.all_rows_active
                || chunk.num_local_context_tokens as i32 != sum
                || sum > room
                || chunk.token_to_seq != Tensor::SegmentIds
            {
                return Err(format!("chunk {index} is of others"));
            }
            sums(&chunk.cu_seq_lens, &chunk.seq_lens)?;
            if chunk.num_context_tokens as i32 != chunk.cu_seq_lens[rows.len()] {
                return Err(format!("chunk {index} has other tokens"));
            }
            for (at, row) in rows.clone().enumerate() {
                let query = chunk.query_start_loc.get(at..=at + 1).ok_or("no queries")?;
                if query != [own[row] - begin, own[row + 1] - begin]
                    || query[1] - query[0] > chunk.max_query_len as i32
                    || chunk.seq_lens[at] > chunk.max_seq_len as i32
                    || (at > 0 && !found[row].is_empty())
                {
                    return Err(format!("chunk {index} has other queries or keys"));
                }
                let (mut start, mut len) = (chunk.starts[at], chunk.seq_lens[at]);
                if let Some(dcp) = &chunk.dcp {
                    sums(&dcp.padded_local_cu_seq_lens, &dcp.padded_local_seq_lens)?;
                    if dcp.local_starts != chunk.starts
                        || dcp.padded_local_token_to_seq != Tensor::SegmentIds
                    {
                        return Err("other ranks' rows".to_owned());
                    }
                    // What the rank really has of it: padding is nobody's key.
                    let held = dcp.local_context_lens_allranks[at * ranks as usize + rank];
                    start = dcp.local_starts[at];
                    len = dcp.padded_local_seq_lens[at].min(held - start).max(0);
                    self.shares(&dcp.local_context_lens_allranks, at, row, own)?;
                }
                // In order, so that each key comes once.
                if start as usize != found[row].len() && ranks == 1 {
                    return Err("a gap in the context".to_owned());
                }
                let pages = &table[row * width..(row + 1) * width];
                for key in start..start + len {
                    found[row].push(self.slot(pages, key as usize)?);
                }
            }
        }
        // Every context whole.
        for (row, found) in found.iter().enumerate() {
            let context = context.context_lens.get(row).copied().unwrap_or(-1);
            let step = &self.case.step.tensors;
            let at = step.seq_lens.len() - context_rows(own) + row;
            let wanted = step.seq_lens[at] - (own[row + 1] - own[row]);
            if context != wanted || (ranks == 1 && found.len() as i32 != wanted) {
                return Err(format!("row {row} has {} keys of {wanted}", found.len()));
            }
        }
        Ok(())
    }

    /// Every rank's share of a row's whole context: token i lies on rank (i / run) mod ranks.
    fn shares(&self, all: &[i32], at: usize, row: usize, own: &[i32]) -> Result<(), String> {
        let parallel = &self.case.config.parallel;
        let (ranks, run) = (
            parallel.dcp_world_size,
            parallel.cp_kv_cache_interleave_size,
        );
        let lens = &self.case.step.tensors.seq_lens;
        let len = lens[lens.len() - context_rows(own) + row] - (own[row + 1] - own[row]);
        for rank in 0..ranks {
            let held = (0..len as u32)
                .filter(|token| token / run % ranks == rank)
                .count();
            if all.get(at * ranks as usize + rank as usize) != Some(&(held as i32)) {
                return Err("other shares".to_owned());
            }
        }
        Ok(())
    }
}

fn context_rows(own: &[i32]) -> usize {
    own.len() - 1
}

fn sums(found: &[i32], of: &[i32]) -> Result<(), String> {
    let counted = found.windows(2).map(|pair| pair[1] - pair[0]);
    match found.first() == Some(&0) && counted.eq(of.iter().copied()) {
        true => Ok(()),
        false => Err("other sums".to_owned()),
    }
}
