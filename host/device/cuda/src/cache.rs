//! The paged KV caches of a model's layers on the device. It must never know metadata, nor which request owns a block.

use timetable_types::{Dtype, KvCacheLayout};

use crate::driver::{Device, DeviceBuffer, DevicePtr};
use crate::error::{CudaError, Result};
use crate::kernels::{CacheElement, Element};

/// Element type of a KV cache on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheDtype {
    /// 4 bytes; for f32 models, the device's own reference.
    F32,
    /// 2 bytes; for f16 models.
    F16,
    /// 2 bytes; for bf16 models.
    Bf16,
    /// 1 byte: e4m3, with a scale for keys and one for values; for bf16 and f16 models.
    Fp8E4m3,
}

impl CacheDtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            CacheDtype::F32 => 4,
            CacheDtype::F16 | CacheDtype::Bf16 => 2,
            CacheDtype::Fp8E4m3 => 1,
        }
    }

    /// The cache dtype of a contract's dtype; `None` where this device has no such cache.
    pub const fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::Float32 => Some(CacheDtype::F32),
            Dtype::Float16 => Some(CacheDtype::F16),
            Dtype::Bfloat16 => Some(CacheDtype::Bf16),
            Dtype::Float8E4m3 => Some(CacheDtype::Fp8E4m3),
            Dtype::Float8E5m2 | Dtype::Uint8 | Dtype::Int32 => None,
        }
    }

    /// As the kernels name it beside activations of `element`; `None` where no kernel has that pair.
    pub const fn beside(self, element: Element) -> Option<CacheElement> {
        match (self, element) {
            (CacheDtype::F32, Element::F32)
            | (CacheDtype::F16, Element::F16)
            | (CacheDtype::Bf16, Element::Bf16) => Some(CacheElement::Same),
            (CacheDtype::Fp8E4m3, Element::F16 | Element::Bf16) => Some(CacheElement::Fp8),
            _ => None,
        }
    }
}

/// Sizes of all layers' caches. Logically a layer is `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, a key and its
/// value adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers.
    pub num_layers: usize,
    /// Kernel blocks of one layer.
    pub num_blocks: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Tokens of one kernel block; a multiple of 16.
    pub block_size: usize,
    /// Elements of one key, and of one value; a multiple of 16.
    pub head_size: usize,
    /// Element type.
    pub dtype: CacheDtype,
    /// Physical order: LBHNC ("HND"), LBNHC ("NHD"), or any other.
    pub layout: KvCacheLayout,
}

/// Elements from one to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheStrides {
    /// Of a layer.
    pub layer: i64,
    /// Of a block.
    pub block: i64,
    /// Of a KV head.
    pub head: i64,
    /// Of a token within a block.
    pub token: i64,
}

/// The dimensions outside the content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Layer,
    Block,
    Head,
    Token,
}

impl CacheShape {
    /// Strides of the layout. `None` if they do not fit 63 bits.
    pub fn strides(&self) -> Option<CacheStrides> {
        use Axis::{Block, Head, Layer, Token};
        let outermost_first = match self.layout {
            KvCacheLayout::Lbnhc => [Layer, Block, Token, Head],
            KvCacheLayout::Lbhnc => [Layer, Block, Head, Token],
            KvCacheLayout::Lhbnc => [Layer, Head, Block, Token],
            KvCacheLayout::Blhnc => [Block, Layer, Head, Token],
            KvCacheLayout::Blnhc => [Block, Layer, Token, Head],
            KvCacheLayout::Bhlnc => [Block, Head, Layer, Token],
        };
        let mut strides = CacheStrides {
            layer: 0,
            block: 0,
            head: 0,
            token: 0,
        };
        let mut stride = i64::try_from(self.head_size).ok()?.checked_mul(2)?;
        for axis in outermost_first.into_iter().rev() {
            let (place, size) = match axis {
                Layer => (&mut strides.layer, self.num_layers),
                Block => (&mut strides.block, self.num_blocks),
                Head => (&mut strides.head, self.num_kv_heads),
                Token => (&mut strides.token, self.block_size),
            };
            *place = stride;
            stride = stride.checked_mul(i64::try_from(size).ok()?)?;
        }
        Some(strides)
    }

