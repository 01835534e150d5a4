//! Turns records into runs: MAMBA1, MAMBA2, SHORT_CONV and LINEAR, and what GDN shares with them. It must never know a layer.

use std::ops::Range;

use timetable_attention::{Resolver, Siblings, StepInputs};
use timetable_types::{
    KvCacheSpec, PaddedTensor, Tensor,
    mamba::{BaseMetadata, CausalConv1d, LinearMetadata, Mamba2Metadata},
};

use super::{From, Place, Runs};
use crate::cpu::{PrepareError, step::inconsistent};

type Result<T = ()> = std::result::Result<T, PrepareError>;

/// A field's name.
pub(super) type Field = &'static str;

/// Resolved tensors.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub starts: Vec<i32>,
    pub states: Vec<i32>,
    pub accepted: Vec<i32>,
    pub has: Vec<i32>,
    pub tokens: Vec<i32>,
    pub prefill_starts: Vec<i32>,
    pub prefill_states: Vec<i32>,
    pub prefill_has: Vec<i32>,
    pub programs: Programs,
}

/// Blocks of a convolution.
#[derive(Debug, Default)]
pub(super) struct Programs {
    rows: Vec<i32>,
    offsets: Vec<i32>,
    /// Where each row's places begin, and those of the next.
    bounds: Vec<u32>,
}

/// The step's tensors, and the runs that become of the metadata.
pub(super) struct Preparation<'a> {
    resolver: Resolver<'a>,
    /// Tokens of the step, padding included: no tensor names a later one.
    pub num_tokens: usize,
    pub chunk_size: usize,
    pub conv: &'a mut Runs,
    pub scan: &'a mut Runs,
}

/// Rows that are scanned, with what each begins with.
pub(super) struct Prefills<'a> {
    pub starts: &'a [i32],
    pub states: &'a [i32],
    pub has: &'a [i32],
}

impl Prefills<'_> {
    /// As many of everything?
    pub(super) fn check(&self, [starts, states, has]: [Field; 3], rows: usize) -> Result {
        same(starts, self.starts.len(), rows + 1)?;
        same(states, self.states.len(), rows)?;
        same(has, self.has.len(), rows)
    }

    /// The state of row `row` and what the row begins with; none where the state is the null state.
    pub(super) fn begin(&self, row: usize) -> Option<(u32, From)> {
        let state = u32::try_from(*self.states.get(row)?)
            .ok()
            .filter(|&state| state > 0)?;
        let from = match self.has.get(row) {
            Some(0) | None => From::Zeros,
            Some(_) => From::State(state),
        };
        Some((state, from))
    }
}

/// The lists' tokens: some of the step's, or all from the first on.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub field: Field,
    pub list: Option<&'a [i32]>,
    /// The list's tokens begin here.
    pub first: usize,
    pub num_tokens: usize,
}

impl Tokens<'_> {
    pub(super) fn at(&self, place: usize) -> Result<u32> {
        let place = self.first + place;
        let token = match self.list {
            None => Some(place),
            Some(list) => list
                .get(place)
                .and_then(|&token| usize::try_from(token).ok()),
        };
        match token.filter(|&token| token < self.num_tokens) {
            Some(token) => Ok(token as u32),
            None => Err(inconsistent(
                self.field,
                format!("no token at place {place}, of {} tokens", self.num_tokens),
            )),
        }
    }

    /// Refuses a range with a token that is none.
    pub(super) fn check(&self, places: Range<usize>) -> Result {
        match self.list {
            // It rises.
            None if places.is_empty() => Ok(()),
            None => self.at(places.end - 1).map(drop),
            Some(_) => places
                .into_iter()
                .try_for_each(|place| self.at(place).map(drop)),
        }
    }

    /// Of a range that has been checked.
    pub(super) fn places(&self, places: Range<usize>) -> impl Iterator<Item = Place> {
        places.filter_map(|place| {
            Some(Place {
                token: self.at(place).ok()?,
                keep: 0,
                computed: true,
            })
        })
    }
}

pub(super) fn same(field: Field, found: usize, expected: usize) -> Result {
    match found == expected {
        true => Ok(()),
        false => Err(inconsistent(
            field,
            format!("{found} elements, expected {expected}"),
        )),
    }
}

