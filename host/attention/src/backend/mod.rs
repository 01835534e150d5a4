//! Backend classes: what each attention backend says it supports, on each device.
//!
//! One [`BackendRow`] per backend, declarative; [`row`] specialises it for a device. Must never know an implementation: a row
//! is what is asked before anything runs. Source: vLLM `vllm/v1/attention/backend.py` and `vllm/v1/attention/backends/*`
//! @0.33 (where 0.32 differs, 0.33's answer), as recorded in `tests/vectors/backend_supports_tables.json`.

mod combination;
mod cpu;
mod mamba;
mod names;
mod registry;
mod rows;
mod validate;

use std::borrow::Cow;
use std::fmt;

use timetable_types::{CudagraphSupport, Dtype, KvCacheLayout};

pub(crate) use cpu::priority as cpu_priority;

pub use combination::{FlashAttnQuery, flash_attn_version};
pub use mamba::MambaBackend;
pub use names::{Backend, NameError, family_of};
pub use registry::{BackendRegistry, Hook, RegisterError, RegisteredBackend};
pub use rows::row;
pub use validate::{KV_CACHE_DTYPES, KvCacheDtypeError, check_kv_cache_dtype};

use crate::kernel_block::{BlockSizes, KernelBlockSize};
use crate::spec::{AttentionSpec, CacheSpec};

/// A CUDA compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// 9 of 9.0
    pub major: u32,
    /// 0 of 9.0
    pub minor: u32,
}

impl Capability {
    /// `major.minor`
    pub const fn new(major: u32, minor: u32) -> Self {
        Capability { major, minor }
    }

    /// From `9.0`; none for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Capability {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The device whose answers are wanted: each device adds its own column to the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// An NVIDIA GPU: the field's answers, exactly.
    Cuda {
        /// Its compute capability.
        capability: Capability,
    },
    /// Timetable's CPU device: what its own impls run.
    Cpu,
}

impl Device {
    /// The field's `device_name`, used in error texts.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Cuda { .. } => "cuda",
            Device::Cpu => "cpu",
        }
    }

    /// The capability, where there is one.
    pub const fn capability(self) -> Option<Capability> {
        match self {
            Device::Cuda { capability } => Some(capability),
            Device::Cpu => None,
        }
    }
}

/// What a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttentionType {
    /// Causal self-attention with a cache.
    Decoder,
    /// An encoder's self-attention, inside an encoder-decoder model.
    Encoder,
    /// Self-attention without a cache.
    EncoderOnly,
    /// Cross attention: a decoder's queries, an encoder's keys.
    EncoderDecoder,
}

impl AttentionType {
    /// All four.
    pub const ALL: [AttentionType; 4] = [
        AttentionType::Decoder,
        AttentionType::Encoder,
        AttentionType::EncoderOnly,
        AttentionType::EncoderDecoder,
    ];

    /// The field's name: `decoder`, `encoder`, `encoder_only`, `encoder_decoder`.
    pub const fn name(self) -> &'static str {
        match self {
            AttentionType::Decoder => "decoder",
            AttentionType::Encoder => "encoder",
            AttentionType::EncoderOnly => "encoder_only",
            AttentionType::EncoderDecoder => "encoder_decoder",
        }
    }

    /// The type called `name`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }
}

impl fmt::Display for AttentionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `torch.bfloat16`, as the field prints a dtype.
pub const fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "torch.float32",
        Dtype::Float16 => "torch.float16",
        Dtype::Bfloat16 => "torch.bfloat16",
        Dtype::Float8E4m3 => "torch.float8_e4m3fn",
        Dtype::Float8E5m2 => "torch.float8_e5m2",
        Dtype::Uint8 => "torch.uint8",
        Dtype::Int32 => "torch.int32",
    }
}

/// Parts of the model's configuration that a few MLA backends ask for. None: the model's configuration has no such entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ModelFacts {
    /// Elements of a key without its rotary part.
    pub qk_nope_head_dim: Option<u32>,
    /// Elements of a key's rotary part.
    pub qk_rope_head_dim: Option<u32>,
    /// Elements of a value.
    pub v_head_dim: Option<u32>,
    /// Keys that a sparse indexer selects per query.
    pub index_topk: Option<u32>,
}

impl ModelFacts {
    /// DeepSeek R1's MLA: 128 + 64 per key, 128 per value, no indexer.
    pub const DEEPSEEK_R1: ModelFacts = ModelFacts {
        qk_nope_head_dim: Some(128),
        qk_rope_head_dim: Some(64),
        v_head_dim: Some(128),
        index_topk: None,
    };
}

