//! Prepared metadata as an impl outside this crate reads it. It must never know how it was prepared, nor let a reader change
//! it.

use std::ops::Range;

use super::StepMetadata;

/// One request of a prepared step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestView<'a> {
    /// Its tokens: rows of `query` and of `output`.
    pub tokens: Range<usize>,
    /// Its keys. Its last token stands at key `num_keys − 1`.
    pub num_keys: usize,
    /// Is every later key hidden from a token?
    pub causal: bool,
    /// `s32 [ceil(num_keys / block_size)]`: its blocks of the cache, in order.
    pub pages: &'a [i32],
    /// Tokens of one block.
    pub block_size: usize,
}

impl RequestView<'_> {
    /// Where key `key` lies in the cache: block · block_size + offset.
    ///
    /// # Panics
    /// If the request has no such key, or its block is negative, which the verifier refuses.
    pub fn slot(&self, key: usize) -> usize {
        let block = usize::try_from(self.pages[key / self.block_size]).expect("a verified block");
        block * self.block_size + key % self.block_size
    }
}

/// One work item: some queries of a request against some of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkItemView {
    /// Index into [`StepMetadata::requests`].
    pub request: usize,
    /// Tokens of the request, counted from its first; packed rows where [`StepMetadata::queries_are_packed`].
    pub queries: Range<usize>,
    /// Keys of the request.
    pub keys: Range<usize>,
}

impl StepMetadata {
    /// The step's requests, row by row.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = RequestView<'_>> {
        self.rows.iter().map(|row| {
            let (token, keys, page) = (row.token as usize, row.kv_len as usize, row.page as usize);
            RequestView {
                tokens: token..token + row.q_len as usize,
                num_keys: keys,
                causal: row.causal,
                pages: &self.pages[page..page + keys.div_ceil(self.block_size)],
                block_size: self.block_size,
            }
        })
    }

    /// The schedule or work list, in order of execution.
    pub fn work_items(&self) -> impl ExactSizeIterator<Item = WorkItemView> {
        self.items.iter().map(|item| WorkItemView {
            request: item.row as usize,
            queries: item.q0 as usize..item.q1 as usize,
            keys: item.k0 as usize..item.k1 as usize,
        })
    }

    /// Do work items count packed rows (one token of one of the query heads that share a KV head, token-major) instead of
    /// tokens? FLASHINFER's do, FLASH_ATTN's do not.
    pub fn queries_are_packed(&self) -> bool {
        self.packed
    }
}
