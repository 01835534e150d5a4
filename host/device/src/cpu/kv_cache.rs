//! One layer's paged KV cache on the CPU, and the scatter into it. It must never know metadata.

use half::bf16;

use super::math::Element;

/// Element type of a KV cache on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes; keys and values are rounded to nearest even on the way in, and computed with in f32.
    Bf16,
}

impl CacheDtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            CacheDtype::F32 => 4,
            CacheDtype::Bf16 => 2,
        }
    }
}

/// The elements, by dtype.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Storage {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// One layer's KV cache, owned. Logical shape [num_blocks, num_kv_heads, block_size, 2 * head_size], K before V in the last
/// dimension, row-major (layout LBHNC). Zero when new.
#[derive(Clone, Debug, PartialEq)]
pub struct KvCache {
    num_blocks: usize,
    num_kv_heads: usize,
    block_size: usize,
    head_size: usize,
    pub(super) storage: Storage,
}

impl KvCache {
    /// A zeroed cache. The memory is the process's; `num_blocks` pages of 2 · `num_kv_heads` · `block_size` · `head_size` elements.
    ///
    /// # Panics
    /// If the size overflows `usize`.
    pub fn new(
        num_blocks: usize,
        num_kv_heads: usize,
        block_size: usize,
        head_size: usize,
        dtype: CacheDtype,
    ) -> Self {
        let len = [num_kv_heads, block_size, 2, head_size]
            .iter()
            .try_fold(num_blocks, |product, &factor| product.checked_mul(factor))
            .expect("a KV cache's number of elements fits in usize");
        let storage = match dtype {
            CacheDtype::F32 => Storage::F32(vec![0.0; len]),
            CacheDtype::Bf16 => Storage::Bf16(vec![bf16::ZERO; len]),
        };
        KvCache {
            num_blocks,
            num_kv_heads,
            block_size,
            head_size,
            storage,
        }
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Number of KV heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Tokens of one block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Elements of one key (and of one value).
    pub fn head_size(&self) -> usize {
        self.head_size
    }

    /// Element type.
    pub fn dtype(&self) -> CacheDtype {
        match self.storage {
            Storage::F32(_) => CacheDtype::F32,
            Storage::Bf16(_) => CacheDtype::Bf16,
        }
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::F32(data) => bytemuck::cast_slice(data),
            Storage::Bf16(data) => bytemuck::cast_slice(data),
        }
    }

    /// Sets every element: poison for tests, or zero.
    pub fn fill(&mut self, value: f32) {
        match &mut self.storage {
            Storage::F32(data) => data.fill(value),
            Storage::Bf16(data) => data.fill(bf16::from_f32(value)),
        }
    }

    /// The key of one token of one head, widened: `f32 [head_size]`.
    ///
    /// # Panics
    /// If there is no such slot or head.
    pub fn key(&self, slot: usize, kv_head: usize) -> Vec<f32> {
        let mut content = self.content(slot, kv_head);
        content.truncate(self.head_size);
        content
    }

    /// The value of one token of one head, widened: `f32 [head_size]`.
    ///
    /// # Panics
    /// If there is no such slot or head.
    pub fn value(&self, slot: usize, kv_head: usize) -> Vec<f32> {
        self.content(slot, kv_head).split_off(self.head_size)
    }

    fn content(&self, slot: usize, kv_head: usize) -> Vec<f32> {
        let start = self.offset(slot, kv_head);
        let range = start..start + 2 * self.head_size;
        match &self.storage {
            Storage::F32(data) => data[range].to_vec(),
            Storage::Bf16(data) => data[range].iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Index of the first element of `slot`'s content.
    ///
    /// # Panics
    /// If there is no such slot or head.
    fn offset(&self, slot: usize, kv_head: usize) -> usize {
        assert!(
            slot < self.num_blocks * self.block_size,
            "slot {slot} is outside the KV cache of {} blocks of {} tokens",
            self.num_blocks,
            self.block_size,
        );
        assert!(
            kv_head < self.num_kv_heads,
            "KV head {kv_head} of {}",
            self.num_kv_heads
        );
        let (block, state) = (slot / self.block_size, slot % self.block_size);
        ((block * self.num_kv_heads + kv_head) * self.block_size + state) * 2 * self.head_size
    }

    /// Writes row i of `key` and `value` ([T, num_kv_heads, head_size]) into slot `slot_mapping[i]`, for every i below
    /// `slot_mapping.len()`. A negative slot is skipped; later rows of `key` write nothing.
    ///
    /// # Panics
    /// If a slot lies outside the cache, or a slot that is not negative has no row. Slots are the host's own.
    pub(super) fn scatter(&mut self, key: &[f32], value: &[f32], slot_mapping: &[i64]) {
        let width = self.num_kv_heads * self.head_size;
        for (row, &slot) in slot_mapping.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else {
                continue;
            };
            let rows = row * width..(row + 1) * width;
            let (key, value) = (&key[rows.clone()], &value[rows]);
            for head in 0..self.num_kv_heads {
                let start = self.offset(slot, head);
                let part = head * self.head_size..(head + 1) * self.head_size;
                let content = start..start + 2 * self.head_size;
                match &mut self.storage {
                    Storage::F32(data) => {
                        store(&mut data[content], &key[part.clone()], &value[part]);
                    }
                    Storage::Bf16(data) => {
                        store(&mut data[content], &key[part.clone()], &value[part]);
                    }
                }
            }
        }
    }
}

fn store<E: Element>(content: &mut [E], key: &[f32], value: &[f32]) {
    for (element, &x) in content.iter_mut().zip(key.iter().chain(value)) {
        *element = E::narrow(x);
    }
}
