//! One layer's paged cache of latents on the CPU, and the write into it. It must never know metadata.

use half::bf16;

use super::fp8;
use crate::cpu::{ImplError, math::Element};

/// Element type of a latent cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LatentDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes, rounded to nearest even on the way in.
    Bf16,
    /// 656 bytes a token: 512 e4m3 elements, their 4 scales, 64 bf16 elements. For a latent of 512 and a rotated key of 64.
    Fp8DsMla,
}

impl LatentDtype {
    /// Bytes of a token with a latent of `kv_lora_rank` and a rotated key of `qk_rope_head_dim` elements.
    pub const fn entry_size(self, kv_lora_rank: usize, qk_rope_head_dim: usize) -> usize {
        match self {
            LatentDtype::F32 => 4 * (kv_lora_rank + qk_rope_head_dim),
            LatentDtype::Bf16 => 2 * (kv_lora_rank + qk_rope_head_dim),
            LatentDtype::Fp8DsMla => fp8::ENTRY,
        }
    }
}

/// The elements, by dtype.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Storage {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    Fp8DsMla(Vec<u8>),
}

/// One layer's cache, owned. Logical shape [num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim], row-major: a token's
/// latent, then its rotated key (`fp8_ds_mla`: 656 bytes in their place). Zero when new.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentCache {
    num_blocks: usize,
    block_size: usize,
    kv_lora_rank: usize,
    qk_rope_head_dim: usize,
    pub(super) storage: Storage,
}

impl LatentCache {
    /// A zeroed cache of `num_blocks` blocks of `block_size` tokens.
    ///
    /// # Errors
    /// If a size is 0, the cache would not fit in memory's addresses, or the dtype has no such sizes.
    pub fn new(
        num_blocks: usize,
        block_size: usize,
        kv_lora_rank: usize,
        qk_rope_head_dim: usize,
        dtype: LatentDtype,
    ) -> Result<Self, ImplError> {
        check_sizes(block_size, kv_lora_rank, qk_rope_head_dim, dtype)?;
        let entry = match dtype {
            LatentDtype::Fp8DsMla => Some(fp8::ENTRY),
            _ => kv_lora_rank.checked_add(qk_rope_head_dim),
        };
        let len = entry
            .and_then(|entry| entry.checked_mul(block_size))
            .and_then(|block| block.checked_mul(num_blocks))
            .filter(|len| {
                len.checked_mul(4)
                    .is_some_and(|bytes| bytes <= isize::MAX as usize)
            });
        let Some(len) = len else {
            return Err(ImplError::Config {
                name: "num_blocks",
                value: num_blocks.to_string(),
                remedy: "the cache has more bytes than memory has addresses: choose fewer blocks",
            });
        };
        let storage = match dtype {
            LatentDtype::F32 => Storage::F32(vec![0.0; len]),
            LatentDtype::Bf16 => Storage::Bf16(vec![bf16::ZERO; len]),
            LatentDtype::Fp8DsMla => Storage::Fp8DsMla(vec![0; len]),
        };
        Ok(LatentCache {
            num_blocks,
            block_size,
            kv_lora_rank,
            qk_rope_head_dim,
            storage,
        })
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Elements of a latent.
    pub fn kv_lora_rank(&self) -> usize {
        self.kv_lora_rank
    }

    /// Elements of a rotated key.
    pub fn qk_rope_head_dim(&self) -> usize {
        self.qk_rope_head_dim
    }

    /// Elements of a token, latent and rotated key.
    pub fn head_size(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Element type.
    pub fn dtype(&self) -> LatentDtype {
        match self.storage {
            Storage::F32(_) => LatentDtype::F32,
            Storage::Bf16(_) => LatentDtype::Bf16,
            Storage::Fp8DsMla(_) => LatentDtype::Fp8DsMla,
        }
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::F32(data) => bytemuck::cast_slice(data),
            Storage::Bf16(data) => bytemuck::cast_slice(data),
            Storage::Fp8DsMla(data) => data,
        }
    }

    /// Writes `value` as every element: poison for tests, or zero.
    pub fn fill(&mut self, value: f32) {
        match &mut self.storage {
            Storage::F32(data) => data.fill(value),
            Storage::Bf16(data) => data.fill(bf16::from_f32(value)),
            Storage::Fp8DsMla(data) => {
                let mut entry = [0; fp8::ENTRY];
                fp8::pack(&[value; fp8::LATENT], &[value; fp8::ROTATED], &mut entry);
                data.chunks_mut(fp8::ENTRY)
                    .for_each(|to| to.copy_from_slice(&entry));
            }
        }
    }

    /// A token's latent and rotated key, widened: `f32 [kv_lora_rank + qk_rope_head_dim]`.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn entry(&self, slot: usize) -> Vec<f32> {
        let mut entry = vec![0.0; self.head_size()];
        self.read(slot, &mut entry);
        entry
    }

