//! GDN: rows that verify drafts, and the others, which decode and prefill. No step has verifications and decodes both.

use timetable_types::{PaddedTensor, Tensor, mamba::GdnMetadata};

use super::{Group, rows::Rows};
use crate::verify::{
    Scratch,
    refusal::{Refusal, Rule, absent, between, equal, length, present},
};

impl Group<'_> {
    pub(super) fn gdn(&self, metadata: &GdnMetadata, scratch: &mut Scratch) -> Result<(), Refusal> {
        let GdnMetadata {
            num_prefills,
            num_prefill_tokens,
            num_decodes,
            num_decode_tokens,
            num_spec_decodes,
            num_spec_decode_tokens,
            num_actual_tokens,
            has_initial_state,
            spec_query_start_loc,
            non_spec_query_start_loc,
            spec_state_indices_tensor,
            non_spec_state_indices_tensor,
            spec_sequence_masks,
            spec_token_indx,
            non_spec_token_indx,
            num_accepted_tokens,
            uniform_spec_sequence_length,
            chunk_indices,
            chunk_offsets,
            prefill_query_start_loc,
            prefill_state_indices,
            prefill_has_initial_state,
            conv,
        } = metadata;
        let common = self.ctx.common;
        equal(
            "num_actual_tokens",
            *num_actual_tokens,
            common.num_actual_tokens,
        )?;
        // Only decodes and verifications are captured.
        if self.ctx.promise.is_some() {
            equal("num_prefills", *num_prefills, 0)?;
        }
        let (verified, others) = self.part(spec_sequence_masks.as_ref(), scratch);
        let (verified, others) = (Rows::of(verified), Rows::of(others));
        let has_verified = verified.len() > 0;
        let tokens_of = |rows: &Rows<'_>| -> i64 {
            rows.iter().map(|row| i64::from(self.query_len(row))).sum()
        };
        equal("num_spec_decodes", *num_spec_decodes, verified.len() as i64)?;
        equal(
            "num_spec_decode_tokens",
            *num_spec_decode_tokens,
            tokens_of(&verified),
        )?;

        // The verifications: a state for each token, beginning with the accepted one's.
        let is_alone = tokens_of(&others) == 0;
        if has_verified {
            equal("num_decodes", *num_decodes, 0)?;
            self.at_most_states("spec_query_start_loc", &verified)?;
            self.own_states("spec_state_indices_tensor", &verified)?;
            let masks = present("spec_sequence_masks", spec_sequence_masks)?;
            self.padded("spec_sequence_masks", masks, common.num_reqs, 0)?;
            match &masks.tensor {
                Tensor::RowMask(rows) => verified.equal("spec_sequence_masks", rows)?,
                _ => return Err(mask()),
            }
            let starts = present("spec_query_start_loc", spec_query_start_loc)?;
            // Verifications alone may stand in the buffers of a captured graph, padded to the step's rows.
            let padded = starts.rows.saturating_sub(1);
            let may_pad = is_alone && padded == common.num_reqs;
            let padded = if may_pad { padded } else { *num_spec_decodes };
            self.padded(
                "spec_query_start_loc",
                starts,
                padded + 1,
                *num_spec_decode_tokens as i32,
            )?;
            self.query_starts("spec_query_start_loc", &starts.tensor, &verified)?;
            let states = present("spec_state_indices_tensor", spec_state_indices_tensor)?;
            self.padded_states(
                "spec_state_indices_tensor",
                states,
                &verified,
                self.states,
                padded,
            )?;
            let accepted = present("num_accepted_tokens", num_accepted_tokens)?;
            self.padded("num_accepted_tokens", accepted, padded, 1)?;
            self.accepted("num_accepted_tokens", &accepted.tensor, &verified)?;
            let tokens = present("spec_token_indx", spec_token_indx)?;
            self.tokens("spec_token_indx", tokens, &verified)?;
            let tokens = present("non_spec_token_indx", non_spec_token_indx)?;
            self.tokens("non_spec_token_indx", tokens, &others)?;
            // Said only where it holds for every row.
            if let Some(len) = uniform_spec_sequence_length {
                for row in verified.iter() {
                    equal("uniform_spec_sequence_length", *len, self.query_len(row))?;
                }
            }
        } else {
            absent("spec_sequence_masks", spec_sequence_masks.is_some())?;
            absent("spec_query_start_loc", spec_query_start_loc.is_some())?;
            absent(
                "spec_state_indices_tensor",
                spec_state_indices_tensor.is_some(),
            )?;
            absent("num_accepted_tokens", num_accepted_tokens.is_some())?;
            absent("spec_token_indx", spec_token_indx.is_some())?;
            absent("non_spec_token_indx", non_spec_token_indx.is_some())?;
            absent(
                "uniform_spec_sequence_length",
                uniform_spec_sequence_length.is_some(),
            )?;
        }

        // The others: decodes of one token each, then prefills.
        if has_verified && is_alone {
            equal("num_prefills", *num_prefills, 0)?;
            absent(
                "non_spec_query_start_loc",
                non_spec_query_start_loc.is_some(),
            )?;
            absent(
                "non_spec_state_indices_tensor",
                non_spec_state_indices_tensor.is_some(),
            )?;
        } else {
            let rows = others.len() as u32;
            let starts = present("non_spec_query_start_loc", non_spec_query_start_loc)?;
            self.padded("non_spec_query_start_loc", starts, rows + 1, 0)?;
            self.query_starts("non_spec_query_start_loc", &starts.tensor, &others)?;
            let states = present(
                "non_spec_state_indices_tensor",
                non_spec_state_indices_tensor,
            )?;
            self.padded_states("non_spec_state_indices_tensor", states, &others, 1, rows)?;
        }
        between("num_decodes", *num_decodes, 0, others.len() as i64)?;
        let prefills = match others {
            // Without verifications the others are all rows.
            Rows::Range(start, end) => Rows::Range(start + *num_decodes, end),
            Rows::List(list) => Rows::List(&list[*num_decodes as usize..]),
        };
        let with_tokens = prefills.iter().filter(|&row| self.query_len(row) > 0);
        let (least, most) = match *num_prefills {
            // Rows of padding are decodes where nothing prefills.
            0 => (with_tokens.count(), 0),
            _ => (with_tokens.count().max(1), prefills.len()),
        };
        between("num_prefills", *num_prefills, least as i64, most as i64)?;
        let decode_tokens = match (has_verified, *num_prefills) {
            (true, _) => 0,
            (false, 0) => {
                equal("num_decodes", *num_decodes, common.num_reqs)?;
                common.num_actual_tokens
            }
            (false, _) => self.starts[*num_decodes as usize] as u32,
        };
        equal("num_decode_tokens", *num_decode_tokens, decode_tokens)?;
        if !has_verified {
            self.one_token_each(*num_decodes)?;
            self.own_states(
                "non_spec_state_indices_tensor",
                &Rows::Range(0, *num_decodes),
            )?;
        }
        // Tokens of padding may count as the prefills'.
        let padding = common.num_actual_tokens - *self.starts.last().unwrap_or(&0) as u32;
        let own = tokens_of(&prefills);
        let most = match *num_prefills > 0 && !has_verified {
            true => own + i64::from(padding),
            false => own,
        };
        between("num_prefill_tokens", *num_prefill_tokens, own, most)?;

        if *num_prefills == 0 {
            absent("has_initial_state", has_initial_state.is_some())?;
            absent("prefill_query_start_loc", prefill_query_start_loc.is_some())?;
            absent("prefill_state_indices", prefill_state_indices.is_some())?;
            absent(
                "prefill_has_initial_state",
                prefill_has_initial_state.is_some(),
            )?;
            absent("conv", conv.is_some())?;
            length("chunk_indices", chunk_indices.len(), 0)?;
            return length("chunk_offsets", chunk_offsets.len(), 0);
        }
        // The convolution runs over decodes too.
        let has = present("has_initial_state", has_initial_state)?;
        self.context("has_initial_state", has, &others)?;
        let conv = present("conv", conv)?;
        self.conv(conv, &others).map_err(|r| r.within("conv"))?;
        let starts = present("prefill_query_start_loc", prefill_query_start_loc)?;
        self.query_starts("prefill_query_start_loc", starts, &prefills)?;
        let states = present("prefill_state_indices", prefill_state_indices)?;
        self.states("prefill_state_indices", states, &prefills, 1)?;
        let has = present("prefill_has_initial_state", prefill_has_initial_state)?;
        self.context("prefill_has_initial_state", has, &prefills)?;
        self.chunks(chunk_indices, chunk_offsets, &prefills)
    }

    /// The rows that verify drafts, and the others. The model state says which; where it does not, none, or when a graph is
    /// captured all that have tokens, as the mask has it.
    fn part<'s>(
        &self,
        masks: Option<&PaddedTensor>,
        scratch: &'s mut Scratch,
    ) -> (&'s [u32], &'s [u32]) {
        let (verified, others) = (&mut scratch.tile_start, &mut scratch.chunks);
        verified.clear();
        others.clear();
        let drafts = self.drafts();
        let rows = 0..self.num_reqs();
        let is_capture = self.states > 1
            && drafts.is_none()
            && masks.is_some()
            && rows.clone().all(|row| !self.has_context(row));
        for row in rows {
            let is_verified = match drafts {
                Some(drafts) => drafts.get(row as usize).is_some_and(|&drafts| drafts >= 0),
                None => is_capture && self.query_len(row) > 0,
            };
            if is_verified {
                verified.push(row);
            } else {
                others.push(row);
            }
        }
        (verified, others)
    }

    /// The token indices of `rows`.
    fn tokens(&self, field: &'static str, tensor: &Tensor, rows: &Rows<'_>) -> Result<(), Refusal> {
        match tensor {
            Tensor::RowTokens(found) => rows.equal(field, found),
            Tensor::Values(found) => {
                let mut at = 0;
                for row in rows.iter() {
                    let (start, end) = (self.starts[row as usize], self.starts[row as usize + 1]);
                    for token in start..end {
                        let value = found.get(at).copied().unwrap_or(-1);
                        if value != token {
                            return Err(Refusal::at(
                                field,
                                at,
                                value.into(),
                                Rule::Equal,
                                token.into(),
                            ));
                        }
                        at += 1;
                    }
                }
                length(field, found.len(), at)
            }
            _ => Err(Refusal::reference(field, "tokens of its rows")),
        }
    }

    /// Chunks of the scan that cover each prefill once, in order.
    fn chunks(&self, indices: &[i32], offsets: &[i32], rows: &Rows<'_>) -> Result<(), Refusal> {
        length("chunk_offsets", offsets.len(), rows.len() + 1)?;
        let offset = |index: usize, wanted: usize| {
            let value = i64::from(offsets[index]);
            match value == wanted as i64 {
                true => Ok(()),
                false => Err(Refusal::at(
                    "chunk_offsets",
                    index,
                    value,
                    Rule::Equal,
                    wanted as i64,
                )),
            }
        };
        offset(0, 0)?;
        let mut done = 0;
        for (index, row) in rows.iter().enumerate() {
            let chunks = (self.query_len(row) as u32).div_ceil(self.mamba.chunk_size.max(1));
            for chunk in 0..chunks as usize {
                for (place, wanted) in [(2 * done, index), (2 * done + 1, chunk)] {
                    let value = indices.get(place).map_or(-1, |&value| i64::from(value));
                    if value != wanted as i64 {
                        return Err(Refusal::at(
                            "chunk_indices",
                            place,
                            value,
                            Rule::Equal,
                            wanted as i64,
                        ));
                    }
                }
                done += 1;
            }
            offset(index + 1, done)?;
        }
        length("chunk_indices", indices.len(), 2 * done)
    }
}

fn mask() -> Refusal {
    Refusal::reference("spec_sequence_masks", "mask of the rows that verify drafts")
}
