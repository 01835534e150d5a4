//! The table: one row per backend, and what changes with the compute capability.
//!
//! Source: vLLM `vllm/v1/attention/backends/*` @0.33, recorded in `tests/vectors/backend_supports_tables.json`.

use std::borrow::Cow;

use timetable_types::{CudagraphSupport, Dtype, KvCacheLayout};

use super::combination as why;
use super::{
    AttentionType, Backend, BackendRow, BlockSizeRule, BuilderTraits, Capabilities, Capability,
    Device, Flags, HeadSizes, QueryLenSupport, cpu,
};
use crate::kernel_block::KernelBlockSize::{self, Exact, MultipleOf};
use crate::layout::DEFAULT_LAYOUTS;
use crate::spec::{AttentionSpec, KvQuantMode, dtype_size};

const HALF: &[Dtype] = &[Dtype::Float16, Dtype::Bfloat16];
const HALF_AND_FLOAT: &[Dtype] = &[Dtype::Float16, Dtype::Bfloat16, Dtype::Float32];
const BFLOAT16: &[Dtype] = &[Dtype::Bfloat16];

const PLAIN_KV: &[&str] = &["auto", "float16", "bfloat16"];
const FP8_KV: &[&str] = &["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"];

const DECODER: &[AttentionType] = &[AttentionType::Decoder];
const ALL_TYPES: &[AttentionType] = &AttentionType::ALL;
const DECODER_AND_ENCODER_ONLY: &[AttentionType] =
    &[AttentionType::Decoder, AttentionType::EncoderOnly];

const LBHNC_BLHNC: &[KvCacheLayout] = &[KvCacheLayout::Lbhnc, KvCacheLayout::Blhnc];

const SM80: Capability = Capability::new(8, 0);
const SM121: Capability = Capability::new(12, 1);

