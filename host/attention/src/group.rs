//! Attention groups: layers that share a backend, a spec and a query head count share one builder and, per step, one metadata.
//!
//! Must never know a builder's implementation or a device: builders and metadata are type parameters. Source: vLLM
//! `vllm/v1/worker/gpu/attn_utils.py` (`init_attn_backend`, `AttentionGroup`) and `vllm/v1/worker/utils.py` @0.32/0.33.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::kernel_block::{
    BlockSizes, KernelBlockError, KernelBlockMap, KernelBlockSize, select_common_block_size,
};
use crate::spec::{CacheSpec, SpecError};

/// Which implementation of which backend: the field's `(module, qualname)` with the name it answers to. Part of a group's key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendClass {
    /// The backend's name, such as `FLASH_ATTN`.
    pub name: Arc<str>,
    /// What makes two implementations of one name different, such as the class path. Wrappers prefix it.
    pub class: Arc<str>,
}

impl BackendClass {
    /// The class `class` of backend `name`.
    pub fn new(name: &str, class: &str) -> Self {
        BackendClass {
            name: name.into(),
            class: class.into(),
        }
    }

    /// A wrapper around this class (`FastPrefill`, `ChunkedLocalAttention`, …): another class, the same name.
    pub fn wrapped(&self, prefix: &str) -> Self {
        BackendClass {
            name: Arc::clone(&self.name),
            class: format!("{prefix}{}", self.class).into(),
        }
    }
}

/// One attention layer, as grouping sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionLayer {
    /// The layer's name: unique, such as `model.layers.0.self_attn.attn`.
    pub name: String,
    /// Its backend.
    pub backend: BackendClass,
    /// Query heads on this rank; 0 for layers without (Mamba).
    pub num_heads: u32,
    /// Its own spec.
    pub spec: CacheSpec,
    /// Another layer whose KV cache this one reads instead of having its own.
    pub kv_sharing_target: Option<String>,
}

/// Layers that share one block table and one pool of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCacheGroup {
    /// Names, in the model's order.
    pub layer_names: Vec<String>,
    /// What each block holds per layer.
    pub spec: CacheSpec,
}

/// Layers of one KV cache group that share a builder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionGroup {
    /// Their backend.
    pub backend: BackendClass,
    /// Names, in the order in which they were seen.
    pub layer_names: Vec<String>,
    /// Their spec, with the manager's block size.
    pub spec: CacheSpec,
    /// Query heads on this rank.
    pub num_heads: u32,
    /// Index of the KV cache group.
    pub kv_cache_group_id: usize,
    /// The kernel's block size where it is not the manager's, in tokens.
    pub kernel_block_size: Option<u32>,
    /// Kernel pages between manager blocks in a packed cache; 0 where blocks are dense.
    pub kernel_block_stride: u32,
}

/// What a group's builder and kernels see of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BatchView {
    /// The batch as it is.
    Plain,
    /// Its virtual rows, each within one chunk.
    Local {
        /// Tokens of a chunk.
        chunk: u32,
    },
    /// A table of one column, each row's state; no slots.
    States,
}

impl fmt::Display for BatchView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchView::Plain => f.write_str("plain"),
            BatchView::Local { chunk } => write!(f, "chunks of {chunk}"),
            BatchView::States => f.write_str("states"),
        }
    }
}

impl AttentionGroup {
    /// What its builder sees of a step. A spec with a chunk asks for virtual rows, whether its keys are all kept or not.
    pub fn view(&self) -> BatchView {
        match &self.spec {
            CacheSpec::Mamba(_) => BatchView::States,
            CacheSpec::ChunkedLocalAttention(spec) => BatchView::Local {
                chunk: spec.attention_chunk_size,
            },
            CacheSpec::FullAttention(spec) => spec
                .attention_chunk_size
                .map_or(BatchView::Plain, |chunk| BatchView::Local { chunk }),
            _ => BatchView::Plain,
        }
    }