    /// Bytes of one block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.num_layers
            * self.num_kv_heads
            * self.block_size
            * 2
            * self.head_size
            * self.dtype.size()
    }

    /// Bytes of everything. `None` if they do not fit.
    pub fn bytes(&self) -> Option<usize> {
        self.block_bytes().checked_mul(self.num_blocks)
    }

    fn check(&self) -> Result<CacheStrides> {
        let refuse = |what, value: usize, remedy| {
            Err(CudaError::Invalid {
                what,
                value: value.to_string(),
                remedy,
            })
        };
        if self.block_size == 0 || !self.block_size.is_multiple_of(16) {
            return refuse(
                "the KV cache's block size",
                self.block_size,
                "the kernels take multiples of 16 tokens: set --block-size to one",
            );
        }
        if self.head_size == 0 || !self.head_size.is_multiple_of(16) {
            return refuse(
                "the KV cache's head size",
                self.head_size,
                "the kernels take multiples of 16 elements",
            );
        }
        if self.num_kv_heads == 0 {
            return refuse("the KV cache's number of heads", 0, "at least 1");
        }
        if self.num_blocks > i32::MAX as usize / self.block_size {
            return refuse(
                "the KV cache's number of blocks",
                self.num_blocks,
                "slots are counted in 31 bits: lower --gpu-memory-utilization",
            );
        }
        match self.strides() {
            Some(strides) if self.bytes().is_some() => Ok(strides),
            _ => refuse(
                "the KV cache's number of blocks",
                self.num_blocks,
                "use fewer",
            ),
        }
    }
}

/// Scales of one layer's fp8 cache: stored = x / scale. One for all heads, or one a head; as many for keys as for values.
#[derive(Clone, Debug, PartialEq)]
pub struct KvScales {
    /// f32 `[1]` or `[num_kv_heads]`
    pub key: Vec<f32>,
    /// f32 `[1]` or `[num_kv_heads]`
    pub value: Vec<f32>,
}

/// One layer's cache: what kernels are told. Copied freely; owned by [`KvCaches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCache {
    /// Its first element.
    pub ptr: DevicePtr,
    /// Kernel blocks.
    pub num_blocks: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Tokens of a kernel block.
    pub block_size: usize,
    /// Elements of one key.
    pub head_size: usize,
    /// Element type.
    pub dtype: CacheDtype,
    /// In elements.
    pub strides: CacheStrides,
    /// f32; null: 1.
    pub k_scale: DevicePtr,
    /// f32; null: 1.
    pub v_scale: DevicePtr,
    /// 0: one scale for all heads; 1: one a head.
    pub scale_stride: i32,
}

/// Every layer's cache, owned: one allocation, zero when new.
#[derive(Debug)]
pub struct KvCaches {
    shape: CacheShape,
    strides: CacheStrides,
    memory: DeviceBuffer,
    /// f32 `[num_layers, 2, n]`, keys first.
    scales: Option<DeviceBuffer>,
    scales_per_layer: usize,
}