const fn list<T: Clone>(items: &'static [T]) -> Cow<'static, [T]> {
    Cow::Borrowed(items)
}

const fn class(module: &'static str, name: &'static str) -> (Cow<'static, str>, Cow<'static, str>) {
    (Cow::Borrowed(module), Cow::Borrowed(name))
}

const fn heads(sizes: &'static [u32]) -> HeadSizes {
    HeadSizes::Listed(Cow::Borrowed(sizes))
}

fn plain(_: &mut AttentionSpec) {}

/// NVFP4: keys' heads, then values' heads; per head the 4-bit values of a token, then one fp8 scale per 16.
fn pack_nvfp4(spec: &mut AttentionSpec) {
    if spec.kv_quant_mode == KvQuantMode::Nvfp4 {
        spec.num_head_slots = Some(2 * spec.num_kv_heads);
        spec.state_content_bytes = Some(u64::from(spec.head_size / 2 + spec.head_size / 16));
    }
}

/// One f32 scale per token and head after the key and after the value; int4 packs two elements per byte.
fn pack_scales(spec: &mut AttentionSpec) {
    let per_byte = match spec.kv_quant_mode {
        KvQuantMode::Int8PerTokenHead | KvQuantMode::Fp8PerTokenHead => 1,
        KvQuantMode::Int4PerTokenHead => 2,
        _ => return,
    };
    let bytes = |elements: u32| u64::from(elements.div_ceil(per_byte)) + dtype_size(Dtype::Float32);
    spec.state_content_bytes = Some(bytes(spec.head_size) + bytes(spec.head_size_v));
}

const fn builder(class: &'static str, cudagraph_support: CudagraphSupport) -> BuilderTraits {
    BuilderTraits {
        class,
        reorder_batch_threshold: None,
        supports_update_block_table: false,
        cudagraph_support,
        supports_draft_decode_metadata_update: false,
        requires_block_table_width: false,
        query_len_support: None,
    }
}

const fn mla_builder(
    class: &'static str,
    cudagraph_support: CudagraphSupport,
    threshold: u32,
    query_len_support: QueryLenSupport,
) -> BuilderTraits {
    BuilderTraits {
        reorder_batch_threshold: Some(threshold),
        query_len_support: Some(query_len_support),
        ..builder(class, cudagraph_support)
    }
}

/// The field's base class, with the sizes most backends have.
fn base() -> BackendRow {
    BackendRow {
        name: Cow::Borrowed(""),
        full_cls_name: class("", ""),
        forward_includes_kv_cache_update: false,
        supported_dtypes: list(HALF),
        supported_kv_cache_dtypes: list(PLAIN_KV),
        usable_kv_cache_dtypes: None,
        accepts_unset_kv_cache_dtype: true,
        kernel_block_sizes: list(&[MultipleOf(16)]),
        block_size_rule: BlockSizeRule::Divides,
        head_sizes: HeadSizes::Any,
        kv_cache_layouts: None,
        attn_types: list(DECODER),
        capabilities: Capabilities::Any,
        flags: Flags::DEFAULT,
        builder: builder("", CudagraphSupport::Never),
        combination: why::none,
        customize: plain,
    }
}

const MLA_FLAGS: Flags = Flags {
    is_mla: true,
    supports_pcp: true,
    supports_dcp: true,
    ..Flags::DEFAULT
};

/// What the MLA backends share.
fn mla() -> BackendRow {
    BackendRow {
        forward_includes_kv_cache_update: true,
        supported_kv_cache_dtypes: list(FP8_KV),
        head_sizes: heads(&[320, 512, 576]),
        flags: MLA_FLAGS,
        ..base()
    }
}

const SPARSE_FLAGS: Flags = Flags {
    is_sparse: true,
    ..MLA_FLAGS
};

/// What `backend` answers on `device`.
pub fn row(backend: Backend, device: Device) -> BackendRow {
    let base = BackendRow {
        name: Cow::Borrowed(backend.name()),
        ..general(backend)
    };
    match device {
        Device::Cuda { capability } => on_cuda(backend, base, capability),
        Device::Cpu => cpu::on_cpu(backend, base),
    }
}

/// The row as far as it does not depend on the device.
fn general(backend: Backend) -> BackendRow {
    match backend {
        Backend::FlashAttn => flash_attn(
            "vllm.v1.attention.backends.flash_attn",
            "FlashAttentionBackend",
        ),
        Backend::FlashAttnDiffKv => flash_attn(
            "vllm.v1.attention.backends.flash_attn_diffkv",
            "FlashAttentionDiffKVBackend",
        ),
        Backend::FlashInfer => BackendRow {
            full_cls_name: class("vllm.v1.attention.backends.flashinfer", "FlashInferBackend"),
            supported_kv_cache_dtypes: list(&[
                "auto",
                "float16",
                "bfloat16",
                "fp8",
                "fp8_e4m3",
                "fp8_e5m2",
                "nvfp4",
                "nvfp4_4over6",
            ]),
            kernel_block_sizes: list(&[Exact(16), Exact(32), Exact(64)]),
            head_sizes: heads(&[64, 128, 256, 512]),
            capabilities: Capabilities::Between(SM80, SM121),
            flags: Flags {
                supports_sliding_window: true,
                supports_non_causal: true,
                supports_dcp: true,
                supports_device_cpu_query_lens_mismatch: false,
                ..Flags::DEFAULT
            },
            builder: BuilderTraits {
                reorder_batch_threshold: Some(1),
                ..builder("FlashInferMetadataBuilder", CudagraphSupport::Never)
            },
            combination: why::flashinfer,
            customize: pack_nvfp4,
            ..base()
        },
        Backend::TritonAttn => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.triton_attn",
                "TritonAttentionBackend",
            ),
            supported_dtypes: list(HALF_AND_FLOAT),
            supported_kv_cache_dtypes: list(&[
                "auto",
                "float16",
                "bfloat16",
                "fp8",
                "fp8_e4m3",
                "fp8_e5m2",
                "int4_per_token_head",
                "int8_per_token_head",
                "fp8_per_token_head",
            ]),
            head_sizes: HeadSizes::AtLeast(32),
            attn_types: list(ALL_TYPES),
            flags: Flags {
                supports_sink: true,
                supports_mm_prefix: true,
                supports_sliding_window: true,
                supports_rswa: true,
                supports_non_causal: true,
                supports_batch_invariance: true,
                supports_alibi_sqrt: true,
                ..Flags::DEFAULT
            },
            builder: BuilderTraits {
                supports_draft_decode_metadata_update: true,
                ..builder("TritonAttentionMetadataBuilder", CudagraphSupport::Always)
            },
            customize: pack_scales,
            ..base()
        },
        Backend::FlexAttention => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.flex_attention",
                "FlexAttentionBackend",
            ),
            supported_dtypes: list(HALF_AND_FLOAT),
            kv_cache_layouts: Some(list(&[KvCacheLayout::Lbnhc])),
            attn_types: list(DECODER_AND_ENCODER_ONLY),
            flags: Flags {
                supports_mm_prefix: true,
                supports_sliding_window: true,
                supports_rswa: true,
                supports_non_causal: true,
                supports_batch_invariance: true,
                ..Flags::DEFAULT
            },
            builder: builder("FlexAttentionMetadataBuilder", CudagraphSupport::Always),
            ..base()
        },
        Backend::TurboQuant => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.turboquant_attn",
                "TurboQuantAttentionBackend",
            ),
            supported_kv_cache_dtypes: list(&[
                "turboquant_k8v4",
                "turboquant_4bit_nc",
                "turboquant_k3v4_nc",
                "turboquant_3bit_nc",
            ]),
            accepts_unset_kv_cache_dtype: false,
            kernel_block_sizes: list(&[Exact(16), Exact(32), Exact(64), Exact(128)]),
            kv_cache_layouts: Some(list(&[KvCacheLayout::Lbnhc])),
            builder: builder("TurboQuantMetadataBuilder", CudagraphSupport::UniformBatch),
            ..base()
        },
        Backend::B12x => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.b12x",
                "B12xPagedAttentionBackend",
            ),
            supported_dtypes: list(BFLOAT16),
            supported_kv_cache_dtypes: list(&["auto", "bfloat16", "fp8", "fp8_e4m3"]),
            kernel_block_sizes: list(&[Exact(64), Exact(128)]),
            block_size_rule: BlockSizeRule::Exact { preferred: 128 },
            head_sizes: heads(&[64, 128, 192, 256]),
            kv_cache_layouts: Some(list(LBHNC_BLHNC)),
            capabilities: Capabilities::Majors(&[12]),
            flags: Flags {
                supports_sink: true,
                supports_sliding_window: true,
                ..Flags::DEFAULT
            },
            builder: BuilderTraits {
                supports_update_block_table: true,
                ..builder("B12xPagedMetadataBuilder", CudagraphSupport::UniformBatch)
            },
            ..base()
        },
        Backend::TritonFlashAttn => composite(
            "vllm.v1.attention.backends.triton_flash_attn",
            "TritonFlashAttentionBackend",
            9,
        ),
        Backend::TritonFlashInfer => composite(
            "vllm.v1.attention.backends.triton_flashinfer",
            "TritonFlashInferBackend",
            10,
        ),
        Backend::CpuAttn => BackendRow {
            full_cls_name: class("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
            supported_dtypes: list(HALF_AND_FLOAT),
            supported_kv_cache_dtypes: list(&["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
            // It says "auto" and means the model's own dtype, whichever of the two that is.
            usable_kv_cache_dtypes: Some(list(&[
                "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
            ])),
            kernel_block_sizes: list(&[MultipleOf(32)]),
            head_sizes: heads(&[32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]),
            kv_cache_layouts: Some(list(&[KvCacheLayout::Lbhnc])),
            attn_types: list(ALL_TYPES),
            flags: Flags {
                supports_sliding_window: true,
                supports_non_causal: true,
                ..Flags::DEFAULT
            },
            builder: builder("CPUAttentionMetadataBuilder", CudagraphSupport::Never),
            combination: why::cpu_attn,
            ..base()
        },
        other => mla_row(other),
    }
}

fn flash_attn(module: &'static str, name: &'static str) -> BackendRow {
    BackendRow {
        full_cls_name: class(module, name),
        supported_kv_cache_dtypes: list(FP8_KV),
        usable_kv_cache_dtypes: Some(list(PLAIN_KV)),
        head_sizes: HeadSizes::Multiples {
            multiple: 8,
            max: 256,
        },
        attn_types: list(ALL_TYPES),
        capabilities: Capabilities::AtLeast(SM80),
        flags: Flags {
            supports_sliding_window: true,
            supports_rswa: true,
            supports_non_causal: true,
            supports_batch_invariance: true,
            supports_dcp: true,
            ..Flags::DEFAULT
        },
        builder: BuilderTraits {
            supports_update_block_table: true,
            ..builder(
                "FlashAttentionMetadataBuilder",
                CudagraphSupport::UniformBatch,
            )
        },
        combination: why::flash_attn,
        ..base()
    }
}

/// Triton for layers with multimodal prefixes, `major`'s native backend for the rest.
fn composite(module: &'static str, name: &'static str, major: u32) -> BackendRow {
    let on_hopper = major == 9;
    BackendRow {
        full_cls_name: class(module, name),
        usable_kv_cache_dtypes: Some(if on_hopper {
            list(FP8_KV)
        } else {
            list(&["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
        }),
        kernel_block_sizes: if on_hopper {
            list(&[MultipleOf(16)])
        } else {
            list(&[Exact(64)])
        },
        head_sizes: heads(&[256, 512]),
        kv_cache_layouts: Some(list(&DEFAULT_LAYOUTS)),
        capabilities: if on_hopper {
            Capabilities::Majors(&[9])
        } else {
            Capabilities::Majors(&[10])
        },
        flags: Flags {
            supports_mm_prefix: true,
            supports_sliding_window: true,
            supports_rswa: on_hopper,
            supports_device_cpu_query_lens_mismatch: false,
            ..Flags::DEFAULT
        },
        builder: builder("CompositeAttentionMetadataBuilder", CudagraphSupport::Never),
        combination: if on_hopper {
            why::triton_flash_attn
        } else {
            why::triton_flashinfer
        },
        ..base()
    }
}

fn mla_row(backend: Backend) -> BackendRow {
    match backend {
        Backend::FlashAttnMla => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashattn_mla",
                "FlashAttnMLABackend",
            ),
            supported_kv_cache_dtypes: list(PLAIN_KV),
            capabilities: Capabilities::Majors(&[9]),
            flags: Flags {
                supports_batch_invariance: true,
                ..MLA_FLAGS
            },
            builder: mla_builder(
                "FlashAttnMLAMetadataBuilder",
                CudagraphSupport::UniformBatch,
                512,
                QueryLenSupport::Varlen,
            ),
            combination: why::flash_attn_mla,
            ..mla()
        },
        Backend::FlashInferMla => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashinfer_mla",
                "FlashInferMLABackend",
            ),
            kernel_block_sizes: list(&[Exact(32), Exact(64)]),
            capabilities: Capabilities::Majors(&[10]),
            flags: Flags {
                supports_non_causal: true,
                supports_non_causal_dcp: true,
                ..MLA_FLAGS
            },
            builder: mla_builder(
                "FlashInferMLAMetadataBuilder",
                CudagraphSupport::Always,
                1,
                QueryLenSupport::Varlen,
            ),
            combination: why::flashinfer_mla,
            ..mla()
        },
        Backend::CutlassMla => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.cutlass_mla",
                "CutlassMLABackend",
            ),
            kernel_block_sizes: list(&[Exact(128)]),
            capabilities: Capabilities::Majors(&[10]),
            builder: mla_builder(
                "CutlassMLAMetadataBuilder",
                CudagraphSupport::UniformSingleTokenDecode,
                1,
                QueryLenSupport::SingleOnly,
            ),
            ..mla()
        },
        Backend::TritonMla => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.triton_mla",
                "TritonMLABackend",
            ),
            head_sizes: HeadSizes::Any,
            flags: Flags {
                supports_non_causal: true,
                supports_batch_invariance: true,
                ..MLA_FLAGS
            },
            builder: mla_builder(
                "TritonMLAMetadataBuilder",
                CudagraphSupport::UniformBatch,
                1,
                QueryLenSupport::Uniform,
            ),
            ..mla()
        },
        Backend::TokenspeedMla => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.tokenspeed_mla",
                "TokenspeedMLABackend",
            ),
            supported_kv_cache_dtypes: list(&["fp8", "fp8_e4m3"]),
            kernel_block_sizes: list(&[Exact(32), Exact(64)]),
            capabilities: Capabilities::Majors(&[10]),
            flags: Flags {
                supports_non_causal: true,
                supports_non_causal_dcp: true,
                ..MLA_FLAGS
            },
            builder: mla_builder(
                "TokenspeedMLAMetadataBuilder",
                CudagraphSupport::UniformBatch,
                1,
                QueryLenSupport::Uniform,
            ),
            combination: why::tokenspeed_mla,
            ..mla()
        },
        Backend::FlashMlaSparse => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashmla_sparse",
                "FlashMLASparseBackend",
            ),
            supported_dtypes: list(BFLOAT16),
            supported_kv_cache_dtypes: list(&[
                "auto",
                "bfloat16",
                "fp8_ds_mla",
                "fp8",
                "nvfp4_ds_mla",
            ]),
            kernel_block_sizes: list(&[MultipleOf(64)]),
            head_sizes: heads(&[576, 512]),
            capabilities: Capabilities::Majors(&[9, 10]),
            flags: SPARSE_FLAGS,
            builder: builder(
                "FlashMLASparseMetadataBuilder",
                CudagraphSupport::UniformBatch,
            ),
            ..mla()
        },
        Backend::FlashAttnMlaSparse => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashattn_mla_sparse",
                "FlashAttnMLASparseBackend",
            ),
            supported_kv_cache_dtypes: list(PLAIN_KV),
            kernel_block_sizes: list(&[MultipleOf(64)]),
            head_sizes: HeadSizes::Any,
            capabilities: Capabilities::Majors(&[9]),
            flags: Flags {
                supports_dcp: false,
                ..SPARSE_FLAGS
            },
            builder: builder(
                "FlashAttnMLASparseMetadataBuilder",
                CudagraphSupport::UniformBatch,
            ),
            combination: why::flash_attn_mla_sparse,
            ..mla()
        },
        // The next three are recorded through selection only: what no recorded case asks is the base class's answer.
        Backend::FlashAttnMlaSparseFa4 => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashattn_mla_sparse_fa4",
                "FlashAttnMLASparseFA4Backend",
            ),
            supported_dtypes: list(BFLOAT16),
            supported_kv_cache_dtypes: list(PLAIN_KV),
            kernel_block_sizes: list(&[MultipleOf(64)]),
            head_sizes: heads(&[576]),
            capabilities: Capabilities::Majors(&[10]),
            flags: Flags {
                supports_dcp: false,
                ..SPARSE_FLAGS
            },
            builder: builder(
                "FlashAttnMLASparseFA4MetadataBuilder",
                CudagraphSupport::UniformBatch,
            ),
            combination: why::flash_attn_mla_sparse_fa4,
            ..mla()
        },
        Backend::FlashInferMlaSparse => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashinfer_mla_sparse",
                "FlashInferMLASparseBackend",
            ),
            kernel_block_sizes: list(&[Exact(32), Exact(64)]),
            head_sizes: heads(&[576]),
            capabilities: Capabilities::Majors(&[10]),
            flags: SPARSE_FLAGS,
            builder: builder(
                "FlashInferMLASparseMetadataBuilder",
                CudagraphSupport::UniformBatch,
            ),
            combination: why::flashinfer_mla_sparse,
            ..mla()
        },
        Backend::FlashInferMlaSparseSm90 => BackendRow {
            full_cls_name: class(
                "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90",
                "FlashInferMLASparseSM90Backend",
            ),
            supported_dtypes: list(BFLOAT16),
            kernel_block_sizes: list(&[MultipleOf(64)]),
            head_sizes: heads(&[512, 576]),
            capabilities: Capabilities::Majors(&[9]),
            flags: Flags {
                supports_dcp: false,
                ..SPARSE_FLAGS
            },
            builder: builder(
                "FlashInferMLASparseSM90MetadataBuilder",
                CudagraphSupport::UniformBatch,
            ),
            combination: why::flashinfer_mla_sparse_sm90,
            ..mla()
        },
        _ => BackendRow {
            full_cls_name: class("vllm.v1.attention.backends.mla.flashmla", "FlashMLABackend"),
            kernel_block_sizes: list(&[Exact(64)]),
            capabilities: Capabilities::Majors(&[9, 10]),
            builder: mla_builder(
                "FlashMLAMetadataBuilder",
                CudagraphSupport::UniformBatch,
                128,
                QueryLenSupport::Uniform,
            ),
            combination: why::flashmla,
            ..mla()
        },
    }
}

