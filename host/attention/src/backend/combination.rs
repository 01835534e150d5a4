//! `supports_combination`: why a configuration whose parts are supported is not, in the field's words.
//!
//! Source: each backend's `supports_combination` @0.33, as recorded in `tests/vectors/validate_configuration`.

use super::{Capability, Configuration, Device};

/// What FlashAttention's version depends on.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnQuery {
    /// The device's capability.
    pub capability: Capability,
    /// Elements of a key.
    pub head_size: u32,
    /// `--block-size`, if given.
    pub block_size: Option<u32>,
    /// Attention sinks?
    pub has_sink: bool,
    /// Bidirectional multimodal prefixes?
    pub use_mm_prefix: bool,
}

/// The FlashAttention version in use: 2, 3 or 4.
///
/// SM90: 3, or 4 beyond head size 256. SM10x: 4, but 2 beyond head size 128, where only the head-size-256 kernel is FA4 and
/// it wants blocks that are multiples of 128, no sinks and no multimodal prefix. Elsewhere 2. Source: vLLM
/// `get_flash_attn_version` @0.33.
pub fn flash_attn_version(query: &FlashAttnQuery) -> u32 {
    match (query.capability.major, query.head_size) {
        (9, ..=256) => 3,
        (9, _) | (10, ..=128) => 4,
        (10, 256) => {
            let plain = !query.has_sink && !query.use_mm_prefix;
            let whole = query.block_size.is_none_or(|b| b.is_multiple_of(128));
            if plain && whole { 4 } else { 2 }
        }
        _ => 2,
    }
}

pub(super) fn none(_: &Configuration, _: Device) -> Option<String> {
    None
}

/// The field never asks this on a GPU and would only fail later.
pub(super) fn cpu_attn(_: &Configuration, device: Device) -> Option<String> {
    device
        .capability()
        .map(|_| "CPU_ATTN runs on CPUs only".to_owned())
}

pub(super) fn flash_attn(config: &Configuration, device: Device) -> Option<String> {
    let capability = device.capability()?;
    if config.has_sink && capability < Capability::new(9, 0) {
        return Some("sink not supported on compute capability < 9.0".to_owned());
    }
    let version = flash_attn_version(&FlashAttnQuery {
        capability,
        head_size: config.head_size,
        block_size: config.block_size,
        has_sink: config.has_sink,
        use_mm_prefix: config.use_mm_prefix,
    });
    if config.is_quantized_kv_cache() {
        if capability.major == 9 && config.use_mm_prefix {
            return Some("SM90 FP8 KV with mm_prefix requires Triton".to_owned());
        }
        let served = match (capability.major, version) {
            (9, 3) | (10, 4) => true,
            (9, 4) => config.head_size == 512,
            _ => false,
        };
        if !served || config.kv_cache_dtype.as_deref() == Some("fp8_e5m2") {
            return Some(
                "FP8 KV cache requires FA3 on SM90, FA4 with head_size=512 on SM90, or FA4 on SM100"
                    .to_owned(),
            );
        }
    } else if config.use_mm_prefix && version != 4 {
        return Some(
            "mm_prefix (PrefixLM bidirectional attention) requires FlashAttention v4, which does not resolve for this head_size"
                .to_owned(),
        );
    }
    None
}

pub(super) fn flashinfer(config: &Configuration, device: Device) -> Option<String> {
    let capability = device.capability()?;
    // SM10x prefills with generated kernels instead, and below 8.0 nothing is asked: the cache dtype is refused already.
    let fa2_prefill = capability >= Capability::new(8, 0) && capability.major != 10;
    if fa2_prefill && is_nvfp4(config) {
        if config.head_size == 64 {
            return Some("fa2 prefill misreads an NVFP4 KV cache at head_size 64".to_owned());
        }
        if config.has_sink {
            return Some("the sink prefill wrapper cannot read an NVFP4 KV cache".to_owned());
        }
    }
    None
}

