//! Random steps, schedules and work lists; and whether what became of them covers every key once.

use std::collections::HashMap;
use std::sync::Arc;

use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64;
use timetable_attention::batch::{GroupStep, PaddingValues, StepTensors, pad_step};
use timetable_attention::{Grant, StepInputs, VerifyContext};
use timetable_types::{
    BuilderConfig, Causal, Family, Metadata, PageSelection, Tensor,
    flash_attn::TileOrder,
    flashinfer::{Plan, WorkList},
};

use crate::attention::plan_on_host::{self, Planned};
use crate::attention::run::GroupLaunch;
use crate::attention::{AttentionIo, GroupConfig, GroupState, Workspace, WorkspaceSize, testing};
use crate::cache::{CacheDtype, CacheStrides, KvCache};
use crate::driver::DevicePtr;
use crate::kernels::Element;
use crate::ops::Rows;
use crate::upload::interpret::Machine;
use crate::upload::testing as batches;

pub(super) const BLOCK: i32 = 16;
pub(super) const WIDTH: usize = 40;
pub(super) const MAX_PARTIAL_BYTES: usize = 4 << 20;

/// Decodes first, then prefills, then padding.
pub(super) fn step(rng: &mut Pcg64, num_decodes: usize, num_prefills: usize) -> GroupStep {
    let (mut starts, mut lens) = (vec![0], Vec::new());
    for row in 0..num_decodes + num_prefills {
        let query = if row < num_decodes {
            1
        } else {
            rng.random_range(2..90)
        };
        starts.push(starts[row] + query);
        lens.push(
            query
                + if rng.random_bool(0.3) {
                    0
                } else {
                    rng.random_range(0..500)
                },
        );
    }
    let tokens = starts[lens.len()];
    // Blocks are shared now and then, as prefixes are.
    let table = (0..lens.len() * WIDTH)
        .map(|_| rng.random_range(1..900))
        .collect();
    let tensors = StepTensors {
        slot_mapping: (0..i64::from(tokens)).map(|token| 20_000 + token).collect(),
        positions: vec![0; tokens as usize],
        query_start_loc: starts,
        seq_lens: lens.clone(),
        block_table: table,
        block_table_width: WIDTH,
        ..StepTensors::default()
    };
    let mut common = batches::common(&tensors, tokens as u32);
    common.is_prefilling = vec![0; num_decodes + num_prefills];
    let step = GroupStep {
        cam: common,
        tensors,
    };
    let rows = (num_decodes + num_prefills) as u32;
    if rng.random_bool(0.5) && rows > 0 {
        let padded = pad_step(
            &step,
            tokens as u32 + rng.random_range(0..5),
            rows + rng.random_range(0..4),
            PaddingValues::default(),
        );
        return padded.expect("it is larger");
    }
    step
}

pub(super) fn context<'a>(
    config: &'a BuilderConfig,
    step: &'a GroupStep,
    inputs: &'a StepInputs<'a>,
) -> VerifyContext<'a> {
    VerifyContext {
        config,
        common: &step.cam,
        inputs,
        promise: None,
        grant: Grant::Subset,
        num_blocks: 4000,
    }
}

pub(super) fn config(rng: &mut Pcg64) -> BuilderConfig {
    let mut config = batches::config(BLOCK as u32, [8, 2, 12][rng.random_range(0..3)], 2, 64);
    config.scheduler.max_num_blocks_per_req = WIDTH as u32;
    if rng.random_bool(0.3) {
        config.kv_cache_spec.sliding_window = Some(rng.random_range(1..200));
    }
    config
}

