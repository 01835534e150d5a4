//! The attention kernels' figures: decodes with the splits that the component chooses, causal prefills, and the plan that makes
//! their work items once a step. It must never know the peer.

use timetable_attention::batch::{GroupStep, StepTensors};
use timetable_device_cuda::{driver::DevicePtr, kernels::AttentionKind};
use timetable_types::Metadata;

use super::{
    BenchError, Row,
    cases::{DECODE, HEAD_SIZE, HEADS, PAGE, PREFILL, decode_bytes, prefill_flop},
    timing::{graph_us, sets_for},
};
use crate::{
    batch::Shape,
    builders::{self, Builder},
    gpu::Gpu,
    paged::{Cut, OnDevice, WorkList, kernel},
    random::Random,
};

/// The engine's default.
pub(super) const MAX_NUM_SPLITS: u32 = 32;

pub(super) fn shape(batch: usize, query: usize, keys: usize) -> Shape {
    Shape {
        head_size: HEAD_SIZE,
        kv_heads: HEADS.1,
        group: HEADS.0 / HEADS.1,
        page: PAGE,
        query_lens: vec![query; batch],
        kv_lens: vec![keys; batch],
        ..Shape::new()
    }
}

/// The splits that the flash-attn component chooses for a batch on this device.
fn splits(gpu: &Gpu, shape: &Shape) -> Result<Vec<i32>, BenchError> {
    let config = shape.config(
        MAX_NUM_SPLITS,
        gpu.device.capability(),
        gpu.device.num_multiprocessors(),
    );
    let sandbox = builders::sandbox().map_err(BenchError::Builder)?;
    let mut builder = Builder::new(&sandbox, "flash-attn", config).map_err(BenchError::Builder)?;
    let (step, num_blocks) = step(shape);
    match builder
        .build(&step, num_blocks, None)
        .map_err(BenchError::Builder)?
    {
        Metadata::FlashAttn(metadata) => {
            let mut splits = metadata.schedule.num_splits;
            // Empty: every row is 1.
            splits.resize(shape.query_lens.len(), 1);
            Ok(splits)
        }
        other => Err(BenchError::Builder(format!(
            "the flash-attn component answered with metadata of {}",
            other.family().interface()
        ))),
    }
}

/// The shape as a step of the host's, its pages one after the other.
pub(super) fn step(shape: &Shape) -> (GroupStep, usize) {
    let mut tensors = StepTensors {
        query_start_loc: vec![0],
        block_table_width: shape
            .kv_lens
            .iter()
            .map(|len| len.div_ceil(shape.page))
            .max()
            .unwrap_or(1),
        ..StepTensors::default()
    };
    let mut block = 1;
    for (&q_len, &kv_len) in shape.query_lens.iter().zip(&shape.kv_lens) {
        let first = block;
        for column in 0..tensors.block_table_width {
            let used = column < kv_len.div_ceil(shape.page);
            tensors.block_table.push(if used { block } else { 0 });
            block += i32::from(used);
        }
        for position in kv_len - q_len..kv_len {
            let page = i64::from(first) + (position / shape.page) as i64;
            tensors.positions.push(position as i64);
            tensors
                .slot_mapping
                .push(page * shape.page as i64 + (position % shape.page) as i64);
        }
        tensors.query_start_loc.push(tensors.positions.len() as i32);
        tensors.seq_lens.push(kv_len as i32);
    }
    let (lens, tokens) = (tensors.seq_lens.clone(), tensors.positions.len() as u32);
    let longest = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0) as u32;
    let (query, keys) = (longest(&shape.query_lens), longest(&shape.kv_lens));
    let step = GroupStep::new(tensors, lens, tokens, query, keys);
    (step, block as usize)
}

/// Every decode of the table.
pub(super) fn decode(
    gpu: &Gpu,
    random: &mut Random,
    shown: &mut dyn FnMut(Row),
) -> Result<(), BenchError> {
    for (batch, context) in DECODE {
        let shape = shape(batch, 1, context);
        let splits = splits(gpu, &shape)?;
        let us = run(gpu, random, &shape, AttentionKind::Decode, &splits, 60)?;
        let bytes = decode_bytes(batch, context);
        shown(
            Row::new("decode", batch, context, us)
                .bandwidth(bytes)
                .note(format!("{} splits", splits.iter().max().unwrap_or(&1)))
                .peer_ratio_at_least(0.95),
        );
    }
    Ok(())
}

/// Every prefill of the table.
pub(super) fn prefill(
    gpu: &Gpu,
    random: &mut Random,
    shown: &mut dyn FnMut(Row),
) -> Result<(), BenchError> {
    for (batch, tokens) in PREFILL {
        let shape = shape(batch, tokens, tokens);
        let splits = splits(gpu, &shape)?;
        let us = run(gpu, random, &shape, AttentionKind::Prefill, &splits, 15)?;
        let row = Row::new("prefill", batch, tokens, us)
            .arithmetic(prefill_flop(batch, tokens))
            .note(format!("{} splits", splits.iter().max().unwrap_or(&1)));
        shown(if batch == 1 {
            row.achieved_at_least(300.0)
        } else {
            row
        });
    }
    Ok(())
}

/// Median microseconds of the attention launch, planned before.
fn run(
    gpu: &Gpu,
    random: &mut Random,
    shape: &Shape,
    kind: AttentionKind,
    splits: &[i32],
    iterations: usize,
) -> Result<f64, BenchError> {
    let kernel = kernel(gpu, shape, kind)?;
    let keys: usize = shape.kv_lens.iter().sum();
    let sets = sets_for(keys * shape.kv_heads * shape.head_size * 4);
    let rows: usize = shape.query_lens.iter().sum::<usize>() * shape.heads();
    let output = gpu.poisoned(shape.dtype, rows * shape.head_size)?;
    let mut inputs = Vec::new();
    for _ in 0..sets {
        let on = OnDevice::for_timing(gpu, shape, random)?;
        let cut = Cut {
            tile_rows: kernel.tile_rows() as usize,
            splits: Some(splits),
            with_tail: false,
            ..Cut::default()
        };
        let (list, plan) = WorkList::flash_attn(gpu, &on, cut)?;
        // SAFETY: planned for this batch, whose buffers live until the replays have ended.
        unsafe { gpu.kernels.plan_flash_attn(&gpu.stream, &plan) }?;
        inputs.push((on, list));
    }
    gpu.stream.synchronize()?;
    let us = graph_us(&gpu.stream, sets, iterations, |stream, set| {
        let (on, list) = &inputs[set];
        // SAFETY: as above.
        unsafe {
            list.attend(
                gpu,
                stream,
                on,
                kernel,
                output.buffer.ptr(),
                DevicePtr::NULL,
            )
        }
    })?;
    Ok(us)
}

/// The plan of 256 decodes, once a step.
pub(super) fn plan_us(gpu: &Gpu, random: &mut Random) -> Result<f64, BenchError> {
    let shape = shape(256, 1, 1_024);
    let on = OnDevice::for_timing(gpu, &shape, random)?;
    let tile_rows = kernel(gpu, &shape, AttentionKind::Decode)?.tile_rows() as usize;
    let splits = vec![2; 256];
    let cut = Cut {
        tile_rows,
        splits: Some(&splits),
        ..Cut::default()
    };
    let (_list, plan) = WorkList::flash_attn(gpu, &on, cut)?;
    let us = graph_us(&gpu.stream, 1, 60, |stream, _| {
        // SAFETY: planned for this batch, whose buffers live until the replays have ended.
        unsafe { gpu.kernels.plan_flash_attn(stream, &plan) }
    })?;
    Ok(us)
}
