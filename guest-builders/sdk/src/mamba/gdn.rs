//! GDN: rows that verify drafts apart from the others, which decode or prefill.

use timetable_types::{
    BuildError, CommonAttentionMetadata, ErrorKind, PaddedTensor, Tensor,
    batch::{BatchRows, split_stateful},
    mamba::GdnMetadata,
};

use super::{Accepted, NULL_BLOCK_ID, Record, first_query_starts, rows::Rows};
use crate::decline;

impl Record {
    pub(super) fn gdn(
        &self,
        common: &CommonAttentionMetadata,
        drafts: &[i32],
        accepted: Accepted,
    ) -> Result<GdnMetadata, BuildError> {
        let is_verified = |row: u32| drafts.get(row as usize).is_some_and(|&drafts| drafts >= 0);
        let (verified, others): (Vec<u32>, Vec<u32>) = match self.states > 1 && !drafts.is_empty() {
            true => (0..common.num_reqs).partition(|&row| is_verified(row)),
            false => Default::default(),
        };
        if verified.is_empty() {
            return self.gdn_without_drafts(common);
        }
        if accepted == Accepted::One {
            return Err(decline(
                ErrorKind::InvalidValue,
                format!(
                    "{} rows verify drafts, and num_accepted_tokens is not given for the {} rows",
                    verified.len(),
                    common.num_reqs
                ),
            ));
        }
        let (verified, others) = (Rows::of(common, verified), Rows::of(common, others));
        // A decode beside verifications is a prefill of one token: no step has both.
        let num_prefills = others.lens().filter(|&len| len > 0).count() as u32;
        let num_prefill_tokens = others.lens().sum::<i32>() as u32;
        let all_tokens = common.query_start_loc_cpu.last().copied().unwrap_or(0) as u32;
        let num_spec_decodes = verified.len() as u32;
        let num_spec_decode_tokens = all_tokens - num_prefill_tokens;

        let is_alone = num_prefills == 0;
        let most = self.max_graph_size;
        let fits = num_spec_decodes <= most && num_spec_decode_tokens <= most;
        let padded = match self.full_graphs && is_alone && fits {
            true => common.num_reqs,
            false => num_spec_decodes,
        };
        // The field's token indices of verifications alone: no more than their states are for.
        let most_tokens = num_spec_decodes.saturating_mul(self.states);
        let mut lens = verified.lens();
        let first_len = lens.next();
        let is_uniform = lens.all(|len| Some(len) == first_len);
        let mut metadata = GdnMetadata {
            num_prefill_tokens,
            num_spec_decodes,
            num_spec_decode_tokens,
            spec_query_start_loc: Some(PaddedTensor {
                tensor: match is_alone && verified.is_first() {
                    true => first_query_starts(common, num_spec_decodes),
                    false => Tensor::Values(verified.query_starts()),
                },
                rows: padded + 1,
                fill: num_spec_decode_tokens as i32,
            }),
            spec_state_indices_tensor: Some(PaddedTensor {
                tensor: self.states_of(&verified, self.states_there(common)),
                rows: padded,
                fill: NULL_BLOCK_ID,
            }),
            spec_sequence_masks: Some(PaddedTensor {
                tensor: Tensor::RowMask(verified.list()),
                rows: common.num_reqs,
                fill: 0,
            }),
            spec_token_indx: Some(match is_alone && all_tokens > most_tokens {
                true => Tensor::Values((0..most_tokens as i32).collect()),
                false => Tensor::RowTokens(verified.list()),
            }),
            non_spec_token_indx: Some(match is_alone {
                true => Tensor::Values(Vec::new()),
                false => Tensor::RowTokens(others.list()),
            }),
            num_accepted_tokens: Some(self.accepted_tokens(&verified, accepted, padded)),
            uniform_spec_sequence_length: first_len.filter(|_| is_uniform).map(|len| len as u32),
            ..empty(common)
        };
        if !is_alone {
            self.others(&mut metadata, &others);
            self.prefills(&mut metadata, &others, &others);
        }
        metadata.num_prefills = num_prefills;
        Ok(metadata)
    }