    /// Tokens of the blocks that this group's kernels read.
    pub fn block_size(&self) -> u32 {
        self.kernel_block_size
            .unwrap_or_else(|| self.spec.block_size())
    }

    /// The spec that the group's builder is given: with the kernel's block size.
    pub fn builder_spec(&self) -> CacheSpec {
        self.spec.copy_with_new_block_size(self.block_size())
    }

    /// Chooses the kernel block size from what the backend declares: at builder creation, once per group.
    ///
    /// # Errors
    /// [`KernelBlockError::NoCommon`].
    pub fn select_kernel_block_size(
        &mut self,
        sizes: BlockSizes<'_>,
    ) -> Result<(), KernelBlockError> {
        let manager = self.spec.block_size();
        if matches!(self.spec, CacheSpec::Mamba(_)) {
            self.kernel_block_size = None;
            return Ok(());
        }
        let kernel = select_common_block_size(manager, &[sizes])?;
        self.kernel_block_size = (kernel != manager).then_some(kernel);
        Ok(())
    }

    /// As [`select_kernel_block_size`](Self::select_kernel_block_size) where the cache packs several layers' blocks
    /// together (block outermost), `kernel_block_stride` kernel pages apart; 0 says that a split is impossible.
    ///
    /// # Errors
    /// [`KernelBlockError::PackedSplit`] where a split is needed and impossible, and as above.
    pub fn select_packed_kernel_block_size(
        &mut self,
        sizes: BlockSizes<'_>,
        kernel_block_stride: u32,
    ) -> Result<(), KernelBlockError> {
        self.select_kernel_block_size(sizes)?;
        match self.kernel_block_size {
            Some(kernel_block_size) if kernel_block_stride == 0 => {
                Err(KernelBlockError::PackedSplit {
                    backend: self.backend.name.to_string(),
                    kernel_block_size,
                    block_size: self.spec.block_size(),
                })
            }
            Some(_) => {
                self.kernel_block_stride = kernel_block_stride;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// How this group's block table is rewritten; the identity where kernel and manager blocks are the same.
    ///
    /// # Errors
    /// As [`KernelBlockMap::new`].
    pub fn kernel_block_map(&self, num_blocks: u32) -> Result<KernelBlockMap, KernelBlockError> {
        KernelBlockMap::new(
            self.spec.block_size(),
            self.block_size(),
            self.kernel_block_stride,
            num_blocks,
        )
    }
}

/// Why layers cannot be grouped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// Two layers have one name. The field's text.
    #[error("Duplicate layer name: {name}")]
    DuplicateLayer {
        /// The name.
        name: String,
    },
    /// A KV cache group names a layer that does not exist.
    #[error("KV cache group {group} names layer {name}, which the model does not have")]
    UnknownLayer {
        /// Index of the KV cache group.
        group: usize,
        /// The layer.
        name: String,
    },
    /// A layer stands in no KV cache group.
    #[error("layer {name} is in no KV cache group: its metadata would never be built")]
    Ungrouped {
        /// The layer.
        name: String,
    },
    /// A layer's spec is not the one of its group.
    #[error(
        "layer {name} has another KV cache spec than its group {group}: put it in a group of its own"
    )]
    SpecDiffers {
        /// The layer.
        name: String,
        /// Index of the KV cache group.
        group: usize,
    },
    /// KV sharing with itself. The field's text.
    #[error(
        "Specified KV sharing target layer for {layer} is not valid: target layer {target} cannot be the same as the current layer."
    )]
    SharesWithItself {
        /// The layer.
        layer: String,
        /// Its target.
        target: String,
    },
    /// KV sharing with a later layer. The field's text.
    #[error(
        "Specified KV sharing target layer for {layer} is not valid: target layer {target} must come before the current layer."
    )]
    TargetComesLater {
        /// The layer.
        layer: String,
        /// Its target.
        target: String,
    },
    /// KV sharing with a layer that does not exist. The field's text.
    #[error(
        "Specified KV sharing target layer for {layer} is not valid: target layer {target} is not a valid Attention layer in the model."
    )]
    UnknownTarget {
        /// The layer.
        layer: String,
        /// Its target.
        target: String,
    },
    /// Specs that do not fit together.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// KV cache groups of `layers`: one per distinct spec, in first-seen order. Layers that share another's cache, and layers
