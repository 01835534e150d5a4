//! KV-sharing fast prefill: trailing layers that share another layer's cache compute only the tokens whose logits are wanted.

use timetable_types::Causal;

use super::step::GroupStep;

/// The step as those layers see it: one query per wanted logit. `None` where nothing changes: all queries have one token, or
/// fast prefill is not armed.
///
/// Each index of `logits_indices_padded` (the first `num_logits_indices`; the rest repeat the last one) is a token of the
/// batch; rows count theirs, and the running sum is the new `query_start_loc`. Lengths, block table and slots stay, causal
/// is true, the request-wise flags are dropped. (vLLM 0.33 `make_kv_sharing_fast_prefill_common_attn_metadata`.)
///
/// # Panics
/// If an index is negative.
#[must_use]
pub fn make_kv_sharing_fast_prefill_step(step: &GroupStep) -> Option<GroupStep> {
    if step.cam.max_query_len == 1 {
        return None;
    }
    let armed = step.cam.fast_prefill.as_ref()?;
    let indices = step.tensors.logits_indices_padded.as_ref()?;
    let indices = &indices[..(armed.num_logits_indices as usize).min(indices.len())];
    let starts = &step.tensors.query_start_loc;
    let mut counts = vec![0; starts.len()];
    for &token in indices {
        assert!(token >= 0, "logits index {token} is negative");
        // The row whose token range holds it: query starts that are at most the token, rows without tokens passed over.
        let row = starts[1..].partition_point(|&end| end <= token);
        if let Some(count) = counts.get_mut(row + 1) {
            *count += 1;
        }
    }
    for row in 1..counts.len() {
        counts[row] += counts[row - 1];
    }
    let mut made = step.clone();
    made.cam.query_start_loc_cpu.clone_from(&counts);
    made.tensors.query_start_loc = counts;
    made.cam.num_actual_tokens = indices.len() as u32;
    made.cam.max_query_len = armed.max_logits_per_req;
    made.cam.causal = Causal::All(true);
    made.tensors.causal = None;
    made.cam.is_prefilling.clear();
    made.cam.fast_prefill = None;
    made.tensors.logits_indices_padded = None;
    made.tensors.positions.clear();
    Some(made)
}
