//! The unpack kernel: every symbolic tensor of the contract, lowered as the engine lowers it and evaluated on the device, against
//! the host's own evaluation of the same tensor. All in one upload: one copy, one launch.

use timetable_attention::{
    Resolver, Siblings,
    batch::{GroupStep, StepTensors},
};
use timetable_device_cuda::{
    CudaError,
    driver::DeviceBuffer,
    upload::{
        Destination, LowerContext, Stage, StepBuffers, StepLimits, UnpackStep, UploadRing,
        UploadSize, stage_tensor,
    },
};
use timetable_types::{
    BuilderConfig, ConvChunks, DcpLocal, DcpSource, Extra, ExtraGather, ExtraValue, Input, Matrix,
    PageSelection, RowGather, RowRange, StateColumn, StateGather, Tensor, TensorSlice,
};

use super::{CheckError, Context};
use crate::{
    batch::Shape,
    gpu::{GUARD, POISON},
    random::Random,
    report::Group,
};

/// Elements of a destination beyond the tensor's own.
const SPARE: usize = 5;
/// The model state's own field.
const EXTRA: &str = "state_rows";

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut group = Group::new("unpack, every tensor");
    let rounds = if context.quick { 3 } else { 40 };
    for round in 0..rounds {
        let (reqs, query, keys) = match round % 4 {
            0 => (1, 3, 40),
            1 => (9, 40, 300),
            2 => (64, 5, 500),
            _ => (if context.quick { 80 } else { 600 }, 20, 200),
        };
        one(context, &mut group, reqs, query, keys)?;
    }
    Ok(vec![group])
}

/// A step, and the extras that the host's tensors do not have.
struct Case {
    config: BuilderConfig,
    step: GroupStep,
    extra: Vec<i32>,
}

/// A step whose every block-table entry is a number of its own.
fn case(random: &mut Random, reqs: usize, longest_query: usize, longest: usize) -> Case {
    let page = *random.pick(&[16usize, 48, 64]);
    let width = (longest + longest_query).div_ceil(page) + 1;
    let mut tensors = StepTensors {
        query_start_loc: vec![0],
        block_table_width: width,
        ..StepTensors::default()
    };
    for _ in 0..reqs {
        let q_len = random.count(0, longest_query);
        let kv_len = q_len + random.count(0, longest);
        let start = tensors.query_start_loc[tensors.query_start_loc.len() - 1];
        tensors.query_start_loc.push(start + q_len as i32);
        tensors.seq_lens.push(kv_len as i32);
        for position in kv_len - q_len..kv_len {
            tensors.positions.push(position as i64);
            tensors.slot_mapping.push(random.int(0, 1 << 40));
        }
        for _ in 0..width {
            tensors.block_table.push(random.int(0, 1 << 30) as i32);
        }
    }
    let padding = random.count(0, 7);
    let tokens = tensors.positions.len() + padding;
    tensors.positions.resize(tokens, 0);
    tensors.slot_mapping.resize(tokens, -1);
    let mut ints =
        |count: usize| -> Vec<i32> { (0..count).map(|_| random.int(-9, 1 << 20) as i32).collect() };
    tensors.causal = Some(ints(reqs));
    tensors.dcp_local_seq_lens = Some(ints(reqs));
    tensors.encoder_seq_lens = Some(ints(reqs));
    tensors.rswa_prefix_lens = Some(ints(reqs));
    tensors.logits_indices_padded = Some(ints(reqs + 3));
    let extra = ints(reqs);
    let lens = tensors.seq_lens.clone();
    let (query, keys) = (longest_query as u32, (longest + longest_query) as u32);
    let mut step = GroupStep::new(tensors, lens, tokens as u32, query, keys);
    step.cam.extras.push(Extra {
        name: EXTRA.to_owned(),
        value: ExtraValue::Device(reqs as u32),
    });
    let shape = Shape {
        page,
        query_lens: vec![longest_query; reqs],
        kv_lens: vec![longest + longest_query; reqs],
        ..Shape::new()
    };
    let mut config = shape.config(32, (9, 0), 132);
    config.parallel.dcp_world_size = random.count(1, 4) as u32;
    config.parallel.dcp_rank = random.count(0, config.parallel.dcp_world_size as usize - 1) as u32;
    config.parallel.cp_kv_cache_interleave_size = 1 << random.count(0, 4);
    Case {
        config,
        step,
        extra,
    }
}