    fn gdn_without_drafts(
        &self,
        common: &CommonAttentionMetadata,
    ) -> Result<GdnMetadata, BuildError> {
        let split = split_stateful(&BatchRows::from(common), &[], 1)
            .map_err(|error| decline(ErrorKind::InvalidValue, error.to_string()))?;
        let rows = common.num_reqs;
        let (all, prefills) = (
            Rows::range(common, 0, rows),
            Rows::range(common, split.num_decodes, rows),
        );
        let mut metadata = GdnMetadata {
            num_prefills: split.num_prefills,
            num_prefill_tokens: split.num_prefill_tokens,
            num_decodes: split.num_decodes,
            num_decode_tokens: split.num_decode_tokens,
            ..empty(common)
        };
        self.others(&mut metadata, &all);
        if split.num_prefills > 0 {
            self.prefills(&mut metadata, &all, &prefills);
            // Rows of padding behind them are none, and then no token of padding counts.
            let starts = &common.query_start_loc_cpu;
            let end = starts[rows as usize];
            let padding = starts.iter().rev().skip(1).take_while(|&&at| at == end);
            let padding = padding.count() as u32;
            if padding > 0 {
                metadata.num_prefills -= padding;
                metadata.num_prefill_tokens = end as u32 - split.num_decode_tokens;
            }
        }
        Ok(metadata)
    }

    /// The rows that verify nothing.
    fn others(&self, metadata: &mut GdnMetadata, others: &Rows<'_>) {
        metadata.non_spec_query_start_loc = Some(PaddedTensor {
            tensor: others.query_start_loc(),
            rows: others.len() as u32 + 1,
            fill: 0,
        });
        metadata.non_spec_state_indices_tensor = Some(PaddedTensor {
            tensor: self.states_of(others, 1),
            rows: others.len() as u32,
            fill: NULL_BLOCK_ID,
        });
    }

    /// Those of `others` that prefill. The convolution runs over all of them.
    fn prefills(&self, metadata: &mut GdnMetadata, others: &Rows<'_>, prefills: &Rows<'_>) {
        metadata.has_initial_state = Some(others.has_context());
        metadata.conv = Some(others.conv());
        metadata.prefill_query_start_loc = Some(prefills.query_start_loc());
        metadata.prefill_state_indices = Some(self.states_of(prefills, 1));
        metadata.prefill_has_initial_state = Some(prefills.has_context());
        let chunk = self.mamba.chunk_size as i32;
        let mut at = 0;
        metadata.chunk_offsets.push(at);
        for (row, len) in prefills.lens().enumerate() {
            let chunks = (len.max(0) + chunk - 1) / chunk;
            let of_row = (0..chunks).flat_map(|index| [row as i32, index]);
            metadata.chunk_indices.extend(of_row);
            at += chunks;
            metadata.chunk_offsets.push(at);
        }
    }
}

/// A step without rows of any kind.
fn empty(common: &CommonAttentionMetadata) -> GdnMetadata {
    GdnMetadata {
        num_prefills: 0,
        num_prefill_tokens: 0,
        num_decodes: 0,
        num_decode_tokens: 0,
        num_spec_decodes: 0,
        num_spec_decode_tokens: 0,
        num_actual_tokens: common.num_actual_tokens,
        has_initial_state: None,
        spec_query_start_loc: None,
        non_spec_query_start_loc: None,
        spec_state_indices_tensor: None,
        non_spec_state_indices_tensor: None,
        spec_sequence_masks: None,
        spec_token_indx: None,
        non_spec_token_indx: None,
        num_accepted_tokens: None,
        uniform_spec_sequence_length: None,
        chunk_indices: Vec::new(),
        chunk_offsets: Vec::new(),
        prefill_query_start_loc: None,
        prefill_state_indices: None,
        prefill_has_initial_state: None,
        conv: None,
    }
}
