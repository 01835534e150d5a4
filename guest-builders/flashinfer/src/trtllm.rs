//! The parts that TensorRT-LLM's generated kernels or XQA run: they need no plan, only views, and XQA a draft mask. It must
//! never know a work list.

use timetable_guest::{
    batch::DecodePrefillSplit,
    types::{
        CommonAttentionMetadata, Input, Matrix, RowRange, Tensor, TensorSlice,
        flashinfer::{TrtllmDecode, TrtllmKernel, TrtllmPrefill},
    },
};

use crate::PlannedWork;

impl PlannedWork {
    pub(crate) fn trtllm_decode(
        &self,
        common: &CommonAttentionMetadata,
        split: &DecodePrefillSplit,
        causal: bool,
    ) -> TrtllmDecode {
        let rows = split.num_decodes;
        let starts = &common.query_start_loc_cpu[..=rows as usize];
        let lens = || {
            starts
                .iter()
                .zip(&starts[1..])
                .map(|(start, end)| end - start)
        };
        let q_len = lens().max().unwrap_or(0).max(0);
        let xqa = self.config.device.xqa;
        // XQA takes padding rows among rows of one length; trtllm-gen takes starts as soon as a draft is not full.
        let uniform = q_len <= 1 || lens().all(|len| len == q_len || (xqa && len == 0));
        let q_cu_seq_lens = (!uniform).then(|| {
            if rows == common.num_reqs {
                Tensor::Input(Input::QueryStartLoc)
            } else {
                Tensor::Slice(TensorSlice {
                    source: Input::QueryStartLoc,
                    start: 0,
                    end: rows + 1,
                })
            }
        });
        let mask = (xqa && q_len > 1).then(|| {
            if uniform {
                draft_mask((0..rows).map(|_| q_len), q_len, causal)
            } else {
                draft_mask(lens(), q_len, causal)
            }
        });
        TrtllmDecode {
            kernel: if xqa {
                TrtllmKernel::Xqa
            } else {
                TrtllmKernel::TrtllmGen
            },
            block_tables: rows_of(Input::BlockTable, 0, rows, common.num_reqs),
            seq_lens: rows_of(Input::SeqLens, 0, rows, common.num_reqs),
            max_seq_len: common.max_seq_len,
            q_len_per_req: q_len.max(1) as u32,
            q_cu_seq_lens,
            mask,
            dcp_query_start_loc: None,
        }
    }
}

/// Prefills by TensorRT-LLM: rows after the decodes.
pub fn prefill(common: &CommonAttentionMetadata, split: &DecodePrefillSplit) -> TrtllmPrefill {
    let (first, all) = (split.num_decodes, common.num_reqs);
    let starts = &common.query_start_loc_cpu[first as usize..];
    let max_q_len = starts
        .iter()
        .zip(&starts[1..])
        .map(|(start, end)| end - start)
        .max();
    let rows = RowRange {
        start: first,
        end: all,
    };
    TrtllmPrefill {
        block_tables: rows_of(Input::BlockTable, first, all, all),
        seq_lens: rows_of(Input::SeqLens, first, all, all),
        cum_seq_lens_q: Tensor::RebasedQueryStartLoc(rows.clone()),
        cum_seq_lens_kv: Tensor::CuPageCounts(rows),
        max_q_len: max_q_len.unwrap_or(0).max(0) as u32,
        max_seq_len: common.max_seq_len,
    }
}

fn rows_of(source: Input, start: u32, end: u32, all: u32) -> Tensor {
    if start == 0 && end == all {
        Tensor::Input(source)
    } else {
        Tensor::Slice(TensorSlice { source, start, end })
    }
}

/// Which of its request's query tokens each query token sees, as bits: itself and those before it, or all.
/// s32 [tokens, ceil(q_len / 32)]: pairs of u16 words, low first.
fn draft_mask(lens: impl Iterator<Item = i32>, q_len: i32, causal: bool) -> Matrix {
    let columns = (q_len as u32).div_ceil(32);
    let mut values = Vec::new();
    for len in lens {
        for token in 0..len {
            let mut seen = if causal { token + 1 } else { q_len };
            for _ in 0..columns {
                let bits = seen.clamp(0, 32);
                values.push(if bits == 32 { -1 } else { (1_i32 << bits) - 1 });
                seen -= 32;
            }
        }
    }
    Matrix {
        rows: values.len() as u32 / columns.max(1),
        columns,
        values,
    }
}