impl KvCaches {
    /// Allocates and zeroes them. `scales`: one entry for each layer, for fp8 caches; none: all scales are 1.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for sizes that the kernels do not take or scales that do not fit them,
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn new(device: &Device, shape: CacheShape, scales: Option<&[KvScales]>) -> Result<Self> {
        let strides = shape.check()?;
        let packed = scales
            .map(|scales| pack_scales(&shape, scales))
            .transpose()?;
        let bytes = shape.block_bytes() * shape.num_blocks;
        let memory =
            DeviceBuffer::alloc_zeroed(device, bytes, "the KV cache").map_err(|error| {
                error
                    .with_remedy("lower --gpu-memory-utilization, or the number of KV cache blocks")
            })?;
        let (scales, scales_per_layer) = match packed {
            Some((values, per_layer)) => (
                Some(DeviceBuffer::from_host(
                    device,
                    &values,
                    "the KV cache's scales",
                )?),
                per_layer,
            ),
            None => (None, 0),
        };
        Ok(Self {
            shape,
            strides,
            memory,
            scales,
            scales_per_layer,
        })
    }

    /// Their sizes.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.len() + self.scales.as_ref().map_or(0, DeviceBuffer::len)
    }

    /// Layer `layer`'s cache; none where there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<KvCache> {
        let shape = &self.shape;
        (layer < shape.num_layers).then(|| {
            let elements = layer * self.strides.layer as usize;
            let scale = |of_values: usize| match &self.scales {
                Some(scales) => {
                    let index = (2 * layer + of_values) * self.scales_per_layer;
                    scales.ptr().offset(index * size_of::<f32>())
                }
                None => DevicePtr::NULL,
            };
            KvCache {
                ptr: self.memory.ptr().offset(elements * shape.dtype.size()),
                num_blocks: shape.num_blocks,
                num_kv_heads: shape.num_kv_heads,
                block_size: shape.block_size,
                head_size: shape.head_size,
                dtype: shape.dtype,
                strides: self.strides,
                k_scale: scale(0),
                v_scale: scale(1),
                scale_stride: i32::from(self.scales_per_layer > 1),
            }
        })
    }

    /// Sets every byte: 0, or poison for tests (0xFF is NaN in every dtype). Blocks; no stream may use the caches meanwhile.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        self.memory.fill(byte)
    }

    /// The memory of all layers, for tests and checks that read or write it from the host.
    pub fn memory(&mut self) -> &mut DeviceBuffer {
        &mut self.memory
    }
}

