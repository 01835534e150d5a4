//! Whole steps of one layer: metadata from the components, verified, packed, copied, unpacked, planned, scattered, computed; in
//! every element type against f64. Then what must change nothing: a graph captured at length 1 and replayed at 100,000, padded
//! rows, poison in every buffer beyond the step, a stream that is behind while the next step is packed.

use timetable_attention::batch::{GroupStep, PaddingValues, pad_step};
use timetable_device_cuda::{
    CudaError,
    attention::{GroupConfig, Launch, Replay},
    driver::{CaptureMode, DeviceBuffer, GraphExec},
    upload::StepLimits,
};
use timetable_types::{
    BuilderConfig, CaptureShape, CudagraphConfig, CudagraphMode, Dtype, Family, LaunchPromise,
    Metadata,
};

use super::{CheckError, Context, soak::largest};
use crate::{
    batch::{Batch, Shape},
    builders::{self, Builder},
    compare::{lse_error, row_error},
    element,
    gpu::{Gpu, POISON},
    pipeline::{Layer, Pipeline, StepError},
    random::Random,
    report::Group,
};

const BUILDERS: [(&str, Family); 3] = [
    ("flash-attn", Family::FlashAttn),
    ("flash-attn-fixed-split", Family::FlashAttn),
    ("flashinfer", Family::Flashinfer),
];

/// Element types of queries and cache.
const TYPES: [(Dtype, Dtype); 5] = [
    (Dtype::Bfloat16, Dtype::Bfloat16),
    (Dtype::Float16, Dtype::Float16),
    (Dtype::Bfloat16, Dtype::Float8E4m3),
    (Dtype::Float16, Dtype::Float8E4m3),
    (Dtype::Float32, Dtype::Float32),
];

/// Rows that the graphs are captured for.
const ROWS: usize = 8;
/// A stream is this far behind.
const STALL_US: f64 = 50_000.0;
/// Bytes of one of the copies that hold a stream up.
const STALL_BYTES: usize = 256 << 20;

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let sandbox = builders::sandbox().map_err(CheckError::Sandbox)?;
    let mut groups = Vec::new();
    for (name, family) in BUILDERS {
        for types in TYPES {
            let (dtype, cache) = types;
            let mut group = Group::with_bar(
                format!(
                    "step {name} {}{}",
                    element::name(dtype),
                    if cache == dtype { "" } else { " over fp8" }
                ),
                element::bar(dtype),
            );
            let rounds = if context.quick { 1 } else { 6 };
            for round in 0..rounds {
                let shape = random_shape(context, types, round);
                let config = shape.config(
                    32,
                    context.gpu.device.capability(),
                    context.gpu.device.num_multiprocessors(),
                );
                let mut builder =
                    Builder::new(&sandbox, name, config).map_err(CheckError::Sandbox)?;
                whole(context, &mut group, &mut builder, family, &shape)?;
            }
            groups.push(group);
        }
        let mut group = Group::new(format!("step {name}, in a graph"));
        graph(context, &mut group, &sandbox, name, family)?;
        groups.push(group);
    }
    Ok(groups)
}

fn random_shape(context: &mut Context<'_>, types: (Dtype, Dtype), round: usize) -> Shape {
    let (longest, most) = if context.quick { (100, 24) } else { (600, 120) };
    let random = &mut context.random;
    let rows = random.count(1, 7);
    let mut shape = Shape {
        dtype: types.0,
        cache_dtype: types.1,
        head_size: [64, 96, 128, 256][round % 4],
        kv_heads: random.count(1, 3),
        group: *random.pick(&[1, 4, 7]),
        page: *random.pick(&[16, 32, 48]),
        nhd: random.one_in(2),
        window: (round % 3 == 1).then(|| random.count(8, longest)),
        soft_cap: (round % 3 == 2).then_some(30.0),
        ..Shape::new()
    };
    for _ in 0..rows {
        shape.query_lens.push(if random.one_in(2) {
            1
        } else {
            random.count(2, most)
        });
    }
    shape.query_lens.sort_unstable_by_key(|&q_len| q_len > 1);
    for index in 0..rows {
        let before = if random.one_in(3) {
            0
        } else {
            random.count(0, longest)
        };
        shape.kv_lens.push(shape.query_lens[index] + before);
    }
    shape
}

