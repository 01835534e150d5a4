//! Random metadata of a step, all by value, made here and nowhere else: no builder's logic is used. Blocks of the convolution come
//! in any size and order, Mamba2's chunks in any length.

use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use timetable_attention::batch::GroupStep;
use timetable_types::{
    MambaSpec, MambaType, Matrix, Metadata, PaddedTensor, Tensor,
    mamba::{
        BaseMetadata, CausalConv1d, GdnMetadata, LinearMetadata, Mamba2Metadata, Metadata as Record,
    },
};

use super::{Kind, Row};
use crate::support::pick;

pub struct Step<'a> {
    pub mamba_type: MambaType,
    pub spec: &'a MambaSpec,
    pub step: &'a GroupStep,
    pub rows: &'a [Row],
    pub accepted: &'a [i32],
    /// Where each row's states begin.
    pub columns: Vec<usize>,
}

pub fn metadata(step: &Step<'_>, rng: &mut Pcg64Mcg) -> Metadata {
    Metadata::Mamba(match step.mamba_type {
        MambaType::Mamba1 => Record::Mamba1(step.base(rng)),
        MambaType::ShortConv => Record::ShortConv(step.base(rng)),
        MambaType::Mamba2 => Record::Mamba2(step.mamba2(rng)),
        MambaType::Linear => Record::Linear(step.linear()),
        MambaType::Gdn => Record::Gdn(step.gdn(rng)),
    })
}

fn values(values: impl IntoIterator<Item = i32>) -> Tensor {
    Tensor::Values(values.into_iter().collect())
}

fn padded(tensor: Tensor, rows: usize) -> PaddedTensor {
    PaddedTensor {
        tensor,
        rows: rows as u32,
        fill: 0,
    }
}

