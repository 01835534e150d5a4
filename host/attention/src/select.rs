//! Choosing a backend for a layer: priority lists, an explicit choice, and the answer to "why not that one?".
//!
//! Pure: the same questions give the same answers. Source: vLLM `CudaPlatform.get_valid_backends` and
//! `get_attn_backend_cls` (`vllm/platforms/cuda.py`), `get_attn_backend` (`vllm/v1/attention/selector.py`) @0.33, as
//! recorded in `tests/vectors/backend_selection.json`.

use crate::backend::{
    AttentionType, Backend, BackendRegistry, BackendRow, Capability, Configuration, Device,
    NameError, RegisterError, cpu_priority, torch_name,
};

/// A layer's question.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// What the layer asks.
    pub config: &'a Configuration,
    /// Query heads on this rank: the sparse MLA order depends on it.
    pub num_heads: u32,
    /// The device.
    pub device: Device,
    /// The operator's choice, parsed by [`BackendRegistry::parse`]; none: automatic.
    pub requested: Option<&'a str>,
}

/// The backend of a layer.
#[derive(Clone, Debug)]
pub struct Selection {
    /// What was chosen.
    pub row: BackendRow,
    /// The field's log line.
    pub log: String,
    /// What the operator should know, in the field's words.
    pub warning: Option<String>,
}

/// Why there is no backend. An explicit choice never falls back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// The chosen one does not serve the configuration. The field's text.
    #[error(
        "Selected backend AttentionBackendEnum.{name} is not valid for this configuration. Reason: {}",
        python_list(.reasons)
    )]
    NotValid {
        /// Its name.
        name: String,
        /// Every reason.
        reasons: Vec<String>,
    },
    /// None serves it. The field's text.
    #[error("No valid attention backend found for {device} with {config}. Reasons: {reasons}.")]
    NoneValid {
        /// The device's name.
        device: &'static str,
        /// The configuration, as the field prints it.
        config: String,
        /// `{NAME: [reason, …], …}`
        reasons: String,
    },
    /// The choice does not exist.
    #[error(transparent)]
    Unknown(#[from] RegisterError),
}

/// Backends that are tried for `config`, most preferred first.
///
/// Source: `_get_backend_priorities` @0.33. A name that the priority lists have but no recorded case does is left out: on
/// 12.x that is FLASHINFER_MLA_SPARSE_SM120.
pub fn priority(config: &Configuration, num_heads: u32, device: Device) -> Vec<Backend> {
    match device {
        Device::Cpu => cpu_priority(config),
        Device::Cuda { capability } if config.use_mla => {
            mla_priority(config, num_heads, capability)
        }
        Device::Cuda { capability } => mha_priority(config, capability),
    }
}

fn mha_priority(config: &Configuration, capability: Capability) -> Vec<Backend> {
    let mut order = Vec::with_capacity(6);
    if config.use_mm_prefix {
        match capability.major {
            9 => order.push(Backend::TritonFlashAttn),
            10 if !config.use_non_causal => order.push(Backend::TritonFlashInfer),
            _ => {}
        }
    }
    if capability.major == 10 && !config.use_non_causal {
        order.extend([Backend::FlashInfer, Backend::FlashAttn]);
    } else {
        order.extend([Backend::FlashAttn, Backend::FlashInfer]);
    }
    order.extend([
        Backend::TritonAttn,
        Backend::FlexAttention,
        Backend::TurboQuant,
    ]);
    order
}

fn mla_priority(config: &Configuration, num_heads: u32, capability: Capability) -> Vec<Backend> {
    match capability.major {
        10 => {
            let mut order = vec![
                Backend::FlashInferMla,
                Backend::TokenspeedMla,
                Backend::CutlassMla,
                Backend::FlashAttnMla,
                Backend::FlashMla,
                Backend::TritonMla,
            ];
            let quantized = config.is_quantized_kv_cache();
            let few_heads = num_heads <= 16;
            if few_heads && !quantized {
                order.push(Backend::FlashAttnMlaSparseFa4);
            }
            if few_heads || quantized {
                order.extend([Backend::FlashInferMlaSparse, Backend::FlashMlaSparse]);
            } else {
                order.extend([Backend::FlashMlaSparse, Backend::FlashInferMlaSparse]);
            }
            order
        }
        12 => vec![Backend::TritonMla],
        _ => {
            let mut order = vec![
                Backend::FlashAttnMla,
                Backend::FlashMla,
                Backend::FlashInferMla,
                Backend::TritonMla,
            ];
            let sparse = [Backend::FlashAttnMlaSparse, Backend::FlashMlaSparse];
            if config.head_size == 512 {
                order.push(Backend::FlashInferMlaSparseSm90);
                order.extend(sparse);
            } else {
                order.extend(sparse);
                order.push(Backend::FlashInferMlaSparseSm90);
            }
            order
        }
    }
}

