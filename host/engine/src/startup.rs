//! What start-up decides and finds once the builders exist: the CUDA graph mode that survives, the graphs that are captured, the
//! steps in flight, and the report.
//!
//! Both are the rule book's, kept as data and logged once. This module must never know a step.

use timetable_attention::{
    batch::RunnerGeneration,
    graphs::{
        ConfigFacts, CudagraphManager, Explanation, GraphModes, GroupSupport, ManagerConfig,
        Outcome, ResolveInput, RuntimeMode, explain,
    },
    group::AttentionGroup,
    report::{Hazard, RunFacts, Severity, StartupReport},
};
use timetable_types::{BuilderInfo, CudagraphMode, CudagraphSupport};

use crate::{
    attention::{Attention, AttentionPlan},
    config::{EngineConfig, EngineError},
    executor::{DeviceFacts, Executor, FullGraph, GraphPlan, capture_shape},
    speculation::SpeculativeMethod,
};

/// What of this engine's configuration changes the graph mode before a builder is asked: a CPU captures no graphs.
pub(crate) fn config_facts(facts: &DeviceFacts) -> ConfigFacts {
    ConfigFacts {
        no_static_graphs: !facts.captures_graphs(),
        ..ConfigFacts::default()
    }
}

/// What start-up found.
pub(crate) struct Startup {
    pub report: StartupReport,
    pub cudagraph_mode: Explanation,
}

impl Startup {
    /// Asks each group's builders (`infos`, every slot's with its group) for their graph support, and looks for hazards.
    ///
    /// # Errors
    /// [`EngineError::Refused`] with the first refusal.
    pub fn new<'a>(
        engine: &EngineConfig,
        plan: &AttentionPlan,
        infos: impl Iterator<Item = (&'a BuilderInfo, &'a AttentionGroup)>,
    ) -> Result<Self, EngineError> {
        let supports: Vec<GroupSupport> = infos
            .map(|(info, group)| GroupSupport {
                backend: class_name(&group.backend.class).to_owned(),
                support: info.cudagraph_support,
            })
            .collect();
        let cudagraph_mode = explain(
            engine.cudagraph_mode,
            &config_facts(plan.facts()),
            &supports,
            &resolve_input(engine, plan),
        );
        let changes: Vec<String> = cudagraph_mode
            .changes
            .iter()
            .map(|change| change.reason.clone())
            .collect();
        let report = StartupReport::new(
            plan.groups(),
            &RunFacts {
                device: plan.facts().device,
                batch_invariant: engine.batch_invariant,
                supports_batch_invariance: plan.supports_batch_invariance(),
                prefix_caching: engine.enable_prefix_caching,
                max_num_splits: engine.max_num_splits,
                dcp_world_size: 1,
                cp_kv_cache_interleave_size: 1,
                num_speculative_tokens: engine.num_speculative_tokens() as u32,
                selection_warnings: plan.selection_warnings(),
                graph_mode_changes: &changes,
                lse_bases: &[],
                per_request_causal: None,
                unsplit_model: None,
            },
        );
        if let Outcome::Refused { error } = &cudagraph_mode.outcome {
            return Err(EngineError::Refused(error.clone()));
        }
        if let Some(hazard) = report.refusal() {
            return Err(EngineError::Refused(hazard.message.clone()));
        }
        let startup = Self {
            report,
            cudagraph_mode,
        };
        startup.log();
        Ok(startup)
    }

    /// Are equal prefixes shared? As configured, unless the report says that they must not be.
    pub fn enables_prefix_caching(&self, configured: bool) -> bool {
        let disabled = |hazard: &Hazard| hazard.code == "prefix_caching_disabled";
        configured && !self.report.hazards.iter().any(disabled)
    }

    /// The mode that survived, and the sizes that are captured.
    pub fn survived(&self) -> (CudagraphMode, &[u32]) {
        match &self.cudagraph_mode.outcome {
            Outcome::Survived {
                mode,
                capture_sizes,
                ..
            } => (*mode, capture_sizes),
            Outcome::Refused { .. } => (CudagraphMode::None, &[]),
        }
    }

    fn log(&self) {
        let layers = StartupReport {
            layers: self.report.layers.clone(),
            hazards: Vec::new(),
        };
        for line in layers.to_string().lines() {
            tracing::info!("{line}");
        }
        if let Outcome::Survived { mode, .. } = &self.cudagraph_mode.outcome {
            tracing::info!(
                configured = self.cudagraph_mode.configured.name(),
                survived = mode.name(),
                "CUDA graph mode"
            );
        }
        for hazard in &self.report.hazards {
            match hazard.severity {
                Severity::Warning => tracing::warn!(code = hazard.code, "{}", hazard.message),
                Severity::Refusal => tracing::error!(code = hazard.code, "{}", hazard.message),
            }
        }
    }
}