/// The batch's cache without this step's keys and values, and those as the layer brings them.
fn before_the_step(batch: &Batch) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    let shape = &batch.shape;
    let (size, content) = (shape.head_size, 2 * shape.head_size);
    let element_bytes = element::bytes(shape.cache_dtype);
    let mut cache = batch.cache.clone();
    let (mut key, mut value) = (Vec::new(), Vec::new());
    for (row, (&q_len, &kv_len)) in shape.query_lens.iter().zip(&shape.kv_lens).enumerate() {
        let blocks = batch.step.tensors.table().row(row);
        for position in kv_len - q_len..kv_len {
            for head in 0..shape.kv_heads {
                let block = blocks[position / shape.page] as usize;
                let at = shape.state_at(block, position % shape.page, head) * element_bytes;
                cache[at..at + content * element_bytes].fill(POISON);
                let from = (position * shape.kv_heads + head) * content;
                let state = &batch.states[row][from..from + content];
                key.extend_from_slice(&state[..size]);
                value.extend_from_slice(&state[size..]);
            }
        }
    }
    (cache, key, value)
}

/// One step, everything in it, against f64.
fn whole(
    context: &mut Context<'_>,
    group: &mut Group,
    builder: &mut Builder,
    family: Family,
    shape: &Shape,
) -> Result<(), CheckError> {
    let gpu = context.gpu;
    let batch = Batch::new(shape, &mut context.random);
    let what = || shape.describe();
    let metadata = match builder.build(&batch.step, batch.num_blocks, None) {
        Ok(metadata) => metadata,
        Err(refused) => {
            group.check(false, || format!("{}: {refused}", what()));
            return Ok(());
        }
    };
    let layer = Layer {
        family,
        config: builder.config(),
        shape,
        num_blocks: batch.num_blocks,
        limits: StepLimits {
            max_num_reqs: batch.num_reqs(),
            max_num_tokens: batch.num_tokens(),
            table_width: batch.step.tensors.block_table_width,
            max_num_logits: batch.num_reqs(),
        },
        scales: (&batch.k_scale, &batch.v_scale),
    };
    let mut pipeline = Pipeline::new(gpu, &layer, |_| Vec::new())?;
    let (cache, key, value) = before_the_step(&batch);
    pipeline.load_cache(&cache)?;
    let dtype = shape.dtype;
    pipeline
        .query
        .write(0, &element::encode(dtype, &batch.query))?;
    pipeline.key.write(0, &element::encode(dtype, &key))?;
    pipeline.value.write(0, &element::encode(dtype, &value))?;
    pipeline.poison_buffers(&gpu.stream)?;
    let inputs = batch.step.tensors.inputs();
    let verified = builder.context(&batch.step, &inputs, batch.num_blocks, None);
    let begun = pipeline.begin(gpu, &gpu.stream, &metadata, &verified, &batch.step, None);
    if let Err(error) = begun {
        gpu.stream.synchronize()?;
        group.check(false, || format!("{}: {error}", what()));
        return Ok(());
    }
    // SAFETY: the step was begun above; the stream is waited for while everything lives.
    unsafe { pipeline.eager(gpu, &gpu.stream, true) }?;
    gpu.stream.synchronize()?;
    let answer = batch.answer();
    let got = element::decode(dtype, &pipeline.output.to_host::<u8>()?);
    group.error(row_error(&got, &answer.output, shape.head_size), what);
    let off = lse_error(&pipeline.lse.to_host::<f32>()?, &answer.lse);
    let bar = if dtype == Dtype::Float32 { 2e-6 } else { 2e-4 };
    group.check(off <= bar, || format!("{}: LSE off by {off:.1e}", what()));
    Ok(())
}

