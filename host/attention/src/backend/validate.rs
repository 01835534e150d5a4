//! `validate_configuration`: every check, in the field's order, with the field's reason texts.

use super::{BackendRow, Configuration, Device};

impl BackendRow {
    /// Why this backend cannot serve `config` on `device`, in the order of the checks; empty: it can.
    ///
    /// Source: vLLM `AttentionBackend.validate_configuration` @0.33 (`vllm/v1/attention/backend.py`), recorded in
    /// `tests/vectors/validate_configuration`. The row must be the one for `device` ([`super::row`]).
    pub fn validate_configuration(&self, config: &Configuration, device: Device) -> Vec<String> {
        let flags = &self.flags;
        let capability_missing = device
            .capability()
            .is_some_and(|c| !self.supports_compute_capability(c));
        let attn_type = format!("attention type {} not supported", config.attn_type);
        let checks: [(bool, &str); 20] = [
            (
                !self.supports_head_size(config.head_size),
                "head_size not supported",
            ),
            (!self.supports_dtype(config.dtype), "dtype not supported"),
            (
                !self.supports_kv_cache_dtype(config.kv_cache_dtype.as_deref()),
                "kv_cache_dtype not supported",
            ),
            (
                !self.supports_block_size(config.block_size),
                "block_size not supported",
            ),
            (
                config.use_mm_prefix && !flags.supports_mm_prefix,
                "partial multimodal token full attention not supported",
            ),
            (
                config.use_mla != flags.is_mla,
                if config.use_mla {
                    "MLA not supported"
                } else {
                    "non-MLA not supported"
                },
            ),
            (
                config.has_sink && !flags.supports_sink,
                "attention sinks not supported",
            ),
            (
                config.use_sparse != flags.is_sparse,
                if config.use_sparse {
                    "sparse not supported"
                } else {
                    "non-sparse not supported"
                },
            ),
            (
                config.use_per_head_quant_scales && !flags.supports_per_head_quant_scales,
                "per-head quant scales not supported",
            ),
            (capability_missing, "compute capability not supported"),
            (!self.supports_attn_type(config.attn_type), &attn_type),
            (
                config.has_sliding_window && !flags.supports_sliding_window,
                "sliding window not supported",
            ),
            (
                config.use_rswa && !flags.supports_rswa,
                "R-SWA not supported",
            ),
            (
                config.use_non_causal && !flags.supports_non_causal,
                "non-causal attention not supported",
            ),
            (
                config.use_mla
                    && config.use_non_causal
                    && config.use_dcp
                    && !flags.supports_non_causal_dcp,
                "non-causal MLA attention with DCP not supported",
            ),
            (
                config.use_batch_invariant && !flags.supports_batch_invariance,
                "batch invariance not supported",
            ),
            (
                config.use_kv_connector && !flags.supports_kv_connector,
                "KV connector not supported",
            ),
            (config.use_pcp && !flags.supports_pcp, "PCP not supported"),
            (config.use_dcp && !flags.supports_dcp, "DCP not supported"),
            (
                config.use_adaptive_verification && !flags.supports_device_cpu_query_lens_mismatch,
                "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
            ),
        ];
        checks
            .into_iter()
            .filter(|(fails, _)| *fails)
            .map(|(_, reason)| reason.to_owned())
            .chain((self.combination)(config, device))
            .collect()
    }
}

/// Cache dtypes that may be configured: the field's, and `float32` for the CPU device's own caches.
pub const KV_CACHE_DTYPES: &[&str] = &[
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
    "nvfp4",
    "nvfp4_4over6",
    "nvfp4_ds_mla",
    "int8_per_token_head",
    "int4_per_token_head",
    "fp8_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
];

/// A cache dtype that does not exist. The field's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Invalid kv_cache_dtype: {name}. Valid values are: ({valid})")]
pub struct KvCacheDtypeError {
    /// What was given.
    pub name: String,
    /// Every name, quoted.
    pub valid: String,
}

/// Is `name` a cache dtype?
///
/// # Errors
/// [`KvCacheDtypeError`], listing the valid ones.
pub fn check_kv_cache_dtype(name: &str) -> Result<(), KvCacheDtypeError> {
    if KV_CACHE_DTYPES.contains(&name) {
        return Ok(());
    }
    let quoted: Vec<String> = KV_CACHE_DTYPES.iter().map(|n| format!("'{n}'")).collect();
    Err(KvCacheDtypeError {
        name: name.to_owned(),
        valid: quoted.join(", "),
    })
}