/// A group whose workspace lies in the machine's free memory.
pub(super) fn group(
    config: &BuilderConfig,
    family: Family,
    element: Element,
    machine: &Machine,
) -> GroupState {
    let cache = if element == Element::F32 {
        CacheDtype::F32
    } else {
        CacheDtype::Bf16
    };
    let mut group = GroupConfig::new(family, config, element, cache, machine.ptrs.limits, 132)
        .expect("a good group");
    group.max_partial_bytes = MAX_PARTIAL_BYTES;
    let size = WorkspaceSize {
        max_work_items: [3000, 6000],
        ..WorkspaceSize::new(&group, [])
    };
    let workspace = Workspace::at(&group, size, machine.free);
    GroupState::new(group, machine.ptrs, Arc::new(workspace))
}

pub(super) fn machine() -> Machine {
    Machine::new(testing::group(Family::FlashAttn).limits, BLOCK as u32)
}

/// Loads the step's tensors, packs the group and unpacks it.
pub(super) fn unpack(machine: &mut Machine, step: &GroupStep, group: &GroupState) {
    let (tensors, ptrs) = (&step.tensors, machine.ptrs);
    machine.write(ptrs.query_start_loc, &tensors.query_start_loc);
    machine.write(ptrs.seq_lens, &tensors.seq_lens);
    machine.write(ptrs.block_table, &tensors.block_table);
    if let Some(causal) = &tensors.causal {
        machine.write(ptrs.causal, causal);
    }
    let (bytes, ops) = group.max_upload();
    machine.pack_and_run(
        bytes,
        ops,
        tensors.seq_lens.len(),
        step.cam.num_actual_tokens as usize,
        |packer| {
            group.pack(packer).expect("it fits its own bound");
        },
    );
}

pub(super) fn plan(
    machine: &Machine,
    launches: &GroupLaunch<'_>,
    family: Family,
) -> Vec<(usize, Planned)> {
    launches
        .lists()
        .map(|(index, list)| {
            let planned = match family {
                Family::Flashinfer => {
                    plan_on_host::flashinfer(machine, &launches.work_list_params(index, list))
                }
                _ => plan_on_host::flash_attn(machine, &launches.plan_params(index, list)),
            };
            (index, planned)
        })
        .collect()
}

pub(super) fn io() -> AttentionIo {
    let rows = Rows {
        ptr: DevicePtr::NULL,
        stride: 0,
    };
    AttentionIo {
        query: rows,
        output: rows,
        lse: DevicePtr::NULL,
    }
}

pub(super) fn cache(config: &GroupConfig) -> KvCache {
    KvCache {
        ptr: DevicePtr::NULL,
        num_blocks: 4000,
        num_kv_heads: config.num_kv_heads as usize,
        block_size: config.block_size as usize,
        head_size: config.head_size as usize,
        dtype: config.cache,
        strides: CacheStrides {
            layer: 0,
            block: 0,
            head: 0,
            token: 0,
        },
        k_scale: DevicePtr::NULL,
        v_scale: DevicePtr::NULL,
        scale_stride: 0,
    }
}

/// What row `row` of the step attends to: block ids of its keys.
pub(super) type Blocks = Vec<Vec<i32>>;

pub(super) fn all_blocks(step: &GroupStep) -> Blocks {
    let tensors = &step.tensors;
    let rows = tensors.seq_lens.iter().enumerate();
    rows.map(|(row, &len)| {
        let pages = (len + BLOCK - 1) / BLOCK;
        tensors.block_table[row * WIDTH..][..pages as usize].to_vec()
    })
    .collect()
}