/// A step of decodes, its metadata, and a name for people.
struct Decode {
    step: GroupStep,
    metadata: Metadata,
    name: String,
}

/// What the graph checks work with.
struct Captured<'a> {
    gpu: &'a Gpu,
    pipeline: Pipeline,
    builder: Builder,
    promise: LaunchPromise,
    launch: Launch,
    num_blocks: usize,
    cache: Vec<u8>,
}

fn capture_shape() -> CaptureShape {
    CaptureShape {
        num_tokens: ROWS as u32,
        num_reqs: ROWS as u32,
        max_query_len: 1,
        uniform_query_len: Some(1),
    }
}

fn graph(
    context: &mut Context<'_>,
    group: &mut Group,
    sandbox: &timetable_sandbox::Sandbox,
    name: &str,
    family: Family,
) -> Result<(), CheckError> {
    let gpu = context.gpu;
    let longest = if context.quick { 600 } else { 100_000 };
    let lens: Vec<usize> = [1, 3, 7, 1_000, 2, 9, 11, 5]
        .iter()
        .map(|part| (longest / part).max(17))
        .collect();
    let shape = Shape {
        head_size: 64,
        query_lens: vec![1; ROWS],
        kv_lens: lens.clone(),
        ..Shape::new()
    };
    let batch = Batch::new(&shape, &mut context.random);
    let limits = StepLimits {
        max_num_reqs: ROWS,
        max_num_tokens: ROWS,
        table_width: batch.step.tensors.block_table_width,
        max_num_logits: ROWS,
    };
    let config = shape.config(
        32,
        gpu.device.capability(),
        gpu.device.num_multiprocessors(),
    );
    let config = BuilderConfig {
        cudagraph: CudagraphConfig {
            mode: CudagraphMode::FullAndPiecewise,
            capture_sizes: vec![ROWS as u32],
            max_capture_size: ROWS as u32,
        },
        ..largest(config, limits, longest)
    };
    let mut builder = Builder::new(sandbox, name, config).map_err(CheckError::Sandbox)?;
    let promise = builder
        .promise(&capture_shape())
        .map_err(CheckError::Sandbox)?;
    let of = |config: &GroupConfig| Launch::captured(config, &capture_shape(), &promise);
    let layer = Layer {
        family,
        config: builder.config(),
        shape: &shape,
        num_blocks: batch.num_blocks,
        limits,
        scales: (&batch.k_scale, &batch.v_scale),
    };
    let mut pipeline = Pipeline::new(gpu, &layer, |config| vec![of(config)])?;
    let (cache, key, value) = before_the_step(&batch);
    let dtype = shape.dtype;
    pipeline
        .query
        .write(0, &element::encode(dtype, &batch.query))?;
    pipeline.key.write(0, &element::encode(dtype, &key))?;
    pipeline.value.write(0, &element::encode(dtype, &value))?;
    let launch = of(pipeline.group.config());
    let mut captured = Captured {
        gpu,
        pipeline,
        builder,
        promise,
        launch,
        num_blocks: batch.num_blocks,
        cache,
    };
    let ones = captured.decode(&batch, &[1; ROWS])?;
    let full = captured.decode(&batch, &lens)?;
    let few = captured.decode(&batch, &lens[..ROWS - 3])?;

    let replay = captured.capture(&ones)?;
    // Long after short, short after long, padded, and with poison around.
    for (decode, poisoned) in [(&full, false), (&ones, false), (&few, true), (&full, true)] {
        captured.compare(group, &replay, decode, poisoned)?;
    }
    let answer = batch.answer();
    let output = captured.replayed(&replay, &full)?;
    let got = element::decode(dtype, &output);
    let error = row_error(&got, &answer.output, shape.head_size);
    group.check(error <= element::bar(dtype), || {
        format!("replayed at {longest}: relative error {error:.1e}")
    });
    captured.behind(group, &replay, &batch, &mut context.random)
}