fn running(lens: impl Iterator<Item = i32>) -> Vec<i32> {
    let sums = lens.scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

impl Step<'_> {
    fn all(&self) -> usize {
        self.step.tensors.seq_lens.len()
    }

    fn len(&self, row: usize) -> i32 {
        self.step.tensors.query_start_loc[row + 1] - self.step.tensors.query_start_loc[row]
    }

    fn has(&self, row: usize) -> i32 {
        i32::from(self.step.tensors.seq_lens[row] > self.len(row))
    }

    fn states(&self, row: usize, width: usize) -> Vec<i32> {
        let table = self.step.tensors.table().row(row);
        let first = self.columns.get(row).copied().unwrap_or(0);
        table[first..first + width].to_vec()
    }

    fn state_matrix(&self, rows: &[usize], width: usize) -> PaddedTensor {
        let states = rows.iter().flat_map(|&row| self.states(row, width));
        let matrix = Matrix {
            rows: rows.len() as u32,
            columns: width as u32,
            values: states.collect(),
        };
        padded(Tensor::Matrix(matrix), rows.len())
    }

    /// Decodes, decode tokens, prefills, prefill tokens.
    fn counts(&self) -> [u32; 4] {
        let first = |row: &Row| row.kind != Kind::Prefill;
        let mut decodes = self.rows.iter().filter(|row| first(row)).count();
        let tokens = self.step.cam.num_actual_tokens;
        let mut decode_tokens = self.step.tensors.query_start_loc[decodes] as u32;
        if decodes == self.rows.len() {
            (decodes, decode_tokens) = (self.all(), tokens);
        }
        let prefills = self.all() - decodes;
        [
            decodes as u32,
            decode_tokens,
            prefills as u32,
            tokens - decode_tokens,
        ]
    }

    fn conv(&self, rows: &[usize], rng: &mut Pcg64Mcg) -> CausalConv1d {
        let block_m = *pick(rng, &[1, 3, 8, 16]);
        let nums: Vec<i32> = rows
            .iter()
            .map(|&row| (self.len(row) as u32).div_ceil(block_m) as i32)
            .collect();
        let of_row = |(row, &num): (usize, &i32)| (0..num).map(move |block| (row as i32, block));
        let mut programs: Vec<(i32, i32)> = nums.iter().enumerate().flat_map(of_row).collect();
        programs.shuffle(rng);
        let padding = rng.random_range(0..4);
        let with_padding = programs
            .iter()
            .copied()
            .chain(std::iter::repeat_n((-1, -1), padding));
        CausalConv1d {
            block_m,
            total: programs.len() as u32,
            nums,
            batch_ptr: values(with_padding.clone().map(|program| program.0)),
            token_chunk_offset_ptr: values(with_padding.map(|program| program.1)),
        }
    }

    fn base(&self, rng: &mut Pcg64Mcg) -> BaseMetadata {
        let [
            num_decodes,
            num_decode_tokens,
            num_prefills,
            num_prefill_tokens,
        ] = self.counts();
        let states = 1 + self.spec.num_speculative_blocks as usize;
        let decodes: Vec<usize> = (0..num_decodes as usize).collect();
        let prefills: Vec<usize> = (num_decodes as usize..self.all()).collect();
        let lens = |rows: &[usize]| running(rows.iter().map(|&row| self.len(row)));
        let verifies = states > 1 && num_decodes > 0;
        let some = num_prefills > 0;
        BaseMetadata {
            num_prefills,
            num_prefill_tokens,
            num_decodes,
            num_decode_tokens,
            num_reqs: self.all() as u32,
            has_initial_states_p: some.then(|| values(prefills.iter().map(|&row| self.has(row)))),
            query_start_loc_p: some.then(|| values(lens(&prefills))),
            state_indices_tensor_p: values(prefills.iter().map(|&row| self.states(row, 1)[0])),
            state_indices_tensor_d: self.state_matrix(&decodes, states),
            query_start_loc_d: verifies.then(|| padded(values(lens(&decodes)), decodes.len() + 1)),
            num_accepted_tokens: verifies.then(|| {
                padded(
                    values(self.accepted[..decodes.len()].to_vec()),
                    decodes.len(),
                )
            }),
            seq_lens: values(self.step.tensors.seq_lens.clone()),
            conv: some.then(|| self.conv(&prefills, rng)),
        }
    }

    fn mamba2(&self, rng: &mut Pcg64Mcg) -> Mamba2Metadata {
        let base = self.base(rng);
        let mut metadata = Mamba2Metadata {
            prep_initial_states: false,
            chunk_size: self.spec.chunk_size,
            seq_idx_p: Vec::new(),
            cu_chunk_seqlen_p: Vec::new(),
            last_chunk_indices_p: Vec::new(),
            replayssm: None,
            base,
        };
        if metadata.base.num_prefills == 0 {
            return metadata;
        }
        metadata.cu_chunk_seqlen_p.push(0);
        let mut done = 0;
        for (prefill, row) in (metadata.base.num_decodes as usize..self.all()).enumerate() {
            metadata.prep_initial_states |= self.has(row) != 0;
            let end = done + self.len(row);
            while done < end {
                let most = (end - done).min(self.spec.chunk_size as i32);
                done += rng.random_range(1..=most);
                metadata.cu_chunk_seqlen_p.push(done);
                metadata.seq_idx_p.push(prefill as i32);
            }
            let last = metadata.seq_idx_p.len() as i32 - 1;
            metadata.last_chunk_indices_p.push(last);
        }
        metadata
    }

    fn linear(&self) -> LinearMetadata {
        let [
            num_decodes,
            num_decode_tokens,
            num_prefills,
            num_prefill_tokens,
        ] = self.counts();
        LinearMetadata {
            num_prefills,
            num_prefill_tokens,
            num_decodes,
            num_decode_tokens,
            query_start_loc: values(self.step.tensors.query_start_loc.clone()),
            seq_lens: values(self.step.tensors.seq_lens.clone()),
            state_indices_tensor: values((0..self.all()).map(|row| self.states(row, 1)[0])),
        }
    }

    fn gdn(&self, rng: &mut Pcg64Mcg) -> GdnMetadata {
        let is_verified = |row: &usize| {
            let row = self.rows.get(*row);
            row.is_some_and(|row| row.kind == Kind::Verify)
        };
        let (verified, others): (Vec<usize>, Vec<usize>) = (0..self.all()).partition(is_verified);
        let tokens = |rows: &[usize]| -> Vec<i32> {
            let starts = &self.step.tensors.query_start_loc;
            let of_row = |&row: &usize| starts[row]..starts[row + 1];
            rows.iter().flat_map(of_row).collect()
        };
        let lens = |rows: &[usize]| running(rows.iter().map(|&row| self.len(row)));
        let has = |rows: &[usize]| values(rows.iter().map(|&row| self.has(row)));
        let has_verified = !verified.is_empty();
        let [mut decodes, mut decode_tokens, _, _] = self.counts();
        if has_verified {
            (decodes, decode_tokens) = (0, 0);
        }
        let prefills = &others[decodes as usize..];
        let prefill_tokens = tokens(prefills).len() as u32;
        let some = prefill_tokens > 0;
        let has_others = some || !has_verified;
        let spec_tokens = tokens(&verified);
        let mut metadata = GdnMetadata {
            num_prefills: prefills.iter().filter(|&&row| self.len(row) > 0).count() as u32,
            num_prefill_tokens: prefill_tokens,
            num_decodes: decodes,
            num_decode_tokens: decode_tokens,
            num_spec_decodes: verified.len() as u32,
            num_spec_decode_tokens: spec_tokens.len() as u32,
            num_actual_tokens: self.step.cam.num_actual_tokens,
            has_initial_state: some.then(|| has(&others)),
            spec_query_start_loc: has_verified
                .then(|| padded(values(lens(&verified)), verified.len() + 1)),
            non_spec_query_start_loc: has_others
                .then(|| padded(values(lens(&others)), others.len() + 1)),
            spec_state_indices_tensor: has_verified.then(|| {
                let width = 1 + self.spec.num_speculative_blocks as usize;
                self.state_matrix(&verified, width)
            }),
            non_spec_state_indices_tensor: has_others.then(|| self.state_matrix(&others, 1)),
            spec_sequence_masks: None,
            spec_token_indx: has_verified.then(|| values(spec_tokens)),
            non_spec_token_indx: has_verified.then(|| values(tokens(&others))),
            num_accepted_tokens: has_verified.then(|| {
                let accepted = verified.iter().map(|&row| self.accepted[row]);
                padded(values(accepted), verified.len())
            }),
            uniform_spec_sequence_length: None,
            chunk_indices: Vec::new(),
            chunk_offsets: Vec::new(),
            prefill_query_start_loc: some.then(|| values(lens(prefills))),
            prefill_state_indices: some
                .then(|| values(prefills.iter().map(|&row| self.states(row, 1)[0]))),
            prefill_has_initial_state: some.then(|| has(prefills)),
            conv: some.then(|| self.conv(&others, rng)),
        };
        if some {
            metadata.chunk_offsets.push(0);
            for (index, &row) in prefills.iter().enumerate() {
                let chunks = (self.len(row) as u32).div_ceil(self.spec.chunk_size) as i32;
                let of_row = (0..chunks).flat_map(|chunk| [index as i32, chunk]);
                metadata.chunk_indices.extend(of_row);
                let done = metadata.chunk_indices.len() as i32 / 2;
                metadata.chunk_offsets.push(done);
            }
        }
        metadata
    }
}
