//! The small steps that a new instance builds before it is let near a live one: they prove that it builds at all, and warm
//! its code and memory.
//!
//! Must never know: what the metadata means. Judging it is the verifier's.

use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_types::{
    BuilderConfig, Causal, CommonAttentionMetadata, DcpInputs, EncoderInputs, KvCacheSpecKind,
};

/// A decode-only step, and a step with a prefill where the configuration allows more than one token for a request.
pub fn probe_steps(config: &BuilderConfig) -> Vec<CommonAttentionMetadata> {
    let scheduler = &config.scheduler;
    let longest = scheduler
        .max_model_len
        .min(
            scheduler
                .max_num_blocks_per_req
                .saturating_mul(config.kv_cache_spec.block_size),
        )
        .max(1);
    let rows = scheduler
        .max_num_seqs
        .min(scheduler.max_num_batched_tokens)
        .clamp(1, 8);
    let decodes: Vec<(u32, u32)> = (0..rows)
        .map(|row| (1, (17 * row + 1).min(longest)))
        .collect();
    let mut steps = vec![step(config, &decodes)];
    let prompt = longest
        .min(scheduler.max_num_batched_tokens.saturating_sub(1))
        .min(40);
    if prompt > 1 && scheduler.max_num_seqs > 1 {
        steps.push(step(config, &[(1, longest.min(33)), (prompt, prompt)]));
    }
    steps
}

/// A step of rows (query tokens, keys), decodes first.
fn step(config: &BuilderConfig, rows: &[(u32, u32)]) -> CommonAttentionMetadata {
    let starts = rows.iter().scan(0, |end, (tokens, _)| {
        *end += *tokens as i32;
        Some(*end)
    });
    let tokens: u32 = rows.iter().map(|(tokens, _)| tokens).sum();
    let lens: Vec<i32> = rows.iter().map(|(_, keys)| *keys as i32).collect();
    let encoder = config.kv_cache_spec.kind == KvCacheSpecKind::CrossAttention;
    CommonAttentionMetadata {
        num_reqs: rows.len() as u32,
        num_actual_tokens: tokens,
        max_query_len: rows.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0),
        max_seq_len: rows.iter().map(|(_, keys)| *keys).max().unwrap_or(0),
        causal: Causal::All(true),
        block_table_width: config.scheduler.max_num_blocks_per_req,
        slot_mapping_len: tokens,
        query_start_loc_cpu: std::iter::once(0).chain(starts).collect(),
        seq_lens_cpu_upper_bound: lens.clone(),
        is_prefilling: rows
            .iter()
            .map(|(tokens, keys)| u8::from(*tokens == *keys && *tokens > 1))
            .collect(),
        dcp: (config.parallel.dcp_world_size > 1).then(|| DcpInputs {
            dcp_local_seq_lens_cpu_upper_bound: lens.clone(),
        }),
        encoder: encoder.then_some(EncoderInputs {
            encoder_seq_lens_cpu: lens,
        }),
        fast_prefill: None,
        req_idx: Vec::new(),
        mm_req_doc_ranges: Vec::new(),
        replayssm_decode_base_cpu: Vec::new(),
        extras: Vec::new(),
    }
}

/// Builds every probe step once.
pub(crate) fn run(
    builder: &mut dyn MetadataBuilder,
    config: &BuilderConfig,
) -> Result<(), BuildFault> {
    for common in probe_steps(config) {
        let metadata = builder.build(&common, false)?;
        if metadata.family() != builder.family() {
            return Err(BuildFault::Fault {
                kind: FaultKind::LiftBound,
                message: format!("built metadata of {}", metadata.family().interface()),
            });
        }
    }
    Ok(())
}
