//! MAMBA1, MAMBA2, SHORT_CONV and LINEAR, and what GDN shares with them: one rule for each field.
//!
//! What the rules hold: rows [0, num_decodes) go on from their state, one token each or as many as a verification has; every other
//! row is scanned from its state or from nothing, in chunks that cover its tokens once. States are columns of a row's own block
//! table, by reference. A row that has no state yet never decodes from whatever its block holds.

mod gdn;
mod rows;

use timetable_types::{
    Input, MambaCacheMode, MambaSpec, MambaType, PaddedTensor, StateColumn, Tensor,
    batch::{NUM_ACCEPTED_TOKENS, NUM_DECODE_DRAFT_TOKENS_CPU, device_extra, host_extra},
    mamba::{BaseMetadata, LinearMetadata, Mamba2Metadata, Metadata},
};

use super::{
    Rules, Scratch, VerifyContext, lanes, reference,
    refusal::{Refusal, Rule, absent, between, configured, equal, length, present},
};
use rows::Rows;

impl Rules for Metadata {
    /// A row's states are where its block table says.
    const SELECTS_BLOCKS: bool = false;

    fn verify(&self, ctx: &VerifyContext<'_>, scratch: &mut Scratch) -> Result<(), Refusal> {
        let mamba = present("kv_cache_spec.mamba", &ctx.config.kv_cache_spec.mamba)?;
        let group = Group {
            ctx,
            mamba,
            starts: ctx.inputs.query_start_loc,
            lens: ctx.inputs.seq_lens,
            states: 1 + ctx.config.scheduler.num_speculative_tokens,
        };
        let found = match self {
            Metadata::Mamba1(_) => MambaType::Mamba1,
            Metadata::Mamba2(_) => MambaType::Mamba2,
            Metadata::Gdn(_) => MambaType::Gdn,
            Metadata::ShortConv(_) => MambaType::ShortConv,
            Metadata::Linear(_) => MambaType::Linear,
        };
        configured(
            "mamba_type",
            found == mamba.mamba_type,
            found as i64,
            mamba.mamba_type as i64,
        )?;
        match self {
            Metadata::Mamba1(base) | Metadata::ShortConv(base) => group.base(base).map(drop),
            Metadata::Mamba2(metadata) => group.mamba2(metadata),
            Metadata::Linear(metadata) => group.linear(metadata),
            Metadata::Gdn(metadata) => group.gdn(metadata, scratch),
        }
    }
}

/// A step of a group that keeps states.
struct Group<'c> {
    ctx: &'c VerifyContext<'c>,
    mamba: &'c MambaSpec,
    starts: &'c [i32],
    lens: &'c [i32],
    /// Columns of a verification: a state for each token that it may accept.
    states: u32,
}

