//! `kv_cache_spec` and `config` of a description: the contract's records, with a default for what is not given.

use serde_json::{Map, Value};
use timetable_types::{
    AttentionConfig, BuilderConfig, CudagraphConfig, CudagraphMode, DeviceConfig, Dtype,
    KvCacheLayout, KvCacheSpec, KvCacheSpecKind, ParallelConfig, SchedulerConfig,
};

use super::{
    DescriptionError,
    fields::{integer, wrong},
};

/// What the step itself says of the limits.
pub(super) struct StepShape {
    pub(super) num_reqs: u32,
    pub(super) num_actual_tokens: u32,
    pub(super) max_seq_len: u32,
    pub(super) width: u32,
}

/// The defaults; `StepDescription::validate` documents them.
pub(super) fn default_config(spec: KvCacheSpec, shape: &StepShape) -> BuilderConfig {
    let scale = 1.0 / f64::from(spec.head_size.max(1)).sqrt();
    BuilderConfig {
        layer_names: vec!["model.layers.0.self_attn.attn".to_owned()],
        attention: AttentionConfig {
            num_heads: spec.num_kv_heads,
            scale,
            logits_soft_cap: None,
            sliding_windows: Vec::new(),
            model_dtype: Dtype::Bfloat16,
            kv_cache_dtype: "auto".to_owned(),
            kv_cache_layout: KvCacheLayout::Lbnhc,
            has_sinks: false,
            use_rswa: false,
            rswa_window: 0,
            kv_lora_rank: 0,
            qk_rope_head_dim: 0,
        },
        scheduler: SchedulerConfig {
            max_num_seqs: shape.num_reqs.max(256),
            max_num_batched_tokens: shape.num_actual_tokens.max(8_192),
            max_model_len: shape.max_seq_len.max(32_768),
            max_num_blocks_per_req: shape.width,
            num_speculative_tokens: 0,
            parallel_drafting: false,
        },
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::None,
            capture_sizes: Vec::new(),
            max_capture_size: 0,
        },
        parallel: ParallelConfig {
            dcp_world_size: 1,
            dcp_rank: 0,
            cp_kv_cache_interleave_size: 1,
            prefill_context_parallel: false,
        },
        device: DeviceConfig {
            compute_capability: (0, 0),
            num_workers: 1,
            ctas_per_worker: 1,
            flash_attn_version: 0,
            trtllm_attention: false,
            xqa: false,
        },
        batch_invariant: false,
        max_num_splits: 32,
        model_runner_v2: true,
        options: Vec::new(),
        kv_cache_spec: spec,
    }
}

/// The configuration that `kv_cache_spec` and `config` describe.
pub(super) fn config(
    object: &Map<String, Value>,
    shape: &StepShape,
) -> Result<BuilderConfig, DescriptionError> {
    const SPEC: &str = "kv_cache_spec";
    const REMEDY: &str = "an object with block_size, num_kv_heads and head_size";
    let given = match object.get(SPEC) {
        Some(Value::Object(given)) => given,
        Some(other) if !other.is_null() => return Err(wrong(SPEC, other, REMEDY)),
        _ => {
            return Err(DescriptionError::Missing {
                field: SPEC.to_owned(),
                remedy: REMEDY,
            });
        }
    };
    let size = |key: &'static str, remedy| {
        let field = format!("{SPEC}.{key}");
        let value = given.get(key).ok_or(DescriptionError::Missing {
            field: field.clone(),
            remedy,
        })?;
        integer(&field, value, 1, 1 << 20).map(|value| value as u32)
    };
    let head_size = size("head_size", "elements of a head")?;
    let spec = KvCacheSpec {
        kind: KvCacheSpecKind::FullAttention,
        block_size: size("block_size", "tokens of a kernel block")?,
        num_kv_heads: size("num_kv_heads", "KV heads of this rank")?,
        head_size,
        head_size_v: head_size,
        dtype: Dtype::Bfloat16,
        sliding_window: None,
        attention_chunk_size: None,
        dcp_sharded: false,
        mamba: None,
    };
    let spec: KvCacheSpec = overlay(SPEC, &spec, &Value::Object(given.clone()))?;
    let defaults = default_config(spec, shape);
    match object.get("config") {
        None | Some(Value::Null) => Ok(defaults),
        Some(Value::Object(given)) if given.contains_key(SPEC) => {
            Err(DescriptionError::Inconsistent {
                field: "config.kv_cache_spec".to_owned(),
                value: "given".to_owned(),
                other: "the spec stands beside config".to_owned(),
            })
        }
        Some(given) => overlay("config", &defaults, given),
    }
    .and_then(|config: BuilderConfig| consistent(&config).map(|()| config))
}

