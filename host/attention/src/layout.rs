//! KV cache layouts: the logical shape every backend sees, its physical orders, and how one order is agreed on.
//!
//! Must never know memory: shapes and strides are numbers. Source: vLLM `vllm/v1/kv_cache_interface.py` (`KVCacheLayout`),
//! `vllm/v1/attention/backends/utils.py` (`get_supported_kv_cache_layouts`) and the engine core's
//! `resolve_kv_cache_layout` @0.32/0.33, as recorded in `tests/vectors/kv_cache_shape.json` and
//! `tests/vectors/get_supported_kv_cache_layouts.json`.

pub use timetable_types::KvCacheLayout;

use crate::kernel_block::KernelBlockError;
use crate::spec::CacheSpec;

/// Layouts of a worker whose backends all take any, most preferred first.
pub const DEFAULT_LAYOUTS: [KvCacheLayout; 6] = [
    KvCacheLayout::Lbnhc,
    KvCacheLayout::Lbhnc,
    KvCacheLayout::Blnhc,
    KvCacheLayout::Blhnc,
    KvCacheLayout::Bhlnc,
    KvCacheLayout::Lhbnc,
];

/// The field's members in declaration order: (layout, name, stride order). The stride order lists the logical axes
/// L0 B1 H2 N3 C4 from outermost to innermost. Ties among candidates are broken by this order.
const MEMBERS: [(KvCacheLayout, &str, [usize; 5]); 6] = [
    (KvCacheLayout::Lbhnc, "LBHNC", [0, 1, 2, 3, 4]),
    (KvCacheLayout::Lbnhc, "LBNHC", [0, 1, 3, 2, 4]),
    (KvCacheLayout::Lhbnc, "LHBNC", [0, 2, 1, 3, 4]),
    (KvCacheLayout::Blhnc, "BLHNC", [1, 0, 2, 3, 4]),
    (KvCacheLayout::Blnhc, "BLNHC", [1, 0, 3, 2, 4]),
    (KvCacheLayout::Bhlnc, "BHLNC", [1, 2, 0, 3, 4]),
];

/// Why there is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No such name. The field's text.
    #[error("Unknown KV cache layout '{name}'. Valid layouts: {valid}.")]
    Unknown {
        /// What was given.
        name: String,
        /// Every valid name.
        valid: String,
    },
    /// The backends of one worker agree on none. The field's text.
    #[error("No KV cache layout satisfies every supported set: {sets}.")]
    NoneSatisfies {
        /// The backends' sets.
        sets: String,
    },
    /// No worker said anything. The field's text.
    #[error("No worker reported supported KV cache layouts.")]
    NoWorker,
    /// Workers differ. The field's text.
    #[error("Workers disagree on supported KV cache layouts: {sets}.")]
    WorkersDisagree {
        /// The workers' sets.
        sets: String,
    },
    /// Specs of several shapes. The field's text.
    #[error(
        "Specs with mixed HNC shapes need a block-compact layout, but none is in every supported set: {sets}"
    )]
    MixedShapes {
        /// The workers' sets.
        sets: String,
    },
    /// Sharded and replicated caches of different page sizes. The field's text.
    #[error(
        "DCP with a replicated draft and mixed KV page sizes requires a block-outer KV cache layout; supported sets: {sets}"
    )]
    MixedSharding {
        /// The workers' sets.
        sets: String,
    },
    /// The operator's choice is impossible. The field's text.
    #[error(
        "VLLM_KV_CACHE_LAYOUT={name} does not satisfy every supported set; valid layouts: {valid}."
    )]
    RequestedUnsupported {
        /// What was asked for.
        name: &'static str,
        /// What would do.
        valid: String,
    },
    /// A second resolution that differs. The field's text.
    #[error("KV cache layout is already resolved to {resolved}; cannot change it to {other}.")]
    AlreadyResolved {
        /// The first.
        resolved: &'static str,
        /// The second.
        other: &'static str,
    },
    /// Read too early. The field's text.
    #[error(
        "KV cache layout has not been resolved yet; it is resolved once by the engine core (resolve_kv_cache_layout) unless explicitly set by the user."
    )]
    NotResolved,
}

/// The field's name: `LBNHC`, …
pub fn name(layout: KvCacheLayout) -> &'static str {
    member(layout).1
}

