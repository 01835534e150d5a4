//! `backends`: each attention backend's answer to a layer's configuration.

use serde_json::json;
use timetable_attention::backend::{
    AttentionType, BackendRegistry, Capability, Configuration, Device, check_kv_cache_dtype,
};
use timetable_attention::select::{BackendAnswer, Request, explain, select};
use timetable_types::Dtype;

use super::table::table;
use super::{print, print_json};
use crate::cli::Backends;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Backends) -> Result<(), Failure> {
    let device = match &arguments.capability {
        Some(text) => Device::Cuda {
            capability: capability(text)?,
        },
        None => Device::Cpu,
    };
    let config = configuration(arguments)?;
    let registry = BackendRegistry::new();
    let requested = match &arguments.attention_backend {
        Some(name) => registry.parse(name).map_err(Failure::of(Exit::Usage))?,
        None => None,
    };
    let request = Request {
        config: &config,
        num_heads: arguments.num_heads,
        device,
        requested: requested.as_deref(),
    };
    let answers = explain(&registry, &request);
    let selected = select(&registry, &request);
    if arguments.json {
        let backends: Vec<_> = answers
            .iter()
            .map(|answer| {
                json!({
                    "name": answer.name,
                    "priority": answer.priority,
                    "valid": answer.valid,
                    "chosen": answer.chosen,
                    "reasons": answer.reasons,
                    "why_not": answer.why_not,
                })
            })
            .collect();
        print_json(&json!({
            "device": device.name(),
            "chosen": selected.as_ref().ok().map(|selection| &*selection.row.name),
            "warning": selected.as_ref().ok().and_then(|selection| selection.warning.as_deref()),
            "error": selected.as_ref().err().map(ToString::to_string),
            "backends": backends,
        }))?;
    } else {
        print(render(&answers).as_bytes())?;
        if let Ok(selection) = &selected {
            print(format!("\n{}\n", selection.log).as_bytes())?;
            if let Some(warning) = &selection.warning {
                eprintln!("warning: {warning}");
            }
        }
    }
    selected
        .map(drop)
        .map_err(|error| Failure::new(Exit::BadInput, error))
}

/// A compute capability from the command line.
pub fn capability(text: &str) -> Result<Capability, Failure> {
    Capability::parse(text).ok_or_else(|| {
        Failure::new(
            Exit::Usage,
            format!("--capability {text}: not a compute capability; give it as MAJOR.MINOR, for example 9.0"),
        )
    })
}

fn configuration(arguments: &Backends) -> Result<Configuration, Failure> {
    check_kv_cache_dtype(&arguments.kv_cache_dtype).map_err(Failure::of(Exit::Usage))?;
    let attn_type = AttentionType::parse(&arguments.attn_type).ok_or_else(|| {
        Failure::new(
            Exit::Usage,
            format!(
                "--attn-type {}: unknown; valid are {}",
                arguments.attn_type,
                AttentionType::ALL.map(AttentionType::name).join(", ")
            ),
        )
    })?;
    Ok(Configuration {
        kv_cache_dtype: Some(arguments.kv_cache_dtype.clone()),
        block_size: arguments.block_size,
        use_mla: arguments.mla,
        has_sink: arguments.sinks,
        use_sparse: arguments.sparse,
        use_mm_prefix: arguments.mm_prefix,
        use_per_head_quant_scales: arguments.per_head_quant_scales,
        attn_type,
        has_sliding_window: arguments.sliding_window,
        use_non_causal: arguments.non_causal,
        use_batch_invariant: arguments.batch_invariant,
        use_kv_connector: arguments.kv_connector,
        use_pcp: arguments.pcp,
        use_dcp: arguments.dcp,
        ..Configuration::new(arguments.head_size, model_dtype(&arguments.dtype)?)
    })
}

/// The names and the short forms in use.
fn model_dtype(text: &str) -> Result<Dtype, Failure> {
    match text {
        "float32" | "float" | "f32" | "fp32" => Ok(Dtype::Float32),
        "float16" | "half" | "f16" | "fp16" => Ok(Dtype::Float16),
        "bfloat16" | "bf16" => Ok(Dtype::Bfloat16),
        other => Err(Failure::new(
            Exit::Usage,
            format!("--dtype {other}: not a model dtype; valid are float32, float16, bfloat16"),
        )),
    }
}

fn render(answers: &[BackendAnswer]) -> String {
    let rows: Vec<Vec<String>> = answers
        .iter()
        .map(|answer| {
            vec![
                answer.name.clone(),
                answer
                    .priority
                    .map_or_else(String::new, |place| (place + 1).to_string()),
                if answer.chosen {
                    "chosen"
                } else if answer.valid {
                    "valid"
                } else {
                    "no"
                }
                .to_owned(),
                answer.why_not.clone().unwrap_or_default(),
            ]
        })
        .collect();
    table(&["BACKEND", "PRIORITY", "ANSWER", "WHY NOT"], &rows)
}