/// `defaults` with what `given` names replaced. A key that the record does not have is an error, and so is a value that it
/// does not take; each names its path.
fn overlay<T>(path: &str, defaults: &T, given: &Value) -> Result<T, DescriptionError>
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    let mut whole = serde_json::to_value(defaults)
        .map_err(|error| DescriptionError::Json(error.to_string()))?;
    let mut leaves = Vec::new();
    flatten(path, &whole, given, &mut Vec::new(), &mut leaves)?;
    for (field, keys, value) in leaves {
        let mut place = &mut whole;
        for key in &keys {
            place = &mut place[key.as_str()];
        }
        *place = value.clone();
        // One leaf at a time, so that an error is this leaf's.
        if let Err(error) = serde_json::from_value::<T>(whole.clone()) {
            return Err(wrong(&field, value, &format!("another value ({error})")));
        }
    }
    serde_json::from_value(whole).map_err(|error| DescriptionError::Json(error.to_string()))
}

type Leaf<'v> = (String, Vec<String>, &'v Value);

fn flatten<'v>(
    path: &str,
    defaults: &Value,
    given: &'v Value,
    keys: &mut Vec<String>,
    leaves: &mut Vec<Leaf<'v>>,
) -> Result<(), DescriptionError> {
    let Value::Object(known) = defaults else {
        leaves.push((path.to_owned(), keys.clone(), given));
        return Ok(());
    };
    let Value::Object(given) = given else {
        return Err(wrong(path, given, "an object"));
    };
    for (key, value) in given {
        let field = format!("{path}.{key}");
        let Some(default) = known.get(key) else {
            let known: Vec<&str> = known.keys().map(String::as_str).collect();
            return Err(DescriptionError::Unknown {
                field,
                known: known.join(", "),
            });
        };
        keys.push(key.clone());
        flatten(&field, default, value, keys, leaves)?;
        keys.pop();
    }
    Ok(())
}

/// What no single field shows.
fn consistent(config: &BuilderConfig) -> Result<(), DescriptionError> {
    let (heads, kv_heads) = (
        config.attention.num_heads,
        config.kv_cache_spec.num_kv_heads,
    );
    let parallel = &config.parallel;
    let fault = |field: &str, value: u32, other: String| DescriptionError::Inconsistent {
        field: field.to_owned(),
        value: value.to_string(),
        other,
    };
    if heads == 0 || heads % kv_heads != 0 {
        let other = format!("it must be a multiple of kv_cache_spec.num_kv_heads, {kv_heads}");
        return Err(fault("config.attention.num_heads", heads, other));
    }
    if config.max_num_splits == 0 {
        return Err(fault(
            "config.max_num_splits",
            0,
            "a request has at least 1 split".to_owned(),
        ));
    }
    if parallel.dcp_world_size == 0 || parallel.dcp_rank >= parallel.dcp_world_size {
        let other = format!("dcp_world_size is {}", parallel.dcp_world_size);
        return Err(fault("config.parallel.dcp_rank", parallel.dcp_rank, other));
    }
    if parallel.cp_kv_cache_interleave_size == 0 {
        let other = "a run has at least 1 token".to_owned();
        return Err(fault(
            "config.parallel.cp_kv_cache_interleave_size",
            0,
            other,
        ));
    }
    Ok(())
}
