//! The kernels, loaded: from the embedded images to functions by type.
//!
//! Knows the symbols of `kernels/src` and what a launch of each needs. Must never know arguments, or when a kernel runs.
//!
//! Everything is resolved in [`Kernels::load`]; a lookup afterwards is an array index. The step formats no name and allocates
//! nothing.

use timetable_types::Dtype;

use crate::driver::{Device, Function, Module};
use crate::error::{CudaError, Result};
use crate::images;

/// Element type of activations and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single: the device's own reference.
    F32,
}

impl Element {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// The element of a dtype; `None` where no kernel computes in it.
    #[must_use]
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::Bfloat16 => Some(Self::Bf16),
            Dtype::Float16 => Some(Self::F16),
            Dtype::Float32 => Some(Self::F32),
            _ => None,
        }
    }

    /// Bytes of one.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

/// Element type of a KV cache, beside that of the keys and values that go into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheElement {
    /// The same.
    Same,
    /// fp8 e4m3 with scales, under bf16 or f16.
    Fp8,
}

impl CacheElement {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Same, Self::Fp8];

    /// Bytes of one under `element`.
    #[must_use]
    pub const fn bytes(self, element: Element) -> usize {
        match self {
            Self::Same => element.bytes(),
            Self::Fp8 => 1,
        }
    }

    const fn suffix(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::Fp8 => "_fp8",
        }
    }
}

/// Head sizes that the attention kernels are built for; the plain f32 kernel takes any up to 256.
pub const HEAD_SIZES: [usize; 4] = [64, 96, 128, 256];

/// Which attention kernel executes a list of work items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// At most 16 packed rows an item, memory-bound.
    Decode,
    /// At most 64 packed rows an item: short queries, and FLASHINFER's lists of such tiles.
    Prefill64,
    /// At most 128 packed rows an item (64 at a head of 256), on tensor cores.
    Prefill,
}

impl AttentionKind {
    /// All of them, by packed rows.
    pub const ALL: [Self; 3] = [Self::Decode, Self::Prefill64, Self::Prefill];

    /// The kernel for a FLASHINFER work list whose tiles have `cta_tile_q` packed rows.
    #[must_use]
    pub const fn of_tile(cta_tile_q: u32) -> Self {
        match cta_tile_q {
            0..=16 => Self::Decode,
            17..=64 => Self::Prefill64,
            _ => Self::Prefill,
        }
    }
}

/// An attention kernel, and what a launch of it needs.
#[derive(Clone, Debug)]
pub struct AttentionKernel {
    pub(crate) function: Function,
    pub(crate) shared: u32,
    tile_rows: u32,
}

impl AttentionKernel {
    /// Packed rows that a work item has at most: what the plan kernel is told.
    #[must_use]
    pub fn tile_rows(&self) -> u32 {
        self.tile_rows
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.function.name()
    }
}

/// The kernels of one element type.
#[derive(Debug)]
pub(crate) struct LayerKernels {
    pub(crate) embedding: Function,
    pub(crate) rms_norm: Function,
    pub(crate) head_norm: Function,
    pub(crate) rope: Function,
    pub(crate) silu_mul: Function,
    pub(crate) gather_rows: Function,
    pub(crate) argmax: Function,
    pub(crate) merge_states: Function,
}

/// Attention kernels of one element type (bf16, f16), by cache, kind and head size.
type AttentionTable = [[[AttentionKernel; HEAD_SIZES.len()]; 3]; 2];

/// Every kernel, loaded on one device. Launches are in [`ops`](crate::ops).
#[derive(Debug)]
pub struct Kernels {
    device: Device,
    pub(crate) layers: [LayerKernels; 3],
    attention: [AttentionTable; 2],
    pub(crate) attention_plain: Function,
    scatter: [Function; 3],
    scatter_fp8: [Function; 2],
    pub(crate) plan_flash_attn: Function,
    pub(crate) plan_flashinfer: Function,
    pub(crate) sample: Function,
    pub(crate) unpack: Function,
    /// Bytes of dynamic shared memory that `plan_flashinfer` may be launched with.
    pub(crate) max_plan_shared: u32,
}

