//! What start-up tells the operator: which backend each layer got, and every hazard as a warning or a refusal.
//!
//! A report is data: the log, the metrics and the command line print it. Texts are the field's where the field has one.

use std::fmt;

use serde::Serialize;

use timetable_types::Family;

use crate::backend::{Capability, Device, family_of};
use crate::batch::{InvarianceFinding, check_batch_invariance};
use crate::group::{AttentionGroup, BatchView};
use crate::spec::KvQuantMode;

/// One layer's line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerReport {
    /// The layer's name.
    pub layer: String,
    /// Its backend's name.
    pub backend: String,
    /// The interface of the family whose metadata it reads; none where no contract has it.
    pub family: Option<&'static str>,
    /// The backend's class, wrappers included.
    pub class: String,
    /// `FULL_ATTENTION`, `SLIDING_WINDOW`, …
    pub kind: &'static str,
    /// Index of its KV cache group.
    pub kv_cache_group: usize,
    /// Index of its attention group.
    pub attention_group: usize,
    /// What its builder sees of a step: `plain`, `chunks of 8192`, `states`.
    pub view: String,
    /// Query heads on this rank; 0 for layers without.
    pub num_heads: u32,
    /// Tokens of a manager block.
    pub block_size: u32,
    /// Tokens of a kernel block.
    pub kernel_block_size: u32,
    /// Bytes of a manager block of this layer, or of one state.
    pub page_size_bytes: u64,
}

/// How bad a hazard is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The engine runs, with less than was asked for.
    Warning,
    /// The engine must not start.
    Refusal,
}

/// One thing that the original leaves silent, or only logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hazard {
    /// Warning or refusal.
    pub severity: Severity,
    /// A stable name for metrics, such as `block_size_precluded`.
    pub code: &'static str,
    /// What and why, with the value and the remedy.
    pub message: String,
}

impl Hazard {
    /// A warning.
    pub fn warning(code: &'static str, message: impl Into<String>) -> Self {
        Hazard {
            severity: Severity::Warning,
            code,
            message: message.into(),
        }
    }

    /// A refusal.
    pub fn refusal(code: &'static str, message: impl Into<String>) -> Self {
        Hazard {
            severity: Severity::Refusal,
            code,
            message: message.into(),
        }
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.severity {
            Severity::Warning => "warning",
            Severity::Refusal => "refused",
        };
        write!(f, "{kind}: {}", self.message)
    }
}

/// What the hazards depend on, beside the groups.
#[derive(Clone, Debug)]
pub struct RunFacts<'a> {
    /// Where kernels run.
    pub device: Device,
    /// Must results not depend on the batch?
    pub batch_invariant: bool,
    /// For each attention group: does its backend support batch invariance?
    pub supports_batch_invariance: &'a [bool],
    /// Is prefix caching on?
    pub prefix_caching: bool,
    /// The largest number of KV splits configured.
    pub max_num_splits: u32,
    /// Decode-context-parallel ranks.
    pub dcp_world_size: u32,
    /// Tokens per rank before the next one's turn.
    pub cp_kv_cache_interleave_size: u32,
    /// Draft tokens per decode; 0 without speculation.
    pub num_speculative_tokens: u32,
    /// Warnings of [`crate::select::select`], of any layer.
    pub selection_warnings: &'a [String],
    /// Each change of the CUDA graph mode, with its reason.
    pub graph_mode_changes: &'a [String],
    /// Logarithm bases of the log-sum-exp that an impl returns and that the merge of partial results expects, per attention
    /// group where both are known: `true` is base e.
    pub lse_bases: &'a [(usize, LseBases)],
    /// Where batches carry a causal flag per request: the FlashAttention version that would read them. None: one flag for
    /// each batch.
    pub per_request_causal: Option<u32>,
    /// Where piecewise graphs were asked for and nothing splits the model at its attention layers: (model, mode).
    pub unsplit_model: Option<(&'a str, &'a str)>,
}

/// Who assumes which base of log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LseBases {
    /// The impl returns natural logarithms.
    pub impl_on_e: bool,
    /// The merge expects natural logarithms.
    pub merge_on_e: bool,
}