    /// As `entry`, into `to`.
    pub(super) fn read(&self, slot: usize, to: &mut [f32]) {
        let stride = self.stride();
        let range = slot * stride..(slot + 1) * stride;
        match &self.storage {
            Storage::F32(data) => f32::unpack(&data[range], to),
            Storage::Bf16(data) => bf16::unpack(&data[range], to),
            Storage::Fp8DsMla(data) => u8::unpack(&data[range], to),
        }
    }

    /// Elements of the storage from one token to the next.
    pub(super) fn stride(&self) -> usize {
        match self.storage {
            Storage::Fp8DsMla(_) => fp8::ENTRY,
            _ => self.head_size(),
        }
    }

    /// Writes row i of `kv_c` ([T, kv_lora_rank]) and `k_pe` ([T, qk_rope_head_dim]) into slot `slot_mapping[i]`, for every i
    /// below `slot_mapping.len()`. A negative slot is skipped; later rows write nothing.
    ///
    /// # Panics
    /// If a slot lies outside the cache, or a slot that is not negative has no row. Slots are the host's own.
    pub(super) fn concat_and_cache(&mut self, kv_c: &[f32], k_pe: &[f32], slot_mapping: &[i64]) {
        let (latent, rotated, stride) = (self.kv_lora_rank, self.qk_rope_head_dim, self.stride());
        for (row, &slot) in slot_mapping.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else {
                continue;
            };
            assert!(
                slot < self.num_blocks * self.block_size,
                "slot {slot} is outside the cache of {} blocks of {} tokens",
                self.num_blocks,
                self.block_size,
            );
            let kv_c = &kv_c[row * latent..(row + 1) * latent];
            let k_pe = &k_pe[row * rotated..(row + 1) * rotated];
            let range = slot * stride..(slot + 1) * stride;
            match &mut self.storage {
                Storage::F32(data) => store(&mut data[range], kv_c, k_pe),
                Storage::Bf16(data) => store(&mut data[range], kv_c, k_pe),
                Storage::Fp8DsMla(data) => fp8::pack(kv_c, k_pe, &mut data[range]),
            }
        }
    }
}

/// What a latent layer's cache cannot have.
pub(super) fn check_sizes(
    block_size: usize,
    kv_lora_rank: usize,
    qk_rope_head_dim: usize,
    dtype: LatentDtype,
) -> Result<(), ImplError> {
    for (name, value) in [
        ("block_size", block_size),
        ("kv_lora_rank", kv_lora_rank),
        ("qk_rope_head_dim", qk_rope_head_dim),
    ] {
        if value == 0 {
            return Err(ImplError::Config {
                name,
                value: "0".to_owned(),
                remedy: "it must be at least 1",
            });
        }
    }
    let sizes = (kv_lora_rank, qk_rope_head_dim);
    if dtype == LatentDtype::Fp8DsMla && sizes != (fp8::LATENT, fp8::ROTATED) {
        return Err(ImplError::Config {
            name: "kv_cache_dtype",
            value: format!(
                "fp8_ds_mla with kv_lora_rank {kv_lora_rank} and qk_rope_head_dim {qk_rope_head_dim}"
            ),
            remedy: "it holds 512 and 64 elements: choose auto, float32 or bfloat16 (--kv-cache-dtype)",
        });
    }
    Ok(())
}

fn store<E: Element>(entry: &mut [E], kv_c: &[f32], k_pe: &[f32]) {
    for (element, &x) in entry.iter_mut().zip(kv_c.iter().chain(k_pe)) {
        *element = E::narrow(x);
    }
}
