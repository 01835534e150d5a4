//! Some rows of a step: by reference where they stand together, else by what the host knows of them. It must never know what is
//! done with them.

use timetable_types::{
    CommonAttentionMetadata, ConvChunks, Input, RowRange, Tensor,
    batch::{CAUSAL_CONV1D_BLOCK_M, PAD},
    mamba::CausalConv1d,
};

/// Query tokens of each row of the step.
pub(super) fn lens(common: &CommonAttentionMetadata) -> impl Iterator<Item = i32> {
    let starts = &common.query_start_loc_cpu;
    starts.windows(2).map(|pair| pair[1] - pair[0])
}

/// Rows of a step, rising.
#[derive(Clone, Debug)]
pub(super) struct Rows<'a> {
    common: &'a CommonAttentionMetadata,
    chosen: Chosen,
}

#[derive(Clone, Debug)]
enum Chosen {
    Range(u32, u32),
    List(Vec<u32>),
}

impl<'a> Rows<'a> {
    /// Rows [start, end).
    pub(super) fn range(common: &'a CommonAttentionMetadata, start: u32, end: u32) -> Self {
        Self {
            common,
            chosen: Chosen::Range(start, end),
        }
    }

    /// These rows.
    pub(super) fn of(common: &'a CommonAttentionMetadata, list: Vec<u32>) -> Self {
        match (list.first(), list.last()) {
            (Some(&first), Some(&last)) if (last - first) as usize == list.len() - 1 => {
                Self::range(common, first, last + 1)
            }
            _ => Self {
                common,
                chosen: Chosen::List(list),
            },
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.chosen {
            Chosen::Range(start, end) => (end - start) as usize,
            Chosen::List(list) => list.len(),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let (range, list) = match &self.chosen {
            Chosen::Range(start, end) => (*start..*end, &[][..]),
            Chosen::List(list) => (0..0, list.as_slice()),
        };
        range.chain(list.iter().copied())
    }

    pub(super) fn list(&self) -> Vec<u32> {
        match &self.chosen {
            Chosen::Range(start, end) => (*start..*end).collect(),
            Chosen::List(list) => list.clone(),
        }
    }

    /// Are these all rows of the step?
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.chosen, Chosen::Range(0, end) if end == self.common.num_reqs)
    }

    /// Are these the step's first rows?
    pub(super) fn is_first(&self) -> bool {
        matches!(self.chosen, Chosen::Range(0, _))
    }

    /// Query tokens of each.
    pub(super) fn lens(&self) -> impl Iterator<Item = i32> {
        let starts = &self.common.query_start_loc_cpu;
        self.iter()
            .map(|row| starts[row as usize + 1] - starts[row as usize])
    }

    /// `s32 [n + 1]`: the running sum of their query tokens, from 0.
    pub(super) fn query_starts(&self) -> Vec<i32> {
        let starts = &self.common.query_start_loc_cpu;
        match self.chosen {
            Chosen::Range(start, end) => {
                let own = &starts[start as usize..=end as usize];
                own.iter().map(|at| at - own[0]).collect()
            }
            Chosen::List(_) => {
                let mut sums = Vec::with_capacity(self.len() + 1);
                sums.push(0);
                for len in self.lens() {
                    sums.push(sums[sums.len() - 1] + len);
                }
                sums
            }
        }
    }

    /// The same as a tensor.
    pub(super) fn query_start_loc(&self) -> Tensor {
        match self.chosen {
            _ if self.is_whole() => Tensor::Input(Input::QueryStartLoc),
            Chosen::Range(start, end) => Tensor::RebasedQueryStartLoc(RowRange { start, end }),
            Chosen::List(_) => Tensor::Values(self.query_starts()),
        }
    }

    /// `bool [n]`: which have a state from before.
    pub(super) fn has_context(&self) -> Tensor {
        match self.chosen {
            Chosen::Range(start, end) => Tensor::HasContext(RowRange { start, end }),
            Chosen::List(_) => {
                // The host's lengths are at least the device's: exact where a row prefills, above its query where it decodes.
                let bounds = &self.common.seq_lens_cpu_upper_bound;
                let has = self.iter().zip(self.lens());
                Tensor::Values(
                    has.map(|(row, len)| i32::from(bounds[row as usize] > len))
                        .collect(),
                )
            }
        }
    }

    /// Their chunks of the causal convolution.
    pub(super) fn conv(&self) -> CausalConv1d {
        let nums: Vec<i32> = self
            .lens()
            .map(|len| (len.max(0) + CAUSAL_CONV1D_BLOCK_M - 1) / CAUSAL_CONV1D_BLOCK_M)
            .collect();
        let total = nums.iter().sum::<i32>() as u32;
        // The field's buffers.
        let length = 2 * total.max(1024);
        let (batch_ptr, token_chunk_offset_ptr) = match self.chosen {
            Chosen::Range(start, end) => {
                let chunks = ConvChunks {
                    rows: RowRange { start, end },
                    block_m: CAUSAL_CONV1D_BLOCK_M as u32,
                    length,
                };
                (
                    Tensor::ConvChunkRows(chunks.clone()),
                    Tensor::ConvChunkOffsets(chunks),
                )
            }
            Chosen::List(_) => {
                let (mut of_row, mut offset) = (
                    Vec::with_capacity(length as usize),
                    Vec::with_capacity(length as usize),
                );
                for (index, &num) in nums.iter().enumerate() {
                    of_row.resize(of_row.len() + num as usize, index as i32);
                    offset.extend(0..num);
                }
                of_row.resize(length as usize, PAD);
                offset.resize(length as usize, PAD);
                (Tensor::Values(of_row), Tensor::Values(offset))
            }
        };
        CausalConv1d {
            block_m: CAUSAL_CONV1D_BLOCK_M as u32,
            nums,
            total,
            batch_ptr,
            token_chunk_offset_ptr,
        }
    }
}
