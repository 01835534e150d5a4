//! Paged attention by every kernel: FLASH_ATTN's schedule and FLASHINFER's work list; decode, prefill, chunks and mixed batches;
//! windows, soft cap, grouped queries, every head size, fp8; the plain f32 kernel. Output and LSE, every element, against f64.

use timetable_device_cuda::{CudaError, driver::DevicePtr, kernels::AttentionKind};
use timetable_types::Dtype;

use super::{CheckError, Context};
use crate::{
    batch::{Answer, Batch, Shape},
    compare::{lse_error, row_error},
    element,
    gpu::Poisoned,
    paged::{Cut, OnDevice, WorkList, kernel},
    random::Random,
    report::Group,
};

/// Types of queries and cache.
const PAIRS: [(Dtype, Dtype); 4] = [
    (Dtype::Bfloat16, Dtype::Bfloat16),
    (Dtype::Float16, Dtype::Float16),
    (Dtype::Bfloat16, Dtype::Float8E4m3),
    (Dtype::Float16, Dtype::Float8E4m3),
];

const SIZES: [usize; 4] = [64, 96, 128, 256];

/// How a batch is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// FLASH_ATTN: one list for this kernel.
    Schedule(AttentionKind),
    /// FLASH_ATTN: the decode kernel for up to 16 packed rows, the prefill kernel for the others.
    Mixed,
    /// FLASHINFER: one part, for this kernel.
    List(AttentionKind),
    /// The plain f32 kernel.
    Plain,
}

pub(super) fn run(context: &mut Context<'_>) -> Result<Vec<Group>, CheckError> {
    let mut groups = Vec::new();
    for (dtype, cache_dtype) in PAIRS {
        for (name, how) in [
            ("decode", How::Schedule(AttentionKind::Decode)),
            ("prefill", How::Schedule(AttentionKind::Prefill)),
            ("prefill, 64 rows", How::Schedule(AttentionKind::Prefill64)),
            ("mixed", How::Mixed),
            ("work list, decode", How::List(AttentionKind::Decode)),
            ("work list, prefill", How::List(AttentionKind::Prefill)),
            ("work list, 64 rows", How::List(AttentionKind::Prefill64)),
        ] {
            let types = if cache_dtype == dtype {
                element::name(dtype).to_owned()
            } else {
                format!(
                    "{} over {}",
                    element::name(dtype),
                    element::name(cache_dtype)
                )
            };
            let mut group =
                Group::with_bar(format!("attention {name} {types}"), element::bar(dtype));
            for head_size in SIZES {
                for round in 0..rounds(context) {
                    let shape = random_shape(context, (dtype, cache_dtype), head_size, how, round);
                    one(context, &mut group, &shape, how)?;
                }
            }
            groups.push(group);
        }
    }
    let mut plain = Group::with_bar("attention plain f32", element::bar(Dtype::Float32));
    for head_size in SIZES {
        for round in 0..rounds(context) {
            let types = (Dtype::Float32, Dtype::Float32);
            let shape = random_shape(context, types, head_size, How::Plain, round);
            one(context, &mut plain, &shape, How::Plain)?;
        }
    }
    groups.push(plain);
    groups.push(super::replay::alone(context)?);
    groups.push(super::replay::grown(context)?);
    Ok(groups)
}

fn rounds(context: &Context<'_>) -> usize {
    if context.quick { 2 } else { 6 }
}

/// Round by round other windows, caps, pages, layouts, groups, lengths; some requests ask nothing, some have no keys.
fn random_shape(
    context: &mut Context<'_>,
    (dtype, cache_dtype): (Dtype, Dtype),
    head_size: usize,
    how: How,
    round: usize,
) -> Shape {
    let (longest, most) = if context.quick { (120, 30) } else { (900, 140) };
    let random = &mut context.random;
    let decodes = matches!(
        how,
        How::Schedule(AttentionKind::Decode) | How::List(AttentionKind::Decode)
    );
    let rows = random.count(1, if decodes { 8 } else { 4 });
    let (mut query_lens, mut kv_lens) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let longest_query = match how {
            _ if decodes => 1 + 3 * (round % 2),
            How::Mixed if row % 2 == 0 => 1,
            _ => most,
        };
        let q_len = random.count(0, longest_query);
        // The first round has prefills without context.
        let context = if round == 0 && !decodes {
            0
        } else {
            random.count(0, longest)
        };
        query_lens.push(q_len);
        kv_lens.push(q_len + context);
    }
    query_lens[0] = query_lens[0].max(1);
    kv_lens[0] = kv_lens[0].max(query_lens[0]);
    Shape {
        dtype,
        cache_dtype,
        head_size,
        kv_heads: random.count(1, 3),
        group: *random.pick(&[1, 3, 4, 7, 8]),
        page: *random.pick(&[16, 48, 64, 256]),
        nhd: random.one_in(2),
        window: match round % 3 {
            1 => Some(random.count(1, longest / 2)),
            _ => None,
        },
        soft_cap: (round % 3 == 2).then_some(30.0),
        causal: round != 3,
        query_lens,
        kv_lens,
        padding: if round.is_multiple_of(2) {
            0
        } else {
            random.count(1, 6)
        },
        ..Shape::new()
    }
}