/// What an attention layer asks of a backend: the field's `AttentionSelectorConfig`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Configuration {
    /// Elements of a key.
    pub head_size: u32,
    /// The model's dtype.
    pub dtype: Dtype,
    /// The cache dtype as configured: `auto`, `fp8`, …; none: not set.
    pub kv_cache_dtype: Option<String>,
    /// The user's `--block-size` in tokens; none when the user gave none.
    pub block_size: Option<u32>,
    /// Multi-head latent attention?
    pub use_mla: bool,
    /// Attention sinks?
    pub has_sink: bool,
    /// Sparse attention (an indexer selects keys)?
    pub use_sparse: bool,
    /// Bidirectional attention within multimodal prefixes?
    pub use_mm_prefix: bool,
    /// Quantisation scales per head?
    pub use_per_head_quant_scales: bool,
    /// What the layer attends to.
    pub attn_type: AttentionType,
    /// Does the layer have a sliding window?
    pub has_sliding_window: bool,
    /// Do queries see later keys?
    pub use_non_causal: bool,
    /// Must results not depend on the batch?
    pub use_batch_invariant: bool,
    /// Does a KV connector move blocks?
    pub use_kv_connector: bool,
    /// Does the device trim drafts, so that its query lengths differ from the host's?
    pub use_adaptive_verification: bool,
    /// Prefill context parallelism?
    pub use_pcp: bool,
    /// Decode context parallelism?
    pub use_dcp: bool,
    /// Retained sliding-window attention?
    pub use_rswa: bool,
    /// What a few MLA backends ask of the model.
    pub model: ModelFacts,
}

impl Configuration {
    /// A plain decoder layer: no MLA, no window, cache dtype `auto`, no `--block-size`.
    pub fn new(head_size: u32, dtype: Dtype) -> Self {
        Configuration {
            head_size,
            dtype,
            kv_cache_dtype: Some("auto".to_owned()),
            block_size: None,
            use_mla: false,
            has_sink: false,
            use_sparse: false,
            use_mm_prefix: false,
            use_per_head_quant_scales: false,
            attn_type: AttentionType::Decoder,
            has_sliding_window: false,
            use_non_causal: false,
            use_batch_invariant: false,
            use_kv_connector: false,
            use_adaptive_verification: false,
            use_pcp: false,
            use_dcp: false,
            use_rswa: false,
            model: ModelFacts::default(),
        }
    }

    /// Is the cache quantised, that is, of another dtype than the model's kinds?
    pub fn is_quantized_kv_cache(&self) -> bool {
        !matches!(
            self.kv_cache_dtype.as_deref(),
            None | Some("auto" | "float16" | "bfloat16" | "float32")
        )
    }
}

/// Head sizes a backend takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadSizes {
    /// Any.
    Any,
    /// These.
    Listed(Cow<'static, [u32]>),
    /// Multiples of `multiple` up to `max`.
    Multiples {
        /// The base.
        multiple: u32,
        /// The largest.
        max: u32,
    },
    /// This or more.
    AtLeast(u32),
}

impl HeadSizes {
    /// Is `head_size` one of them?
    pub fn contains(&self, head_size: u32) -> bool {
        match self {
            HeadSizes::Any => true,
            HeadSizes::Listed(sizes) => sizes.contains(&head_size),
            HeadSizes::Multiples { multiple, max } => {
                head_size.is_multiple_of(*multiple) && head_size <= *max
            }
            HeadSizes::AtLeast(min) => head_size >= *min,
        }
    }

    /// What `get_supported_head_sizes()` declares: the list, empty where there is none.
    pub fn declared(&self) -> &[u32] {
        match self {
            HeadSizes::Listed(sizes) => sizes,
            _ => &[],
        }
    }
}

/// Compute capabilities a backend runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capabilities {
    /// Any.
    Any,
    /// From this on.
    AtLeast(Capability),
    /// From the first to the second, both included.
    Between(Capability, Capability),
    /// These major versions.
    Majors(&'static [u32]),
}

impl Capabilities {
    /// Is `capability` one of them?
    pub fn contains(self, capability: Capability) -> bool {
        match self {
            Capabilities::Any => true,
            Capabilities::AtLeast(min) => capability >= min,
            Capabilities::Between(min, max) => (min..=max).contains(&capability),
            Capabilities::Majors(majors) => majors.contains(&capability.major),
        }
    }
}