/// Tokens of row `row`, as places of its list, which has no more than `most`.
pub(super) fn own(field: Field, starts: &[i32], row: usize, most: usize) -> Result<Range<usize>> {
    let bound = |at: usize| {
        starts
            .get(at)
            .and_then(|&start| usize::try_from(start).ok())
    };
    match (bound(row), bound(row + 1)) {
        (Some(start), Some(end)) if start <= end && end <= most => Ok(start..end),
        _ => Err(inconsistent(
            field,
            format!("row {row} of {starts:?} is no range of {most} tokens"),
        )),
    }
}

impl<'a> Preparation<'a> {
    pub(super) fn new(
        inputs: &StepInputs<'a>,
        spec: &KvCacheSpec,
        conv: &'a mut Runs,
        scan: &'a mut Runs,
    ) -> Self {
        let last = inputs.query_start_loc.last().copied().unwrap_or(0);
        let tokens = inputs.slot_mapping.len().max(inputs.positions.len());
        let num_tokens = tokens.max(usize::try_from(last).unwrap_or(0));
        Preparation {
            resolver: Resolver::of_step(*inputs, num_tokens, spec.block_size),
            num_tokens,
            chunk_size: spec
                .mamba
                .as_ref()
                .map_or(0, |mamba| mamba.chunk_size as usize),
            conv,
            scan,
        }
    }