/// One backend's answer to a layer's question.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BackendAnswer {
    /// Its name.
    pub name: String,
    /// Its place in the priority list; none: never chosen automatically.
    pub priority: Option<usize>,
    /// Does it serve the configuration?
    pub valid: bool,
    /// Why not, in the order of the checks; empty if it does.
    pub reasons: Vec<String>,
    /// Was it chosen?
    pub chosen: bool,
    /// Why it was not chosen, in one line; none for the chosen one.
    pub why_not: Option<String>,
}

/// The backends of the priority list, tried: `(row, reasons)` in order.
fn tried(registry: &BackendRegistry, request: &Request<'_>) -> Vec<(BackendRow, Vec<String>)> {
    priority(request.config, request.num_heads, request.device)
        .into_iter()
        .filter_map(|backend| registry.row(backend.name(), request.device).ok())
        .map(|row| {
            let reasons = row.validate_configuration(request.config, request.device);
            (row, reasons)
        })
        .collect()
}

/// The backend for a layer.
///
/// # Errors
/// [`SelectError`]: for an explicit choice its reasons, without trying another; else every backend's.
pub fn select(registry: &BackendRegistry, request: &Request<'_>) -> Result<Selection, SelectError> {
    if let Some(name) = request.requested {
        let row = registry.row(name, request.device)?;
        let reasons = row.validate_configuration(request.config, request.device);
        return if reasons.is_empty() {
            Ok(Selection {
                log: format!("Using {name} backend."),
                row,
                warning: None,
            })
        } else {
            Err(SelectError::NotValid {
                name: name.to_owned(),
                reasons,
            })
        };
    }
    let tried = tried(registry, request);
    let valid: Vec<&str> = tried
        .iter()
        .filter(|(_, reasons)| reasons.is_empty())
        .map(|(row, _)| &*row.name)
        .collect();
    let Some(first) = tried.iter().position(|(_, reasons)| reasons.is_empty()) else {
        return Err(SelectError::NoneValid {
            device: request.device.name(),
            config: config_repr(request.config),
            reasons: reasons_repr(&tried),
        });
    };
    let row = tried[first].0.clone();
    let warning = request.config.block_size.and_then(|block_size| {
        let precluded: Vec<&str> = tried[..first]
            .iter()
            .filter(|(_, reasons)| matches!(reasons.as_slice(), [only] if only == "block_size not supported"))
            .map(|(row, _)| &*row.name)
            .collect();
        (!precluded.is_empty()).then(|| {
            format!(
                "--block-size {block_size} precluded higher-priority backend(s) {}. Using {} instead, which may result in reduced performance. Consider removing --block-size to auto-select the optimal block size.",
                precluded.join(", "),
                row.name
            )
        })
    });
    Ok(Selection {
        log: format!(
            "Using {} attention backend out of potential backends: {}.",
            row.name,
            python_list(&valid)
        ),
        row,
        warning,
    })
}

/// Every backend's answer: those of the priority list in order, then the others by name. What `timetable backends` prints.
pub fn explain(registry: &BackendRegistry, request: &Request<'_>) -> Vec<BackendAnswer> {
    let selected = select(registry, request);
    let chosen = selected.as_ref().ok().map(|s| s.row.name.to_string());
    let order: Vec<&str> = priority(request.config, request.num_heads, request.device)
        .into_iter()
        .map(Backend::name)
        .collect();
    let rest = registry.names().into_iter().filter(|n| !order.contains(n));
    order
        .iter()
        .copied()
        .chain(rest)
        .filter_map(|name| {
            let row = registry.row(name, request.device).ok()?;
            let reasons = row.validate_configuration(request.config, request.device);
            let priority = order.iter().position(|n| *n == name);
            let is_chosen = chosen.as_deref() == Some(name);
            Some(BackendAnswer {
                name: name.to_owned(),
                priority,
                valid: reasons.is_empty(),
                chosen: is_chosen,
                why_not: (!is_chosen)
                    .then(|| why_not(&reasons, priority, request, chosen.as_deref())),
                reasons,
            })
        })
        .collect()
}

/// One line: the first thing that keeps a backend from being chosen.
fn why_not(
    reasons: &[String],
    priority: Option<usize>,
    request: &Request<'_>,
    chosen: Option<&str>,
) -> String {
    if !reasons.is_empty() {
        return reasons.join("; ");
    }
    match (request.requested, chosen, priority) {
        (Some(asked), Some(_), _) => format!("valid, but {asked} was asked for"),
        (Some(asked), None, _) => {
            format!("valid, but {asked} was asked for, and an explicit choice never falls back")
        }
        (None, Some(chosen), Some(_)) => format!("valid, but {chosen} comes first"),
        (None, _, _) => "valid, but never chosen automatically: ask for it by name".to_owned(),
    }
}