/// The layout called `name`; `NHD` and `HND` are aliases of `LBNHC` and `LBHNC`.
///
/// # Errors
/// [`LayoutError::Unknown`].
pub fn parse(name: &str) -> Result<KvCacheLayout, LayoutError> {
    match name {
        "NHD" => return Ok(KvCacheLayout::Lbnhc),
        "HND" => return Ok(KvCacheLayout::Lbhnc),
        _ => {}
    }
    MEMBERS
        .iter()
        .find_map(|(layout, n, _)| (*n == name).then_some(*layout))
        .ok_or_else(|| LayoutError::Unknown {
            name: name.to_owned(),
            valid: list(&MEMBERS.map(|(layout, _, _)| layout)),
        })
}

/// Logical axes (L0 B1 H2 N3 C4) from outermost to innermost.
pub fn stride_order(layout: KvCacheLayout) -> [usize; 5] {
    member(layout).2
}

/// Is one layer's cache one dense piece (L outermost)?
pub fn layer_compact(layout: KvCacheLayout) -> bool {
    stride_order(layout)[0] == 0
}

/// Are L and B the two outermost axes, so that a block of a layer is one dense piece?
pub fn block_compact(layout: KvCacheLayout) -> bool {
    stride_order(layout)[..2].iter().all(|axis| *axis < 2)
}

/// Is B outermost, so that a block holds all layers?
pub fn block_outermost(layout: KvCacheLayout) -> bool {
    stride_order(layout)[0] == 1
}

/// Are the three innermost axes H, N and C in that order?
pub fn block_contiguous(layout: KvCacheLayout) -> bool {
    stride_order(layout)[2..] == [2, 3, 4]
}

/// What FlashInfer calls the layout: `NHD` or `HND`; none for LHBNC, which it cannot read.
pub fn flashinfer_layout(layout: KvCacheLayout) -> Option<&'static str> {
    match layout {
        KvCacheLayout::Lbnhc | KvCacheLayout::Blnhc => Some("NHD"),
        KvCacheLayout::Lbhnc | KvCacheLayout::Blhnc | KvCacheLayout::Bhlnc => Some("HND"),
        KvCacheLayout::Lhbnc => None,
    }
}

fn member(layout: KvCacheLayout) -> &'static (KvCacheLayout, &'static str, [usize; 5]) {
    // MEMBERS has every case; the first stands in for the impossible.
    MEMBERS
        .iter()
        .find(|(l, _, _)| *l == layout)
        .unwrap_or(&MEMBERS[0])
}

/// `['LBNHC', 'LBHNC']`, as the field prints lists of names.
pub fn list(layouts: &[KvCacheLayout]) -> String {
    let quoted: Vec<String> = layouts.iter().map(|l| format!("'{}'", name(*l))).collect();
    format!("[{}]", quoted.join(", "))
}

fn lists<L: AsRef<[KvCacheLayout]>>(sets: &[L]) -> String {
    let printed: Vec<String> = sets.iter().map(|s| list(s.as_ref())).collect();
    format!("[{}]", printed.join(", "))
}

/// Layouts that satisfy every backend of a worker, most preferred first. `declared` holds what each backend declares; none
/// means any.
///
/// Equal declarations stand as they are; otherwise the intersection, ordered by how many backends prefer a layout most.
///
/// # Errors
/// [`LayoutError::NoneSatisfies`].
pub fn supported_layouts(
    declared: &[Option<&[KvCacheLayout]>],
) -> Result<Vec<KvCacheLayout>, LayoutError> {
    let sets: Vec<&[KvCacheLayout]> = declared.iter().flatten().copied().collect();
    let Some(first) = sets.first() else {
        return Ok(DEFAULT_LAYOUTS.to_vec());
    };
    if sets.iter().all(|s| s == first) {
        return Ok(first.to_vec());
    }
    let votes = |l: KvCacheLayout| sets.iter().filter(|s| s.first() == Some(&l)).count();
    let mut candidates: Vec<KvCacheLayout> = MEMBERS
        .iter()
        .map(|(layout, _, _)| *layout)
        .filter(|l| sets.iter().all(|s| s.contains(l)))
        .collect();
    candidates.sort_by_key(|l| std::cmp::Reverse(votes(*l)));
    if candidates.is_empty() {
        return Err(LayoutError::NoneSatisfies { sets: lists(&sets) });
    }
    Ok(candidates)
}