impl Kernels {
    /// Loads the embedded images on `device` and resolves every kernel. Takes tens of milliseconds; much longer, once, where
    /// the driver has to compile PTX (it caches the result).
    ///
    /// # Errors
    /// [`CudaError::NoKernelImage`] with what is embedded, where nothing is or none of it runs on this device; what the driver
    /// says of an image or a symbol.
    pub fn load(device: &Device) -> Result<Self> {
        let embedded = || {
            images::targets()
                .iter()
                .map(|target| images::describe(target))
        };
        if !images::run_on(images::targets(), device.capability()) {
            return Err(CudaError::NoKernelImage {
                capability: device.capability(),
                embedded: embedded().collect(),
            });
        }
        let loader =
            Loader::new(device).map_err(|error| error.with_embedded(embedded().collect()))?;
        let plan_flashinfer = loader.function("plan", "tt_plan_flashinfer")?;
        // Static shared memory counts too.
        let max_plan_shared = device
            .max_shared_per_block()
            .saturating_sub(plan_flashinfer.static_shared()?);
        plan_flashinfer.set_max_shared(max_plan_shared)?;
        let [bf16, f16, f32] = Element::ALL;
        Ok(Self {
            device: device.clone(),
            layers: [
                loader.layers(bf16)?,
                loader.layers(f16)?,
                loader.layers(f32)?,
            ],
            attention: [loader.attention(bf16)?, loader.attention(f16)?],
            attention_plain: loader.function("attention_plain", "tt_attention_plain_f32")?,
            scatter: [
                loader.function("kv_cache", "tt_reshape_and_cache_bf16")?,
                loader.function("kv_cache", "tt_reshape_and_cache_f16")?,
                loader.function("kv_cache", "tt_reshape_and_cache_f32")?,
            ],
            scatter_fp8: [
                loader.function("kv_cache", "tt_reshape_and_cache_bf16_fp8")?,
                loader.function("kv_cache", "tt_reshape_and_cache_f16_fp8")?,
            ],
            plan_flash_attn: loader.function("plan", "tt_plan_flash_attn")?,
            plan_flashinfer,
            sample: loader.function("sampling", "tt_sample_f32")?,
            unpack: loader.function("unpack", "tt_unpack")?,
            max_plan_shared,
        })
    }

    /// The device that they are loaded on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The attention kernel for queries of `element`, a cache of `cache`, and heads of `head_size`. Where a cache of fp8 has no
    /// kernel of 64 rows, the one of 128 takes its place: it executes items of fewer rows too.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for f32 (which has [`plain`](Self::plain_attention) attention only) and for other head sizes.
    pub fn attention(
        &self,
        kind: AttentionKind,
        element: Element,
        cache: CacheElement,
        head_size: usize,
    ) -> Result<&AttentionKernel> {
        let table = match element {
            Element::Bf16 => &self.attention[0],
            Element::F16 => &self.attention[1],
            Element::F32 => {
                return Err(CudaError::Invalid {
                    what: "the element type of tiled attention",
                    value: "f32".to_owned(),
                    remedy: "run the model in bf16 or f16, or use the plain f32 kernel with an f32 cache",
                });
            }
        };
        let Some(size) = HEAD_SIZES.iter().position(|&size| size == head_size) else {
            return Err(CudaError::Invalid {
                what: "the head size of attention",
                value: head_size.to_string(),
                remedy: "kernels are built for heads of 64, 96, 128 and 256",
            });
        };
        Ok(&table[cache as usize][kind as usize][size])
    }

    pub(crate) fn layer(&self, element: Element) -> &LayerKernels {
        &self.layers[element as usize]
    }

    pub(crate) fn scatter(&self, element: Element, cache: CacheElement) -> Result<&Function> {
        match cache {
            CacheElement::Same => Ok(&self.scatter[element as usize]),
            CacheElement::Fp8 => self.scatter_fp8.get(element as usize).ok_or_else(|| {
                CudaError::Invalid {
                    what: "the element type of keys for an fp8 cache",
                    value: "f32".to_owned(),
                    remedy: "run the model in bf16 or f16, or give the cache its own element type",
                }
            }),
        }
    }
}