    /// All of the step's, from `first` on.
    pub(super) fn tokens_from(&self, field: Field, first: usize) -> Tokens<'static> {
        Tokens {
            field,
            list: None,
            first,
            num_tokens: self.num_tokens,
        }
    }

    pub(super) fn vector(&self, field: Field, tensor: &Tensor, into: &mut Vec<i32>) -> Result {
        let resolved = self.resolver.resolve_into(tensor, Siblings::NONE, into);
        resolved.map_err(|error| inconsistent(field, error.to_string()))
    }

    pub(super) fn padded(
        &self,
        field: Field,
        padded: &PaddedTensor,
        into: &mut Vec<i32>,
    ) -> Result<usize> {
        let resolved = self
            .resolver
            .resolve_padded_into(padded, Siblings::NONE, into);
        resolved.map_err(|error| inconsistent(field, error.to_string()))?;
        Ok(self.resolver.row_width(&padded.tensor))
    }

    pub(super) fn needed<T>(field: Field, value: &Option<T>) -> Result<&T> {
        value
            .as_ref()
            .ok_or_else(|| inconsistent(field, "missing, where there are rows that need it".into()))
    }

    /// A row whose tokens each leave a state, in `states` in turn; it begins with that of the last token that was accepted.
    pub(super) fn step_by_step(
        &mut self,
        tokens: Tokens<'_>,
        own: Range<usize>,
        states: &[i32],
        accepted: i32,
    ) -> Result {
        let state = |index: usize| {
            let state = states
                .get(index)
                .and_then(|&state| u32::try_from(state).ok());
            state.filter(|&state| state > 0)
        };
        let Some(from) = (usize::try_from(accepted).ok())
            .and_then(|accepted| accepted.checked_sub(1))
            .and_then(state)
        else {
            return Ok(());
        };
        tokens.check(own.clone())?;
        for runs in [&mut *self.conv, &mut *self.scan] {
            let places = runs.push(From::State(from), tokens.places(own.clone()));
            for (index, place) in places.iter_mut().enumerate() {
                place.keep = state(index).unwrap_or(0);
            }
        }
        Ok(())
    }

    /// The convolution over rows: each block computes its tokens, and a row's first keeps its state.
    pub(super) fn convolve(
        &mut self,
        conv: &CausalConv1d,
        rows: &Prefills<'_>,
        tokens: Tokens<'_>,
        programs: &mut Programs,
    ) -> Result {
        let Programs {
            rows: of_rows,
            offsets,
            bounds,
        } = programs;
        self.vector("conv.batch_ptr", &conv.batch_ptr, of_rows)?;
        self.vector(
            "conv.token_chunk_offset_ptr",
            &conv.token_chunk_offset_ptr,
            offsets,
        )?;
        if conv.block_m == 0 {
            return Err(inconsistent(
                "conv.block_m",
                "0; a block has at least 1 token".into(),
            ));
        }
        bounds.clear();
        for row in 0..rows.states.len() {
            bounds.push(self.conv.places.len() as u32);
            let own = own("query_start_loc", rows.starts, row, self.num_tokens)?;
            if let Some((_, from)) = rows.begin(row) {
                tokens.check(own.clone())?;
                let places = self.conv.push(from, tokens.places(own));
                places.iter_mut().for_each(|place| place.computed = false);
            }
        }
        bounds.push(self.conv.places.len() as u32);
        for (&row, &offset) in of_rows.iter().zip(&*offsets).take(conv.total as usize) {
            let (Ok(row), Ok(offset)) = (usize::try_from(row), usize::try_from(offset)) else {
                continue;
            };
            let Some(bounds) = bounds.get(row..row + 2) else {
                continue;
            };
            let places = &mut self.conv.places[bounds[0] as usize..bounds[1] as usize];
            let block = conv.block_m as usize;
            let computed = places
                .iter_mut()
                .skip(offset.saturating_mul(block))
                .take(block);
            computed.for_each(|place| place.computed = true);
            if let (0, Some(last), Some((state, _))) = (offset, places.last_mut(), rows.begin(row))
            {
                last.keep = state;
            }
        }
        Ok(())
    }

    pub(super) fn base(
        &mut self,
        base: &BaseMetadata,
        chunked: Option<&Mamba2Metadata>,
        buffers: &mut Buffers,
    ) -> Result {
        let (decodes, prefills) = (base.num_decodes as usize, base.num_prefills as usize);
        let decode_tokens = base.num_decode_tokens as usize;
        let Buffers {
            starts,
            states,
            accepted,
            has,
            programs,
            ..
        } = buffers;
        let field = "state_indices_tensor_d";
        let width = self.padded(field, &base.state_indices_tensor_d, states)?;
        same(field, states.len(), decodes.saturating_mul(width.max(1)))?;
        starts.clear();
        if let Some(padded) = &base.query_start_loc_d {
            self.padded("query_start_loc_d", padded, starts)?;
            same("query_start_loc_d", starts.len(), decodes + 1)?;
        }
        accepted.clear();
        if let Some(padded) = &base.num_accepted_tokens {
            self.padded("num_accepted_tokens", padded, accepted)?;
        }
        let tokens = self.tokens_from("num_decode_tokens", 0);
        for row in 0..decodes {
            // Without starts token i is row i's.
            let own = match &base.query_start_loc_d {
                Some(_) => own("query_start_loc_d", starts, row, decode_tokens)?,
                None => row.min(decode_tokens)..(row + 1).min(decode_tokens),
            };
            let taken = match &base.num_accepted_tokens {
                Some(_) => accepted.get(row).copied().unwrap_or(0),
                None => 1,
            };
            self.step_by_step(tokens, own, &states[row * width..(row + 1) * width], taken)?;
        }
        if prefills == 0 {
            return Ok(());
        }
        self.vector(
            "query_start_loc_p",
            Self::needed("query_start_loc_p", &base.query_start_loc_p)?,
            starts,
        )?;
        self.vector(
            "state_indices_tensor_p",
            &base.state_indices_tensor_p,
            states,
        )?;
        self.vector(
            "has_initial_states_p",
            Self::needed("has_initial_states_p", &base.has_initial_states_p)?,
            has,
        )?;
        let rows = Prefills {
            starts,
            states,
            has,
        };
        let fields = [
            "query_start_loc_p",
            "state_indices_tensor_p",
            "has_initial_states_p",
        ];
        rows.check(fields, prefills)?;
        let tokens = self.tokens_from("query_start_loc_p", decode_tokens);
        let conv = Self::needed("conv", &base.conv)?;
        self.convolve(conv, &rows, tokens, programs)?;
        match chunked {
            Some(metadata) => self.chunks(metadata, &rows, tokens),
            None => {
                for row in 0..prefills {
                    let own = own("query_start_loc_p", starts, row, self.num_tokens)?;
                    self.scan_row(rows.begin(row), tokens, own)?;
                }
                Ok(())
            }
        }
    }

    /// A row at once; the state behind it is kept.
    fn scan_row(
        &mut self,
        row: Option<(u32, From)>,
        tokens: Tokens<'_>,
        own: Range<usize>,
    ) -> Result {
        if let Some((state, from)) = row {
            tokens.check(own.clone())?;
            if let Some(last) = self.scan.push(from, tokens.places(own)).last_mut() {
                last.keep = state;
            }
        }
        Ok(())
    }

    /// Chunk by chunk: the first of a row begins with its state, the next ones with what is there. Behind its last chunk a row's
    /// state is kept.
    fn chunks(
        &mut self,
        metadata: &Mamba2Metadata,
        rows: &Prefills<'_>,
        tokens: Tokens<'_>,
    ) -> Result {
        let ends = &metadata.cu_chunk_seqlen_p;
        let of_rows = &metadata.seq_idx_p;
        same("cu_chunk_seqlen_p", ends.len(), of_rows.len() + 1)?;
        let last = &metadata.last_chunk_indices_p;
        same("last_chunk_indices_p", last.len(), rows.states.len())?;
        let all = own(
            "query_start_loc_p",
            rows.starts,
            rows.states.len() - 1,
            self.num_tokens,
        )?;
        let first = self.scan.runs.len();
        let mut before = None;
        for (chunk, &row) in of_rows.iter().enumerate() {
            let own = own("cu_chunk_seqlen_p", ends, chunk, all.end)?;
            let begin = usize::try_from(row).ok().and_then(|row| rows.begin(row));
            let Some((_, from)) = begin.filter(|_| !own.is_empty()) else {
                // So that there is one run for each chunk.
                self.scan.runs.push(super::Run {
                    start: 0,
                    end: 0,
                    from: From::Before,
                });
                continue;
            };
            let from = match (from, metadata.prep_initial_states) {
                _ if before == Some(row) => From::Before,
                (From::State(_), false) => From::Zeros,
                (from, _) => from,
            };
            before = Some(row);
            tokens.check(own.clone())?;
            self.scan.push(from, tokens.places(own));
        }
        for (row, &chunk) in last.iter().enumerate() {
            let run = usize::try_from(chunk)
                .ok()
                .filter(|&chunk| chunk < of_rows.len());
            if let (Some(chunk), Some((state, _))) = (run, rows.begin(row)) {
                let run = self.scan.runs[first + chunk];
                if run.start < run.end {
                    self.scan.places[run.end as usize - 1].keep = state;
                }
            }
        }
        Ok(())
    }

    pub(super) fn linear(&mut self, metadata: &LinearMetadata, buffers: &mut Buffers) -> Result {
        let Buffers {
            starts,
            states,
            has,
            ..
        } = buffers;
        let (decodes, prefills) = (
            metadata.num_decodes as usize,
            metadata.num_prefills as usize,
        );
        self.vector("query_start_loc", &metadata.query_start_loc, starts)?;
        self.vector("seq_lens", &metadata.seq_lens, has)?;
        self.vector(
            "state_indices_tensor",
            &metadata.state_indices_tensor,
            states,
        )?;
        let rows = Prefills {
            starts,
            states,
            has,
        };
        let fields = ["query_start_loc", "state_indices_tensor", "seq_lens"];
        rows.check(fields, decodes.saturating_add(prefills))?;
        let tokens = self.tokens_from("query_start_loc", 0);
        let decode_tokens = metadata.num_decode_tokens as usize;
        for (row, &len) in has.iter().enumerate() {
            let of_row = own("query_start_loc", starts, row, self.num_tokens)?;
            // A row that is all query begins with nothing.
            let has_context = i64::from(len) > of_row.len() as i64;
            let begin = rows.begin(row).map(|(state, _)| match has_context {
                true => (state, From::State(state)),
                false => (state, From::Zeros),
            });
            let of_row = match row < decodes {
                true => row.min(decode_tokens)..(row + 1).min(decode_tokens),
                false => of_row.start.max(decode_tokens)..of_row.end.max(decode_tokens),
            };
            self.scan_row(begin, tokens, of_row)?;
        }
        Ok(())
    }
}
