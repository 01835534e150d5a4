//! An independent reading of the Mamba family's records: what each token's output and each state that is kept depend on. For a
//! family that the CPU device does not run; any record may be read, verified or not. It must never share code with the verifier.

use timetable_attention::{Resolver, Siblings, VerifyContext};
use timetable_types::{
    PaddedTensor, Tensor,
    mamba::{BaseMetadata, CausalConv1d, GdnMetadata, LinearMetadata, Mamba2Metadata, Metadata},
};

use super::Reading;

/// No state: all zeros.
const ZEROS: i64 = i64::MIN;
/// In front of what is no token's.
const STATE: i64 = i64::MAX;
const NUMBER: i64 = i64::MAX - 1;
const CONV: i64 = i64::MAX - 2;
/// The block that padding's states are in: nobody reads it.
const NULL_BLOCK: i64 = 0;

struct Reader<'c> {
    ctx: &'c VerifyContext<'c>,
    resolver: Resolver<'c>,
    /// For each token what its output depends on: a state's block or zeros, then tokens in order.
    tokens: Vec<Vec<i64>>,
    /// What is kept, and numbers that a launch is told.
    others: Vec<Vec<i64>>,
}

type Read<T = ()> = Result<T, String>;

/// What `metadata` says, or what is wrong with it.
pub fn read(ctx: &VerifyContext<'_>, metadata: &Metadata) -> Read<Reading> {
    let mut reader = Reader {
        ctx,
        resolver: Resolver::new(ctx.config, ctx.common, *ctx.inputs),
        tokens: vec![Vec::new(); ctx.common.num_actual_tokens as usize],
        others: Vec::new(),
    };
    // One record's numbers are another's nonsense.
    let kind = match metadata {
        Metadata::Mamba1(base) => reader.base(base, None).map(|()| 1)?,
        Metadata::Mamba2(metadata) => reader.base(&metadata.base, Some(metadata)).map(|()| 2)?,
        Metadata::ShortConv(base) => reader.base(base, None).map(|()| 3)?,
        Metadata::Linear(metadata) => reader.linear(metadata).map(|()| 4)?,
        Metadata::Gdn(metadata) => reader.gdn(metadata).map(|()| 5)?,
    };
    reader.number(kind);
    reader.others.sort();
    reader.tokens.append(&mut reader.others);
    Ok(reader.tokens)
}

fn at<T: Copy>(values: &[T], index: usize) -> Read<T> {
    let value = values.get(index).copied();
    value.ok_or_else(|| format!("no element {index} of {}", values.len()))
}

fn index(value: i32) -> Read<usize> {
    usize::try_from(value).map_err(|_| format!("{value} is no index"))
}

fn between(starts: &[i32], row: usize) -> Read<std::ops::Range<usize>> {
    let (start, end) = (index(at(starts, row)?)?, index(at(starts, row + 1)?)?);
    match start <= end && end <= 1 << 20 {
        true => Ok(start..end),
        false => Err(format!("tokens {start}..{end}")),
    }
}

fn same(what: &str, found: usize, wanted: usize) -> Read {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{found} {what} where there are {wanted}")),
    }
}