/// The loaded images, by source.
struct Loader(Vec<(&'static str, Module)>);

impl Loader {
    fn new(device: &Device) -> Result<Self> {
        let load = |image: &images::Image| {
            let module =
                Module::load(device, image.bytes).map_err(|error| error.about(image.name))?;
            Ok((image.name, module))
        };
        Ok(Self(
            images::embedded().iter().map(load).collect::<Result<_>>()?,
        ))
    }

    fn module(&self, image: &str) -> Result<&Module> {
        self.0
            .iter()
            .find(|(name, _)| *name == image)
            .map(|(_, module)| module)
            .ok_or_else(|| CudaError::Invalid {
                what: "the set of embedded kernel images",
                value: format!("without {image}"),
                remedy: "build the kernels again (cargo xtask kernels)",
            })
    }

    fn function(&self, image: &str, name: &str) -> Result<Function> {
        self.module(image)?.function(name)
    }

    fn layers(&self, element: Element) -> Result<LayerKernels> {
        let of =
            |image, what: &str| self.function(image, &format!("tt_{what}_{}", element.suffix()));
        Ok(LayerKernels {
            embedding: of("layers", "embedding")?,
            rms_norm: of("layers", "rms_norm")?,
            head_norm: of("layers", "head_norm")?,
            rope: of("layers", "rope")?,
            silu_mul: of("layers", "silu_mul")?,
            gather_rows: of("layers", "gather_rows")?,
            argmax: of("layers", "argmax")?,
            merge_states: of("merge", "merge_states")?,
        })
    }

    fn attention(&self, element: Element) -> Result<AttentionTable> {
        let of_cache = |cache| -> Result<_> {
            let of_kind = |kind| -> Result<_> {
                let of_size = |size| self.attention_kernel(kind, element, cache, size);
                let [a, b, c, d] = HEAD_SIZES;
                Ok([of_size(a)?, of_size(b)?, of_size(c)?, of_size(d)?])
            };
            let [a, b, c] = AttentionKind::ALL;
            Ok([of_kind(a)?, of_kind(b)?, of_kind(c)?])
        };
        let [a, b] = CacheElement::ALL;
        Ok([of_cache(a)?, of_cache(b)?])
    }

    fn attention_kernel(
        &self,
        kind: AttentionKind,
        element: Element,
        cache: CacheElement,
        head_size: usize,
    ) -> Result<AttentionKernel> {
        let (image, name) = attention_symbol(kind, element, cache, head_size);
        let module = self.module(image)?;
        let function = module.function(&name)?;
        let global = |what: &str| {
            let symbol = format!("tt_{what}_{name}");
            let value = module.global_i32(&symbol)?;
            u32::try_from(value).map_err(|_| CudaError::Invalid {
                what: "a symbol of the kernel images",
                value: format!("{value} ({symbol})"),
                remedy: "build the kernels again (cargo xtask kernels)",
            })
        };
        let (shared, tile_rows) = (global("shared_bytes")?, global("tile_rows")?);
        function.set_max_shared(shared)?;
        Ok(AttentionKernel {
            function,
            shared,
            tile_rows,
        })
    }
}

/// The image and the name of an attention kernel.
fn attention_symbol(
    kind: AttentionKind,
    element: Element,
    cache: CacheElement,
    head_size: usize,
) -> (&'static str, String) {
    // At a head of 256 every prefill kernel has 64 rows; over fp8 there is none of 64 rows of its own.
    let of_64 = cache == CacheElement::Same && head_size != 256;
    let (image, end) = match kind {
        AttentionKind::Decode => ("decode", ""),
        AttentionKind::Prefill64 if of_64 => ("prefill", "_r64"),
        AttentionKind::Prefill64 | AttentionKind::Prefill => ("prefill", ""),
    };
    let name = format!(
        "tt_{image}_{}{}_d{head_size}{end}",
        element.suffix(),
        cache.suffix()
    );
    (image, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources, by the image that each becomes.
    const SOURCES: [(&str, &str); 9] = [
        (
            "attention_plain",
            include_str!("../../../../kernels/src/attention_plain.cu"),
        ),
        ("decode", include_str!("../../../../kernels/src/decode.cu")),
        (
            "kv_cache",
            include_str!("../../../../kernels/src/kv_cache.cu"),
        ),
        ("layers", include_str!("../../../../kernels/src/layers.cu")),
        ("merge", include_str!("../../../../kernels/src/merge.cu")),
        ("plan", include_str!("../../../../kernels/src/plan.cu")),
        (
            "prefill",
            include_str!("../../../../kernels/src/prefill.cu"),
        ),
        (
            "sampling",
            include_str!("../../../../kernels/src/sampling.cu"),
        ),
        ("unpack", include_str!("../../../../kernels/src/unpack.cu")),
    ];

    fn source(image: &str) -> &'static str {
        SOURCES
            .iter()
            .find(|(name, _)| *name == image)
            .map(|(_, text)| *text)
            .expect("an image has a source")
    }

    #[test]
    fn every_attention_kernel_that_is_asked_for_exists() {
        for element in [Element::Bf16, Element::F16] {
            for cache in CacheElement::ALL {
                for kind in AttentionKind::ALL {
                    for size in HEAD_SIZES {
                        let (image, name) = attention_symbol(kind, element, cache, size);
                        assert!(
                            source(image).contains(&format!("({name}, ")),
                            "{image}.cu defines no {name}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_other_kernel_that_is_asked_for_exists() {
        for (image, name) in [
            ("attention_plain", "tt_attention_plain_f32("),
            ("kv_cache", "(tt_reshape_and_cache_bf16,"),
            ("kv_cache", "(tt_reshape_and_cache_f16,"),
            ("kv_cache", "(tt_reshape_and_cache_f32,"),
            ("kv_cache", "(tt_reshape_and_cache_bf16_fp8,"),
            ("kv_cache", "(tt_reshape_and_cache_f16_fp8,"),
            ("layers", "tt_embedding_##"),
            ("layers", "tt_rms_norm_##"),
            ("layers", "tt_head_norm_##"),
            ("layers", "tt_rope_##"),
            ("layers", "tt_silu_mul_##"),
            ("layers", "tt_gather_rows_##"),
            ("layers", "tt_argmax_##"),
            ("merge", "tt_merge_states_##"),
            ("plan", "tt_plan_flash_attn("),
            ("plan", "tt_plan_flashinfer("),
            ("sampling", "tt_sample_f32("),
            ("unpack", "tt_unpack("),
        ] {
            assert!(source(image).contains(name), "{image}.cu defines no {name}");
        }
    }

    #[test]
    fn a_tile_chooses_the_kernel_that_has_as_many_rows() {
        assert_eq!(AttentionKind::of_tile(16), AttentionKind::Decode);
        assert_eq!(AttentionKind::of_tile(64), AttentionKind::Prefill64);
        assert_eq!(AttentionKind::of_tile(128), AttentionKind::Prefill);
    }
}
