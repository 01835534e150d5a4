//! How an engine is set up, and what can be wrong with that.

use timetable_attention::{
    BuildFault, Grant, MetadataBuilder, batch::LocalAttentionError, graphs::CaptureSizeError,
    group::GroupError, kernel_block::KernelBlockError, layout::LayoutError, select::SelectError,
    spec::SpecError,
};
use timetable_device::cpu::ImplError;
use timetable_sandbox::{Component, ReloadError, SandboxError, TenantName};
use timetable_types::{BuildError, BuilderConfig, CudagraphMode, Dtype, Family};

use crate::{
    attention::AttentionPlan,
    batch::BlockSizeError,
    model::ModelError,
    speculation::SpeculativeConfig,
    tenants::{self, TenantConfig},
};

/// Where the layers, their caches and sampling live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's own processors.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// The driver's number of it.
        ordinal: usize,
    },
}

impl std::fmt::Display for DeviceChoice {
    /// As operators write it: `cpu`, `cuda:0`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// In what weights are kept and layers compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelDtype {
    /// The device's own: f32 on the CPU, bf16 on a GPU.
    #[default]
    Auto,
    /// f32.
    Float32,
    /// bf16.
    Bfloat16,
    /// f16.
    Float16,
}

impl ModelDtype {
    /// The dtype, where it is named.
    pub fn named(self) -> Option<Dtype> {
        match self {
            ModelDtype::Auto => None,
            ModelDtype::Float32 => Some(Dtype::Float32),
            ModelDtype::Bfloat16 => Some(Dtype::Bfloat16),
            ModelDtype::Float16 => Some(Dtype::Float16),
        }
    }
}

/// Elements of the KV cache. Which of them a device keeps is the device's matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvCacheDtype {
    /// The model's.
    #[default]
    Auto,
    /// f32.
    Float32,
    /// bf16.
    Bfloat16,
    /// f16.
    Float16,
    /// fp8 of 4 exponent bits, one scale for each tensor.
    Fp8E4m3,
    /// DeepSeek's form of a latent: fp8 with a scale for each 128 elements, the rotated key in bf16.
    Fp8DsMla,
}

impl KvCacheDtype {
    /// The dtype of the elements, for a model of `model_dtype`.
    pub fn resolve(self, model_dtype: Dtype) -> Dtype {
        match self {
            KvCacheDtype::Auto => model_dtype,
            KvCacheDtype::Float32 => Dtype::Float32,
            KvCacheDtype::Bfloat16 => Dtype::Bfloat16,
            KvCacheDtype::Float16 => Dtype::Float16,
            KvCacheDtype::Fp8E4m3 => Dtype::Float8E4m3,
            KvCacheDtype::Fp8DsMla => Dtype::Uint8,
        }
    }

    /// The field's name of the setting: `auto` for the model's own dtype, however it was written.
    pub fn name(self, model_dtype: Dtype) -> &'static str {
        if self.resolve(model_dtype) == model_dtype {
            return "auto";
        }
        match self {
            KvCacheDtype::Auto => "auto",
            KvCacheDtype::Float32 => "float32",
            KvCacheDtype::Bfloat16 => "bfloat16",
            KvCacheDtype::Float16 => "float16",
            KvCacheDtype::Fp8E4m3 => "fp8_e4m3",
            KvCacheDtype::Fp8DsMla => "fp8_ds_mla",
        }
    }
}

/// How large the KV cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheSize {
    /// So many blocks, the null block included.
    Blocks(usize),
    /// What remains of this fraction of the device's memory (of the machine's, or of its control group's limit, on the CPU)
    /// beside everything else that steps need.
    MemoryFraction(f64),
}