/// What the engine core resolves a layout from.
#[derive(Clone, Copy, Debug)]
pub struct LayoutRequest<'a> {
    /// The user's explicit choice: taken as it is.
    pub configured: Option<KvCacheLayout>,
    /// Each worker's [`supported_layouts`].
    pub workers: &'a [Vec<KvCacheLayout>],
    /// The specs of all KV cache groups, UniformType ones expanded by this function.
    pub specs: &'a [CacheSpec],
    /// The layout asked for by the environment: must be possible.
    pub environment: Option<KvCacheLayout>,
    /// What a KV connector prefers: taken if possible.
    pub connector_prefers: Option<KvCacheLayout>,
}

/// A resolved layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedLayout {
    /// The layout of every worker's cache.
    pub layout: KvCacheLayout,
    /// What the operator should know, in the field's words.
    pub warning: Option<String>,
}

/// The one layout of an engine. Source: vLLM `resolve_kv_cache_layout` @0.32/0.33.
///
/// # Errors
/// Each [`LayoutError`] in the order of the checks: workers, mixed shapes, mixed sharding, the environment's choice.
pub fn resolve_layout(request: &LayoutRequest<'_>) -> Result<ResolvedLayout, LayoutError> {
    let chosen = |layout| ResolvedLayout {
        layout,
        warning: None,
    };
    if let Some(layout) = request.configured {
        return Ok(chosen(layout));
    }
    let workers = request.workers;
    let first = workers
        .first()
        .filter(|w| !w.is_empty())
        .ok_or(LayoutError::NoWorker)?;
    if workers.iter().any(|w| w != first) {
        return Err(LayoutError::WorkersDisagree {
            sets: lists(workers),
        });
    }
    let mut candidates = first.clone();
    let specs = expand(request.specs);
    let shape = |s: &CacheSpec| (s.num_heads(), s.num_states(), s.page_size_bytes());
    if specs.iter().any(|s| shape(s) != shape(specs[0])) {
        candidates.retain(|l| block_compact(*l));
        if candidates.is_empty() {
            return Err(LayoutError::MixedShapes {
                sets: lists(workers),
            });
        }
    }
    let attention: Vec<&&CacheSpec> = specs.iter().filter(|s| s.attention().is_some()).collect();
    let mixed = |f: &dyn Fn(&CacheSpec) -> u64| attention.iter().any(|s| f(s) != f(attention[0]));
    if mixed(&|s| u64::from(s.dcp_sharded())) && mixed(&CacheSpec::page_size_bytes) {
        candidates.retain(|l| block_outermost(*l));
        if candidates.is_empty() {
            return Err(LayoutError::MixedSharding {
                sets: lists(workers),
            });
        }
    }
    if let Some(wanted) = request.environment {
        return if candidates.contains(&wanted) {
            Ok(chosen(wanted))
        } else {
            Err(LayoutError::RequestedUnsupported {
                name: name(wanted),
                valid: list(&candidates),
            })
        };
    }
    match request.connector_prefers {
        Some(preferred) if candidates.contains(&preferred) => Ok(chosen(preferred)),
        Some(preferred) => Ok(ResolvedLayout {
            layout: candidates[0],
            warning: Some(format!(
                "KV connector cache layout {} does not satisfy every supported set; valid layouts: {}. Using {} instead.",
                name(preferred),
                list(&candidates),
                name(candidates[0])
            )),
        }),
        None => Ok(chosen(candidates[0])),
    }
}

/// UniformType specs replaced by their members'.
fn expand(specs: &[CacheSpec]) -> Vec<&CacheSpec> {
    let mut flat = Vec::new();
    for spec in specs {
        match spec {
            CacheSpec::UniformType(members) => {
                flat.extend(members.members().iter().map(|(_, s)| s));
            }
            spec => flat.push(spec),
        }
    }
    flat
}

/// A layout that is set once: an engine's, or a captured configuration's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutCell(Option<KvCacheLayout>);

