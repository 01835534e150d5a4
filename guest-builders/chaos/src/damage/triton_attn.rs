//! TRITON_ATTN's fields.

use timetable_guest::types::triton_attn::Metadata;

use super::{Damage, Place};

impl Damage for Metadata {
    const FIELDS: &'static [&'static str] = &[
        "num_actual_tokens",
        "max_query_len",
        "query_start_loc",
        "max_seq_len",
        "seq_lens",
        "block_table",
        "slot_mapping",
        "causal",
        "seq_threshold_3d",
        "num_par_softmax_segments",
        "softmax_segm_output",
        "softmax_segm_max",
        "softmax_segm_expsum",
        "mm_prefix_range",
        "rswa_prefix_lens",
        "rswa_window",
    ];

    fn places(&mut self) -> Vec<(&'static str, Place<'_>)> {
        let Metadata {
            num_actual_tokens,
            max_query_len,
            query_start_loc,
            max_seq_len,
            seq_lens,
            block_table,
            slot_mapping,
            causal,
            seq_threshold_3d,
            num_par_softmax_segments,
            softmax_segm_output,
            softmax_segm_max,
            softmax_segm_expsum,
            mm_prefix_range,
            rswa_prefix_lens,
            rswa_window,
        } = self;
        let places = [
            Place::U32(num_actual_tokens),
            Place::U32(max_query_len),
            Place::Tensor(query_start_loc),
            Place::U32(max_seq_len),
            Place::Tensor(seq_lens),
            Place::Tensor(block_table),
            Place::Tensor(slot_mapping),
            Place::Causal(causal),
            Place::U32(seq_threshold_3d),
            Place::U32(num_par_softmax_segments),
            Place::Scratch(softmax_segm_output),
            Place::Scratch(softmax_segm_max),
            Place::Scratch(softmax_segm_expsum),
            Place::MaybeTensor(mm_prefix_range),
            Place::MaybeTensor(rswa_prefix_lens),
            Place::U32(rswa_window),
        ];
        Self::FIELDS.iter().copied().zip(places).collect()
    }

    fn vary(&mut self, turn: u64) {
        // Any number of segments is a good one.
        let segments = 1 << (turn % 3);
        self.num_par_softmax_segments = segments;
        for scratch in [
            &mut self.softmax_segm_output,
            &mut self.softmax_segm_max,
            &mut self.softmax_segm_expsum,
        ] {
            if let Some(size) = scratch.shape.get_mut(2) {
                *size = segments;
            }
        }
    }
}
