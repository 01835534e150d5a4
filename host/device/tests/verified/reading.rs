//! An independent reading of records: which keys each packed query row attends to. For records that the CPU device does not run
//! (spans, prefix windows, TensorRT-LLM's kernels), for MLA beside them, and for blocks that a builder selects. It must never
//! share code with the verifier.

#[path = "reading/flash_mla.rs"]
mod flash_mla;
#[path = "reading/mamba.rs"]
mod mamba;
#[path = "reading/triton_attn.rs"]
mod triton_attn;

use timetable_attention::{Resolver, Siblings};
use timetable_types::{
    Causal, Input, Metadata, Tensor,
    flash_attn::{self, TileOrder},
    flashinfer::{self, Decode, Plan, Prefill, TrtllmDecode, TrtllmPrefill},
};

use crate::case::Case;

/// For each packed row (token · heads of a KV head + head), what it attends to, sorted: slots of the cache, or −1 − t for the
/// step's own token t.
pub type Reading = Vec<Vec<i64>>;

struct Reader<'c> {
    case: &'c Case,
    resolver: Resolver<'c>,
    group: usize,
    found: Reading,
}

/// What `metadata` says, or what is wrong with it.
pub fn read(case: &Case, metadata: &Metadata) -> Result<Reading, String> {
    let config = &case.config;
    // The ranks of context parallelism share their queries' heads.
    let heads = config.attention.num_heads * config.parallel.dcp_world_size;
    let group = (heads / config.kv_cache_spec.num_kv_heads) as usize;
    let mut reader = Reader {
        case,
        resolver: Resolver::new(config, &case.step.cam, case.step.tensors.inputs()),
        group,
        found: vec![Vec::new(); case.step.cam.num_actual_tokens as usize * group],
    };
    match metadata {
        Metadata::FlashAttn(record) => reader.flash_attn(record)?,
        Metadata::Flashinfer(record) => reader.flashinfer(record)?,
        Metadata::TritonAttn(record) => reader.triton_attn(record)?,
        Metadata::FlashMla(record) => reader.flash_mla(record)?,
        Metadata::Mamba(record) => return case.with(|ctx| mamba::read(ctx, record)),
    }
    reader
        .found
        .iter_mut()
        .for_each(|keys| keys.sort_unstable());
    Ok(reader.found)
}

