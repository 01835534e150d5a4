//! The plan kernels of `kernels/src/plan.cu`, on the host: what a prepared step becomes on the device. For tests only; it must
//! never know how the step was prepared.

use crate::driver::DevicePtr;
use crate::params::{PlanParams, WorkItem, WorkListParams, WorkListSizes};
use crate::upload::interpret::Machine;

/// What a plan kernel leaves.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) items: Vec<WorkItem>,
    /// Items that the schedule makes, before the launch's limit.
    pub(super) wanted: usize,
    /// Tokens that belong to no request.
    pub(super) tail: (i32, i32),
}

fn at(machine: &Machine, ptr: DevicePtr, index: i32) -> i32 {
    machine.read(ptr, usize::try_from(index).expect("an index"))
}

pub(super) fn flash_attn(machine: &Machine, p: &PlanParams) -> Planned {
    let (mut items, mut wanted) = (Vec::new(), 0);
    for position in 0..p.num_reqs {
        let row = at(machine, p.row_order, position);
        let first_token = at(machine, p.query_start_loc, row);
        let query_len = at(machine, p.query_start_loc, row + 1).min(p.num_tokens) - first_token;
        let kv_len = at(machine, p.seq_lens, row).max(0);
        let packed = query_len * p.heads_per_kv_head;
        if query_len <= 0 || packed < p.min_packed_rows || packed > p.max_packed_rows {
            continue;
        }
        let pages = (kv_len + p.block_size - 1) / p.block_size;
        let splits = at(machine, p.num_splits, row).clamp(1, p.max_num_splits);
        let pages_per_split = ((pages + splits - 1) / splits).max(1);
        let splits = ((pages + pages_per_split - 1) / pages_per_split).max(1);
        let tiles = (packed + p.tile_rows - 1) / p.tile_rows;
        for tile in (0..tiles).rev() {
            for split in 0..splits {
                let keys = i64::from(pages_per_split) * i64::from(p.block_size);
                let index = wanted as i32;
                wanted += 1;
                let item = WorkItem {
                    row,
                    first_token,
                    query_len,
                    kv_len,
                    row_begin: tile * p.tile_rows,
                    row_end: ((tile + 1) * p.tile_rows).min(packed),
                    key_begin: (i64::from(split) * keys) as i32,
                    key_end: (i64::from(split + 1) * keys).min(kv_len.into()) as i32,
                    causal: i32::from(at(machine, p.causal, row) != 0),
                    slot: index,
                    first_slot: index - split,
                    num_slots: splits,
                };
                if index < p.max_work_items {
                    items.push(item);
                }
            }
        }
    }
    let covered = if p.num_reqs > 0 {
        at(machine, p.query_start_loc, p.num_reqs).min(p.num_tokens)
    } else {
        0
    };
    Planned {
        items,
        wanted,
        tail: if p.with_tail != 0 {
            (covered, p.num_tokens)
        } else {
            (0, 0)
        },
    }
}

pub(super) fn flashinfer(machine: &Machine, p: &WorkListParams) -> Planned {
    let sizes: WorkListSizes = machine.read(p.sizes, 0);
    let sound = sizes.cta_tile_q > 0 && sizes.cta_tile_q <= p.tile_rows && sizes.kv_chunk_size > 0;
    assert!(sound, "{sizes:?} for {p:?}");
    assert!(
        sizes.num_reqs <= p.max_reqs && sizes.num_tiles <= p.max_tiles,
        "{sizes:?} for {p:?}"
    );
    let num_items = sizes.num_items.min(p.max_work_items);
    let query = |request: i32| {
        (
            at(machine, p.qo_indptr, request),
            at(machine, p.qo_indptr, request + 1),
        )
    };
    let mut tile_begin = vec![0];
    for request in 0..sizes.num_reqs {
        let (begin, end) = query(request);
        let tiles = ((end - begin) * p.heads_per_kv_head + sizes.cta_tile_q - 1) / sizes.cta_tile_q;
        tile_begin.push(tile_begin[request as usize] + tiles);
    }
    let of = |item: i32| {
        let request = at(machine, p.request_indices, item);
        let tile = at(machine, p.qo_tile_indices, item);
        (
            request,
            tile,
            at(machine, p.kv_tile_indices, item),
            tile_begin[request as usize] + tile,
        )
    };
    let mut first_chunk = vec![i32::MAX; sizes.num_tiles as usize];
    for item in 0..num_items {
        let (_, _, chunk, tile) = of(item);
        let first = &mut first_chunk[tile as usize];
        *first = chunk.min(*first);
    }
    let items = (0..num_items).map(|index| {
        let (request, q, chunk, tile) = of(index);
        let (begin, end) = (
            at(machine, p.merge_indptr, tile),
            at(machine, p.merge_indptr, tile + 1),
        );
        let slot = begin + chunk - first_chunk[tile as usize];
        assert!(
            slot < end && end <= p.max_work_items,
            "item {index} of {p:?}"
        );
        let (query_begin, query_end) = query(request);
        let packed = (query_end - query_begin) * p.heads_per_kv_head;
        let kv_len = at(machine, p.seq_lens, request).max(0);
        let key = i64::from(chunk) * i64::from(sizes.kv_chunk_size);
        WorkItem {
            row: at(machine, p.paged_kv_indptr, request),
            first_token: sizes.first_token + query_begin,
            query_len: query_end - query_begin,
            kv_len,
            row_begin: q * sizes.cta_tile_q,
            row_end: ((q + 1) * sizes.cta_tile_q).min(packed),
            key_begin: key.min(kv_len.into()) as i32,
            key_end: (key + i64::from(sizes.kv_chunk_size)).min(kv_len.into()) as i32,
            causal: sizes.causal,
            slot,
            first_slot: begin,
            num_slots: end - begin,
        }
    });
    Planned {
        items: items.collect(),
        wanted: sizes.num_items as usize,
        tail: (sizes.tail_begin.max(0), sizes.tail_end.min(p.max_tokens)),
    }
}
