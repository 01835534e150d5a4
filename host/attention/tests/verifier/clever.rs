//! Valid metadata that is not plain, as a good builder would make it: the ground that corruptions start from.

use timetable_attention::{
    plain_builder,
    types::{
        Family, Matrix, Metadata, Tensor,
        batch::ContextWorkspace,
        flash_attn::TileOrder,
        flash_mla::{DecodeSchedule, TileSchedule},
        flashinfer::{Decode, Plan, Prefill, WorkList},
    },
};

use crate::support::{Batch, Random};

/// FLASH_ATTN with random splits and a random tile order.
pub fn flash_attn(batch: &Batch, random: &mut Random) -> Metadata {
    let mut builder = plain_builder(Family::FlashAttn, &batch.config).expect("plain");
    let mut metadata = builder.build(&batch.step.cam, false).expect("built");
    if let Metadata::FlashAttn(record) = &mut metadata {
        let rows = batch.step.cam.num_reqs as usize;
        let most = i64::from(batch.config.max_num_splits);
        record.schedule.max_num_splits = random.between(1, most) as u32;
        let max = i64::from(record.schedule.max_num_splits);
        record.schedule.num_splits = (0..rows).map(|_| random.between(1, max) as i32).collect();
        let mut order: Vec<i32> = (0..rows as i32).collect();
        for place in (1..rows).rev() {
            order.swap(place, random.between(0, place as i64) as usize);
        }
        record.schedule.tile_order = TileOrder::Rows(order);
    }
    metadata
}

/// FLASHINFER with chunks as short as the splits allow, items shuffled.
pub fn flashinfer(batch: &Batch, random: &mut Random) -> Metadata {
    let mut builder = plain_builder(Family::Flashinfer, &batch.config).expect("plain");
    let mut metadata = builder.build(&batch.step.cam, false).expect("built");
    if let Metadata::Flashinfer(record) = &mut metadata {
        let starts = &batch.step.cam.query_start_loc_cpu;
        let decodes = record.num_decodes as usize;
        let most = batch.config.max_num_splits;
        if let Some(Decode::Wrapper(plan)) = &mut record.decode {
            split(plan, &starts[..=decodes], most, random);
        }
        if let Some(Prefill::Wrapper(plan)) = &mut record.prefill {
            split(plan, &starts[decodes..], most, random);
        }
    }
    metadata
}

/// TRITON_ATTN with a random threshold, segments and scratch.
pub fn triton_attn(batch: &Batch, random: &mut Random) -> Metadata {
    let mut builder = plain_builder(Family::TritonAttn, &batch.config).expect("plain");
    let mut metadata = builder.build(&batch.step.cam, false).expect("built");
    if let Metadata::TritonAttn(record) = &mut metadata {
        record.seq_threshold_3d = random.pick(&[0, 3, 64, 1000]);
        record.num_par_softmax_segments = random.pick(&[1, 2, 16, 64]);
        let rows = batch.step.cam.num_actual_tokens + random.between(0, 5) as u32;
        for scratch in [
            &mut record.softmax_segm_output,
            &mut record.softmax_segm_max,
            &mut record.softmax_segm_expsum,
        ] {
            scratch.shape[0] = rows.min(512);
            scratch.shape[2] = record.num_par_softmax_segments;
        }
    }
    metadata
}