/// f32 `[num_layers, 2, n]` and n.
fn pack_scales(shape: &CacheShape, scales: &[KvScales]) -> Result<(Vec<f32>, usize)> {
    let refuse = |value: String, remedy| {
        Err(CudaError::Invalid {
            what: "the KV cache's scales",
            value,
            remedy,
        })
    };
    if shape.dtype != CacheDtype::Fp8E4m3 {
        return refuse(
            format!("given for {:?}", shape.dtype),
            "only fp8 caches have scales",
        );
    }
    let per_layer = scales.first().map_or(0, |first| first.key.len());
    if scales.len() != shape.num_layers || (per_layer != 1 && per_layer != shape.num_kv_heads) {
        return refuse(
            format!("{per_layer} for keys in {} layers", scales.len()),
            "one entry for each layer, with one scale or one for each KV head",
        );
    }
    let mut values = Vec::with_capacity(scales.len() * 2 * per_layer);
    for layer in scales {
        for part in [&layer.key, &layer.value] {
            if part.len() != per_layer
                || part
                    .iter()
                    .any(|scale| !(scale.is_finite() && *scale > 0.0))
            {
                return refuse(
                    format!("{part:?}"),
                    "equally many in all layers, finite and positive",
                );
            }
            values.extend_from_slice(part);
        }
    }
    Ok((values, per_layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(layout: KvCacheLayout) -> CacheShape {
        CacheShape {
            num_layers: 3,
            num_blocks: 5,
            num_kv_heads: 2,
            block_size: 16,
            head_size: 64,
            dtype: CacheDtype::Bf16,
            layout,
        }
    }

    #[test]
    fn every_layout_gives_each_state_a_place_of_its_own() {
        for layout in [
            KvCacheLayout::Lbnhc,
            KvCacheLayout::Lbhnc,
            KvCacheLayout::Lhbnc,
            KvCacheLayout::Blhnc,
            KvCacheLayout::Blnhc,
            KvCacheLayout::Bhlnc,
        ] {
            let shape = shape(layout);
            let strides = shape.check().unwrap();
            let mut seen = vec![false; 3 * 5 * 2 * 16];
            for layer in 0..3 {
                for block in 0..5 {
                    for head in 0..2 {
                        for token in 0..16 {
                            let at = layer * strides.layer
                                + block * strides.block
                                + head * strides.head
                                + token * strides.token;
                            assert_eq!(at % 128, 0);
                            let place = &mut seen[at as usize / 128];
                            assert!(!*place, "{layout:?}");
                            *place = true;
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&seen| seen), "{layout:?}");
            assert_eq!(shape.bytes(), Some(3 * 5 * 2 * 16 * 128 * 2));
        }
        // The two that have names of their own.
        let nhd = shape(KvCacheLayout::Lbnhc).strides().unwrap();
        assert_eq!(
            (nhd.block, nhd.token, nhd.head),
            (16 * 2 * 128, 2 * 128, 128)
        );
        let hnd = shape(KvCacheLayout::Lbhnc).strides().unwrap();
        assert_eq!(
            (hnd.block, hnd.head, hnd.token),
            (16 * 2 * 128, 16 * 128, 128)
        );
    }

    #[test]
    fn sizes_that_the_kernels_do_not_take_are_refused_by_name() {
        let good = shape(KvCacheLayout::Lbhnc);
        let cases = [
            (
                CacheShape {
                    block_size: 24,
                    ..good
                },
                "block size is 24",
            ),
            (
                CacheShape {
                    head_size: 60,
                    ..good
                },
                "head size is 60",
            ),
            (
                CacheShape {
                    num_kv_heads: 0,
                    ..good
                },
                "number of heads is 0",
            ),
            (
                CacheShape {
                    num_blocks: 1 << 40,
                    ..good
                },
                "number of blocks",
            ),
        ];
        for (shape, text) in cases {
            let message = shape.check().unwrap_err().to_string();
            assert!(message.contains(text), "{message}");
        }
    }

    #[test]
    fn scales_belong_to_fp8_and_are_the_same_number_everywhere() {
        let fp8 = CacheShape {
            dtype: CacheDtype::Fp8E4m3,
            num_layers: 2,
            ..shape(KvCacheLayout::Lbhnc)
        };
        let layer = |n| KvScales {
            key: vec![0.5; n],
            value: vec![2.0; n],
        };
        let (values, per_layer) = pack_scales(&fp8, &[layer(2), layer(2)]).unwrap();
        assert_eq!((per_layer, values), (2, [0.5, 0.5, 2.0, 2.0].repeat(2)));
        assert!(pack_scales(&fp8, &[layer(2)]).is_err());
        assert!(pack_scales(&fp8, &[layer(1), layer(2)]).is_err());
        assert!(pack_scales(&fp8, &[layer(3), layer(3)]).is_err());
        assert!(
            pack_scales(
                &shape(KvCacheLayout::Lbhnc),
                &[layer(1), layer(1), layer(1)]
            )
            .is_err()
        );
        let zero = KvScales {
            key: vec![0.0],
            value: vec![1.0],
        };
        assert!(
            pack_scales(
                &CacheShape {
                    num_layers: 1,
                    ..fp8
                },
                &[zero]
            )
            .is_err()
        );
    }

    #[test]
    fn pairs_without_a_kernel_are_none() {
        assert_eq!(
            CacheDtype::Bf16.beside(Element::Bf16),
            Some(CacheElement::Same)
        );
        assert_eq!(
            CacheDtype::Fp8E4m3.beside(Element::F16),
            Some(CacheElement::Fp8)
        );
        assert_eq!(CacheDtype::Fp8E4m3.beside(Element::F32), None);
        assert_eq!(CacheDtype::Bf16.beside(Element::F16), None);
    }
}