fn is_nvfp4(config: &Configuration) -> bool {
    matches!(
        config.kv_cache_dtype.as_deref(),
        Some("nvfp4" | "nvfp4_4over6")
    )
}

/// Multimodal prefixes go to the Triton half, so FlashAttention is asked without them.
pub(super) fn triton_flash_attn(config: &Configuration, device: Device) -> Option<String> {
    let rest = Configuration {
        use_mm_prefix: false,
        ..config.clone()
    };
    flash_attn(&rest, device).map(|reason| format!("FLASH_ATTN: {reason}"))
}

pub(super) fn triton_flashinfer(config: &Configuration, device: Device) -> Option<String> {
    let rest = Configuration {
        use_mm_prefix: false,
        ..config.clone()
    };
    flashinfer(&rest, device).map(|reason| format!("FLASHINFER: {reason}"))
}

pub(super) fn flash_attn_mla(_: &Configuration, device: Device) -> Option<String> {
    (device.capability()?.major != 9)
        .then(|| "FlashAttention MLA not supported on this device".to_owned())
}

pub(super) fn flashmla(config: &Configuration, device: Device) -> Option<String> {
    let major = device.capability()?.major;
    if config.use_sparse {
        (!matches!(major, 9 | 10)).then(|| {
            "FlashMLA Sparse is only supported on Hopper and Blackwell DC devices.".to_owned()
        })
    } else {
        (major != 9).then(|| "FlashMLA Dense is only supported on Hopper devices.".to_owned())
    }
}

pub(super) fn flashinfer_mla(config: &Configuration, _: Device) -> Option<String> {
    let got = config.model.qk_nope_head_dim.unwrap_or(1);
    (![64, 128, 192].contains(&got)).then(|| {
        format!("FlashInfer MLA kernel requires qk_nope_head_dim in [64, 128, 192], but got {got}")
    })
}

pub(super) fn tokenspeed_mla(config: &Configuration, _: Device) -> Option<String> {
    let model = &config.model;
    let dims = (
        model.qk_nope_head_dim.unwrap_or(0),
        model.qk_rope_head_dim.unwrap_or(0),
        model.v_head_dim.unwrap_or(0),
    );
    (dims != (128, 64, 128)).then(|| {
        format!(
            "tokenspeed_mla requires DeepSeek R1 MLA dimensions (qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), got ({}, {}, {})",
            dims.0, dims.1, dims.2
        )
    })
}

pub(super) fn flash_attn_mla_sparse(config: &Configuration, device: Device) -> Option<String> {
    if config.is_quantized_kv_cache() {
        return Some(
            "FlashAttention MLA Sparse currently supports only FP16/BF16 KV cache".to_owned(),
        );
    }
    flash_attn_mla(config, device).or_else(|| {
        config
            .model
            .index_topk
            .is_none()
            .then(|| "FlashAttention MLA Sparse requires model with index_topk".to_owned())
    })
}

pub(super) fn flash_attn_mla_sparse_fa4(config: &Configuration, _: Device) -> Option<String> {
    let got = match config.model.index_topk {
        Some(topk) if topk.is_multiple_of(128) => return None,
        Some(topk) => topk.to_string(),
        None => "None".to_owned(),
    };
    Some(format!(
        "FA4 sparse MLA requires index_topk % 128 == 0, got {got}"
    ))
}

pub(super) fn flashinfer_mla_sparse(config: &Configuration, _: Device) -> Option<String> {
    config
        .model
        .index_topk
        .is_none()
        .then(|| "FlashInfer MLA Sparse requires model with index_topk config".to_owned())
}

pub(super) fn flashinfer_mla_sparse_sm90(config: &Configuration, _: Device) -> Option<String> {
    (!config.use_sparse).then(|| "FLASHINFER_MLA_SPARSE_SM90 requires sparse MLA".to_owned())
}