/// The MLA backends' with chunks of another workspace, and on one rank with the decodes' pages dealt out at random.
pub fn flash_mla(batch: &Batch, random: &mut Random) -> Metadata {
    let mut builder = plain_builder(Family::FlashMla, &batch.config).expect("plain");
    let mut metadata = builder.build(&batch.step.cam, false).expect("built");
    let Metadata::FlashMla(record) = &mut metadata else {
        return metadata;
    };
    let (config, common) = (&batch.config, &batch.step.cam);
    if let Some(prefill) = &mut record.prefill {
        let first = record.num_decodes as usize;
        let starts = &common.query_start_loc_cpu[first..];
        let rebased: Vec<i32> = starts.iter().map(|start| start - starts[0]).collect();
        let lens = &common.seq_lens_cpu_upper_bound[first..];
        let contexts = lens.iter().zip(rebased.windows(2));
        let contexts = contexts
            .map(|(len, pair)| len - (pair[1] - pair[0]))
            .collect();
        let workspace = ContextWorkspace::new(config, random.pick(&[1, 100, 500, 5_000]));
        let workspace = workspace.expect("a workspace");
        prefill.chunked_context = workspace
            .chunked_context(contexts, &rebased)
            .expect("a plan");
    }
    let (Some(decode), 1) = (&mut record.decode, config.parallel.dcp_world_size) else {
        return metadata;
    };
    let page = config.kv_cache_spec.block_size;
    let rows = record.num_decodes as usize;
    let pages = |row: usize| (common.seq_lens_cpu_upper_bound[row].max(0) as u32).div_ceil(page);
    // A padded row has no keys, and is passed over.
    let next = |row: usize| (row..rows).find(|&row| pages(row) > 0).unwrap_or(rows);
    let (mut parts, mut splits, mut from) = (Vec::new(), vec![0], [next(0) as i32, 0, 0]);
    let mut most = 1;
    for row in 0..rows {
        let (mut page, mut split) = (0, 0);
        while page < pages(row) {
            page += random.between(1, 20).min(i64::from(pages(row) - page)) as u32;
            split += 1;
            let ends = page == pages(row);
            // Some parts go on with the next request.
            if !ends || next(row + 1) == rows || random.chance(2) {
                parts.extend([from[0], from[1], row as i32, page as i32, from[2], 0, 0, 0]);
                from = match ends {
                    true => [next(row + 1) as i32, 0, 0],
                    false => [row as i32, page as i32, split],
                };
            }
        }
        most = most.max(split as u32);
        splits.push(splits[row] + split);
    }
    if parts.is_empty() {
        parts.extend([rows as i32, 0, rows as i32, 0, 0, 0, 0, 0]);
    }
    decode.max_num_splits = most;
    decode.schedule = DecodeSchedule::Tiles(TileSchedule {
        tile_scheduler_metadata: Tensor::Matrix(Matrix {
            rows: parts.len() as u32 / 8,
            columns: 8,
            values: parts,
        }),
        num_splits: Tensor::Values(splits),
    });
    metadata
}

/// Replaces the plan's work by one with chunks.
pub fn split(plan: &mut Plan, starts: &[i32], most: u32, random: &mut Random) {
    let longest = plan.seq_lens.iter().copied().max().unwrap_or(0).max(1) as u32;
    let pages = longest.div_ceil(most).div_ceil(plan.page_size).max(1);
    plan.work = work(plan, starts, pages * plan.page_size, random);
}

fn work(plan: &Plan, starts: &[i32], chunk: u32, random: &mut Random) -> WorkList {
    let group = plan.num_qo_heads / plan.num_kv_heads;
    let tile = random.pick(&[16, 64, 128]);
    let mut items = Vec::new();
    let mut merge_indptr = vec![0];
    for (row, &len) in plan.seq_lens.iter().enumerate() {
        let query = (starts[row + 1] - starts[row]) as u32;
        for index in 0..(query * group).div_ceil(tile) {
            // The last token of the tile; keys after it may be left out.
            let last = (((index + 1) * tile - 1) / group).min(query - 1) as i32;
            let causal = plan.causal && plan.dcp_world_size == 1;
            let end = if causal {
                len - query as i32 + last + 1
            } else {
                len
            };
            let chunks = (end.max(0) as u32).div_ceil(chunk).max(1);
            for part in 0..chunks {
                items.push((row as i32, index as i32, part as i32));
            }
            merge_indptr.push(items.len() as i32);
        }
    }
    let split_kv = merge_indptr.windows(2).any(|pair| pair[1] - pair[0] > 1);
    for place in (1..items.len()).rev() {
        items.swap(place, random.between(0, place as i64) as usize);
    }
    let workers = (plan.work.worker_indptr.len() - 1).max(1);
    let worker_indptr = (0..=workers)
        .map(|worker| (worker * items.len() / workers) as i32)
        .collect();
    WorkList {
        kv_chunk_size: chunk,
        cta_tile_q: tile,
        request_indices: items.iter().map(|item| item.0).collect(),
        qo_tile_indices: items.iter().map(|item| item.1).collect(),
        kv_tile_indices: items.iter().map(|item| item.2).collect(),
        worker_indptr,
        merge_indptr,
        split_kv,
    }
}