impl Captured<'_> {
    /// A step of decodes at those lengths of the batch's requests; fewer than the graph's rows are padded.
    fn decode(&mut self, batch: &Batch, lens: &[usize]) -> Result<Decode, CheckError> {
        let name = format!("{lens:?}");
        let mut step = batch.step.unpadded(lens.len() as u32, lens.len() as u32);
        step.tensors.positions = lens.iter().map(|&len| len as i64 - 1).collect();
        step.tensors.seq_lens = lens.iter().map(|&len| len as i32).collect();
        step.cam.seq_lens_cpu_upper_bound = step.tensors.seq_lens.clone();
        let page = batch.shape.page;
        step.tensors.slot_mapping = lens
            .iter()
            .enumerate()
            .map(|(row, &len)| {
                let block = step.tensors.table().row(row)[(len - 1) / page];
                i64::from(block) * page as i64 + ((len - 1) % page) as i64
            })
            .collect();
        let rows = ROWS as u32;
        let mut step = pad_step(&step, rows, rows, PaddingValues::default())
            .map_err(|error| CheckError::Sandbox(format!("padding: {error}")))?;
        step.cam.max_query_len = 1;
        step.cam.max_seq_len = lens.iter().copied().max().unwrap_or(1) as u32;
        let metadata = self
            .builder
            .build(&step, self.num_blocks, Some(&self.promise))
            .map_err(|refused| CheckError::Sandbox(format!("decodes at {name}: {refused}")))?;
        Ok(Decode {
            step,
            metadata,
            name,
        })
    }

    fn begin(&mut self, decode: &Decode, in_graph: bool) -> Result<Replay, CheckError> {
        let inputs = decode.step.tensors.inputs();
        let promise = in_graph.then_some(&self.promise);
        let verified = self
            .builder
            .context(&decode.step, &inputs, self.num_blocks, promise);
        let launch = in_graph.then_some(&self.launch);
        let gpu = self.gpu;
        self.pipeline
            .begin(
                gpu,
                &gpu.stream,
                &decode.metadata,
                &verified,
                &decode.step,
                launch,
            )
            .map_err(|error| match error {
                StepError::Device(error) => CheckError::Device(error),
                other => CheckError::Sandbox(format!("decodes at {}: {other}", decode.name)),
            })
    }

    /// Captures plan, scatter and attention while the step of `decode` is what is unpacked.
    fn capture(&mut self, decode: &Decode) -> Result<GraphExec, CheckError> {
        self.pipeline.load_cache(&self.cache)?;
        self.begin(decode, true)?;
        self.gpu.stream.synchronize()?;
        let launches = self.pipeline.group.launches(&self.launch);
        let graph = self
            .gpu
            .stream
            .capture(CaptureMode::ThreadLocal, |stream| {
                // SAFETY: captured for this pipeline, which outlives the graph's replays.
                unsafe { self.pipeline.layer(self.gpu, stream, &launches, true) }
            })?;
        Ok(graph.instantiate()?)
    }

    fn output(&mut self) -> Result<Vec<u8>, CudaError> {
        self.gpu.stream.synchronize()?;
        let output = self.pipeline.output.to_host()?;
        self.pipeline.output.fill(POISON)?;
        Ok(output)
    }

    fn replayed(&mut self, graph: &GraphExec, decode: &Decode) -> Result<Vec<u8>, CheckError> {
        self.pipeline.load_cache(&self.cache)?;
        self.begin(decode, true)?;
        // SAFETY: the graph's pipeline lives, and the stream is waited for below.
        unsafe { self.gpu.stream.launch_graph(graph) }?;
        Ok(self.output()?)
    }

    /// A replay against the same step launched eagerly, bit for bit.
    fn compare(
        &mut self,
        group: &mut Group,
        graph: &GraphExec,
        decode: &Decode,
        poisoned: bool,
    ) -> Result<(), CheckError> {
        let what = || format!("decodes at {}, poison around {poisoned}", decode.name);
        if poisoned {
            self.pipeline.poison_buffers(&self.gpu.stream)?;
        }
        self.pipeline.load_cache(&self.cache)?;
        let replay = self.begin(decode, true)?;
        group.check(replay == Replay::Fits, || format!("{}: {replay:?}", what()));
        let replayed = self.replayed(graph, decode)?;
        self.pipeline.load_cache(&self.cache)?;
        self.begin(decode, false)?;
        // SAFETY: the step was begun just above, and the stream is waited for below.
        unsafe { self.pipeline.eager(self.gpu, &self.gpu.stream, true) }?;
        let eager = self.output()?;
        group.equal(&replayed, &eager, || format!("{}: against eager", what()));
        group.check(
            !element::decode(Dtype::Bfloat16, &replayed)
                .iter()
                .any(|x| x.is_nan()),
            || format!("{}: NaN in the results", what()),
        );
        Ok(())
    }

    /// Steps one after the other, each held up on the device while the next one is packed, against the same steps waited for.
    fn behind(
        &mut self,
        group: &mut Group,
        graph: &GraphExec,
        batch: &Batch,
        random: &mut Random,
    ) -> Result<(), CheckError> {
        let first = random.count(2, 40);
        let steps = (0..4)
            .map(|index| {
                let lens: Vec<usize> = (0..ROWS)
                    .map(|row| batch.shape.kv_lens[row].min(first + 5 * row) + index % 2)
                    .map(|len| len.min(17))
                    .collect();
                self.decode(batch, &lens)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut waited = Vec::new();
        self.pipeline.load_cache(&self.cache)?;
        for decode in &steps {
            self.begin(decode, true)?;
            // SAFETY: the graph's pipeline lives, and the stream is waited for just below.
            unsafe { self.gpu.stream.launch_graph(graph) }?;
            waited.push(self.output()?);
        }
        let bytes = self.pipeline.output.len();
        let alloc = |bytes| DeviceBuffer::alloc(&self.gpu.device, bytes, "a check's results");
        let kept = alloc(bytes * steps.len())?;
        let (from, to) = (alloc(STALL_BYTES)?, alloc(STALL_BYTES)?);
        let copies = self.copies_of_a_stall(&from, &to)?;
        self.pipeline.load_cache(&self.cache)?;
        let mut overtaken = 0;
        for (index, decode) in steps.iter().enumerate() {
            for _ in 0..copies {
                // SAFETY: both buffers have the bytes, and live until the stream has been waited for.
                unsafe {
                    self.gpu
                        .stream
                        .copy_device(to.ptr(), from.ptr(), STALL_BYTES)
                }?;
            }
            self.begin(decode, true)?;
            // What was begun is behind the copies still.
            overtaken += usize::from(!self.gpu.stream.query()?);
            // SAFETY: graph, results and pipeline live until the stream has been waited for.
            unsafe {
                self.gpu.stream.launch_graph(graph)?;
                let result = kept.ptr().offset(index * bytes);
                self.gpu
                    .stream
                    .copy_device(result, self.pipeline.output.ptr(), bytes)?;
            }
        }
        self.gpu.stream.synchronize()?;
        group.check(overtaken == steps.len(), || {
            format!(
                "{overtaken} of {} steps were packed while the stream was behind",
                steps.len()
            )
        });
        let kept: Vec<u8> = kept.to_host()?;
        for (index, (got, want)) in kept.chunks(bytes).zip(&waited).enumerate() {
            group.equal(got, want, || {
                format!("step {index}, packed while the stream was behind")
            });
        }
        Ok(())
    }

    /// Copies that take the stall's time.
    fn copies_of_a_stall(
        &self,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
    ) -> Result<usize, CudaError> {
        let us = crate::bench::timing::graph_us(&self.gpu.stream, 1, 5, |stream, _| {
            // SAFETY: both buffers have the bytes, and live until the replays have ended.
            unsafe { stream.copy_device(to.ptr(), from.ptr(), STALL_BYTES) }
        })?;
        Ok((STALL_US / us.max(1.0)).ceil() as usize)
    }
}