impl LayoutCell {
    /// Sets the layout, or confirms it.
    ///
    /// # Errors
    /// [`LayoutError::AlreadyResolved`] for another one.
    pub fn set(&mut self, layout: KvCacheLayout) -> Result<(), LayoutError> {
        match self.0 {
            Some(resolved) if resolved != layout => Err(LayoutError::AlreadyResolved {
                resolved: name(resolved),
                other: name(layout),
            }),
            _ => {
                self.0 = Some(layout);
                Ok(())
            }
        }
    }

    /// The layout.
    ///
    /// # Errors
    /// [`LayoutError::NotResolved`].
    pub fn get(&self) -> Result<KvCacheLayout, LayoutError> {
        self.0.ok_or(LayoutError::NotResolved)
    }
}

/// One layer's logical shape `[NB, H, N, C]`: kernel blocks, head slots, states per kernel block, bytes per state.
///
/// `num_blocks` manager blocks of the spec's size are read as blocks of `kernel_block_size` tokens, which must divide it.
/// Keys stand first in C, then values.
pub fn kv_cache_shape_bytes(spec: &CacheSpec, num_blocks: u32, kernel_block_size: u32) -> [u64; 4] {
    let ratio = match spec {
        CacheSpec::Mamba(_) => 1,
        _ => u64::from(spec.block_size() / kernel_block_size.max(1)),
    };
    [
        u64::from(num_blocks) * ratio,
        u64::from(spec.num_heads()),
        u64::from(spec.num_kernel_states(kernel_block_size)),
        spec.state_content_size_bytes(),
    ]
}

/// Strides in bytes of the logical axes `[L, B, H, N, C]` when `num_layers` caches of one shape lie in one allocation in
/// `layout`. `shape` is [`kv_cache_shape_bytes`] of the manager's block.
pub fn layout_strides_bytes(layout: KvCacheLayout, num_layers: u32, shape: [u64; 4]) -> [u64; 5] {
    let [blocks, heads, states, content] = shape;
    let sizes = [u64::from(num_layers), blocks, heads, states, content];
    let mut strides = [0; 5];
    let mut stride = 1;
    for axis in stride_order(layout).into_iter().rev() {
        strides[axis] = stride;
        stride *= sizes[axis];
    }
    strides
}

/// Kernel pages between the starts of two manager blocks when `num_layers` caches of `spec` lie in one allocation in `layout`
/// and are read as blocks of `kernel_block_size` tokens: the `kernel_block_stride` of
/// [`crate::kernel_block::KernelBlockMap::new`]. 0 where blocks are dense or not split.
///
/// A block can be split only if its bytes are one dense, unpadded piece: it is then r kernel pages, one after the other. With
/// blocks outermost, the other layers' pages lie between two blocks of one layer, which the stride steps over.
///
/// # Errors
/// [`KernelBlockError::NotADivisor`], [`KernelBlockError::NotDense`].
pub fn kernel_block_stride(
    layout: KvCacheLayout,
    num_layers: u32,
    spec: &CacheSpec,
    kernel_block_size: u32,
) -> Result<u32, KernelBlockError> {
    let block_size = spec.block_size();
    if kernel_block_size == 0 || !block_size.is_multiple_of(kernel_block_size) {
        return Err(KernelBlockError::NotADivisor {
            kernel_block_size,
            block_size,
        });
    }
    let ratio = block_size / kernel_block_size;
    if ratio == 1 {
        return Ok(0);
    }
    // Two blocks suffice for the stride between them.
    let shape = kv_cache_shape_bytes(spec, 2, block_size);
    let page: u64 = shape[1..].iter().product();
    let padding = spec.page_size_bytes().saturating_sub(page);
    let layers = if layer_compact(layout) {
        1
    } else {
        u64::from(num_layers)
    };
    let block_stride = layout_strides_bytes(layout, num_layers, shape)[1] + padding * layers;
    if !block_compact(layout) || padding != 0 {
        return Err(KernelBlockError::NotDense {
            layout: name(layout),
            block_stride,
            page,
            ratio,
            kernel_block_size,
        });
    }
    let kernel_page = page / u64::from(ratio);
    let stride = block_stride / kernel_page.max(1);
    Ok(if stride == u64::from(ratio) {
        0
    } else {
        u32::try_from(stride).unwrap_or(u32::MAX)
    })
}