/// The report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StartupReport {
    /// One line per layer, group by group.
    pub layers: Vec<LayerReport>,
    /// Refusals first.
    pub hazards: Vec<Hazard>,
}

impl StartupReport {
    /// Describes `groups`, whose kernel blocks are chosen, as they will run.
    pub fn new(groups: &[AttentionGroup], facts: &RunFacts<'_>) -> Self {
        let mut hazards = hazards(groups, facts);
        hazards.sort_by_key(|h| std::cmp::Reverse(h.severity));
        StartupReport {
            layers: layers(groups),
            hazards,
        }
    }

    /// The first reason not to start, if there is one.
    pub fn refusal(&self) -> Option<&Hazard> {
        self.hazards
            .iter()
            .find(|h| h.severity == Severity::Refusal)
    }
}

impl fmt::Display for StartupReport {
    /// One line per run of equal layers, then one per hazard.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for same in self
            .layers
            .chunk_by(|a, b| a.attention_group == b.attention_group)
        {
            let (first, last) = (&same[0], &same[same.len() - 1]);
            write!(f, "{}", first.layer)?;
            if same.len() > 1 {
                write!(f, " … {} ({} layers)", last.layer, same.len())?;
            }
            write!(f, ": {} ({}, ", first.backend, first.kind)?;
            if let Some(family) = first.family {
                write!(f, "metadata of `{family}`, ")?;
            }
            match first.kind {
                "MAMBA" => write!(f, "one state of {} bytes a request", first.page_size_bytes)?,
                _ => write!(
                    f,
                    "{} query heads, block {} read as {}, {} bytes a page",
                    first.num_heads,
                    first.block_size,
                    first.kernel_block_size,
                    first.page_size_bytes
                )?,
            }
            writeln!(f, ", {} view)", first.view)?;
        }
        self.hazards.iter().try_for_each(|h| writeln!(f, "{h}"))
    }
}

fn layers(groups: &[AttentionGroup]) -> Vec<LayerReport> {
    let of_group = |(index, group): (usize, &AttentionGroup)| {
        group
            .layer_names
            .iter()
            .map(|layer| LayerReport {
                layer: layer.clone(),
                backend: group.backend.name.to_string(),
                family: family_of(&group.backend.name).map(Family::interface),
                class: group.backend.class.to_string(),
                kind: group.spec.kind_name(),
                kv_cache_group: group.kv_cache_group_id,
                attention_group: index,
                view: group.view().to_string(),
                num_heads: group.num_heads,
                block_size: group.spec.block_size(),
                kernel_block_size: group.block_size(),
                page_size_bytes: group.spec.page_size_bytes(),
            })
            .collect::<Vec<_>>()
    };
    groups.iter().enumerate().flat_map(of_group).collect()
}