/// Feature flags: the `supports_*` and `is_*` questions that take no argument. All false by default but
/// `supports_kv_connector` and `supports_device_cpu_query_lens_mismatch`, as in the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the field's questions")]
pub struct Flags {
    pub is_mla: bool,
    pub is_sparse: bool,
    pub supports_sink: bool,
    pub supports_alibi_sqrt: bool,
    pub supports_mm_prefix: bool,
    pub supports_per_head_quant_scales: bool,
    pub supports_sliding_window: bool,
    pub supports_rswa: bool,
    pub supports_non_causal: bool,
    pub supports_non_causal_dcp: bool,
    pub supports_batch_invariance: bool,
    pub supports_kv_connector: bool,
    pub supports_pcp: bool,
    pub supports_dcp: bool,
    pub supports_device_cpu_query_lens_mismatch: bool,
}

impl Flags {
    /// The field's defaults.
    pub const DEFAULT: Flags = Flags {
        is_mla: false,
        is_sparse: false,
        supports_sink: false,
        supports_alibi_sqrt: false,
        supports_mm_prefix: false,
        supports_per_head_quant_scales: false,
        supports_sliding_window: false,
        supports_rswa: false,
        supports_non_causal: false,
        supports_non_causal_dcp: false,
        supports_batch_invariance: false,
        supports_kv_connector: true,
        supports_pcp: false,
        supports_dcp: false,
        supports_device_cpu_query_lens_mismatch: true,
    };
}

/// Query lengths that a decode kernel takes. Source: the builders' `query_len_support`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryLenSupport {
    /// One token.
    SingleOnly,
    /// The same for every row.
    Uniform,
    /// Any mix.
    Varlen,
}

/// What the backend's builder class declares. A component's own answers come from the component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuilderTraits {
    /// The class's name.
    pub class: &'static str,
    /// Rows with at most this many query tokens are decodes and go first.
    pub reorder_batch_threshold: Option<u32>,
    /// `supports_update_block_table`
    pub supports_update_block_table: bool,
    /// The class attribute; some builders answer otherwise for a given group.
    pub cudagraph_support: CudagraphSupport,
    /// `supports_draft_decode_metadata_update`
    pub supports_draft_decode_metadata_update: bool,
    /// Is the builder told the block table's width?
    pub requires_block_table_width: bool,
    /// MLA only.
    pub query_len_support: Option<QueryLenSupport>,
}

/// How a requested block size is compared with the declared kernel block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSizeRule {
    /// A multiple of a declared size or base will do: the manager's block is split.
    Divides,
    /// Only a declared size will do; others are replaced by this one.
    Exact {
        /// The preferred size, in tokens.
        preferred: u32,
    },
}

/// Everything that one backend answers on one device.
#[derive(Clone, Debug)]
pub struct BackendRow {
    /// The name, such as `FLASH_ATTN`.
    pub name: Cow<'static, str>,
    /// The field's module and class, which identify an implementation.
    pub full_cls_name: (Cow<'static, str>, Cow<'static, str>),
    /// False: the host scatters new keys and values before `forward`.
    pub forward_includes_kv_cache_update: bool,
    /// Model dtypes.
    pub supported_dtypes: Cow<'static, [Dtype]>,
    /// Cache dtypes as declared; empty: any.
    pub supported_kv_cache_dtypes: Cow<'static, [&'static str]>,
    /// Cache dtypes that this device really takes, where fewer (or more) than declared.
    pub usable_kv_cache_dtypes: Option<Cow<'static, [&'static str]>>,
    /// Is a cache dtype that was never set accepted?
    pub accepts_unset_kv_cache_dtype: bool,
    /// Kernel block sizes without knowledge of a spec; empty: any.
    pub kernel_block_sizes: Cow<'static, [KernelBlockSize]>,
    /// How `--block-size` is compared with them.
    pub block_size_rule: BlockSizeRule,
    /// Head sizes.
    pub head_sizes: HeadSizes,
    /// Layouts it reads, most preferred first; none: any.
    pub kv_cache_layouts: Option<Cow<'static, [KvCacheLayout]>>,
    /// Attention types.
    pub attn_types: Cow<'static, [AttentionType]>,
    /// Compute capabilities; not asked on the CPU device.
    pub capabilities: Capabilities,
    /// Feature flags.
    pub flags: Flags,
    /// What its builder class declares.
    pub builder: BuilderTraits,
    /// `supports_combination`: why the parts of a configuration, each supported, do not go together.
    pub combination: fn(&Configuration, Device) -> Option<String>,
    /// `customize_spec`: how this backend packs a block, where not plainly.
    pub customize: fn(&mut AttentionSpec),
}

impl BackendRow {
    /// `module.qualname`
    pub fn class_path(&self) -> String {
        format!("{}.{}", self.full_cls_name.0, self.full_cls_name.1)
    }

