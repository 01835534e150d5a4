//! TRITON_ATTN's record, read.

use timetable_types::{Causal, Dtype, Input, Tensor, triton_attn::Metadata};

use super::Reader;

impl Reader<'_> {
    pub(super) fn triton_attn(&mut self, record: &Metadata) -> Result<(), String> {
        let starts = self.vector(&record.query_start_loc)?;
        let lens = self.vector(&record.seq_lens)?;
        let table = self.vector(&record.block_table)?;
        let width = self.case.step.tensors.block_table_width;
        let prefixes = record.rswa_prefix_lens.as_ref();
        let prefixes = prefixes.map(|tensor| self.vector(tensor)).transpose()?;
        if record.slot_mapping != Tensor::Input(Input::SlotMapping) {
            return Err("other slots".to_owned());
        }
        let rows = starts.len() - 1;
        let spans = match &record.mm_prefix_range {
            Some(Tensor::Matrix(matrix)) => matrix.values.chunks(matrix.columns as usize).collect(),
            Some(_) => return Err("spans of another form".to_owned()),
            None => vec![&[][..]; rows],
        };
        let segments = record.num_par_softmax_segments;
        let places = record.softmax_segm_output.shape[0];
        for (index, scratch) in [
            &record.softmax_segm_output,
            &record.softmax_segm_max,
            &record.softmax_segm_expsum,
        ]
        .into_iter()
        .enumerate()
        {
            let dims = if index == 0 { 4 } else { 3 };
            let wanted = [places, self.case.config.attention.num_heads, segments, 32];
            if scratch.shape != wanted[..dims] || scratch.dtype != Dtype::Float32 {
                return Err("scratch of another shape".to_owned());
            }
        }
        let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max();
        let is_3d = rows <= record.seq_threshold_3d as usize && longest <= Some(1);
        if is_3d && (segments == 0 || (places as i32) < starts[rows]) {
            return Err("more tokens than places".to_owned());
        }
        for row in 0..rows {
            let (start, len) = (starts[row] as usize, lens[row] as usize);
            let query = starts[row + 1] as usize - start;
            let causal = match record.causal {
                Causal::All(causal) => causal,
                Causal::PerRequest => {
                    self.case.step.tensors.causal.as_ref().ok_or("flags")?[row] != 0
                }
            };
            for token in 0..query.min(record.max_query_len as usize) {
                // An encoder's keys may be fewer than the queries, and are then all seen.
                let position = (len + token) as i64 - query as i64;
                let mut keys = Vec::new();
                for key in 0..len.min(record.max_seq_len as usize) {
                    let spanned = spans[row].chunks(2).any(|pair| {
                        let span = i64::from(pair[0])..=i64::from(pair[1]);
                        pair[0] < pair[1]
                            && span.contains(&position)
                            && span.contains(&(key as i64))
                    });
                    let reached = prefixes.as_ref().is_none_or(|prefixes| {
                        key as i64 + i64::from(record.rswa_window) > position
                            || key < prefixes[row] as usize
                    });
                    if (!causal || key as i64 <= position || spanned) && reached {
                        let own = &table[row * width..(row + 1) * width];
                        keys.push(self.slot(own, key)?);
                    }
                }
                self.give(start + token, &keys)?;
            }
        }
        Ok(())
    }
}