fn hazards(groups: &[AttentionGroup], facts: &RunFacts<'_>) -> Vec<Hazard> {
    let mut found = Vec::new();
    for warning in facts.selection_warnings {
        found.push(Hazard::warning("block_size_precluded", warning.clone()));
    }
    for change in facts.graph_mode_changes {
        found.push(Hazard::warning("cudagraph_mode_changed", change.clone()));
    }
    if facts.batch_invariant {
        let backends: Vec<(&str, bool)> = groups
            .iter()
            .zip(facts.supports_batch_invariance)
            .map(|(g, supported)| (&*g.backend.name, *supported))
            .collect();
        let findings =
            check_batch_invariance(&backends, facts.prefix_caching, facts.max_num_splits);
        found.extend(findings.iter().map(invariance_hazard));
    }
    for (group, bases) in facts.lse_bases {
        if bases.impl_on_e != bases.merge_on_e {
            found.push(Hazard::refusal(
                "lse_base",
                lse_message(groups, *group, *bases),
            ));
        }
    }
    if let Some((model, mode)) = facts.unsplit_model {
        found.push(Hazard::refusal(
            "piecewise_unavailable",
            format!(
                "{model}: piecewise CUDA graphs (cudagraph_mode={mode}) unavailable, model is not torch-compiled and breakable CUDA graph is off. Set VLLM_USE_BREAKABLE_CUDAGRAPH=1 or cudagraph_mode=NONE/FULL."
            ),
        ));
    }
    // A state stands for all tokens before it: no part of it can be shared.
    if facts.prefix_caching && groups.iter().any(|group| group.view() == BatchView::States) {
        found.push(Hazard::warning(
            "prefix_caching_disabled",
            "Hybrid or mamba-based model detected without support for prefix caching: disabling.",
        ));
    }
    // One line per backend and cause, however many groups it has.
    let mut seen: Vec<(&str, &'static str)> = Vec::new();
    for group in groups {
        for hazard in group_hazards(group, facts) {
            let key = (&*group.backend.name, hazard.code);
            if !seen.contains(&key) {
                seen.push(key);
                found.push(hazard);
            }
        }
    }
    found
}

fn invariance_hazard(finding: &InvarianceFinding) -> Hazard {
    let message = finding.to_string();
    if finding.is_refusal() {
        Hazard::refusal("batch_invariance_unsupported", message)
    } else if matches!(finding, InvarianceFinding::DisablePrefixCaching { .. }) {
        Hazard::warning("prefix_caching_disabled", message)
    } else {
        Hazard::warning("one_split", message)
    }
}

fn lse_message(groups: &[AttentionGroup], group: usize, bases: LseBases) -> String {
    let base = |on_e| if on_e { "e" } else { "2" };
    let name = groups.get(group).map_or("?", |g| &*g.backend.name);
    format!(
        "attention group {group} ({name}): its impl returns log-sum-exp to base {}, but partial results are merged to base {}, which corrupts the output without an error: set lse_base_on_e to what the impl returns",
        base(bases.impl_on_e),
        base(bases.merge_on_e)
    )
}

/// What one group's backend brings with it.
fn group_hazards(group: &AttentionGroup, facts: &RunFacts<'_>) -> Vec<Hazard> {
    let mut found = Vec::new();
    let name = &*group.backend.name;
    let quant = group.spec.attention().map(|a| a.kv_quant_mode);
    if let (Some(KvQuantMode::Fp8PerTensor), Some(capability)) = (quant, facts.device.capability())
    {
        if name == "TRITON_ATTN" && capability < Capability::new(8, 9) {
            found.push(Hazard::refusal(
                "fp8_before_sm89",
                format!(
                    "FP8 KV cache is not supported by the Triton attention backend on {} (compute capability {capability}); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype auto",
                    facts.device.name()
                ),
            ));
        }
        if matches!(name, "FLASH_ATTN" | "FLASH_ATTN_DIFFKV") && !matches!(capability.major, 9 | 10)
        {
            found.push(Hazard::refusal(
                "fp8_flash_attn",
                "FlashAttention does not support fp8 kv-cache on this device.",
            ));
        }
    }
    if name == "FLASHINFER_MLA"
        && facts.dcp_world_size > 1
        && facts.cp_kv_cache_interleave_size != 1
    {
        found.push(Hazard::refusal(
            "flashinfer_mla_dcp_interleave",
            format!(
                "FlashInfer MLA native DCP requires cp_kv_cache_interleave_size=1; got {}.",
                facts.cp_kv_cache_interleave_size
            ),
        ));
    }
    let on_gpu = facts.device.capability().is_some();
    if let Some(version) = facts.per_request_causal
        && name == "FLASH_ATTN"
        && on_gpu
        && version != 4
    {
        found.push(Hazard::refusal(
            "per_request_causal",
            format!("Per-sequence causal requires FA4. Current version: FA{version}"),
        ));
    }
    if name == "FLASHINFER" && on_gpu && facts.num_speculative_tokens > 0 {
        found.push(Hazard::warning(
            "flashinfer_plan_waits",
            format!(
                "FLASHINFER plans on the host: with {} draft tokens the host knows only upper bounds of the lengths, and a plan for exact ones would wait for the GPU each step; plans are made for the upper bounds",
                facts.num_speculative_tokens
            ),
        ));
    }
    found
}
