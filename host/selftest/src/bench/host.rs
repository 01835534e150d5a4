//! What a step of 256 decodes costs around the kernels: build and verification on the host, packing, the copy, the unpack launch,
//! and the plan of work items, once for all layers. It must never know attention's own times.

use timetable_device_cuda::upload::{StepLimits, StepMarks};
use timetable_types::Family;

use super::{
    BenchError, Row,
    attention::{MAX_NUM_SPLITS, plan_us, shape, step},
    timing::{host_us, median},
};
use crate::{
    builders::{self, Builder},
    gpu::Gpu,
    pipeline::{Layer, Pipeline, StepError},
    random::Random,
};

/// Decodes of a step.
const DECODES: usize = 256;
/// Keys of each: with one more, every request begins a page.
const KEYS: usize = 1_024;
/// Steps of each figure.
const STEPS: usize = 60;

pub(super) fn run(
    gpu: &Gpu,
    random: &mut Random,
    shown: &mut dyn FnMut(Row),
) -> Result<(), BenchError> {
    let row = |kind, us| Row::new(kind, DECODES, KEYS, us);
    shown(
        row("plan", plan_us(gpu, random)?)
            .note("FLASH_ATTN's work items, on the device".to_owned()),
    );
    for (name, family) in [
        ("flash-attn", Family::FlashAttn),
        ("flashinfer", Family::Flashinfer),
    ] {
        let costs = measure(gpu, name, family)?;
        for (kind, us, what) in [
            ("build", costs.build, "in the sandbox, verified"),
            ("pack", costs.pack, "prepared, packed, begun, on the host"),
            ("copy", costs.copy, "the one copy of the step"),
            ("unpack", costs.unpack, "the one launch that unpacks it"),
        ] {
            shown(row(kind, us).note(format!("{name}: {what}")));
        }
    }
    Ok(())
}

/// Medians, in microseconds.
struct Costs {
    build: f64,
    pack: f64,
    copy: f64,
    unpack: f64,
}

fn measure(gpu: &Gpu, name: &str, family: Family) -> Result<Costs, BenchError> {
    let shapes = [shape(DECODES, 1, KEYS), shape(DECODES, 1, KEYS + 1)];
    let steps = shapes.each_ref().map(step);
    let num_blocks = steps[0].1.max(steps[1].1);
    let limits = StepLimits {
        max_num_reqs: DECODES,
        max_num_tokens: DECODES,
        table_width: steps[1].0.tensors.block_table_width,
        max_num_logits: DECODES,
    };
    // Both steps have the wider table.
    let steps = steps.map(|(mut step, _)| {
        let width = step.tensors.block_table_width;
        let mut table = Vec::with_capacity(DECODES * limits.table_width);
        for row in step.tensors.block_table.chunks(width) {
            table.extend_from_slice(row);
            table.resize(table.len() + limits.table_width - width, 0);
        }
        step.tensors.block_table = table;
        step.tensors.block_table_width = limits.table_width;
        step.cam.block_table_width = limits.table_width as u32;
        step
    });
    let config = shapes[1].config(
        MAX_NUM_SPLITS,
        gpu.device.capability(),
        gpu.device.num_multiprocessors(),
    );
    let sandbox = builders::sandbox().map_err(BenchError::Builder)?;
    let mut builder = Builder::new(&sandbox, name, config.clone()).map_err(BenchError::Builder)?;
    let build = host_us(STEPS, || {
        builder
            .build(&steps[1], num_blocks, None)
            .map(drop)
            .map_err(BenchError::Builder)
    })?;
    let mut metadata = Vec::new();
    for step in &steps {
        let made = builder.build(step, num_blocks, None);
        metadata.push(made.map_err(BenchError::Builder)?);
    }
    let ones = vec![1.0; shapes[0].kv_heads];
    let layer = Layer {
        family,
        config: &config,
        shape: &shapes[1],
        num_blocks,
        limits,
        scales: (&ones, &ones),
    };
    let mut pipeline = Pipeline::new(gpu, &layer, |_| Vec::new())?;
    pipeline.marks = Some(StepMarks::new(&gpu.device)?);
    let (mut copies, mut unpacks) = (Vec::new(), Vec::new());
    let mut turn = 0;
    let pack = host_us(STEPS, || -> Result<(), StepError> {
        turn = 1 - turn;
        let step = &steps[turn];
        let inputs = step.tensors.inputs();
        let verified = builder.context(step, &inputs, num_blocks, None);
        pipeline
            .begin(gpu, &gpu.stream, &metadata[turn], &verified, step, None)
            .map(drop)
    })?;
    for _ in 0..STEPS {
        turn = 1 - turn;
        let step = &steps[turn];
        let inputs = step.tensors.inputs();
        let verified = builder.context(step, &inputs, num_blocks, None);
        pipeline.begin(gpu, &gpu.stream, &metadata[turn], &verified, step, None)?;
        gpu.stream.synchronize()?;
        if let Some(marks) = &pipeline.marks {
            let (copy, unpack) = marks.elapsed_us()?;
            copies.push(f64::from(copy));
            unpacks.push(f64::from(unpack));
        }
    }
    Ok(Costs {
        build,
        pack,
        copy: median(copies),
        unpack: median(unpacks),
    })
}