/// An engine's settings. Names are the field's.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// The device.
    pub device: DeviceChoice,
    /// Weights and activations.
    pub model_dtype: ModelDtype,
    /// The backend of every attention layer (FLASH_ATTN, FLASHINFER, TRITON_ATTN) or of every layer of latent attention
    /// (FLASHMLA, FLASH_ATTN_MLA, TRITON_MLA), by its name in capitals. An explicit choice never falls back; none: the device's
    /// first that serves them. A recurrent layer's type decides.
    pub attention_backend: Option<String>,
    /// The CUDA graph mode that is asked for; see [`Engine::cudagraph_mode`](crate::Engine::cudagraph_mode) for what is left
    /// of it.
    pub cudagraph_mode: CudagraphMode,
    /// Token counts that graphs are captured for; none: the field's.
    pub cudagraph_capture_sizes: Option<Vec<u32>>,
    /// Prepare a step while the one before it runs. None: where the device can; on the CPU, whose steps run on the thread that
    /// prepares them, `true` is refused.
    pub async_scheduling: Option<bool>,
    /// Requests of one step.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Tokens of one request; none: what the model was made for.
    pub max_model_len: Option<usize>,
    /// Tokens of one KV block.
    pub block_size: usize,
    /// Tokens of one block of the kernels' table; none: `block_size`.
    pub kernel_block_size: Option<usize>,
    /// Share the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Elements of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Size of the KV cache.
    pub cache_size: CacheSize,
    /// Drafts that steps verify beside each decode's next token; none: no speculation. Costs asynchronous scheduling, because drafts
    /// follow from tokens that the host knows.
    pub speculative: Option<SpeculativeConfig>,
    /// The most KV splits of one request that a builder may choose.
    pub max_num_splits: u32,
    /// A request's logits are, bit for bit, what they are when it runs alone. Costs time: requests are not split, on a GPU one
    /// attention kernel and one algorithm of each matrix product serve every step, and prefix caching is off where the rule
    /// book says so. Refused with a backend that does not support it.
    pub batch_invariant: bool,
    /// Workers that a builder may plan for on the CPU; a GPU has its multiprocessors.
    pub num_workers: u32,
    /// Options of the builder's own.
    pub builder_options: Vec<(String, String)>,
    /// What the default slot's builder may leave out.
    pub grant: Grant,
    /// Who may ask, besides nobody in particular. With none, requests may carry any name: it keeps their cached prefixes apart,
    /// and nothing else.
    pub tenants: Vec<TenantConfig>,
    /// The weight of requests of nobody in particular, beside the tenants' shares.
    pub default_share: f64,
    /// Slots that one step may have rows of; the others wait their turn. A device may take fewer. Cost: a build for each, and
    /// attention launched once for each.
    pub max_tenant_segments: usize,
}

impl Default for EngineConfig {
    /// The CPU, the backend and graph mode of the field's defaults, 256 requests, 2,048 tokens, blocks of 16 tokens, f32, prefix caching, 40 % of memory.
    fn default() -> Self {
        Self {
            device: DeviceChoice::Cpu,
            model_dtype: ModelDtype::Auto,
            attention_backend: None,
            cudagraph_mode: CudagraphMode::FullAndPiecewise,
            cudagraph_capture_sizes: None,
            async_scheduling: None,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_model_len: None,
            block_size: 16,
            kernel_block_size: None,
            enable_prefix_caching: true,
            kv_cache_dtype: KvCacheDtype::Auto,
            cache_size: CacheSize::MemoryFraction(0.4),
            speculative: None,
            max_num_splits: 32,
            batch_invariant: false,
            num_workers: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            builder_options: Vec::new(),
            grant: Grant::Exact,
            tenants: Vec::new(),
            default_share: 1.0,
            max_tenant_segments: 4,
        }
    }
}

/// Makes a native builder for a group.
pub type NativeBuilderFactory =
    Box<dyn Fn(&BuilderConfig) -> Result<Box<dyn MetadataBuilder>, BuildFault> + Send>;

/// Who builds the metadata of attention groups. A component serves the groups of its family; the backend's plain builder the
/// others.
pub enum BuilderSource {
    /// The backend's plain builder; a component can be loaded later.
    Plain,
    /// A component, replaceable while requests run.
    Component {
        /// Loaded.
        component: Component,
        /// Where it came from, for people.
        origin: String,
    },
    /// Native code, not sandboxed and not replaceable; the plain builder stands behind it. For benchmarks and comparison.
    /// Every group's: a model of several families needs one of each, [`BuilderSource::ByFamily`].
    Native(NativeBuilderFactory),
    /// One for each family; the plain builder serves groups of others.
    ByFamily(Vec<FamilyBuilder>),
}

/// Who builds the metadata of one family.
pub struct FamilyBuilder {
    /// The family.
    pub family: Family,
    /// Not [`BuilderSource::ByFamily`] again: that counts as plain.
    pub source: BuilderSource,
    /// Options of the builder's own; none: the engine's, or the tenant's.
    pub options: Option<Vec<(String, String)>>,
    /// What it may leave out; none: as the engine's or the tenant's may.
    pub grant: Option<Grant>,
}

/// What a group of one family is served by.
pub(crate) struct OfFamily<'a> {
    pub source: &'a BuilderSource,
    pub options: Option<&'a [(String, String)]>,
    pub grant: Option<Grant>,
}