/// A tensor, and the sibling fields that it needs.
struct Wanted {
    tensor: Tensor,
    indptr: Vec<i32>,
    segments: bool,
}

impl Wanted {
    fn siblings(&self) -> Siblings<'_> {
        match (&self.indptr[..], self.segments) {
            ([], _) => Siblings::NONE,
            (segments, true) => Siblings::segments(segments),
            (indptr, false) => Siblings::pages(indptr),
        }
    }
}

/// Every case of the contract but scratch memory, which has no value.
fn tensors(random: &mut Random, case: &Case) -> Vec<Wanted> {
    let tensors = &case.step.tensors;
    let reqs = tensors.seq_lens.len();
    let start = random.count(0, reqs - 1);
    let end = random.count(start + 1, reqs);
    let range = RowRange {
        start: start as u32,
        end: end as u32,
    };
    let mut chosen: Vec<u32> = (0..reqs as u32).filter(|_| random.one_in(2)).collect();
    random.shuffle(&mut chosen);
    let (mut indptr, mut some, mut columns) = (vec![0], vec![0], Vec::new());
    let page = case.config.kv_cache_spec.block_size as usize;
    for row in start..end {
        let pages = (tensors.seq_lens[row] as usize).div_ceil(page);
        indptr.push(indptr[indptr.len() - 1] + pages as i32);
        columns.extend((0..pages as u32).filter(|_| random.one_in(3)));
        some.push(columns.len() as i32);
    }
    let lists = random.count(0, 700);
    let values: Vec<i32> = (0..lists)
        .map(|_| random.int(-1 << 30, 1 << 30) as i32)
        .collect();
    let starts = &tensors.query_start_loc[start..=end];
    let own: u32 = starts
        .windows(2)
        .map(|pair| ((pair[1] - pair[0]) as u32).div_ceil(8))
        .sum();
    let chunks = ConvChunks {
        rows: range.clone(),
        block_m: 8,
        length: own + random.count(0, 9) as u32,
    };
    let states = |column, width| {
        Tensor::StateIndices(StateGather {
            rows: chosen.clone(),
            column,
            width,
        })
    };
    let local = |source| {
        Tensor::DcpLocal(DcpLocal {
            source,
            rows: range.clone(),
        })
    };
    let mut plain = vec![
        Tensor::Extra(EXTRA.to_owned()),
        Tensor::Values(values.clone()),
        Tensor::Matrix(Matrix {
            rows: values.len() as u32,
            columns: 1,
            values,
        }),
        Tensor::RebasedQueryStartLoc(range.clone()),
        Tensor::ContextLens(range.clone()),
        Tensor::HasContext(range.clone()),
        local(DcpSource::SeqLens),
        local(DcpSource::ContextLens),
        Tensor::CuPageCounts(range.clone()),
        states(StateColumn::First, 1),
        states(StateColumn::LastToken, 1),
        Tensor::ExtraRows(ExtraGather {
            name: EXTRA.to_owned(),
            rows: chosen.clone(),
        }),
        Tensor::RowMask(chosen.clone()),
        Tensor::RowTokens(chosen.clone()),
        Tensor::TokenToRow,
        Tensor::ConvChunkRows(chunks.clone()),
        Tensor::ConvChunkOffsets(chunks),
    ];
    for source in [
        Input::QueryStartLoc,
        Input::SeqLens,
        Input::BlockTable,
        Input::SlotMapping,
        Input::Positions,
        Input::Causal,
        Input::DcpLocalSeqLens,
        Input::EncoderSeqLens,
        Input::LogitsIndicesPadded,
        Input::RswaPrefixLens,
    ] {
        plain.push(Tensor::Input(source));
        let per_token = matches!(source, Input::SlotMapping | Input::Positions);
        let (start, end) = if per_token {
            (0, tensors.positions.len() as u32 / 2)
        } else {
            (range.start, range.end)
        };
        plain.push(Tensor::Slice(TensorSlice { source, start, end }));
        if !per_token {
            plain.push(Tensor::Rows(RowGather {
                source,
                rows: chosen.clone(),
            }));
        }
    }
    let mut wanted: Vec<Wanted> = plain
        .into_iter()
        .map(|tensor| Wanted {
            tensor,
            indptr: Vec::new(),
            segments: false,
        })
        .collect();
    wanted.push(Wanted {
        tensor: Tensor::GatherPages(range.clone()),
        indptr: indptr.clone(),
        segments: false,
    });
    wanted.push(Wanted {
        tensor: Tensor::SelectPages(PageSelection {
            rows: range,
            columns,
        }),
        indptr: some,
        segments: false,
    });
    wanted.push(Wanted {
        tensor: Tensor::SegmentIds,
        indptr,
        segments: true,
    });
    wanted
}