/// The class's name without its module, as the field prints it.
fn class_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// A decode has one token, and its drafts. Where graphs can be captured the model is cut at its attention layers, which is what a compiled model
/// is to the rules.
fn resolve_input<'a>(engine: &EngineConfig, plan: &'a AttentionPlan) -> ResolveInput<'a> {
    let cut = plan.facts().captures_graphs();
    let capture_sizes = plan.capture_sizes();
    ResolveInput {
        mode: None,
        min_support: CudagraphSupport::Always,
        min_backend: None,
        uniform_decode_query_len: 1 + engine.num_speculative_tokens() as u32,
        attention_is_splitting_op: cut,
        compiled: cut,
        use_inductor_graph_partition: false,
        runner: RunnerGeneration::V2,
        piecewise_capture_available: cut,
        capture_sizes,
        max_capture_size: capture_sizes.last().copied().unwrap_or(0),
        mamba: None,
        is_profiling: false,
    }
}

/// Steps in flight at most, as configured.
pub(crate) fn depth(config: &EngineConfig, executor: &dyn Executor) -> Result<usize, EngineError> {
    match (config.async_scheduling, executor.depth()) {
        // Drafts follow from tokens that the host knows.
        _ if config.speculative.is_some() => Ok(1),
        (Some(false), _) => Ok(1),
        (Some(true), 1) => Err(EngineError::Setting {
            name: "async_scheduling",
            value: "true".to_owned(),
            remedy: "this device runs steps on the thread that prepares them; leave the setting out",
        }),
        // A feed reference names a token of the step just before.
        (_, depth) => Ok(depth.clamp(1, 2)),
    }
}

/// The graphs of the mode that survived, with what the builders promise for each.
pub(crate) fn graph_plan(
    config: &EngineConfig,
    startup: &Startup,
    attention: &mut Attention,
) -> Result<GraphPlan, EngineError> {
    let (mode, sizes) = startup.survived();
    // With speculation decodes have all of their drafts, or, where nothing is proposed, none.
    let longest = 1 + config.num_speculative_tokens() as u32;
    let decode_query_lens = match config.speculative.map(|speculative| speculative.method) {
        Some(SpeculativeMethod::Ngram) => vec![1, longest],
        _ => vec![longest],
    };
    let manager = CudagraphManager::new(&ManagerConfig {
        mode,
        decode_query_lens: &decode_query_lens,
        varlen_decode: false,
        max_num_reqs: config.max_num_seqs as u32,
        capture_sizes: sizes,
        max_capture_size: sizes.last().copied().unwrap_or(0),
        lora_cases: &[0],
        ubatching: None,
    });
    let full = manager
        .capture_order(RuntimeMode::Full)
        .into_iter()
        .map(|descriptor| {
            let promises = attention.launch_promises(&capture_shape(&descriptor))?;
            Ok(FullGraph {
                descriptor,
                promises,
            })
        })
        .collect::<Result<_, _>>()
        .map_err(EngineError::Promise)?;
    let eager = match attention.plan().facts().captures_graphs() {
        true => attention.eager_promises().map_err(EngineError::Promise)?,
        false => Vec::new(),
    };
    Ok(GraphPlan {
        mode,
        piecewise: manager.capture_order(RuntimeMode::Piecewise),
        manager,
        full,
        eager,
    })
}