impl Group<'_> {
    fn num_reqs(&self) -> u32 {
        self.ctx.common.num_reqs
    }

    fn query_len(&self, row: u32) -> i32 {
        self.starts[row as usize + 1] - self.starts[row as usize]
    }

    fn has_context(&self, row: u32) -> bool {
        self.lens[row as usize] > self.query_len(row)
    }

    /// The common part; gives the rows that prefill.
    fn base(&self, base: &BaseMetadata) -> Result<Rows<'static>, Refusal> {
        let BaseMetadata {
            num_prefills,
            num_prefill_tokens,
            num_decodes,
            num_decode_tokens,
            num_reqs,
            has_initial_states_p,
            query_start_loc_p,
            state_indices_tensor_p,
            state_indices_tensor_d,
            query_start_loc_d,
            num_accepted_tokens,
            seq_lens,
            conv,
        } = base;
        equal("num_reqs", *num_reqs, self.num_reqs())?;
        self.counts([
            *num_decodes,
            *num_decode_tokens,
            *num_prefills,
            *num_prefill_tokens,
        ])?;
        reference("seq_lens", seq_lens, Input::SeqLens)?;
        let decodes = Rows::Range(0, *num_decodes);
        let prefills = Rows::Range(*num_decodes, *num_reqs);
        // Decodes: one token each, or what a verification may have.
        self.own_states("state_indices_tensor_d", &decodes)?;
        self.padded_states(
            "state_indices_tensor_d",
            state_indices_tensor_d,
            &decodes,
            self.states,
            *num_decodes,
        )?;
        if self.states > 1 && *num_decodes > 0 {
            let starts = present("query_start_loc_d", query_start_loc_d)?;
            self.padded("query_start_loc_d", starts, *num_decodes + 1, 0)?;
            self.query_starts("query_start_loc_d", &starts.tensor, &decodes)?;
            self.at_most_states("query_start_loc_d", &decodes)?;
            let accepted = present("num_accepted_tokens", num_accepted_tokens)?;
            self.padded("num_accepted_tokens", accepted, *num_decodes, 1)?;
            self.accepted("num_accepted_tokens", &accepted.tensor, &decodes)?;
        } else {
            absent("query_start_loc_d", query_start_loc_d.is_some())?;
            self.one_token_each(*num_decodes)?;
            self.accepted_unread(num_accepted_tokens.as_ref())?;
        }
        // Prefills: scanned from their state, if they have one.
        if *num_prefills > 0 {
            let has = present("has_initial_states_p", has_initial_states_p)?;
            self.context("has_initial_states_p", has, &prefills)?;
            let starts = present("query_start_loc_p", query_start_loc_p)?;
            self.query_starts("query_start_loc_p", starts, &prefills)?;
            self.no_verification_among(*num_decodes)?;
            let conv = present("conv", conv)?;
            self.conv(conv, &prefills).map_err(|r| r.within("conv"))?;
        } else {
            absent("has_initial_states_p", has_initial_states_p.is_some())?;
            absent("query_start_loc_p", query_start_loc_p.is_some())?;
            absent("conv", conv.is_some())?;
        }
        self.states(
            "state_indices_tensor_p",
            state_indices_tensor_p,
            &prefills,
            1,
        )?;
        Ok(prefills)
    }

    fn mamba2(&self, metadata: &Mamba2Metadata) -> Result<(), Refusal> {
        let Mamba2Metadata {
            base,
            prep_initial_states,
            chunk_size,
            seq_idx_p,
            cu_chunk_seqlen_p,
            last_chunk_indices_p,
            replayssm,
        } = metadata;
        let prefills = self.base(base).map_err(|r| r.within("base"))?;
        equal("chunk_size", *chunk_size, self.mamba.chunk_size)?;
        // Nothing says what would be right in it.
        absent("replayssm", replayssm.is_some())?;
        // Whether any prefill goes on from a state.
        let any = prefills.iter().any(|row| self.has_context(row));
        equal(
            "prep_initial_states",
            i64::from(*prep_initial_states),
            i64::from(any),
        )?;
        if prefills.len() == 0 {
            length("seq_idx_p", seq_idx_p.len(), 0)?;
            length("cu_chunk_seqlen_p", cu_chunk_seqlen_p.len(), 0)?;
            return length("last_chunk_indices_p", last_chunk_indices_p.len(), 0);
        }
        length(
            "cu_chunk_seqlen_p",
            cu_chunk_seqlen_p.len(),
            seq_idx_p.len() + 1,
        )?;
        length(
            "last_chunk_indices_p",
            last_chunk_indices_p.len(),
            prefills.len(),
        )?;
        let at = |field, index: usize, value: i32, rule, bound: i64| {
            Err(Refusal::at(field, index, i64::from(value), rule, bound))
        };
        if cu_chunk_seqlen_p[0] != 0 {
            return at("cu_chunk_seqlen_p", 0, cu_chunk_seqlen_p[0], Rule::Equal, 0);
        }
        // Each chunk lies within one prefill, is no longer than a chunk may be, and begins where the one before it ends.
        let (mut chunk, mut done, mut end) = (0, 0, 0);
        let longest = i64::from(*chunk_size);
        for (index, row) in prefills.iter().enumerate() {
            end += self.query_len(row);
            while done < end {
                let (Some(&of_row), Some(&until)) =
                    (seq_idx_p.get(chunk), cu_chunk_seqlen_p.get(chunk + 1))
                else {
                    return at("cu_chunk_seqlen_p", chunk, done, Rule::Equal, end.into());
                };
                if of_row != index as i32 {
                    return at("seq_idx_p", chunk, of_row, Rule::Equal, index as i64);
                }
                if until <= done {
                    return at(
                        "cu_chunk_seqlen_p",
                        chunk + 1,
                        until,
                        Rule::AtLeast,
                        i64::from(done) + 1,
                    );
                }
                let most = i64::from(end).min(i64::from(done) + longest);
                if i64::from(until) > most {
                    return at("cu_chunk_seqlen_p", chunk + 1, until, Rule::AtMost, most);
                }
                (done, chunk) = (until, chunk + 1);
            }
            // The chunk whose end is the row's; for a row of padding the one before, of which nothing is kept for it.
            let last = chunk as i64 - 1;
            if i64::from(last_chunk_indices_p[index]) != last {
                return at(
                    "last_chunk_indices_p",
                    index,
                    last_chunk_indices_p[index],
                    Rule::Equal,
                    last,
                );
            }
        }
        length("seq_idx_p", seq_idx_p.len(), chunk)
    }

    /// An impl sees every row's query and length here, and begins without a state where the one is the other.
    fn linear(&self, metadata: &LinearMetadata) -> Result<(), Refusal> {
        let LinearMetadata {
            num_prefills,
            num_prefill_tokens,
            num_decodes,
            num_decode_tokens,
            query_start_loc,
            seq_lens,
            state_indices_tensor,
        } = metadata;
        self.counts([
            *num_decodes,
            *num_decode_tokens,
            *num_prefills,
            *num_prefill_tokens,
        ])?;
        self.one_token_each(*num_decodes)?;
        reference("query_start_loc", query_start_loc, Input::QueryStartLoc)?;
        reference("seq_lens", seq_lens, Input::SeqLens)?;
        // The first column, whatever the cache mode.
        self.gather(
            "state_indices_tensor",
            state_indices_tensor,
            &Rows::Range(0, self.num_reqs()),
            StateColumn::First,
            1,
        )
    }

    /// Every row is a decode or, behind those, a prefill; tokens of padding belong to the last kind that there is.
    fn counts(
        &self,
        [decodes, decode_tokens, prefills, prefill_tokens]: [u32; 4],
    ) -> Result<(), Refusal> {
        let (rows, tokens) = (self.num_reqs(), self.ctx.common.num_actual_tokens);
        between("num_decodes", decodes, 0, rows)?;
        equal("num_prefills", prefills, rows - decodes)?;
        // Only decodes are captured.
        if self.ctx.promise.is_some() {
            equal("num_prefills", prefills, 0)?;
        }
        let first = match prefills {
            0 => tokens,
            _ => self.starts[decodes as usize] as u32,
        };
        equal("num_decode_tokens", decode_tokens, first)?;
        equal("num_prefill_tokens", prefill_tokens, tokens - first)
    }

    /// The first `decodes` rows have one token each, and those of padding behind them none: token i is row i's.
    fn one_token_each(&self, decodes: u32) -> Result<(), Refusal> {
        let starts = &self.starts[..=decodes as usize];
        let own = starts[decodes as usize].min(decodes as i32) as usize;
        if lanes::counts_up(&starts[..=own], 0) && lanes::all_equal_i32(&starts[own..], own as i32)
        {
            return Ok(());
        }
        for row in 0..decodes {
            let len = i64::from(self.query_len(row));
            let most = i64::from((row as usize) < own);
            if len > 1 {
                return Err(Refusal::at(
                    "num_decodes",
                    row as usize,
                    len,
                    Rule::AtMost,
                    1,
                ));
            }
            if len != most {
                return Err(Refusal::at(
                    "num_decodes",
                    row as usize,
                    len,
                    Rule::Equal,
                    most,
                ));
            }
        }
        Ok(())
    }

    /// A decode begins with its state. One without context has none, and its block what the owner before left: only the null
    /// block will do, where a graph is captured.
    fn own_states(&self, field: &'static str, rows: &Rows<'_>) -> Result<(), Refusal> {
        let table = &self.ctx.inputs.block_table;
        for row in rows.iter() {
            if self.query_len(row) > 0 && !self.has_context(row) {
                let column = self.first_column(row);
                let states = table.row(row as usize);
                let state = states.get(column).copied().unwrap_or(-1);
                if state != 0 {
                    return Err(Refusal::at(
                        field,
                        row as usize,
                        state.into(),
                        Rule::Equal,
                        0,
                    ));
                }
            }
        }
        Ok(())
    }

    /// No more tokens than states: the others' would be nowhere.
    fn at_most_states(&self, field: &'static str, rows: &Rows<'_>) -> Result<(), Refusal> {
        for row in rows.iter() {
            let len = self.query_len(row);
            if i64::from(len) > i64::from(self.states) {
                return Err(Refusal::at(
                    field,
                    row as usize,
                    len.into(),
                    Rule::AtMost,
                    self.states.into(),
                ));
            }
        }
        Ok(())
    }

    /// The draft tokens of each row, where the model state gives them.
    fn drafts(&self) -> Option<&[i32]> {
        if self.states == 1 {
            return None;
        }
        host_extra(self.ctx.common, NUM_DECODE_DRAFT_TOKENS_CPU)
    }

    /// A verification begins with the state that the last one accepted, which is not where a prefill looks.
    fn no_verification_among(&self, first: u32) -> Result<(), Refusal> {
        for row in first..self.num_reqs() {
            let drafts = self
                .drafts()
                .and_then(|drafts| drafts.get(row as usize).copied());
            if let Some(drafts) = drafts
                && drafts >= 0
                && self.query_len(row) > 0
            {
                return Err(Refusal::at(
                    "num_prefills",
                    row as usize,
                    drafts.into(),
                    Rule::Equal,
                    -1,
                ));
            }
        }
        Ok(())
    }

    /// The tokens that were accepted of each of `rows`: the model state's own, or where it gives none, one.
    fn accepted(
        &self,
        field: &'static str,
        tensor: &Tensor,
        rows: &Rows<'_>,
    ) -> Result<(), Refusal> {
        let wrong = Refusal::reference(field, "num_accepted_tokens of its rows");
        let given = device_extra(self.ctx.common, NUM_ACCEPTED_TOKENS);
        let is_given = given.is_some_and(|given| given >= self.num_reqs());
        match tensor {
            Tensor::Extra(name) if is_given && name == NUM_ACCEPTED_TOKENS => {
                match rows.is_range(0, self.num_reqs()) && given == Some(self.num_reqs()) {
                    true => Ok(()),
                    false => Err(wrong),
                }
            }
            Tensor::ExtraRows(gather) if is_given && gather.name == NUM_ACCEPTED_TOKENS => {
                rows.equal(field, &gather.rows)
            }
            // Nothing was verified before. A row without context, of a graph that is captured, may have had it all accepted.
            Tensor::Values(values) => {
                length(field, values.len(), rows.len())?;
                for (index, (&value, row)) in values.iter().zip(rows.iter()).enumerate() {
                    let has_context = self.has_context(row);
                    if has_context && is_given {
                        return Err(wrong);
                    }
                    if value != 1 && (has_context || value != self.query_len(row)) {
                        return Err(Refusal::at(field, index, value.into(), Rule::Equal, 1));
                    }
                }
                Ok(())
            }
            _ => Err(wrong),
        }
    }

    /// Without decodes nobody reads them: the model state's own or none.
    fn accepted_unread(&self, accepted: Option<&PaddedTensor>) -> Result<(), Refusal> {
        const FIELD: &str = "num_accepted_tokens";
        match accepted {
            Some(accepted) if self.states > 1 => {
                self.padded(FIELD, accepted, self.num_reqs(), 1)?;
                self.accepted(FIELD, &accepted.tensor, &Rows::Range(0, self.num_reqs()))
            }
            accepted => absent(FIELD, accepted.is_some()),
        }
    }

    /// A buffer's size, and what stands behind the tensor's own rows.
    fn padded(
        &self,
        field: &'static str,
        padded: &PaddedTensor,
        rows: u32,
        fill: i32,
    ) -> Result<(), Refusal> {
        equal("rows", padded.rows, rows).map_err(|r| r.within(field))?;
        equal("fill", padded.fill, fill).map_err(|r| r.within(field))
    }

    /// `width` states of each of `rows`, in a buffer of `padded` rows; behind them the null block.
    fn padded_states(
        &self,
        field: &'static str,
        states: &PaddedTensor,
        rows: &Rows<'_>,
        width: u32,
        padded: u32,
    ) -> Result<(), Refusal> {
        self.padded(field, states, padded, 0)?;
        self.states(field, &states.tensor, rows, width)
    }

    /// `width` states of each of `rows`, by reference to their block tables.
    fn states(
        &self,
        field: &'static str,
        tensor: &Tensor,
        rows: &Rows<'_>,
        width: u32,
    ) -> Result<(), Refusal> {
        let column = match self.mamba.cache_mode {
            MambaCacheMode::None => StateColumn::First,
            MambaCacheMode::Align => StateColumn::LastToken,
        };
        self.gather(field, tensor, rows, column, width)
    }

    fn gather(
        &self,
        field: &'static str,
        tensor: &Tensor,
        rows: &Rows<'_>,
        column: StateColumn,
        width: u32,
    ) -> Result<(), Refusal> {
        let Tensor::StateIndices(gather) = tensor else {
            return Err(Refusal::reference(field, "state columns of its rows"));
        };
        rows.equal(field, &gather.rows)?;
        configured(
            field,
            gather.column == column,
            gather.column as i64,
            column as i64,
        )?;
        equal("width", gather.width, width).map_err(|r| r.within(field))?;
        // The columns are there.
        let there = self.ctx.inputs.block_table.width;
        for row in rows.iter() {
            let first = match column {
                StateColumn::First => 0,
                StateColumn::LastToken => self.first_column(row),
            };
            let end = first + width as usize;
            if end > there {
                return Err(Refusal::at(
                    field,
                    row as usize,
                    end as i64,
                    Rule::AtMost,
                    there as i64,
                ));
            }
        }
        Ok(())
    }

    /// Where a row's states begin.
    fn first_column(&self, row: u32) -> usize {
        match self.mamba.cache_mode {
            MambaCacheMode::None => 0,
            MambaCacheMode::Align => {
                let last = (self.lens[row as usize] - 1).max(0) as usize;
                last / self.ctx.config.kv_cache_spec.block_size.max(1) as usize
            }
        }
    }
}