impl BuilderSource {
    pub(crate) fn of_family(&self, family: Family) -> OfFamily<'_> {
        let whole = |source| OfFamily {
            source,
            options: None,
            grant: None,
        };
        match self {
            BuilderSource::Component { component, .. } if component.family() != family => {
                whole(&BuilderSource::Plain)
            }
            BuilderSource::ByFamily(builders) => builders
                .iter()
                .find(|builder| builder.family == family)
                .map_or(whole(&BuilderSource::Plain), |builder| OfFamily {
                    source: &builder.source,
                    options: builder.options.as_deref(),
                    grant: builder.grant,
                }),
            source => whole(source),
        }
    }

    /// Does every component have a group to serve?
    ///
    /// # Errors
    /// [`EngineError::NoGroup`]
    pub(crate) fn check(&self, plan: &AttentionPlan) -> Result<(), EngineError> {
        let fits = |family: Family, component: &Component| {
            let wanted = plan.backends();
            if family == component.family() && wanted.iter().any(|(_, of)| *of == family) {
                return Ok(());
            }
            let wanted = wanted.iter().map(|(backend, family)| {
                let interface = family.interface();
                format!("`{interface}` ({backend})")
            });
            Err(EngineError::NoGroup {
                found: component.family(),
                wanted: wanted.collect::<Vec<_>>().join(", "),
            })
        };
        match self {
            BuilderSource::Component { component, .. } => fits(component.family(), component),
            BuilderSource::ByFamily(builders) => {
                builders
                    .iter()
                    .try_for_each(|builder| match &builder.source {
                        BuilderSource::Component { component, .. } => {
                            fits(builder.family, component)
                        }
                        _ => Ok(()),
                    })
            }
            BuilderSource::Plain | BuilderSource::Native(_) => Ok(()),
        }
    }
}

/// Who builds in each slot.
#[derive(Clone, Copy)]
pub struct Builders<'a> {
    /// For everybody who has no builder of their own.
    pub default: &'a BuilderSource,
    /// For tenants with a [slot](crate::SlotConfig). One that is not named here begins with the plain builder.
    pub tenants: &'a [(TenantName, BuilderSource)],
}

impl<'a> From<&'a BuilderSource> for Builders<'a> {
    /// One builder for everybody; tenants' slots begin with the plain one.
    fn from(default: &'a BuilderSource) -> Self {
        Self {
            default,
            tenants: &[],
        }
    }
}

/// Tokens of a KV block, at most.
const MAX_BLOCK_SIZE: usize = 1 << 16;

