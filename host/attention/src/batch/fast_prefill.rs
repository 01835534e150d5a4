//! KV-sharing fast prefill: trailing layers that share another layer's cache compute only the tokens whose logits are wanted.
//! It must never know how logits are sampled.

use timetable_types::{Causal, FastPrefillInputs};

use super::step::GroupStep;

/// A layer, in registration order, as far as fast prefill asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingLayer<'a> {
    /// The layer's name.
    pub name: &'a str,
    /// Does it read another layer's cache?
    pub shares_kv_cache: bool,
    /// Is it a draft model's?
    pub is_draft: bool,
}

/// The layers that may skip prompt tokens: the trailing run of those that read another layer's cache, draft layers passed
/// over. A layer before that run feeds one that writes keys, so it needs every token.
#[must_use]
pub fn fast_prefill_layers<'a>(layers: &[SharingLayer<'a>]) -> Vec<&'a str> {
    let own: Vec<&SharingLayer<'a>> = layers.iter().filter(|layer| !layer.is_draft).collect();
    let first = own
        .iter()
        .rposition(|layer| !layer.shares_kv_cache)
        .map_or(0, |last_writer| last_writer + 1);
    own[first..].iter().map(|layer| layer.name).collect()
}

/// Arms fast prefill for a step: the wanted tokens, padded to a captured piecewise size with the last one repeated, and their
/// counts. `None` where it is not armed: no row prefills, the step is a full graph or cut into micro-batches, or no logits
/// are wanted.
///
/// `capture_sizes` rise; a count above the largest is not padded. `query_start_loc` is `s32 [R + 1]`.
#[must_use]
pub fn arm_fast_prefill(
    logits_indices: &[i32],
    query_start_loc: &[i32],
    capture_sizes: &[u32],
    any_prefill: bool,
    full_graph_or_cut: bool,
) -> Option<(Vec<i32>, FastPrefillInputs)> {
    let &last = logits_indices.last()?;
    if !any_prefill || full_graph_or_cut {
        return None;
    }
    let wanted = logits_indices.len();
    let at = capture_sizes.partition_point(|&size| (size as usize) < wanted);
    let padded_len = capture_sizes.get(at).map_or(wanted, |&size| size as usize);
    let mut padded = logits_indices.to_vec();
    padded.resize(padded_len, last);
    let counts = logits_per_row(logits_indices, query_start_loc);
    let armed = FastPrefillInputs {
        num_logits_indices: wanted as u32,
        max_logits_per_req: counts.iter().copied().max().unwrap_or(0) as u32,
        num_logits_indices_padded: padded_len as u32,
    };
    Some((padded, armed))
}

/// How many of the tokens each row has, `s32 [R]`.
fn logits_per_row(indices: &[i32], query_start_loc: &[i32]) -> Vec<i32> {
    let ends = query_start_loc.get(1..).unwrap_or(&[]);
    let mut counts = vec![0; ends.len()];
    for &token in indices {
        assert!(token >= 0, "logits index {token} is negative");
        // The row whose token range holds it: rows without tokens are passed over.
        let row = ends.partition_point(|&end| end <= token);
        if let Some(count) = counts.get_mut(row) {
            *count += 1;
        }
    }
    counts
}

/// The step as those layers see it: one query per wanted logit. `None` where nothing changes: all queries have one token, or
/// fast prefill is not armed.
///
/// Each index of `logits_indices_padded` (the first `num_logits_indices`; the rest repeat the last one) is a token of the
/// batch; rows count theirs, and the running sum is the new `query_start_loc`. Lengths, block table and slots stay, causal
/// is true, the request-wise flags are dropped. The slots are the whole step's, but these layers write nothing: a host that has
/// the step verified gives none (−1). (vLLM 0.33 `make_kv_sharing_fast_prefill_common_attn_metadata`.)
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
    let mut query_start_loc = vec![0];
    for count in logits_per_row(indices, &step.tensors.query_start_loc) {
        query_start_loc.push(query_start_loc[query_start_loc.len() - 1] + count);
    }
    let mut made = step.clone();
    made.cam.query_start_loc_cpu.clone_from(&query_start_loc);
    made.tensors.query_start_loc = query_start_loc;
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
