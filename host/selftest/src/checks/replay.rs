//! What a captured graph and a batch's neighbours must not change: a graph captured when every length is 1 gives at full
//! length what fresh launches give, and a request alone gives the bits that it gives in a batch.

use timetable_device_cuda::{
    CudaError,
    driver::{CaptureMode, Stream},
    kernels::AttentionKind,
};
use timetable_types::Dtype;

use super::Context;
use crate::{
    batch::{Batch, Shape},
    compare::row_error,
    element,
    paged::{Cut, OnDevice, WorkList, kernel},
    report::Group,
};

/// Splits that the captured launch promises; one request asks for more.
const PROMISE: usize = 16;

/// Captured at length 1, replayed at 100,000, and again with half of the requests gone.
pub(super) fn grown(context: &mut Context<'_>) -> Result<Group, CudaError> {
    let mut group = Group::with_bar(
        "attention, captured at length 1",
        element::bar(Dtype::Bfloat16),
    );
    let longest = if context.quick { 400 } else { 100_000 };
    let shape = Shape {
        query_lens: vec![1; 4],
        kv_lens: vec![longest, longest / 3 + 1, 17, longest / 7 + 1],
        ..Shape::new()
    };
    let gpu = context.gpu;
    let batch = Batch::new(&shape, &mut context.random);
    let mut on = OnDevice::new(gpu, &batch)?;
    let splits = [16, 3, 40, 5];
    let kernel = kernel(gpu, &shape, AttentionKind::Decode)?;
    let cut = Cut {
        tile_rows: kernel.tile_rows() as usize,
        splits: Some(&splits),
        promise: Some(PROMISE),
        ..Cut::default()
    };
    let (list, mut plan) = WorkList::flash_attn(gpu, &on, cut)?;
    plan.max_num_splits = PROMISE as i32;
    let rows = batch.num_tokens() * shape.heads();
    let mut output = gpu.poisoned(shape.dtype, rows * shape.head_size)?;
    let lse = gpu.poisoned(Dtype::Float32, rows)?;
    let (to, lse_to) = (output.buffer.ptr(), lse.buffer.ptr());
    let step = |stream: &Stream, on: &OnDevice| -> Result<(), CudaError> {
        // SAFETY: planned and computed for this batch; all buffers live until the graph has been dropped.
        unsafe {
            gpu.kernels.plan_flash_attn(stream, &plan)?;
            list.attend(gpu, stream, on, kernel, to, lse_to)
        }
    };
    on.seq_lens.write(0, &[1i32; 4])?;
    step(&gpu.stream, &on)?;
    gpu.stream.synchronize()?;
    let graph = gpu
        .stream
        .capture(CaptureMode::ThreadLocal, |stream| step(stream, &on))?
        .instantiate()?;
    let full = &batch.step.tensors;
    let mut answer = batch.answer();
    for half in [false, true] {
        let (mut lens, mut starts) = (full.seq_lens.clone(), full.query_start_loc.clone());
        if half {
            lens[2..].fill(0);
            starts[3..].fill(2);
            let row = shape.heads() * shape.head_size;
            answer.output[2 * row..].fill(0.0);
        }
        on.seq_lens.write(0, &lens)?;
        on.query_start_loc.write(0, &starts)?;
        output.poison()?;
        // SAFETY: as above.
        unsafe { gpu.stream.launch_graph(&graph) }?;
        gpu.stream.synchronize()?;
        let replayed = output.bytes()?.0;
        let (got, guarded) = output.values()?;
        let what = || format!("replayed at {lens:?}");
        group.error(row_error(&got, &answer.output, shape.head_size), what);
        group.check(guarded, || format!("{}: wrote beyond the batch", what()));
        output.poison()?;
        step(&gpu.stream, &on)?;
        gpu.stream.synchronize()?;
        group.equal(&replayed, &output.bytes()?.0, || {
            format!("{}, against fresh launches", what())
        });
    }
    Ok(group)
}

/// A request alone, with the same splits, by the decode and the prefill kernel.
pub(super) fn alone(context: &mut Context<'_>) -> Result<Group, CudaError> {
    let mut group = Group::new("attention, a request alone");
    for (kind, q_len) in [(AttentionKind::Decode, 1), (AttentionKind::Prefill, 33)] {
        let longest = if context.quick { 200 } else { 3_000 };
        let count = 5;
        let mut draw = |low, high| -> Vec<usize> {
            (0..count)
                .map(|_| context.random.count(low, high))
                .collect()
        };
        let (kv_lens, splits) = (draw(40, longest), draw(1, 6));
        let shape = Shape {
            query_lens: vec![q_len; count],
            kv_lens,
            ..Shape::new()
        };
        let splits: Vec<i32> = splits.iter().map(|&splits| splits as i32).collect();
        let batch = Batch::new(&shape, &mut context.random);
        let gpu = context.gpu;
        let mut on = OnDevice::new(gpu, &batch)?;
        let kernel = kernel(gpu, &shape, kind)?;
        let row_bytes = shape.heads() * shape.head_size * element::bytes(shape.dtype);
        let run = |on: &OnDevice| -> Result<Vec<u8>, CudaError> {
            let rows = batch.num_tokens() * shape.heads();
            let output = gpu.poisoned(shape.dtype, rows * shape.head_size)?;
            let cut = Cut {
                tile_rows: kernel.tile_rows() as usize,
                splits: Some(&splits),
                with_tail: false,
                ..Cut::default()
            };
            let (list, plan) = WorkList::flash_attn(gpu, on, cut)?;
            let to = output.buffer.ptr();
            // SAFETY: planned and computed for this batch; all buffers live until the stream has been waited for.
            unsafe {
                gpu.kernels.plan_flash_attn(&gpu.stream, &plan)?;
                list.attend(gpu, &gpu.stream, on, kernel, to, Default::default())?;
            }
            gpu.stream.synchronize()?;
            Ok(output.bytes()?.0)
        };
        let together = run(&on)?;
        let chosen = context.random.count(0, count - 1);
        // The others ask nothing; the one keeps its tokens.
        let starts: Vec<i32> = (0..=count)
            .map(|row| ((chosen + usize::from(row > chosen)) * q_len) as i32)
            .collect();
        on.query_start_loc.write(0, &starts)?;
        let alone = run(&on)?;
        let own = chosen * q_len * row_bytes..(chosen + 1) * q_len * row_bytes;
        let what = || format!("{kind:?} kernel, request {chosen} of {}", shape.describe());
        group.equal(&alone[own.clone()], &together[own.clone()], what);
        let untouched = alone[..own.start]
            .iter()
            .chain(&alone[own.end..])
            .all(|&byte| byte == crate::gpu::POISON);
        group.check(untouched, || {
            format!("{}: wrote rows that ask nothing", what())
        });
    }
    Ok(group)
}
