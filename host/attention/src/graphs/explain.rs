//! From the configured mode to the one that survives, as data: each change with its reason. It must never know who prints it.

use core::fmt;

use serde::Serialize;
use timetable_types::{CudagraphMode, CudagraphSupport};

use super::modes::{GraphModes, support_name, weakest_support};
use super::resolve::{ChangeLevel, ModeChange, ResolveInput, resolve_cudagraph_mode_and_sizes};
use super::{RuntimeMode, resolve};

/// What one attention group's builder says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupSupport {
    /// The backend's name.
    pub backend: String,
    /// The builder's own word.
    pub support: CudagraphSupport,
}

/// Facts of the configuration that change the mode before any backend is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfigFacts {
    /// A pooling model.
    pub pooling: bool,
    /// An encoder-decoder model.
    pub encoder_decoder: bool,
    /// A KV connector that works between layers.
    pub connector_requires_piecewise: bool,
    /// Dynamic speculation in the first-generation runner.
    pub dynamic_speculation_v1: bool,
    /// `enforce_eager`
    pub enforce_eager: bool,
    /// The platform cannot capture graphs (a CPU).
    pub no_static_graphs: bool,
    /// Neither compiled in pieces nor breakable.
    pub no_piecewise: bool,
}

/// What survived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A mode.
    Survived {
        /// The mode.
        mode: CudagraphMode,
        /// How uniform decodes run.
        decode: RuntimeMode,
        /// How other batches run.
        mixed: RuntimeMode,
        /// Sizes that are captured; empty where nothing is.
        capture_sizes: Vec<u32>,
    },
    /// Start-up is refused with this text.
    Refused {
        /// The field's text.
        error: String,
    },
}

/// The whole way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The configured mode.
    pub configured: CudagraphMode,
    /// What each attention group supports.
    pub groups: Vec<GroupSupport>,
    /// The weakest of them.
    pub weakest_support: CudagraphSupport,
    /// Whose it is; `None` if every group is at ALWAYS.
    pub weakest_backend: Option<String>,
    /// Each change and its reason, in order.
    pub changes: Vec<ModeChange>,
    /// What is left.
    pub outcome: Outcome,
}

impl fmt::Display for Explanation {
    /// One line for each fact: configured, supports, changes, outcome.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "configured  {}", self.configured.name())?;
        for group in &self.groups {
            writeln!(
                f,
                "supports    {}: {}",
                group.backend,
                support_name(group.support)
            )?;
        }
        for change in &self.changes {
            writeln!(
                f,
                "changed     {} -> {}: {}",
                change.from.name(),
                change.to.name(),
                change.reason
            )?;
        }
        match &self.outcome {
            Outcome::Survived {
                mode,
                decode,
                mixed,
                capture_sizes,
            } => {
                write!(
                    f,
                    "survived    {}: decodes {}, other batches {}",
                    mode.name(),
                    decode.name(),
                    mixed.name()
                )?;
                match capture_sizes.last() {
                    Some(largest) => write!(
                        f,
                        "; {} sizes, the largest {largest} tokens",
                        capture_sizes.len()
                    ),
                    None => f.write_str("; nothing is captured"),
                }
            }
            Outcome::Refused { error } => write!(f, "refused     {error}"),
        }
    }
}

/// Changes that follow from the configuration alone, in order: pooling, encoder-decoder, connector, dynamic speculation, eager,
/// platform, compilation. (The list is vLLM 0.33's; the texts are ours.)
#[must_use]
pub fn apply_config_overrides(
    configured: CudagraphMode,
    facts: &ConfigFacts,
) -> (CudagraphMode, Vec<ModeChange>) {
    let mut mode = configured;
    let mut changes = Vec::new();
    let mut set = |mode: &mut CudagraphMode, applies: bool, to: CudagraphMode, why: &str| {
        if applies && *mode != to {
            let reason = format!(
                "CUDAGraphMode.{} is not used with {why}; setting cudagraph_mode={}",
                mode.name(),
                to.name()
            );
            changes.push(ModeChange {
                from: *mode,
                to,
                reason,
                level: ChangeLevel::Warning,
            });
            *mode = to;
        }
    };
    let full = mode.has_full_cudagraphs();
    set(
        &mut mode,
        facts.pooling && full,
        CudagraphMode::Piecewise,
        "pooling models",
    );
    let captured = mode != CudagraphMode::None;
    set(
        &mut mode,
        facts.encoder_decoder && captured,
        CudagraphMode::FullDecodeOnly,
        "encoder-decoder models",
    );
    let full = mode.has_full_cudagraphs();
    let connector = "a KV connector that works between layers";
    set(
        &mut mode,
        facts.connector_requires_piecewise && full,
        CudagraphMode::Piecewise,
        connector,
    );
    let full = mode.has_full_cudagraphs();
    set(
        &mut mode,
        facts.dynamic_speculation_v1 && full,
        CudagraphMode::Piecewise,
        "dynamic speculative decoding",
    );
    set(
        &mut mode,
        facts.enforce_eager,
        CudagraphMode::None,
        "enforce_eager",
    );
    set(
        &mut mode,
        facts.no_static_graphs,
        CudagraphMode::None,
        "a platform that cannot capture graphs",
    );
    let rest = mode.without_piecewise();
    let pieces = "a model that is neither compiled in pieces nor breakable";
    set(&mut mode, facts.no_piecewise, rest, pieces);
    (mode, changes)
}

/// Explains: overrides of the configuration, then [`resolve_cudagraph_mode_and_sizes`] with the weakest support of `groups`.
/// `input`'s mode, support and backend are not read; everything else is.
#[must_use]
pub fn explain(
    configured: CudagraphMode,
    facts: &ConfigFacts,
    groups: &[GroupSupport],
    input: &ResolveInput<'_>,
) -> Explanation {
    let weakest = weakest_support(groups.iter().map(|group| group.support));
    let backend = weakest.group.map(|group| groups[group].backend.clone());
    let (mode, mut changes) = apply_config_overrides(configured, facts);
    let input = ResolveInput {
        mode: Some(mode),
        min_support: weakest.support,
        min_backend: backend.as_deref(),
        ..input.clone()
    };
    let outcome = match resolve_cudagraph_mode_and_sizes(&input) {
        Ok(resolve::Resolved {
            mode,
            capture_sizes,
            changes: made,
            ..
        }) => {
            changes.extend(made);
            let capture_sizes = if mode == CudagraphMode::None {
                Vec::new()
            } else {
                capture_sizes
            };
            Outcome::Survived {
                mode,
                decode: mode.decode_mode(),
                mixed: mode.mixed_mode(),
                capture_sizes,
            }
        }
        Err(failure) => {
            let error = failure.to_string();
            changes.extend(failure.changes);
            Outcome::Refused { error }
        }
    };
    Explanation {
        configured,
        groups: groups.to_vec(),
        weakest_support: weakest.support,
        weakest_backend: backend,
        changes,
        outcome,
    }
}