/// without a cache (encoder-only), are left out; [`attention_groups`] appends the former to their target's group.
///
/// # Errors
/// [`GroupError::DuplicateLayer`] and the KV sharing errors.
pub fn kv_cache_groups(layers: &[AttentionLayer]) -> Result<Vec<KvCacheGroup>, GroupError> {
    check_names(layers)?;
    check_sharing(layers)?;
    let mut groups: Vec<KvCacheGroup> = Vec::new();
    for layer in layers {
        if layer.kv_sharing_target.is_some()
            || matches!(layer.spec, CacheSpec::EncoderOnlyAttention(_))
        {
            continue;
        }
        match groups.iter_mut().find(|g| g.spec == layer.spec) {
            Some(group) => group.layer_names.push(layer.name.clone()),
            None => groups.push(KvCacheGroup {
                layer_names: vec![layer.name.clone()],
                spec: layer.spec.clone(),
            }),
        }
    }
    Ok(groups)
}

/// Attention groups of `layers`, which stand in `kv_cache_groups`: keyed by (backend class, spec, query heads) within each KV
/// cache group, in first-seen order. A layer that shares another's cache joins its target's KV cache group, after that
/// group's own layers. In a UniformType group the key has the layer's own spec.
///
/// # Errors
/// [`GroupError`]: unknown, duplicate or ungrouped layers, specs that differ from their group's, bad KV sharing targets.
pub fn attention_groups(
    layers: &[AttentionLayer],
    kv_cache_groups: &[KvCacheGroup],
) -> Result<Vec<AttentionGroup>, GroupError> {
    let by_name = check_names(layers)?;
    check_sharing(layers)?;
    let mut home: BTreeMap<&str, usize> = BTreeMap::new();
    let mut groups: Vec<AttentionGroup> = Vec::new();
    for (id, kv_group) in kv_cache_groups.iter().enumerate() {
        for name in &kv_group.layer_names {
            if !by_name.contains_key(name.as_str()) {
                return Err(GroupError::UnknownLayer {
                    group: id,
                    name: name.clone(),
                });
            }
            if home.insert(name, id).is_some() {
                return Err(GroupError::DuplicateLayer { name: name.clone() });
            }
        }
    }
    // Targets come before the layers that share them, so one pass in the model's order finds every home.
    let mut sharers: Vec<Vec<&str>> = vec![Vec::new(); kv_cache_groups.len()];
    for layer in layers {
        if let (Some(target), false) = (
            &layer.kv_sharing_target,
            home.contains_key(layer.name.as_str()),
        ) && let Some(&id) = home.get(target.as_str())
        {
            home.insert(&layer.name, id);
            sharers[id].push(&layer.name);
        }
    }
    for (id, kv_group) in kv_cache_groups.iter().enumerate() {
        let first = groups.len();
        let own = kv_group.layer_names.iter().map(String::as_str);
        for name in own.chain(sharers[id].iter().copied()) {
            let layer = &layers[by_name[name]];
            let spec = layer_spec(layer, kv_group, id, layers, &by_name)?;
            let same = |g: &&mut AttentionGroup| {
                g.backend == layer.backend && g.num_heads == layer.num_heads && g.spec == *spec
            };
            match groups[first..].iter_mut().find(same) {
                Some(group) => group.layer_names.push(layer.name.clone()),
                None => groups.push(AttentionGroup {
                    backend: layer.backend.clone(),
                    layer_names: vec![layer.name.clone()],
                    spec: spec.clone(),
                    num_heads: layer.num_heads,
                    kv_cache_group_id: id,
                    kernel_block_size: None,
                    kernel_block_stride: 0,
                }),
            }
        }
    }
    let ungrouped = layers.iter().find(|l| {
        !home.contains_key(l.name.as_str()) && !matches!(l.spec, CacheSpec::EncoderOnlyAttention(_))
    });
    match ungrouped {
        Some(layer) => Err(GroupError::Ungrouped {
            name: layer.name.clone(),
        }),
        None => Ok(groups),
    }
}

