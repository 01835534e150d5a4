//! GDN: rows that verify drafts, decodes, and prefills by chunks. It must never know a layer.

use timetable_types::mamba::GdnMetadata;

use super::{
    From,
    prepare::{Buffers, Prefills, Preparation, Tokens, own, same},
};
use crate::cpu::{PrepareError, step::inconsistent};

impl Preparation<'_> {
    pub(super) fn gdn(
        &mut self,
        metadata: &GdnMetadata,
        buffers: &mut Buffers,
    ) -> Result<(), PrepareError> {
        if metadata.num_spec_decodes > 0 {
            self.verifications(metadata, buffers)?;
        }
        if metadata.num_decodes == 0 && metadata.num_prefills == 0 {
            return Ok(());
        }
        let Buffers {
            starts,
            states,
            has,
            tokens,
            prefill_starts,
            prefill_states,
            prefill_has,
            programs,
            ..
        } = buffers;
        let field = "non_spec_query_start_loc";
        let wanted = Self::needed(field, &metadata.non_spec_query_start_loc)?;
        self.padded(field, wanted, starts)?;
        let field = "non_spec_state_indices_tensor";
        let wanted = Self::needed(field, &metadata.non_spec_state_indices_tensor)?;
        self.padded(field, wanted, states)?;
        let rows = states.len();
        same("non_spec_query_start_loc", starts.len(), rows + 1)?;
        let decodes = metadata.num_decodes as usize;
        if decodes > rows {
            return Err(inconsistent(
                "num_decodes",
                format!("{decodes} of {rows} rows"),
            ));
        }
        let list = match &metadata.non_spec_token_indx {
            Some(tensor) => {
                self.vector("non_spec_token_indx", tensor, tokens)?;
                Some(tokens.as_slice())
            }
            None => None,
        };
        let tokens = Tokens {
            list,
            ..self.tokens_from("non_spec_token_indx", 0)
        };
        let decode_tokens = metadata.num_decode_tokens as usize;
        if metadata.num_prefills == 0 {
            for row in 0..decodes {
                let own = own("non_spec_query_start_loc", starts, row, decode_tokens)?;
                self.step_by_step(tokens, own, &states[row..=row], 1)?;
            }
            return Ok(());
        }

        // The convolution runs over decodes and prefills alike, the recurrence does not.
        let wanted = Self::needed("has_initial_state", &metadata.has_initial_state)?;
        self.vector("has_initial_state", wanted, has)?;
        same("has_initial_state", has.len(), rows)?;
        let all = Prefills {
            starts,
            states,
            has,
        };
        let conv = Self::needed("conv", &metadata.conv)?;
        self.convolve(conv, &all, tokens, programs)?;
        for row in 0..decodes {
            let own = own("non_spec_query_start_loc", starts, row, decode_tokens)?;
            if let Some((state, _)) = all.begin(row) {
                tokens.check(own.clone())?;
                let places = self.scan.push(From::State(state), tokens.places(own));
                places.iter_mut().for_each(|place| place.keep = state);
            }
        }
        let field = "prefill_query_start_loc";
        let wanted = Self::needed(field, &metadata.prefill_query_start_loc)?;
        self.vector(field, wanted, prefill_starts)?;
        let field = "prefill_state_indices";
        let wanted = Self::needed(field, &metadata.prefill_state_indices)?;
        self.vector(field, wanted, prefill_states)?;
        let field = "prefill_has_initial_state";
        let wanted = Self::needed(field, &metadata.prefill_has_initial_state)?;
        self.vector(field, wanted, prefill_has)?;
        let prefills = Prefills {
            starts: prefill_starts,
            states: prefill_states,
            has: prefill_has,
        };
        let fields = [
            "prefill_query_start_loc",
            "prefill_state_indices",
            "prefill_has_initial_state",
        ];
        prefills.check(fields, rows - decodes)?;
        let first = decode_tokens;
        self.scan_chunks(metadata, &prefills, Tokens { first, ..tokens })
    }

    fn verifications(
        &mut self,
        metadata: &GdnMetadata,
        buffers: &mut Buffers,
    ) -> Result<(), PrepareError> {
        let Buffers {
            starts,
            states,
            accepted,
            tokens,
            ..
        } = buffers;
        let field = "spec_query_start_loc";
        self.padded(
            field,
            Self::needed(field, &metadata.spec_query_start_loc)?,
            starts,
        )?;
        let field = "spec_state_indices_tensor";
        let wanted = Self::needed(field, &metadata.spec_state_indices_tensor)?;
        let width = self.padded(field, wanted, states)?;
        let field = "num_accepted_tokens";
        self.padded(
            field,
            Self::needed(field, &metadata.num_accepted_tokens)?,
            accepted,
        )?;
        let field = "spec_token_indx";
        self.vector(
            field,
            Self::needed(field, &metadata.spec_token_indx)?,
            tokens,
        )?;
        let rows = starts.len().saturating_sub(1);
        same(
            "spec_state_indices_tensor",
            states.len(),
            rows.saturating_mul(width),
        )?;
        same("num_accepted_tokens", accepted.len(), rows)?;
        let tokens = Tokens {
            list: Some(tokens),
            ..self.tokens_from("spec_token_indx", 0)
        };
        for row in 0..rows.min(metadata.num_spec_decodes as usize) {
            let most = metadata.num_spec_decode_tokens as usize;
            let own = own("spec_query_start_loc", starts, row, most)?;
            let states = &states[row * width..(row + 1) * width];
            self.step_by_step(tokens, own, states, accepted[row])?;
        }
        Ok(())
    }

    /// Each row's chunks, one after the other: the first begins with the row's state, and behind the last it is kept.
    fn scan_chunks(
        &mut self,
        metadata: &GdnMetadata,
        rows: &Prefills<'_>,
        tokens: Tokens<'_>,
    ) -> Result<(), PrepareError> {
        let (chunks, offsets) = (&metadata.chunk_indices, &metadata.chunk_offsets);
        same("chunk_offsets", offsets.len(), rows.states.len() + 1)?;
        let (pairs, _) = chunks.as_chunks::<2>();
        for row in 0..rows.states.len() {
            let own_chunks = own("chunk_offsets", offsets, row, pairs.len())?;
            let own = own("prefill_query_start_loc", rows.starts, row, self.num_tokens)?;
            let Some((state, mut from)) = rows.begin(row) else {
                continue;
            };
            tokens.check(own.clone())?;
            let mut last = None;
            for &[of_row, chunk] in &pairs[own_chunks] {
                // Of another row, or none: nothing to compute here.
                let (true, Ok(chunk)) = (of_row == row as i32, usize::try_from(chunk)) else {
                    continue;
                };
                let start = own
                    .start
                    .saturating_add(chunk.saturating_mul(self.chunk_size));
                let end = start.saturating_add(self.chunk_size).min(own.end);
                if start >= end {
                    continue;
                }
                // No chunk twice: a list is no longer than its row.
                if last.is_some_and(|last| chunk <= last) {
                    return Err(inconsistent(
                        "chunk_indices",
                        format!("chunk {chunk} of row {row} does not follow the one before it"),
                    ));
                }
                self.scan.push(from, tokens.places(start..end));
                (last, from) = (Some(chunk), From::Before);
            }
            if let (Some(_), Some(place)) = (last, self.scan.places.last_mut()) {
                place.keep = state;
            }
        }
        Ok(())
    }
}