/// FlashInfer's block sizes where the generated (trtllm) kernels are usable.
const FLASHINFER_SM100_BLOCKS: &[KernelBlockSize] = &[
    Exact(16),
    Exact(32),
    Exact(64),
    Exact(128),
    Exact(256),
    Exact(512),
    Exact(1024),
];

/// What depends on the compute capability.
fn on_cuda(backend: Backend, mut row: BackendRow, capability: Capability) -> BackendRow {
    let major = capability.major;
    match backend {
        // FlashAttention 3 and 4 add sinks, multimodal prefixes, scales per head, fp8 caches and larger heads.
        Backend::FlashAttn | Backend::FlashAttnDiffKv if matches!(major, 9 | 10) => {
            row.head_sizes = HeadSizes::Multiples {
                multiple: 8,
                max: 512,
            };
            row.usable_kv_cache_dtypes = None;
            row.flags.supports_sink = true;
            row.flags.supports_mm_prefix = true;
            row.flags.supports_per_head_quant_scales = true;
            row.builder.cudagraph_support = CudagraphSupport::Always;
        }
        Backend::FlashInfer => {
            row.flags.supports_sink = matches!(major, 9 | 10 | 12);
            if capability < SM80 {
                row.usable_kv_cache_dtypes = Some(list(&[
                    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
                ]));
            }
            if major == 10 {
                row.kernel_block_sizes = list(FLASHINFER_SM100_BLOCKS);
                row.kv_cache_layouts = Some(list(LBHNC_BLHNC));
                row.flags.supports_device_cpu_query_lens_mismatch = true;
            }
        }
        Backend::TritonFlashInfer if major == 10 => {
            row.kv_cache_layouts = Some(list(LBHNC_BLHNC));
        }
        _ => {}
    }
    row
}