/// The spec in `layer`'s key: the group's, or the layer's own (its target's, where it shares a cache) in a UniformType group.
fn layer_spec<'a>(
    layer: &'a AttentionLayer,
    group: &'a KvCacheGroup,
    id: usize,
    layers: &'a [AttentionLayer],
    by_name: &BTreeMap<&str, usize>,
) -> Result<&'a CacheSpec, GroupError> {
    let mut owner = layer;
    while let Some(target) = &owner.kv_sharing_target {
        owner = &layers[by_name[target.as_str()]];
    }
    let differs = || GroupError::SpecDiffers {
        name: layer.name.clone(),
        group: id,
    };
    match &group.spec {
        CacheSpec::UniformType(members) => members.get(&owner.name).ok_or_else(differs),
        // A group's spec may be the merge of its layers': windows and chunks, where full attention keeps all keys anyway.
        spec => {
            let fits = *spec == owner.spec
                || (matches!(spec, CacheSpec::FullAttention(_))
                    && CacheSpec::merge(&[spec.clone(), owner.spec.clone()]).as_ref() == Ok(spec));
            if fits { Ok(spec) } else { Err(differs()) }
        }
    }
}

/// Layer names to indexes.
fn check_names(layers: &[AttentionLayer]) -> Result<BTreeMap<&str, usize>, GroupError> {
    let mut by_name = BTreeMap::new();
    for (i, layer) in layers.iter().enumerate() {
        if by_name.insert(layer.name.as_str(), i).is_some() {
            return Err(GroupError::DuplicateLayer {
                name: layer.name.clone(),
            });
        }
    }
    Ok(by_name)
}

