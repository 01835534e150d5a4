//! `explain-graphs`: from the configured CUDA graph mode to the one that survives.

use serde_json::json;
use timetable_attention::backend::{BackendRegistry, Device};
use timetable_attention::batch::RunnerGeneration;
use timetable_attention::graphs::{
    CaptureSizeConfig, ConfigFacts, Explanation, GraphModes, GroupSupport, Outcome, ResolveInput,
    default_capture_sizes, explain, support_name,
};
use timetable_types::{CudagraphMode, CudagraphSupport};

use super::ask;
use super::backends::capability;
use super::{print, print_json};
use crate::cli::ExplainGraphs;
use crate::config;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &ExplainGraphs) -> Result<(), Failure> {
    let capability = capability(&arguments.capability)?;
    let device = Device::Cuda { capability };
    let registry = BackendRegistry::new();
    let groups = arguments
        .backend
        .iter()
        .map(|text| group(&registry, device, text, arguments.num_speculative_tokens))
        .collect::<Result<Vec<GroupSupport>, Failure>>()?;
    let query_len = 1 + arguments.num_speculative_tokens;
    let sizes = if arguments.cudagraph_capture_sizes.is_empty() {
        default_capture_sizes(&CaptureSizeConfig {
            max_num_seqs: arguments.max_num_seqs,
            max_num_batched_tokens: arguments.max_num_batched_tokens,
            decode_query_len: query_len,
            compute_capability_major: capability.major,
            interactivity: false,
        })
    } else {
        let mut sizes = arguments.cudagraph_capture_sizes.clone();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    };
    let facts = ConfigFacts {
        pooling: arguments.pooling,
        encoder_decoder: arguments.encoder_decoder,
        connector_requires_piecewise: arguments.kv_connector_piecewise,
        enforce_eager: arguments.enforce_eager,
        no_piecewise: arguments.no_compile,
        ..ConfigFacts::default()
    };
    let input = ResolveInput {
        mode: None,
        min_support: CudagraphSupport::Always,
        min_backend: None,
        uniform_decode_query_len: query_len,
        attention_is_splitting_op: !arguments.no_splitting_ops,
        compiled: !arguments.no_compile,
        use_inductor_graph_partition: false,
        runner: if arguments.runner == 1 {
            RunnerGeneration::V1
        } else {
            RunnerGeneration::V2
        },
        piecewise_capture_available: !arguments.no_compile,
        capture_sizes: &sizes,
        max_capture_size: sizes.last().copied().unwrap_or(0),
        mamba: None,
        is_profiling: false,
    };
    let explanation = explain(mode("--mode", &arguments.mode)?, &facts, &groups, &input);
    if arguments.json {
        print_json(&json!(explanation))?;
    } else {
        print(render(&explanation).as_bytes())?;
    }
    match explanation.outcome {
        Outcome::Survived { .. } => Ok(()),
        Outcome::Refused { error } => Err(Failure::new(Exit::BadInput, error)),
    }
}

/// The mode that `flag` names.
fn mode(flag: &str, text: &str) -> Result<CudagraphMode, Failure> {
    config::mode(text).map_err(|problem| Failure::new(Exit::Usage, format!("{flag} {problem}")))
}

/// `NAME`, whose builder says what it supports, or `NAME=SUPPORT`. Where this binary has the component, the component is
/// asked; else the field's recorded answer stands.
fn group(
    registry: &BackendRegistry,
    device: Device,
    text: &str,
    num_speculative_tokens: u32,
) -> Result<GroupSupport, Failure> {
    let (name, given) = match text.split_once('=') {
        Some((name, support)) => (name, Some(support)),
        None => (text, None),
    };
    let unknown = || {
        Failure::new(
            Exit::Usage,
            format!("--backend {text}: `auto` names no backend; give one"),
        )
    };
    let name = registry
        .parse(name)
        .map_err(Failure::of(Exit::Usage))?
        .ok_or_else(unknown)?;
    let row = registry
        .row(&name, device)
        .map_err(Failure::of(Exit::Usage))?;
    let support = match given {
        None => match device.capability() {
            Some(capability) => ask::builder_info(&name, capability, num_speculative_tokens)?
                .map_or(row.builder.cudagraph_support, |info| info.cudagraph_support),
            None => row.builder.cudagraph_support,
        },
        Some(given) => CudagraphSupport::ALL
            .iter()
            .copied()
            .find(|support| support_name(*support).eq_ignore_ascii_case(given))
            .ok_or_else(|| {
                let valid: Vec<&str> = CudagraphSupport::ALL
                    .iter()
                    .map(|support| support_name(*support))
                    .collect();
                Failure::new(
                    Exit::Usage,
                    format!(
                        "--backend {text}: unknown support; valid are {}",
                        valid.join(", ")
                    ),
                )
            })?,
    };
    Ok(GroupSupport {
        backend: row.full_cls_name.1.to_string(),
        support,
    })
}

fn render(explanation: &Explanation) -> String {
    let mut text = format!("configured  {}\n", explanation.configured.name());
    for group in &explanation.groups {
        text.push_str(&format!(
            "builder     {}: {}\n",
            group.backend,
            support_name(group.support)
        ));
    }
    for change in &explanation.changes {
        text.push_str(&format!(
            "change      {} -> {}: {}\n",
            change.from.name(),
            change.to.name(),
            change.reason
        ));
    }
    match &explanation.outcome {
        Outcome::Survived {
            mode,
            decode,
            mixed,
            capture_sizes,
        } => {
            text.push_str(&format!(
                "survives    {} (decodes {decode:?}, other batches {mixed:?})\n",
                mode.name()
            ));
            if let (Some(first), Some(last)) = (capture_sizes.first(), capture_sizes.last()) {
                text.push_str(&format!(
                    "captured    {} sizes, {first} to {last} tokens\n",
                    capture_sizes.len()
                ));
            }
        }
        Outcome::Refused { .. } => text.push_str("survives    nothing: start-up is refused\n"),
    }
    text
}