/// Every packed row's keys once, through the right blocks; partial results whole and within the workspace; every token
/// covered or in the tail.
pub(super) fn check_items(
    machine: &Machine,
    state: &GroupState,
    launches: &GroupLaunch<'_>,
    step: &GroupStep,
    blocks: &Blocks,
    keys: &[i32],
) {
    let config = state.config();
    let starts = &step.tensors.query_start_loc;
    let group = config.heads_per_kv_head() as i32;
    let row_of_token: HashMap<i32, usize> = (0..keys.len())
        .map(|row| (starts[row], row))
        .filter(|&(start, row)| starts[row + 1] > start)
        .collect();
    // Keys seen by each packed row: (row of the step, packed row) -> intervals.
    let mut seen: HashMap<(usize, i32), Vec<(i32, i32)>> = HashMap::new();
    let mut tails = Vec::new();
    for (index, planned) in plan(machine, launches, config.family) {
        let list = launches.launch().lists[index].expect("it was planned");
        assert_eq!(
            planned.wanted,
            planned.items.len(),
            "items beyond the launch's {}",
            list.max_work_items
        );
        let params = launches.attention_params(index, &list, &cache(config), &io());
        let mut slots: HashMap<i32, Vec<i32>> = HashMap::new();
        for item in &planned.items {
            let row = row_of_token[&item.first_token];
            assert_eq!(item.query_len, starts[row + 1] - starts[row]);
            assert_eq!(item.kv_len, keys[row]);
            assert!(
                item.row_end > item.row_begin
                    && item.row_end - item.row_begin <= list.tile_rows as i32
            );
            assert_eq!(item.key_begin % BLOCK, 0);
            for page in item.key_begin / BLOCK..(item.key_end + BLOCK - 1) / BLOCK {
                let at = i64::from(item.row) * params.block_table_stride + i64::from(page);
                assert_eq!(
                    machine.read::<i32>(params.block_table, at as usize),
                    blocks[row][page as usize]
                );
            }
            for packed in item.row_begin..item.row_end {
                seen.entry((row, packed))
                    .or_default()
                    .push((item.key_begin, item.key_end));
            }
            if item.num_slots > 1 {
                assert!((item.first_slot..item.first_slot + item.num_slots).contains(&item.slot));
                assert!(item.row_end - item.row_begin <= list.partial_rows as i32);
                let end = i64::from(item.slot + 1)
                    * i64::from(config.num_kv_heads)
                    * i64::from(list.partial_rows);
                assert!(end <= state.workspace().size().partial_rows as i64);
                slots.entry(item.first_slot).or_default().push(item.slot);
            }
        }
        for (first, mut slots) in slots {
            slots.sort_unstable();
            let last = first + slots.len() as i32;
            assert_eq!(slots, (first..last).collect::<Vec<_>>());
        }
        tails.push(planned.tail);
    }
    let covered = starts[keys.len()];
    let tokens = step.cam.num_actual_tokens as i32;
    assert!(
        covered == tokens || tails.contains(&(covered, tokens)),
        "{tails:?} of [{covered}, {tokens})"
    );
    assert!(
        tails
            .iter()
            .all(|&(begin, end)| begin >= end || (begin, end) == (covered, tokens))
    );
    for row in 0..keys.len() {
        let (query, len) = (starts[row + 1] - starts[row], keys[row]);
        let causal = is_causal(step, row);
        for packed in 0..query * group {
            let position = len - query + packed / group;
            let high = if causal { (position + 1).min(len) } else { len };
            let low = config
                .sliding_window
                .map_or(0, |window| (position + 1 - window as i32).max(0));
            let mut intervals = seen.remove(&(row, packed)).unwrap_or_default();
            intervals.sort_unstable();
            // No key twice, and those that the row sees without a gap.
            let mut at = intervals.first().map_or(i32::MAX, |first| first.0);
            assert!(
                at <= low,
                "row {row}, packed row {packed} sees keys from {at}, not {low}"
            );
            for (begin, end) in intervals {
                assert_eq!(
                    begin.min(len),
                    at.min(len),
                    "row {row}, packed row {packed}"
                );
                at = end;
            }
            assert!(
                at >= high,
                "row {row}, packed row {packed} sees keys up to {at}, not {high}"
            );
        }
    }
    assert!(seen.is_empty(), "packed rows that do not exist: {seen:?}");
}

pub(super) fn is_causal(step: &GroupStep, row: usize) -> bool {
    match &step.cam.causal {
        Causal::All(causal) => *causal,
        Causal::PerRequest => step.tensors.causal.as_ref().expect("flags")[row] != 0,
    }
}