/// KV sharing targets exist and come first.
fn check_sharing(layers: &[AttentionLayer]) -> Result<(), GroupError> {
    for (i, layer) in layers.iter().enumerate() {
        let Some(target) = &layer.kv_sharing_target else {
            continue;
        };
        let (layer_name, target) = (layer.name.clone(), target.clone());
        if target == layer_name {
            return Err(GroupError::SharesWithItself {
                layer: layer_name,
                target,
            });
        }
        match layers.iter().position(|l| l.name == target) {
            None => {
                return Err(GroupError::UnknownTarget {
                    layer: layer_name,
                    target,
                });
            }
            Some(at) if at > i => {
                return Err(GroupError::TargetComesLater {
                    layer: layer_name,
                    target,
                });
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Chooses kernel block sizes at start-up, in two steps: per KV cache group the size that the backends of all its attention
/// groups share, then per attention group the largest that its own backend reads out of that. Fills each group's
/// `kernel_block_size`.
///
/// `sizes_of` says what a group's backend declares. `packed(id)` tells whether KV cache group `id` lies in a block-outermost
/// allocation with other layers inside a block: such a group keeps the manager's block, because it cannot be split as a whole.
///
/// Source: vLLM `prepare_kernel_block_sizes` and `AttentionGroup.create_metadata_builders` @0.32/0.33.
///
/// # Errors
/// [`KernelBlockError::NoCommon`] with the field's text; [`KernelBlockError::PackedSplit`] for a packed group whose backend
/// needs smaller blocks.
pub fn choose_kernel_blocks<'a>(
    groups: &mut [AttentionGroup],
    kv_cache_groups: &[KvCacheGroup],
    sizes_of: impl Fn(&AttentionGroup) -> Cow<'a, [KernelBlockSize]>,
    packed: impl Fn(usize) -> bool,
) -> Result<(), KernelBlockError> {
    for (id, kv_group) in kv_cache_groups.iter().enumerate() {
        if matches!(kv_group.spec, CacheSpec::Mamba(_)) {
            continue;
        }
        let manager = kv_group.spec.block_size();
        let members: Vec<usize> = (0..groups.len())
            .filter(|i| groups[*i].kv_cache_group_id == id)
            .collect();
        let declared: Vec<Cow<'a, [KernelBlockSize]>> =
            members.iter().map(|i| sizes_of(&groups[*i])).collect();
        let sizes: Vec<BlockSizes<'_>> = members
            .iter()
            .zip(&declared)
            .map(|(i, sizes)| BlockSizes {
                name: &groups[*i].backend.name,
                sizes,
            })
            .collect();
        let shared = if packed(id) {
            manager
        } else {
            select_common_block_size(manager, &sizes)?
        };
        let own: Vec<u32> = sizes
            .iter()
            .map(|s| select_common_block_size(shared, std::slice::from_ref(s)))
            .collect::<Result<_, _>>()?;
        for (i, kernel_block_size) in members.into_iter().zip(own) {
            let group = &mut groups[i];
            if packed(id) && kernel_block_size != manager {
                return Err(KernelBlockError::PackedSplit {
                    backend: group.backend.name.to_string(),
                    kernel_block_size,
                    block_size: manager,
                });
            }
            group.kernel_block_size = (kernel_block_size != manager).then_some(kernel_block_size);
        }
    }
    Ok(())
}

/// Which attention group each layer belongs to: how metadata, made once per group, is found under every layer's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerMap {
    group_of: BTreeMap<String, usize>,
}

impl LayerMap {
    /// Indexes the layers of `groups`.
    ///
    /// # Errors
    /// [`GroupError::DuplicateLayer`].
    pub fn new(groups: &[AttentionGroup]) -> Result<LayerMap, GroupError> {
        let mut group_of = BTreeMap::new();
        for (i, group) in groups.iter().enumerate() {
            for name in &group.layer_names {
                if group_of.insert(name.clone(), i).is_some() {
                    return Err(GroupError::DuplicateLayer { name: name.clone() });
                }
            }
        }
        Ok(LayerMap { group_of })
    }

    /// Index of `layer`'s group in the slice that the map was made from.
    pub fn group_of(&self, layer: &str) -> Option<usize> {
        self.group_of.get(layer).copied()
    }

    /// `layer`'s entry of `per_group`: one item per attention group, in order.
    pub fn get<'a, M>(&self, per_group: &'a [M], layer: &str) -> Option<&'a M> {
        per_group.get(self.group_of(layer)?)
    }

    /// Layer names and group indexes, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, usize)> {
        self.group_of.iter().map(|(name, i)| (name.as_str(), *i))
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.group_of.len()
    }

    /// Is there no layer?
    pub fn is_empty(&self) -> bool {
        self.group_of.is_empty()
    }
}

/// The builders of an engine: one per attention group and micro-batch, kept from start to end.
#[derive(Debug)]
pub struct GroupBuilders<B> {
    builders: Vec<B>,
    num_ubatches: usize,
}

impl<B> GroupBuilders<B> {
    /// Calls `create(group, micro-batch)` for each; `num_ubatches` 1 without micro-batching (0 counts as 1).
    ///
    /// # Errors
    /// The first of `create`'s.
    pub fn create<E>(
        groups: &[AttentionGroup],
        num_ubatches: usize,
        mut create: impl FnMut(&AttentionGroup, usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let num_ubatches = num_ubatches.max(1);
        let mut builders = Vec::with_capacity(groups.len() * num_ubatches);
        for group in groups {
            for ubatch in 0..num_ubatches {
                builders.push(create(group, ubatch)?);
            }
        }
        Ok(GroupBuilders {
            builders,
            num_ubatches,
        })
    }

    /// The builder of attention group `group` for micro-batch `ubatch`.
    pub fn get_mut(&mut self, group: usize, ubatch: usize) -> Option<&mut B> {
        if ubatch >= self.num_ubatches {
            return None;
        }
        self.builders.get_mut(group * self.num_ubatches + ubatch)
    }

    /// Micro-batches.
    pub fn num_ubatches(&self) -> usize {
        self.num_ubatches
    }

    /// Every builder, group by group.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut B> {
        self.builders.iter_mut()
    }
}