    /// The key that grouping uses.
    pub fn class(&self) -> crate::group::BackendClass {
        crate::group::BackendClass::new(&self.name, &self.class_path())
    }

    /// `supports_head_size`
    pub fn supports_head_size(&self, head_size: u32) -> bool {
        self.head_sizes.contains(head_size)
    }

    /// `supports_dtype`
    pub fn supports_dtype(&self, dtype: Dtype) -> bool {
        self.supported_dtypes.contains(&dtype)
    }

    /// `supports_kv_cache_dtype`
    pub fn supports_kv_cache_dtype(&self, dtype: Option<&str>) -> bool {
        let Some(dtype) = dtype else {
            return self.accepts_unset_kv_cache_dtype;
        };
        let usable = self
            .usable_kv_cache_dtypes
            .as_ref()
            .unwrap_or(&self.supported_kv_cache_dtypes);
        usable.is_empty() || usable.contains(&dtype)
    }

    /// `supports_block_size`: is `block_size` (the user's; none when the user gave none) a multiple of a declared size or
    /// base? Even for exact sizes a multiple will do, because the manager's blocks are split.
    pub fn supports_block_size(&self, block_size: Option<u32>) -> bool {
        let Some(block_size) = block_size else {
            return true;
        };
        let sizes = &self.kernel_block_sizes;
        match self.block_size_rule {
            BlockSizeRule::Divides => {
                sizes.is_empty()
                    || sizes
                        .iter()
                        .any(|s| s.base() != 0 && block_size.is_multiple_of(s.base()))
            }
            BlockSizeRule::Exact { .. } => sizes.iter().any(|s| s.accepts(block_size)),
        }
    }

    /// `get_preferred_block_size`: `default` if it is supported, else the smallest declared size or base.
    pub fn preferred_block_size(&self, default: u32) -> u32 {
        if self.supports_block_size(Some(default)) {
            return default;
        }
        match self.block_size_rule {
            BlockSizeRule::Exact { preferred } => preferred,
            BlockSizeRule::Divides => self
                .kernel_block_sizes
                .iter()
                .map(|s| s.base())
                .min()
                .unwrap_or(default),
        }
    }

    /// `supports_attn_type`
    pub fn supports_attn_type(&self, attn_type: AttentionType) -> bool {
        self.attn_types.contains(&attn_type)
    }

    /// `supports_compute_capability`
    pub fn supports_compute_capability(&self, capability: Capability) -> bool {
        self.capabilities.contains(capability)
    }

    /// `customize_spec`: `spec` as this backend packs it.
    pub fn customize_spec(&self, spec: &CacheSpec) -> CacheSpec {
        let mut spec = spec.clone();
        if let Some(attention) = spec.attention_mut() {
            (self.customize)(attention);
        }
        spec
    }

    /// Kernel block sizes for the caches of `spec` on `device`: as declared, but for two FlashAttention 4 kernels.
    ///
    /// Source: `FlashAttentionBackend.get_supported_kernel_block_sizes` @0.33: 64 exactly on SM90 with an fp8 cache and head
    /// size 512, 128 exactly for Blackwell's head-size-256 kernel.
    pub fn kernel_block_sizes_for(
        &self,
        spec: Option<&CacheSpec>,
        device: Device,
    ) -> Cow<'static, [KernelBlockSize]> {
        use crate::spec::KvQuantMode;
        const SM90_FP8_512: &[KernelBlockSize] = &[KernelBlockSize::Exact(64)];
        const SM100_256: &[KernelBlockSize] = &[KernelBlockSize::Exact(128)];
        if matches!(&*self.name, "FLASH_ATTN" | "FLASH_ATTN_DIFFKV")
            && let (Some(attention), Some(capability)) =
                (spec.and_then(CacheSpec::attention), device.capability())
        {
            let fp8 = attention.kv_quant_mode == KvQuantMode::Fp8PerTensor;
            match (capability.major, attention.head_size) {
                (9, 512) if fp8 => return Cow::Borrowed(SM90_FP8_512),
                (10, 256) if !fp8 && attention.block_size.is_multiple_of(128) => {
                    return Cow::Borrowed(SM100_256);
                }
                _ => {}
            }
        }
        self.kernel_block_sizes.clone()
    }

    /// Name and declared sizes, for [`crate::kernel_block::select_common_block_size`].
    pub fn block_sizes(&self) -> BlockSizes<'_> {
        BlockSizes {
            name: &self.name,
            sizes: &self.kernel_block_sizes,
        }
    }
}