pub(super) fn random_schedule(rng: &mut Pcg64, metadata: &mut Metadata, rows: usize) {
    let Metadata::FlashAttn(metadata) = metadata else {
        panic!("not FLASH_ATTN's");
    };
    let schedule = &mut metadata.schedule;
    if rng.random_bool(0.7) {
        schedule.num_splits = (0..rows).map(|_| rng.random_range(1..7)).collect();
        schedule.max_num_splits = schedule.num_splits.iter().copied().max().unwrap_or(1) as u32;
    }
    if rng.random_bool(0.5) {
        let mut order: Vec<i32> = (0..rows as i32).collect();
        order.shuffle(rng);
        schedule.tile_order = TileOrder::Rows(order);
    }
}

/// Another work list over the same keys: other tiles, other chunks, another order.
pub(super) fn random_work(rng: &mut Pcg64, plan: &mut Plan, starts: &[i32], tiles: &[u32]) {
    let tile = tiles[rng.random_range(0..tiles.len())];
    let chunk = BLOCK as u32 * [1, 3, 8, 100][rng.random_range(0..4)];
    let group = plan.num_qo_heads / plan.num_kv_heads;
    let (mut items, mut merge_indptr, mut split_kv) = (Vec::new(), vec![0], false);
    for (row, pair) in starts.windows(2).enumerate() {
        let packed = (pair[1] - pair[0]) as u32 * group;
        for q in 0..packed.div_ceil(tile) {
            let chunks = (plan.seq_lens[row] as u32).div_ceil(chunk).max(1);
            let chunks = if chunks > 32 { 1 } else { chunks };
            merge_indptr.push(merge_indptr[merge_indptr.len() - 1] + chunks as i32);
            split_kv |= chunks > 1;
            items.extend((0..chunks).map(|k| (row as i32, q as i32, k as i32)));
        }
    }
    items.shuffle(rng);
    let workers = rng.random_range(1..5);
    plan.work = WorkList {
        kv_chunk_size: chunk,
        cta_tile_q: tile,
        request_indices: items.iter().map(|item| item.0).collect(),
        qo_tile_indices: items.iter().map(|item| item.1).collect(),
        kv_tile_indices: items.iter().map(|item| item.2).collect(),
        worker_indptr: (0..=workers)
            .map(|worker| (worker * items.len() / workers) as i32)
            .collect(),
        merge_indptr,
        split_kv,
    };
}

/// Leaves out some pages of each row before those that the step writes.
pub(super) fn select_pages(
    rng: &mut Pcg64,
    plan: &mut Plan,
    first_row: usize,
    step: &GroupStep,
    blocks: &mut Blocks,
    keys: &mut [i32],
) {
    let Tensor::GatherPages(rows) = plan.paged_kv_indices.clone() else {
        panic!("the plain builder gathers");
    };
    let starts = &step.tensors.query_start_loc;
    let (mut columns, mut indptr) = (Vec::new(), vec![0]);
    for (index, len) in plan.seq_lens.iter_mut().enumerate() {
        let row = first_row + index;
        let pages = (*len + BLOCK - 1) / BLOCK;
        let own = (*len - (starts[row + 1] - starts[row])) / BLOCK;
        let chosen: Vec<i32> = (0..pages)
            .filter(|&page| page >= own.min(pages - 1) || rng.random_bool(0.6))
            .collect();
        blocks[row] = chosen
            .iter()
            .map(|&page| blocks[row][page as usize])
            .collect();
        if pages > 0 {
            *len -= (pages - chosen.len() as i32) * BLOCK;
        }
        keys[row] = *len;
        indptr.push(indptr[index] + chosen.len() as i32);
        columns.extend(chosen.iter().map(|&page| page as u32));
    }
    plan.paged_kv_indptr = indptr;
    plan.paged_kv_indices = Tensor::SelectPages(PageSelection { rows, columns });
}