impl Reader<'_> {
    fn vector(&self, tensor: &Tensor) -> Read<Vec<i32>> {
        let found = self.resolver.resolve_i32(tensor, Siblings::NONE);
        found
            .map(|values| values.into_owned())
            .map_err(|error| error.to_string())
    }

    fn maybe(&self, tensor: &Option<Tensor>) -> Read<Option<Vec<i32>>> {
        tensor
            .as_ref()
            .map(|tensor| self.vector(tensor))
            .transpose()
    }

    fn buffer(&self, padded: &PaddedTensor) -> Read<Vec<i32>> {
        let mut found = Vec::new();
        self.resolver
            .resolve_padded_into(padded, Siblings::NONE, &mut found)
            .map_err(|error| error.to_string())?;
        Ok(found)
    }

    fn number(&mut self, value: impl Into<i64>) {
        self.others.push(vec![NUMBER, value.into()]);
    }

    /// Token `token`'s output.
    fn output(&mut self, token: usize, history: &[i64]) -> Read {
        let place = self.tokens.get_mut(token);
        let place = place.ok_or_else(|| format!("token {token} is beyond the step"))?;
        if !place.is_empty() {
            return Err(format!("token {token} is computed twice"));
        }
        place.extend_from_slice(history);
        Ok(())
    }

    fn keep(&mut self, block: i32, history: &[i64]) {
        if i64::from(block) != NULL_BLOCK {
            let mut state = vec![STATE, i64::from(block)];
            state.extend_from_slice(history);
            self.others.push(state);
        }
    }

    /// Tokens of one row from a state, each one's state kept in a block of its own.
    fn step_by_step(&mut self, tokens: &[usize], accepted: i32, states: &[i32]) -> Read {
        if tokens.is_empty() {
            return Ok(());
        }
        let first = at(states, index(accepted - 1)?)?;
        let mut history = vec![i64::from(first)];
        for (place, &token) in tokens.iter().enumerate() {
            history.push(token as i64);
            self.output(token, &history)?;
            self.keep(at(states, place)?, &history);
        }
        Ok(())
    }

    /// Tokens of one row at once; the last state is kept.
    fn scan(&mut self, tokens: &[usize], state: i32, has_state: bool) -> Read {
        let mut history = vec![if has_state { i64::from(state) } else { ZEROS }];
        for &token in tokens {
            history.push(token as i64);
            self.output(token, &history)?;
        }
        // Of a row without tokens nothing is kept.
        if !tokens.is_empty() {
            self.keep(state, &history);
        }
        Ok(())
    }

    /// Every block of every row once. `starts`: of the rows.
    fn conv(&mut self, conv: &CausalConv1d, starts: &[i32]) -> Read {
        let rows = self.vector(&conv.batch_ptr)?;
        let offsets = self.vector(&conv.token_chunk_offset_ptr)?;
        same("rows of blocks", conv.nums.len() + 1, starts.len())?;
        let sum: i64 = conv.nums.iter().map(|&num| i64::from(num)).sum();
        if sum != i64::from(conv.total) || rows.len() < conv.total as usize {
            return Err("another number of blocks".to_owned());
        }
        if rows.len() > 1 << 16 || offsets.len() > 1 << 16 {
            return Err("more blocks than room".to_owned());
        }
        for (program, &row) in rows.iter().enumerate() {
            if row == -1 {
                continue;
            }
            let own = between(starts, index(row)?)?;
            let offset = index(at(&offsets, program)?)?;
            let block = conv.block_m as usize;
            let first = own.start.saturating_add(offset.saturating_mul(block));
            if first >= own.end || program >= conv.total as usize {
                return Err("a block of nothing".to_owned());
            }
            let last = first.saturating_add(block).min(own.end);
            // A later block begins where the one before it ended.
            for token in first..last {
                self.others.push(vec![CONV, i64::from(row), token as i64]);
            }
        }
        self.number(conv.block_m);
        Ok(())
    }

    fn base(&mut self, base: &BaseMetadata, chunked: Option<&Mamba2Metadata>) -> Read {
        let lens = self.vector(&base.seq_lens)?;
        same("rows", base.num_reqs as usize, lens.len())?;
        let (decodes, prefills) = (base.num_decodes as usize, base.num_prefills as usize);
        same("rows", decodes.saturating_add(prefills), lens.len())?;
        let states = self.buffer(&base.state_indices_tensor_d)?;
        let width = self.resolver.row_width(&base.state_indices_tensor_d.tensor);
        same(
            "rows of states",
            states.len(),
            decodes.saturating_mul(width),
        )?;
        let starts = match &base.query_start_loc_d {
            Some(starts) => self.buffer(starts)?,
            // Padding is told by its length.
            None => (0..=decodes as i32)
                .map(|row| row.min(lens.iter().filter(|&&len| len > 0).count() as i32))
                .collect(),
        };
        same("starts", starts.len(), decodes + 1)?;
        let accepted = base.num_accepted_tokens.as_ref();
        let accepted = accepted.map(|tensor| self.buffer(tensor)).transpose()?;
        if let (Some(accepted), true) = (&accepted, decodes > 0) {
            same("accepted", accepted.len(), decodes)?;
        }
        for row in 0..decodes {
            let tokens: Vec<usize> = between(&starts, row)?.collect();
            if tokens
                .last()
                .is_some_and(|&last| last >= base.num_decode_tokens as usize)
            {
                return Err("a decode beyond its tokens".to_owned());
            }
            let taken = accepted.as_ref().map_or(Ok(1), |all| at(all, row))?;
            self.step_by_step(&tokens, taken, &states[row * width..(row + 1) * width])?;
        }
        self.number(base.num_decode_tokens);
        self.number(base.num_prefill_tokens);
        let states = self.vector(&base.state_indices_tensor_p)?;
        same("states", states.len(), prefills)?;
        let has = self.maybe(&base.has_initial_states_p)?;
        let starts = self.maybe(&base.query_start_loc_p)?;
        if prefills == 0 {
            let nothing = has.is_none() && starts.is_none() && base.conv.is_none();
            let no_chunks = chunked.is_none_or(|chunked| {
                chunked.seq_idx_p.is_empty() && chunked.last_chunk_indices_p.is_empty()
            });
            return match nothing && no_chunks {
                true => Ok(()),
                false => Err("prefills of nothing".to_owned()),
            };
        }
        let (has, starts) = (has.ok_or("flags")?, starts.ok_or("starts")?);
        same("flags", has.len(), prefills)?;
        same("starts", starts.len(), prefills + 1)?;
        self.conv(base.conv.as_ref().ok_or("no convolution")?, &starts)?;
        if let Some(chunked) = chunked {
            self.number(chunked.chunk_size);
            if chunked.replayssm.is_some() {
                return Err("replay".to_owned());
            }
        }
        for row in 0..prefills {
            let own = between(&starts, row)?;
            let mut prepared = true;
            if let Some(chunked) = chunked {
                prepared = chunked.prep_initial_states;
                chunks_of(chunked, row, own.clone())?;
            }
            let first = base.num_decode_tokens as usize;
            let tokens: Vec<usize> = own.map(|token| first + token).collect();
            let has_state = at(&has, row)? != 0 && prepared;
            self.scan(&tokens, at(&states, row)?, has_state)?;
        }
        if let Some(chunked) = chunked {
            let all = chunked.seq_idx_p.len();
            same("chunk ends", chunked.cu_chunk_seqlen_p.len(), all + 1)?;
            same("last chunks", chunked.last_chunk_indices_p.len(), prefills)?;
            let rows = chunked.seq_idx_p.iter();
            let known = rows.filter(|&&row| row >= 0 && (row as usize) < prefills);
            same("chunks", all, known.count())?;
        }
        Ok(())
    }

    fn linear(&mut self, metadata: &LinearMetadata) -> Read {
        let starts = self.vector(&metadata.query_start_loc)?;
        let lens = self.vector(&metadata.seq_lens)?;
        let states = self.vector(&metadata.state_indices_tensor)?;
        let (decodes, prefills) = (
            metadata.num_decodes as usize,
            metadata.num_prefills as usize,
        );
        same("rows", decodes.saturating_add(prefills), lens.len())?;
        same("starts", starts.len(), lens.len() + 1)?;
        same("states", states.len(), lens.len())?;
        self.number(metadata.num_decode_tokens);
        self.number(metadata.num_prefill_tokens);
        for row in 0..lens.len() {
            let tokens: Vec<usize> = match row < decodes {
                // Token i is row i's, but for padding.
                true if at(&lens, row)? > 0 => vec![row],
                true => Vec::new(),
                false => between(&starts, row)?.collect(),
            };
            if row >= decodes
                && tokens
                    .first()
                    .is_some_and(|&t| t < metadata.num_decode_tokens as usize)
            {
                return Err("a prefill among the decodes".to_owned());
            }
            // A row that is all query has no state.
            let query = between(&starts, row)?.len() as i32;
            self.scan(&tokens, at(&states, row)?, at(&lens, row)? > query)?;
        }
        Ok(())
    }

    fn gdn(&mut self, metadata: &GdnMetadata) -> Read {
        let rows = self.ctx.common.num_reqs as usize;
        let maybe = |padded: &Option<PaddedTensor>| {
            padded
                .as_ref()
                .map(|padded| self.buffer(padded))
                .transpose()
        };
        let spec_starts = maybe(&metadata.spec_query_start_loc)?;
        let spec_states = maybe(&metadata.spec_state_indices_tensor)?;
        let accepted = maybe(&metadata.num_accepted_tokens)?;
        let masks = maybe(&metadata.spec_sequence_masks)?;
        let starts = maybe(&metadata.non_spec_query_start_loc)?;
        let states = maybe(&metadata.non_spec_state_indices_tensor)?;
        let spec_tokens = self.maybe(&metadata.spec_token_indx)?;
        let tokens = self.maybe(&metadata.non_spec_token_indx)?;
        same(
            "tokens",
            metadata.num_actual_tokens as usize,
            self.tokens.len(),
        )?;
        let verified = metadata.num_spec_decodes as usize;
        if let Some(masks) = &masks {
            same("masks", masks.len(), rows)?;
            same(
                "verifications",
                verified,
                masks.iter().filter(|&&mask| mask != 0).count(),
            )?;
            let set = (0..rows)
                .filter(|&row| masks[row] != 0)
                .map(|row| row as i64);
            self.others
                .push(std::iter::once(NUMBER).chain(set).collect());
        } else {
            same("verifications", verified, 0)?;
            let nothing = spec_starts.is_none() && spec_states.is_none() && accepted.is_none();
            if !nothing
                || spec_tokens.is_some()
                || tokens.is_some()
                || metadata.uniform_spec_sequence_length.is_some()
            {
                return Err("verifications of nothing".to_owned());
            }
        }
        self.number(metadata.num_spec_decode_tokens);
        if verified > 0 {
            let (spec_starts, spec_states) =
                (spec_starts.ok_or("starts")?, spec_states.ok_or("states")?);
            let (accepted, spec_tokens) =
                (accepted.ok_or("accepted")?, spec_tokens.ok_or("tokens")?);
            // In a captured graph, as many rows as the step has.
            let padded = spec_starts.len().saturating_sub(1);
            if padded != verified && (padded != rows || starts.is_some()) {
                return Err("another number of starts".to_owned());
            }
            same("accepted", accepted.len(), padded)?;
            let width = metadata.spec_state_indices_tensor.as_ref();
            let width = width.map_or(1, |states| self.resolver.row_width(&states.tensor));
            same("states", spec_states.len(), padded.saturating_mul(width))?;
            same(
                "tokens",
                spec_tokens.len(),
                metadata.num_spec_decode_tokens as usize,
            )?;
            for row in 0..padded {
                let own = between(&spec_starts, row)?;
                if let (Some(each), true) = (metadata.uniform_spec_sequence_length, row < verified)
                {
                    same("tokens of each", own.len(), each as usize)?;
                }
                let tokens: Read<Vec<usize>> =
                    own.map(|place| index(at(&spec_tokens, place)?)).collect();
                self.step_by_step(
                    &tokens?,
                    at(&accepted, row)?,
                    &spec_states[row * width..(row + 1) * width],
                )?;
            }
        }
        let others = match (starts, states) {
            (Some(starts), Some(states)) => Some((starts, states)),
            (None, None) if verified > 0 => None,
            _ => return Err("states without starts".to_owned()),
        };
        let (decodes, has_prefills) = (metadata.num_decodes as usize, metadata.num_prefills > 0);
        let Some((starts, states)) = others else {
            return match decodes == 0
                && !has_prefills
                && tokens.is_some_and(|tokens| tokens.is_empty())
            {
                true => self.nothing_prefills(metadata),
                false => Err("rows of nothing".to_owned()),
            };
        };
        let own_rows = rows - verified.min(rows);
        same("starts", starts.len(), own_rows + 1)?;
        same("states", states.len(), own_rows)?;
        if decodes > own_rows {
            return Err("more decodes than rows".to_owned());
        }
        let all = index(at(&starts, own_rows)?)?;
        let tokens = match tokens {
            Some(tokens) => tokens,
            None => (0..all as i32).collect(),
        };
        same("tokens", tokens.len(), all)?;
        let decode_tokens = metadata.num_decode_tokens as usize;
        self.number(metadata.num_decode_tokens);
        for row in 0..decodes {
            // Token i is row i's; behind the last there is padding.
            if row < all && row < decode_tokens {
                self.step_by_step(&[index(at(&tokens, row)?)?], 1, &[at(&states, row)?])?;
            }
        }
        if !has_prefills {
            return self.nothing_prefills(metadata);
        }
        let has_all = self.maybe(&metadata.has_initial_state)?.ok_or("flags")?;
        same("flags", has_all.len(), own_rows)?;
        let flags = has_all.iter().map(|&flag| i64::from(flag));
        self.others
            .push([NUMBER, CONV].into_iter().chain(flags).collect());
        self.conv(metadata.conv.as_ref().ok_or("no convolution")?, &starts)?;
        let prefill_starts = self
            .maybe(&metadata.prefill_query_start_loc)?
            .ok_or("starts")?;
        let states = self
            .maybe(&metadata.prefill_state_indices)?
            .ok_or("states")?;
        let has = self
            .maybe(&metadata.prefill_has_initial_state)?
            .ok_or("flags")?;
        let prefills = own_rows - decodes;
        same("starts", prefill_starts.len(), prefills + 1)?;
        same("states", states.len(), prefills)?;
        same("flags", has.len(), prefills)?;
        same("chunk offsets", metadata.chunk_offsets.len(), prefills + 1)?;
        let size = self
            .ctx
            .config
            .kv_cache_spec
            .mamba
            .as_ref()
            .map_or(64, |mamba| mamba.chunk_size as usize);
        let mut pairs = metadata.chunk_indices.chunks(2).enumerate().peekable();
        let first = index(at(&starts, decodes)?)?;
        for row in 0..prefills {
            let own = between(&prefill_starts, row)?;
            for chunk in 0..own.len().div_ceil(size) {
                if pairs
                    .next()
                    .is_none_or(|(_, pair)| pair != [row as i32, chunk as i32])
                {
                    return Err("a chunk is missing".to_owned());
                }
            }
            let done = pairs
                .peek()
                .map_or(metadata.chunk_indices.len() / 2, |(done, _)| *done);
            same(
                "chunks",
                index(at(&metadata.chunk_offsets, row + 1)?)?,
                done,
            )?;
            let tokens: Read<Vec<usize>> = own
                .map(|place| index(at(&tokens, first + place)?))
                .collect();
            self.scan(&tokens?, at(&states, row)?, at(&has, row)? != 0)?;
        }
        same("chunks", metadata.chunk_offsets[0] as usize, 0)?;
        match pairs.next() {
            None => Ok(()),
            Some(_) => Err("a chunk of nothing".to_owned()),
        }
    }

    fn nothing_prefills(&self, metadata: &GdnMetadata) -> Read {
        let nothing = metadata.has_initial_state.is_none()
            && metadata.prefill_query_start_loc.is_none()
            && metadata.prefill_state_indices.is_none()
            && metadata.prefill_has_initial_state.is_none()
            && metadata.conv.is_none()
            && metadata.chunk_indices.is_empty()
            && metadata.chunk_offsets.is_empty();
        match nothing {
            true => Ok(()),
            false => Err("prefills of nothing".to_owned()),
        }
    }
}

/// Row `row`'s chunks are `own`, one behind the other, none too long; its last state is that of the last one.
fn chunks_of(metadata: &Mamba2Metadata, row: usize, own: std::ops::Range<usize>) -> Read {
    let mut done = own.start;
    let mut last = None;
    for (chunk, &of_row) in metadata.seq_idx_p.iter().enumerate() {
        if usize::try_from(of_row) != Ok(row) {
            continue;
        }
        let range = between(&metadata.cu_chunk_seqlen_p, chunk)?;
        if range.start != done || range.is_empty() || range.len() > metadata.chunk_size as usize {
            return Err("a chunk elsewhere".to_owned());
        }
        if last.is_some_and(|last| last + 1 != chunk) {
            return Err("another row's chunk between".to_owned());
        }
        (done, last) = (range.end, Some(chunk));
    }
    same("tokens in chunks", done, own.end)?;
    match last {
        Some(last) => same(
            "last chunk",
            index(at(&metadata.last_chunk_indices_p, row)?)?,
            last,
        ),
        None => Ok(()),
    }
}