impl Reader<'_> {
    fn vector(&self, tensor: &Tensor) -> Result<Vec<i32>, String> {
        let found = self.resolver.resolve_i32(tensor, Siblings::NONE);
        found
            .map(|values| values.into_owned())
            .map_err(|error| error.to_string())
    }

    fn sharded(&self) -> bool {
        self.case.config.parallel.dcp_world_size > 1
    }

    /// The slot of key `key` in a list of pages.
    fn slot(&self, pages: &[i32], key: usize) -> Result<i64, String> {
        let size = self.case.config.kv_cache_spec.block_size as usize;
        let page = pages.get(key / size).ok_or("a key without a page")?;
        Ok(i64::from(*page) * size as i64 + (key % size) as i64)
    }

    /// A token's keys for all heads of a KV head.
    fn give(&mut self, token: usize, keys: &[i64]) -> Result<(), String> {
        let rows = token * self.group..(token + 1) * self.group;
        let rows = self.found.get_mut(rows).ok_or("a token beyond the step")?;
        rows.iter_mut().for_each(|row| row.extend_from_slice(keys));
        Ok(())
    }

    fn flash_attn(&mut self, record: &flash_attn::Metadata) -> Result<(), String> {
        let starts = self.vector(&record.query_start_loc)?;
        let lens = self.vector(&record.seq_lens)?;
        let table = self.vector(&record.block_table)?;
        let width = self.case.step.tensors.block_table_width;
        let maybe = |tensor: &Option<Tensor>| tensor.as_ref().map(|t| self.vector(t)).transpose();
        let spans = maybe(&record.mm_prefix_query_range)?;
        let prefixes = maybe(&record.rswa_prefix_lens)?;
        let contexts = maybe(&record.dcp_context_kv_lens)?;
        if record.slot_mapping != Tensor::Input(Input::SlotMapping) {
            return Err("other slots".to_owned());
        }
        let rows = starts.len() - 1;
        let schedule = &record.schedule;
        let order: Vec<i32> = match &schedule.tile_order {
            TileOrder::Natural => (0..rows as i32).collect(),
            TileOrder::Rows(order) => order.clone(),
        };
        for row in order {
            let row = usize::try_from(row).map_err(|_| "a negative row")?;
            let splits = schedule.num_splits.get(row).copied().unwrap_or(1);
            if splits < 1 || i64::from(splits) > i64::from(schedule.max_num_splits) {
                return Err("more splits than room".to_owned());
            }
            let (start, len) = (starts[row] as usize, lens[row] as usize);
            let query = starts[row + 1] as usize - start;
            let pages = &table[row * width..(row + 1) * width];
            let causal = match record.causal {
                Causal::All(causal) => causal,
                Causal::PerRequest => {
                    self.case.step.tensors.causal.as_ref().ok_or("flags")?[row] != 0
                }
            };
            for token in 0..query.min(record.max_query_len as usize) {
                let mut keys = Vec::new();
                if let Some(contexts) = &contexts {
                    let (decodes, prefills) = (record.num_decode_reqs, record.num_prefill_reqs);
                    let counted = row < (decodes + prefills) as usize || decodes + prefills == 0;
                    let most = record.max_dcp_context_kv_len as usize;
                    for key in 0..(contexts[row] as usize).min(most) {
                        if counted {
                            keys.push(self.slot(pages, key)?);
                        }
                    }
                    let last = if causal { token + 1 } else { query };
                    keys.extend((0..last).map(|own| -1 - (start + own) as i64));
                    self.give(start + token, &keys)?;
                    continue;
                }
                let position = len - query + token;
                for key in 0..len.min(record.max_seq_len as usize) {
                    let spanned = spans.as_ref().is_some_and(|spans| {
                        let pair = &spans[2 * (start + token)..];
                        (i64::from(pair[0])..=i64::from(pair[1])).contains(&(key as i64))
                    });
                    let reached = prefixes.as_ref().is_none_or(|prefixes| {
                        key + record.rswa_window as usize > position || key < prefixes[row] as usize
                    });
                    if (!causal || key <= position || spanned) && reached {
                        keys.push(self.slot(pages, key)?);
                    }
                }
                self.give(start + token, &keys)?;
            }
        }
        Ok(())
    }

    fn flashinfer(&mut self, record: &flashinfer::Metadata) -> Result<(), String> {
        if record.slot_mapping != Tensor::Input(Input::SlotMapping) {
            return Err("other slots".to_owned());
        }
        match &record.decode {
            Some(Decode::Wrapper(plan)) => self.plan(plan, 0)?,
            Some(Decode::Trtllm(decode)) => self.trtllm_decode(decode)?,
            None => {}
        }
        match &record.prefill {
            Some(Prefill::Wrapper(plan)) => self.plan(plan, record.num_decode_tokens as usize)?,
            Some(Prefill::Trtllm(prefill)) => {
                self.trtllm_prefill(prefill, record.num_decode_tokens as usize)?;
            }
            None => {}
        }
        Ok(())
    }

    fn plan(&mut self, plan: &Plan, first_token: usize) -> Result<(), String> {
        let starts = self.vector(&plan.qo_indptr)?;
        let siblings = Siblings::pages(&plan.paged_kv_indptr);
        let pages = self.resolver.resolve_i32(&plan.paged_kv_indices, siblings);
        let pages = pages.map_err(|error| error.to_string())?.into_owned();
        let work = &plan.work;
        let (tile, chunk) = (work.cta_tile_q as usize, work.kv_chunk_size as usize);
        let group = (plan.num_qo_heads / plan.num_kv_heads) as usize;
        let tiles: Vec<usize> = starts
            .windows(2)
            .map(|pair| ((pair[1] - pair[0]) as usize * group).div_ceil(tile))
            .collect();
        // The partial results of a tile stand in chunk order, the first chunk first.
        let place = |item: usize| -> Result<usize, String> {
            let row = work.request_indices[item] as usize;
            let before: usize = tiles.get(..row).ok_or("a row beyond")?.iter().sum();
            Ok(before + work.qo_tile_indices[item] as usize)
        };
        let mut taken = vec![false; work.request_indices.len()];
        for worker in work.worker_indptr.windows(2) {
            for item in worker[0] as usize..worker[1] as usize {
                let of_tile = place(item)?;
                let firsts = (0..taken.len()).filter(|&other| place(other) == Ok(of_tile));
                let first = firsts.map(|other| work.kv_tile_indices[other]).min();
                let at = work.merge_indptr[of_tile] + work.kv_tile_indices[item]
                    - first.ok_or("no item")?;
                if at >= work.merge_indptr[of_tile + 1]
                    || std::mem::replace(&mut taken[at as usize], true)
                {
                    return Err("a partial result without a place".to_owned());
                }
                let row = work.request_indices[item] as usize;
                let query = (starts[row + 1] - starts[row]) as usize;
                let len = plan.seq_lens[row] as usize;
                let own = &pages[plan.paged_kv_indptr[row] as usize..];
                let tile_index = work.qo_tile_indices[item] as usize;
                for packed in tile_index * tile..((tile_index + 1) * tile).min(query * group) {
                    let token = packed / group;
                    let first_key = work.kv_tile_indices[item] as usize * chunk;
                    for key in first_key..(first_key + chunk).min(len) {
                        if plan.causal && !self.sharded() && key > len - query + token {
                            continue;
                        }
                        let slot = self.slot(own, key)?;
                        let of_step = first_token + starts[row] as usize + token;
                        let at = of_step * self.group + packed % group;
                        self.found.get_mut(at).ok_or("a token beyond")?.push(slot);
                    }
                }
            }
        }
        Ok(())
    }

    /// Rows of `table` and lengths, read by tokens at `starts`.
    fn rows(
        &mut self,
        (table, lens): (&Tensor, &Tensor),
        starts: &[usize],
        (max_query_len, max_seq_len): (u32, u32),
        sees: impl Fn(usize, usize, usize) -> bool,
    ) -> Result<(), String> {
        let (table, lens) = (self.vector(table)?, self.vector(lens)?);
        let width = self.case.step.tensors.block_table_width;
        for (row, pair) in starts.windows(2).enumerate() {
            let (len, query) = (lens[row] as usize, pair[1] - pair[0]);
            for token in 0..query.min(max_query_len as usize) {
                let mut keys = Vec::new();
                for key in 0..len.min(max_seq_len as usize) {
                    // Under context parallelism a rank's keys are not the last ones.
                    let own = (key + query).checked_sub(len).filter(|_| !self.sharded());
                    if own.is_none_or(|own| sees(pair[0], token, own)) {
                        keys.push(self.slot(&table[row * width..], key)?);
                    }
                }
                self.give(pair[0] + token, &keys)?;
            }
        }
        Ok(())
    }

    fn trtllm_decode(&mut self, record: &TrtllmDecode) -> Result<(), String> {
        let rows = self.vector(&record.seq_lens)?.len();
        let query = record.q_len_per_req as usize;
        let starts: Vec<usize> = match &record.q_cu_seq_lens {
            Some(tensor) => self.vector(tensor)?.iter().map(|&s| s as usize).collect(),
            None => (0..=rows).map(|row| row * query).collect(),
        };
        if let Some(tensor) = &record.dcp_query_start_loc {
            let own = &self.case.step.tensors.query_start_loc[..=rows];
            if self.vector(tensor)? != own {
                return Err("other query starts".to_owned());
            }
        }
        let mask = record.mask.clone();
        self.rows(
            (&record.block_tables, &record.seq_lens),
            &starts,
            (record.q_len_per_req, record.max_seq_len),
            |start, token, own| match &mask {
                Some(mask) => {
                    let columns = mask.columns as usize;
                    let word = mask.values.get((start + token) * columns + own / 16);
                    word.is_some_and(|word| word & (1 << (own % 16)) != 0)
                }
                None => own <= token,
            },
        )
    }

    fn trtllm_prefill(&mut self, record: &TrtllmPrefill, first: usize) -> Result<(), String> {
        let starts = self.vector(&record.cum_seq_lens_q)?;
        let starts: Vec<usize> = starts.iter().map(|&s| first + s as usize).collect();
        let (pages, lens) = (
            self.vector(&record.cum_seq_lens_kv)?,
            self.vector(&record.seq_lens)?,
        );
        let size = self.case.config.kv_cache_spec.block_size as i32;
        let counts = pages.windows(2).map(|pair| pair[1] - pair[0]);
        if !counts.eq(lens.iter().map(|len| (len + size - 1) / size)) {
            return Err("other page counts".to_owned());
        }
        self.rows(
            (&record.block_tables, &record.seq_lens),
            &starts,
            (record.max_q_len, record.max_seq_len),
            |_, token, own| own <= token,
        )
    }
}