/// The kind of KV cache group that a layer stands in, by which `backend_per_kind` may choose its backend. One of [`KINDS`].
pub fn kind_of(attn_type: AttentionType, use_mla: bool, has_sliding_window: bool) -> &'static str {
    match (attn_type, use_mla, has_sliding_window) {
        (AttentionType::EncoderOnly, _, _) => "encoder_only_attention",
        (AttentionType::EncoderDecoder, _, _) => "cross_attention",
        (_, true, false) => "mla_attention",
        (_, true, true) => "sliding_window_mla",
        (_, false, true) => "sliding_window",
        (_, false, false) => "full_attention",
    }
}

/// Kinds that `backend_per_kind` may name.
pub const KINDS: [&str; 6] = [
    "full_attention",
    "sliding_window",
    "mla_attention",
    "sliding_window_mla",
    "cross_attention",
    "encoder_only_attention",
];

/// A kind that does not exist. The field's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Unknown KV cache group kind '{kind}' in backend_per_kind. Valid kinds are: {valid}")]
pub struct KindError {
    /// What was given.
    pub kind: String,
    /// Every kind, comma-separated.
    pub valid: String,
}

/// Is `kind` one of [`KINDS`]?
///
/// # Errors
/// [`KindError`].
pub fn check_kind(kind: &str) -> Result<(), KindError> {
    if KINDS.contains(&kind) {
        Ok(())
    } else {
        Err(KindError {
            kind: kind.to_owned(),
            valid: KINDS.join(", "),
        })
    }
}

/// The operator's choice for a layer: of its kind where `per_kind` has one, else `general`.
///
/// # Errors
/// [`NameError`] for a name that does not exist.
pub fn requested_for(
    registry: &BackendRegistry,
    general: Option<&str>,
    per_kind: &[(String, String)],
    kind: &str,
) -> Result<Option<String>, NameError> {
    let own = per_kind
        .iter()
        .find_map(|(k, name)| (k == kind).then_some(name.as_str()));
    own.or(general)
        .map_or(Ok(None), |name| registry.parse(name))
}

/// `['a', 'b']`
fn python_list<S: AsRef<str>>(items: &[S]) -> String {
    let quoted: Vec<String> = items.iter().map(|i| format!("'{}'", i.as_ref())).collect();
    format!("[{}]", quoted.join(", "))
}

/// `{NAME: [reason, reason], …}`
fn reasons_repr(tried: &[(BackendRow, Vec<String>)]) -> String {
    let one = |(row, reasons): &(BackendRow, Vec<String>)| {
        format!("{}: [{}]", row.name, reasons.join(", "))
    };
    format!(
        "{{{}}}",
        tried.iter().map(one).collect::<Vec<_>>().join(", ")
    )
}

/// `AttentionSelectorConfig(head_size=128, …)`, as the field prints it.
pub fn config_repr(c: &Configuration) -> String {
    let py = |b: bool| if b { "True" } else { "False" };
    let block_size = c
        .block_size
        .map_or_else(|| "None".to_owned(), |b| b.to_string());
    let fields: [(&str, &str); 18] = [
        ("head_size", &c.head_size.to_string()),
        ("dtype", torch_name(c.dtype)),
        (
            "kv_cache_dtype",
            c.kv_cache_dtype.as_deref().unwrap_or("None"),
        ),
        ("block_size", &block_size),
        ("use_mla", py(c.use_mla)),
        ("has_sink", py(c.has_sink)),
        ("use_sparse", py(c.use_sparse)),
        ("use_mm_prefix", py(c.use_mm_prefix)),
        ("use_per_head_quant_scales", py(c.use_per_head_quant_scales)),
        ("attn_type", c.attn_type.name()),
        ("has_sliding_window", py(c.has_sliding_window)),
        ("use_non_causal", py(c.use_non_causal)),
        ("use_batch_invariant", py(c.use_batch_invariant)),
        ("use_kv_connector", py(c.use_kv_connector)),
        ("use_adaptive_verification", py(c.use_adaptive_verification)),
        ("use_pcp", py(c.use_pcp)),
        ("use_dcp", py(c.use_dcp)),
        ("use_rswa", py(c.use_rswa)),
    ];
    let printed: Vec<String> = fields.iter().map(|(k, v)| format!("{k}={v}")).collect();
    format!("AttentionSelectorConfig({})", printed.join(", "))
}