fn one(
    context: &mut Context<'_>,
    group: &mut Group,
    shape: &Shape,
    how: How,
) -> Result<(), CudaError> {
    let gpu = context.gpu;
    let batch = Batch::new(shape, &mut context.random);
    let on = OnDevice::new(gpu, &batch)?;
    let splits: Option<Vec<i32>> = context.random.one_in(2).then(|| {
        (0..batch.num_reqs())
            .map(|_| context.random.int(1, 9) as i32)
            .collect()
    });
    let order: Option<Vec<i32>> = context.random.one_in(3).then(|| {
        let mut order: Vec<i32> = (0..batch.num_reqs() as i32).collect();
        context.random.shuffle(&mut order);
        order
    });
    let chunk = shape.page * context.random.count(1, 5);
    let seed = context.random.int(0, i64::MAX) as u64;
    let what = || {
        let how = match how {
            How::List(_) => format!("chunks of {chunk}"),
            How::Plain => String::new(),
            _ => format!("splits {splits:?}"),
        };
        format!("{}, {how}", shape.describe())
    };

    let rows = batch.num_tokens() * shape.heads();
    let mut results = Vec::new();
    for _ in 0..2 {
        let output = gpu.poisoned(shape.dtype, rows * shape.head_size)?;
        let lse = gpu.poisoned(Dtype::Float32, rows)?;
        let cut = Cut {
            splits: splits.as_deref(),
            order: order.as_deref(),
            ..Cut::default()
        };
        let (to, lse_to) = (output.buffer.ptr(), lse.buffer.ptr());
        let cuts: Vec<(AttentionKind, Cut<'_>)> = match how {
            How::Schedule(kind) => vec![(kind, cut)],
            How::Mixed => vec![
                (
                    AttentionKind::Decode,
                    Cut {
                        max_packed: 16,
                        with_tail: false,
                        ..cut
                    },
                ),
                (
                    AttentionKind::Prefill,
                    Cut {
                        min_packed: 17,
                        ..cut
                    },
                ),
            ],
            How::List(_) | How::Plain => Vec::new(),
        };
        for (kind, cut) in cuts {
            scheduled(context, group, &on, kind, cut, (to, lse_to), &what)?;
        }
        match how {
            How::List(kind) => {
                let tile = kernel(gpu, shape, kind)?;
                let tile_rows = tile.tile_rows() as usize;
                let mut arrange = Random::new(seed);
                let (list, params) =
                    WorkList::flashinfer(gpu, &on, &batch, tile_rows, chunk, |items| {
                        arrange.shuffle(items);
                    })?;
                // SAFETY: planned here for this batch and kernel; everything lives until the stream has been waited for.
                unsafe {
                    gpu.kernels.plan_flashinfer(&gpu.stream, &params)?;
                    list.attend(gpu, &gpu.stream, &on, tile, to, lse_to)?;
                }
                gpu.stream.synchronize()?;
                let zero = list.counters_are_zero()?;
                group.check(zero, || format!("{}: merge counters are left", what()));
            }
            How::Plain => {
                let params = on.plain_params(to, lse_to);
                // SAFETY: the batch's own buffers, which live until the stream has been waited for.
                unsafe { gpu.kernels.plain_attention(&gpu.stream, &params) }?;
                gpu.stream.synchronize()?;
            }
            How::Schedule(_) | How::Mixed => {}
        }
        results.push((output, lse));
    }
    let answer = batch.answer();
    check(group, shape, &results, &answer, &what)
}

/// One list of FLASH_ATTN's schedule, planned and computed.
fn scheduled(
    context: &Context<'_>,
    group: &mut Group,
    on: &OnDevice,
    kind: AttentionKind,
    cut: Cut<'_>,
    (output, lse): (DevicePtr, DevicePtr),
    what: &dyn Fn() -> String,
) -> Result<(), CudaError> {
    let gpu = context.gpu;
    let kernel = kernel(gpu, &on.shape, kind)?;
    let cut = Cut {
        tile_rows: kernel.tile_rows() as usize,
        ..cut
    };
    let (list, params) = WorkList::flash_attn(gpu, on, cut)?;
    // SAFETY: planned here for this batch and kernel; everything lives until the stream has been waited for.
    unsafe {
        gpu.kernels.plan_flash_attn(&gpu.stream, &params)?;
        list.attend(gpu, &gpu.stream, on, kernel, output, lse)?;
    }
    gpu.stream.synchronize()?;
    let zero = list.counters_are_zero()?;
    group.check(zero, || format!("{}: merge counters are left", what()));
    Ok(())
}

/// The first result against the reference, the second against the first.
fn check(
    group: &mut Group,
    shape: &Shape,
    results: &[(Poisoned, Poisoned)],
    answer: &Answer,
    what: &dyn Fn() -> String,
) -> Result<(), CudaError> {
    let (output, lse) = &results[0];
    let (got, guarded) = output.values()?;
    group.error(row_error(&got, &answer.output, shape.head_size), what);
    let (got_lse, lse_guarded) = lse.values()?;
    let off = lse_error(&got_lse, &answer.lse);
    let bar = if shape.dtype == Dtype::Float32 {
        2e-6
    } else {
        2e-4
    };
    group.check(off <= bar, || format!("{}: LSE off by {off:.1e}", what()));
    group.check(guarded && lse_guarded, || {
        format!("{}: wrote beyond the batch", what())
    });
    let again = results[1].0.bytes()?.0;
    group.equal(&again, &output.bytes()?.0, || {
        format!("{}: a second run", what())
    });
    Ok(())
}