/// Why no engine was made.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting out of range.
    #[error("{name} is {value}: {remedy}")]
    Setting {
        /// Which.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        remedy: &'static str,
    },
    /// No backend serves the model, or not the one that was asked for.
    #[error(transparent)]
    Backend(#[from] SelectError),
    /// The backend's metadata are of no contract that this engine speaks.
    #[error(
        "backend {0} has no metadata contract here: choose FLASH_ATTN, FLASHINFER or TRITON_ATTN, or for latent attention FLASHMLA, FLASH_ATTN_MLA or TRITON_MLA"
    )]
    NoContract(String),
    /// Layers that the device does not run.
    #[error("{layer} needs {needs}, and this device runs metadata of {runs}: {remedy}")]
    DeviceLacks {
        /// The first of them.
        layer: String,
        /// What they need.
        needs: String,
        /// Interfaces of the families that it runs.
        runs: String,
        /// What would work.
        remedy: &'static str,
    },
    /// A component that no group can use.
    #[error(
        "the component is a builder of `{}`, and the model's attention groups need {wanted}; give one of those",
        .found.interface()
    )]
    NoGroup {
        /// The component's family.
        found: Family,
        /// Interfaces, each with its backend.
        wanted: String,
    },
    /// A chunk that blocks do not divide.
    #[error(transparent)]
    Chunk(#[from] LocalAttentionError),
    /// A layer's KV cache spec.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Layers that cannot be grouped.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// No kernel block size.
    #[error(transparent)]
    KernelBlock(#[from] KernelBlockError),
    /// No KV cache layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A hazard that the engine must not start with.
    #[error("{0}")]
    Refused(String),
    /// Graph sizes that do not fit together.
    #[error(transparent)]
    CaptureSizes(#[from] CaptureSizeError),
    /// The device cannot be used, or has no room for what was asked.
    #[error("{0}")]
    Device(String),
    /// Block sizes that do not divide.
    #[error(transparent)]
    BlockSize(#[from] BlockSizeError),
    /// A layer cannot run.
    #[error(transparent)]
    Layer(#[from] ImplError),
    /// There is no plain builder to fall back to.
    #[error("no plain builder: {}", .0.message)]
    Plain(BuildError),
    /// The component does not fit.
    #[error(transparent)]
    Component(#[from] ReloadError),
    /// A tenant's limits.
    #[error("tenant `{tenant}`: {error}")]
    TenantLimits {
        /// Whose.
        tenant: TenantName,
        /// What is wrong with them.
        error: SandboxError,
    },
    /// The native builder could not be made.
    #[error("the native builder: {0}")]
    Native(BuildFault),
    /// A builder promises nothing for a graph.
    #[error("no launch promise: {0}")]
    Promise(BuildFault),
    /// The profile run failed.
    #[error("the profile run failed: {0}")]
    Profile(ModelError),
    /// The KV cache asked for is larger than the machine.
    #[error(
        "a KV cache of {blocks} blocks takes {bytes} bytes, and this machine (or its control group) has {total}: lower the number \
         of blocks or the block size"
    )]
    CacheTooLarge {
        /// Blocks asked for.
        blocks: usize,
        /// Bytes of them, over all layers.
        bytes: u64,
        /// The machine's memory or the control group's limit.
        total: u64,
    },
    /// The profile run left no memory.
    #[error(
        "no memory for the KV cache: {fraction} of {total} bytes is {budget}, and {used} are in use after a profile run of \
         {tokens} tokens: raise the fraction, lower max_num_batched_tokens, or choose a smaller model"
    )]
    NoMemory {
        /// As configured.
        fraction: f64,
        /// The machine's memory or the control group's limit.
        total: u64,
        /// The fraction of it.
        budget: u64,
        /// Resident after the profile run.
        used: u64,
        /// Tokens of the profile run.
        tokens: usize,
    },
}

impl EngineConfig {
    /// Draft tokens of a row at most; 0 without speculation.
    pub fn num_speculative_tokens(&self) -> usize {
        self.speculative
            .map_or(0, |speculative| speculative.num_speculative_tokens)
    }

    /// Tokens of one request at most.
    pub(crate) fn model_len(&self, max_position_embeddings: usize) -> usize {
        self.max_model_len.unwrap_or(max_position_embeddings)
    }

    /// Looks at every number, and at what they mean for each other.
    ///
    /// # Errors
    /// The first setting that is out of range, with what is accepted. `max_position_embeddings` is the model's context in
    /// tokens; `usize::MAX` where there is no model yet.
    pub fn check(&self, max_position_embeddings: usize) -> Result<(), EngineError> {
        let refuse = |name, value: String, remedy| {
            Err(EngineError::Setting {
                name,
                value,
                remedy,
            })
        };
        for (name, value) in [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("block_size", self.block_size),
            ("kernel_block_size", self.kernel_block_size.unwrap_or(1)),
            ("max_num_splits", self.max_num_splits as usize),
            ("num_workers", self.num_workers as usize),
            ("max_tenant_segments", self.max_tenant_segments),
        ] {
            if value == 0 {
                return refuse(name, "0".into(), "it must be at least 1");
            }
        }
        tenants::check(&self.tenants, self.default_share)?;
        if self.max_num_batched_tokens > 1 << 20 || self.max_num_seqs > 1 << 16 {
            let value = format!("{} x {}", self.max_num_seqs, self.max_num_batched_tokens);
            let name = "max_num_seqs x max_num_batched_tokens";
            return refuse(name, value, "at most 65536 requests and 1048576 tokens");
        }
        // A block is a unit of sharing; far larger ones only waste memory, and their products must not overflow.
        if self.block_size > MAX_BLOCK_SIZE {
            let remedy = "a KV block has at most 65536 tokens";
            return refuse("block_size", self.block_size.to_string(), remedy);
        }
        if let Some(speculative) = &self.speculative {
            speculative.check(self.max_num_batched_tokens)?;
            if self.async_scheduling == Some(true) {
                let remedy = "drafts follow from tokens that the host knows, one step at a time; leave it out, or speculative_method";
                return refuse("async_scheduling", "true".into(), remedy);
            }
        }
        match self.max_model_len {
            None if max_position_embeddings < 2 => {
                let remedy =
                    "the model's context must hold a prompt token and a new one; use another model";
                let value = max_position_embeddings.to_string();
                return refuse("max_position_embeddings", value, remedy);
            }
            Some(len) if len < 2 => {
                return refuse("max_model_len", len.to_string(), "it must be at least 2");
            }
            Some(len) if len > max_position_embeddings => {
                let remedy = "it must not exceed the context that the model was made for (max_position_embeddings)";
                return refuse("max_model_len", len.to_string(), remedy);
            }
            _ => {}
        }
        match self.cache_size {
            CacheSize::Blocks(blocks) if !(2..i32::MAX as usize).contains(&blocks) => refuse(
                "num_blocks",
                blocks.to_string(),
                "the null block and at least one more, fewer than 2^31",
            ),
            CacheSize::MemoryFraction(fraction) if !(fraction > 0.0 && fraction <= 1.0) => refuse(
                "memory fraction",
                fraction.to_string(),
                "give a number above 0 and at most 1",
            ),
            _ => Ok(()),
        }
    }
}