fn one(
    context: &mut Context<'_>,
    group: &mut Group,
    reqs: usize,
    longest_query: usize,
    longest: usize,
) -> Result<(), CheckError> {
    let gpu = context.gpu;
    let case = case(&mut context.random, reqs, longest_query, longest);
    let extras = [(EXTRA, &case.extra[..])];
    let mut inputs = case.step.tensors.inputs();
    inputs.extras = &extras;
    let resolver = Resolver::new(&case.config, &case.step.cam, inputs);
    let tokens = case.step.cam.num_actual_tokens as usize;
    let limits = StepLimits {
        max_num_reqs: reqs + 2,
        max_num_tokens: tokens + 9,
        table_width: case.step.tensors.block_table_width,
        max_num_logits: reqs + 2,
    };
    let buffers = StepBuffers::new(&gpu.device, limits)?;
    let ptrs = buffers.ptrs();
    let block_size = case.config.kv_cache_spec.block_size;
    let lower = LowerContext {
        ptrs: &ptrs,
        inputs: &inputs,
        num_tokens: tokens,
        block_size,
    };

    let size = UploadSize {
        num_slots: 1,
        max_bytes: 16 * (reqs * limits.table_width + tokens + 100_000),
        max_ops: reqs + 200,
    };
    let mut stage = Stage::new(size.max_bytes, size.max_ops);
    let mut checked = Vec::new();
    for wanted in tensors(&mut context.random, &case) {
        let fill = -(context.random.int(1, 9) as i32);
        let want = match expected(&resolver, &wanted) {
            Ok(want) => want,
            Err(error) => {
                group.check(false, || {
                    format!("{:?}: on the host: {error}", wanted.tensor)
                });
                continue;
            }
        };
        let wide = Resolver::is_i64(&wanted.tensor);
        let bytes = if wide { 8 } else { 4 };
        let room = want.len() + SPARE;
        let mut buffer =
            DeviceBuffer::alloc(&gpu.device, (room + GUARD) * bytes, "an unpacked tensor")?;
        buffer.fill(POISON)?;
        let to = Destination {
            ptr: buffer.ptr(),
            room,
            fill,
        };
        match stage_tensor(&wanted.tensor, wanted.siblings(), to, &lower, &mut stage) {
            Ok(()) => checked.push((wanted, want, fill, wide, buffer)),
            Err(error) => {
                group.check(false, || {
                    format!("{:?}: not lowered: {error}", wanted.tensor)
                });
            }
        }
    }

    let mut ring = UploadRing::new(&gpu.device, size)?;
    let packed = {
        let tensors = &case.step.tensors;
        let mut packer = ring.begin()?;
        let last = tensors.query_start_loc[reqs];
        let mut pack = || -> Result<(), timetable_device_cuda::upload::PackError> {
            let starts = ptrs.query_start_loc(reqs, last);
            packer.values_i32("query_start_loc", starts, &tensors.query_start_loc)?;
            packer.values_i32("seq_lens", ptrs.seq_lens(reqs), &tensors.seq_lens)?;
            let flags = tensors.causal.as_deref().unwrap_or_default();
            packer.values_i32("causal", ptrs.causal(reqs), flags)?;
            let slots = ptrs.slot_mapping(tokens);
            packer.values_i64("slot_mapping", slots, &tensors.slot_mapping)?;
            let positions = ptrs.positions(tokens);
            packer.values_i64("positions", positions, &tensors.positions)?;
            for row in 0..reqs {
                let blocks = tensors.table().row(row);
                packer.values_i32("table", ptrs.table_run(row, 0, blocks.len()), blocks)?;
            }
            packer.stage("tensors", &stage)
        };
        if let Err(error) = pack() {
            group.check(false, || format!("{reqs} requests: not packed: {error}"));
            return Ok(());
        }
        packer.finish()
    };
    let parallel = &case.config.parallel;
    let unpack = UnpackStep {
        dcp_world_size: parallel.dcp_world_size,
        dcp_rank: parallel.dcp_rank,
        dcp_interleave: parallel.cp_kv_cache_interleave_size,
        ..UnpackStep::new(reqs, tokens, block_size)
    };
    // SAFETY: packed above for these buffers, all of which live until the stream has been waited for.
    unsafe { ring.submit(&gpu.stream, &gpu.kernels, packed, unpack, &ptrs, None) }?;
    gpu.stream.synchronize()?;
    for (wanted, mut want, fill, wide, buffer) in checked {
        want.resize(want.len() + SPARE, i64::from(fill));
        let (got, guarded) = read(&buffer, want.len(), wide)?;
        let what = || {
            let text = format!("{:?}", wanted.tensor);
            let short: String = text.chars().take(60).collect();
            format!("{reqs} requests, {short}")
        };
        group.equal(&got, &want, what);
        group.check(guarded, || format!("{}: wrote beyond its room", what()));
    }
    Ok(())
}