/// The keys of each row that a record with chosen blocks leaves in, held against what `subset` means: whole blocks of the
/// row's own in rising order, every block that this step writes among them. None for a record that chooses nothing.
pub fn selected(case: &Case, metadata: &Metadata) -> Result<Option<Vec<Vec<bool>>>, String> {
    let Metadata::Flashinfer(record) = metadata else {
        return Ok(None);
    };
    let decode = match &record.decode {
        Some(Decode::Wrapper(plan)) => Some(plan),
        _ => None,
    };
    let prefill = match &record.prefill {
        Some(Prefill::Wrapper(plan)) => Some(plan),
        _ => None,
    };
    let size = case.config.kv_cache_spec.block_size as usize;
    let tensors = &case.step.tensors;
    let mut kept: Vec<Vec<bool>> = tensors
        .seq_lens
        .iter()
        .map(|&len| vec![true; len as usize])
        .collect();
    let mut any = false;
    for plan in [decode, prefill].into_iter().flatten() {
        let Tensor::SelectPages(selection) = &plan.paged_kv_indices else {
            continue;
        };
        any = true;
        for (index, pair) in plan.paged_kv_indptr.windows(2).enumerate() {
            let row = selection.rows.start as usize + index;
            let columns = selection.columns.get(pair[0] as usize..pair[1] as usize);
            let columns = columns.ok_or("fewer columns than counted")?;
            let len = tensors.seq_lens[row] as usize;
            let query = (tensors.query_start_loc[row + 1] - tensors.query_start_loc[row]) as usize;
            if !columns.windows(2).all(|pair| pair[0] < pair[1]) {
                return Err(format!("row {row}: columns do not rise"));
            }
            if columns.iter().any(|&column| column as usize * size >= len) {
                return Err(format!("row {row}: a column beyond its keys"));
            }
            for (key, kept) in kept[row].iter_mut().enumerate() {
                *kept = columns.contains(&((key / size) as u32));
                if !*kept && key >= len - query {
                    return Err(format!("row {row}: key {key} of this step is left out"));
                }
            }
        }
    }
    Ok(any.then_some(kept))
}
