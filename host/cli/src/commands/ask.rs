//! What a backend's embedded component says of itself on a device: asked in the sandbox, not read from a table.

use serde_json::json;
use timetable_attention::MetadataBuilder;
use timetable_attention::backend::{Capability, FlashAttnQuery, flash_attn_version};
use timetable_attention::describe::StepDescription;
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};
use timetable_types::{BuilderConfig, BuilderInfo, Family};

use super::embedded;
use crate::exit::{Exit, Failure};

/// Tokens of a page, KV heads, and elements of a head: a Llama of 8 billion parameters, for what depends on sizes.
const SIZES: (u32, u32, u32) = (16, 8, 128);
/// The same for the MLA backends, whose builders take nothing else: one latent for all heads, as DeepSeek's.
const LATENT_SIZES: (u32, u32, u32) = (64, 1, 576);

/// The builder's own word. None: this binary has no component for the backend.
pub fn builder_info(
    backend: &str,
    capability: Capability,
    num_speculative_tokens: u32,
) -> Result<Option<BuilderInfo>, Failure> {
    let Ok(component) = embedded(backend) else {
        return Ok(None);
    };
    let config = config(component.family, capability, num_speculative_tokens)?;
    let failed = |what: &dyn std::fmt::Display| {
        Failure::new(
            Exit::Failure,
            format!("component {}: {what}", component.name),
        )
    };
    let sandbox = Sandbox::new(Limits::default()).map_err(|error| failed(&error))?;
    let loaded = sandbox
        .load(component.bytes)
        .map_err(|error| failed(&error))?;
    let builder = WasmBuilder::new(&loaded, &config).map_err(|fault| failed(&fault))?;
    Ok(Some(builder.info().clone()))
}

/// A group's configuration on such a device, everything else as a step description has it by default.
fn config(
    family: Family,
    capability: Capability,
    num_speculative_tokens: u32,
) -> Result<BuilderConfig, Failure> {
    let (block_size, num_kv_heads, head_size) = match family {
        Family::FlashMla => LATENT_SIZES,
        _ => SIZES,
    };
    let version = flash_attn_version(&FlashAttnQuery {
        capability,
        head_size,
        block_size: Some(block_size),
        has_sink: false,
        use_mm_prefix: false,
    });
    let step = json!({
        "query_start_loc": [0, 1], "seq_lens": [1], "num_reqs": 1, "num_actual_tokens": 1,
        "max_query_len": 1, "max_seq_len": 1, "block_table": [[1]], "slot_mapping": [block_size], "positions": [0],
        "is_prefilling": [false],
        "kv_cache_spec": { "block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size },
        "config": {
            "attention": { "num_heads": 4 * num_kv_heads },
            "scheduler": { "num_speculative_tokens": num_speculative_tokens },
            "device": {
                "compute_capability": [capability.major, capability.minor],
                "flash_attn_version": version,
            },
        },
    });
    StepDescription::from_value(step)
        .and_then(|description| description.validate())
        .map(|described| described.config)
        .map_err(Failure::of(Exit::Failure))
}