/// The host's own evaluation.
fn expected(
    resolver: &Resolver<'_>,
    wanted: &Wanted,
) -> Result<Vec<i64>, timetable_attention::ResolveError> {
    if Resolver::is_i64(&wanted.tensor) {
        return Ok(resolver.resolve_i64(&wanted.tensor)?.into_owned());
    }
    let values = resolver.resolve_i32(&wanted.tensor, wanted.siblings())?;
    Ok(values.iter().map(|&x| i64::from(x)).collect())
}

fn read(buffer: &DeviceBuffer, room: usize, wide: bool) -> Result<(Vec<i64>, bool), CudaError> {
    let mut values: Vec<i64> = if wide {
        buffer.to_host()?
    } else {
        let narrow: Vec<i32> = buffer.to_host()?;
        narrow.into_iter().map(i64::from).collect()
    };
    let guard = values.split_off(room);
    Ok((values, guard.iter().all(|&x| x == -1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_evaluates_every_tensor_of_the_check() {
        let mut random = Random::new(3);
        for (reqs, query, keys) in [(1, 3, 40), (9, 40, 300), (64, 5, 500)] {
            let case = case(&mut random, reqs, query, keys);
            let extras = [(EXTRA, &case.extra[..])];
            let mut inputs = case.step.tensors.inputs();
            inputs.extras = &extras;
            let resolver = Resolver::new(&case.config, &case.step.cam, inputs);
            for wanted in tensors(&mut random, &case) {
                let value = expected(&resolver, &wanted);
                assert!(value.is_ok(), "{:?}: {value:?}", wanted.tensor);
            }
        }
    }
}
