//! The kernels as the host launches them: every one resolves, and a row goes from its token to the next through the launches
//! of the layers. Without a device, or without embedded kernels, each test checks that this is what is said. The self-test
//! checks every kernel against the CPU.

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use timetable_device_cuda::driver::{Device, DeviceBuffer, Stream};
use timetable_device_cuda::kernels::{AttentionKind, CacheElement, Element, HEAD_SIZES};
use timetable_device_cuda::ops::Rows;
use timetable_device_cuda::params::{SampleRow, UnpackKind, UnpackOp, UnpackParams};
use timetable_device_cuda::{CudaError, Kernels, images};

/// The kernels on the first device; `None`, with the reason checked, where they cannot be there.
fn load() -> Option<(Kernels, Stream)> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            let missing = matches!(error, CudaError::NoDriver | CudaError::NoDevice { .. });
            assert!(missing, "{error}");
            return None;
        }
    };
    let runs = images::run_on(images::targets(), device.capability());
    match Kernels::load(&device) {
        Ok(kernels) => {
            let stream = Stream::new(&device).expect("a stream");
            Some((kernels, stream))
        }
        Err(CudaError::NoKernelImage { embedded, .. }) => {
            assert!(
                !runs,
                "{embedded:?} should run on {:?}",
                device.capability()
            );
            assert_eq!(embedded.len(), images::targets().len());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn rows(buffer: &DeviceBuffer, stride: usize) -> Rows {
    Rows {
        ptr: buffer.ptr(),
        stride: stride as i64,
    }
}

#[test]
fn every_attention_kernel_says_how_many_rows_its_items_have() {
    let Some((kernels, _stream)) = load() else {
        return;
    };
    for element in [Element::Bf16, Element::F16] {
        for cache in CacheElement::ALL {
            for size in HEAD_SIZES {
                let tile = |kind| {
                    let kernel = kernels
                        .attention(kind, element, cache, size)
                        .expect("it exists");
                    kernel.tile_rows()
                };
                assert_eq!(
                    tile(AttentionKind::Decode),
                    16,
                    "{element:?} {cache:?} {size}"
                );
                let prefill = if size == 256 { 64 } else { 128 };
                assert_eq!(
                    tile(AttentionKind::Prefill),
                    prefill,
                    "{element:?} {cache:?} {size}"
                );
                let short = tile(AttentionKind::Prefill64);
                assert!(short >= 64, "{element:?} {cache:?} {size}: {short}");
            }
        }
    }
    assert!(
        kernels
            .attention(AttentionKind::Decode, Element::F32, CacheElement::Same, 64)
            .is_err()
    );
    assert!(
        kernels
            .attention(AttentionKind::Decode, Element::Bf16, CacheElement::Same, 80)
            .is_err()
    );
}

#[test]
fn a_row_goes_from_its_token_to_the_next() {
    const HIDDEN: usize = 64;
    const VOCABULARY: usize = 96;
    const TOKENS: usize = 5;
    let Some((kernels, stream)) = load() else {
        return;
    };
    let device = kernels.device();
    let mut random = Pcg64::seed_from_u64(rand::random());
    let mut elements = |count: usize| -> Vec<bf16> {
        (0..count)
            .map(|_| bf16::from_f32(random.random_range(-2.0..2.0)))
            .collect()
    };
    let table = elements(VOCABULARY * HIDDEN);
    let weight = elements(HIDDEN);
    let rest = elements(TOKENS * HIDDEN);
    // One is outside the vocabulary: zeros.
    let ids = [7, 0, 95, 96, 31];
    let on_device =
        |values: &[bf16]| DeviceBuffer::from_host(device, values, "a test").expect("memory");
    let empty = |bytes| {
        let mut buffer = DeviceBuffer::alloc(device, bytes, "a test").expect("memory");
        buffer.fill(0xff).expect("filled");
        buffer
    };
    let (d_table, d_weight, d_rest) = (on_device(&table), on_device(&weight), on_device(&rest));
    let d_ids = DeviceBuffer::from_host(device, &ids, "a test").expect("memory");
    let embedded = empty(TOKENS * HIDDEN * 2);
    let normalised = empty(TOKENS * HIDDEN * 2);
    let bf16s = Element::Bf16;
    // SAFETY: every buffer has the shape that the launch is told, and lives until the stream is synchronised.
    unsafe {
        kernels
            .embedding(
                &stream,
                bf16s,
                rows(&embedded, HIDDEN),
                d_table.ptr(),
                d_ids.ptr(),
                TOKENS as u32,
                HIDDEN as u32,
                VOCABULARY as u32,
            )
            .expect("launched");
        kernels
            .rms_norm(
                &stream,
                bf16s,
                rows(&normalised, HIDDEN),
                rows(&embedded, HIDDEN),
                Some(rows(&d_rest, HIDDEN)),
                d_weight.ptr(),
                TOKENS as u32,
                HIDDEN as u32,
                1e-5,
            )
            .expect("launched");
    }
    stream.synchronize().expect("no fault");
    let got: Vec<bf16> = normalised.to_host().expect("copied");
    let sums: Vec<bf16> = d_rest.to_host().expect("copied");
    for (token, &id) in ids.iter().enumerate() {
        let of = |values: &[bf16], i: usize| values[token * HIDDEN + i].to_f64();
        let embedding = |i: usize| {
            table
                .get(id as usize * HIDDEN + i)
                .map_or(0.0, |x| x.to_f64())
        };
        let squares: f64 = (0..HIDDEN).map(|i| of(&sums, i).powi(2)).sum();
        let factor = 1.0 / (squares / HIDDEN as f64 + 1e-5).sqrt();
        for (i, weight) in weight.iter().enumerate() {
            let sum = embedding(i) + of(&rest, i);
            assert!(
                (of(&sums, i) - sum).abs() <= 0.01 * sum.abs() + 1e-6,
                "sum {token} {i}"
            );
            let want = of(&sums, i) * factor * weight.to_f64();
            assert!(
                (of(&got, i) - want).abs() <= 0.01 * want.abs() + 1e-6,
                "norm {token} {i}"
            );
        }
    }

    // Greedy over the rows as if they were logits: the two that the indices name.
    let indices: [i32; 2] = [4, 1];
    let d_indices = DeviceBuffer::from_host(device, &indices, "a test").expect("memory");
    let gathered = empty(indices.len() * HIDDEN * 2);
    let best = empty(indices.len() * 4);
    // SAFETY: as above.
    unsafe {
        kernels
            .gather_rows(
                &stream,
                bf16s,
                rows(&gathered, HIDDEN),
                rows(&normalised, HIDDEN),
                d_indices.ptr(),
                indices.len() as u32,
                HIDDEN as u32,
                TOKENS as u32,
            )
            .and_then(|()| {
                kernels.argmax(
                    &stream,
                    bf16s,
                    best.ptr(),
                    rows(&gathered, HIDDEN),
                    indices.len() as u32,
                    HIDDEN as u32,
                )
            })
            .expect("launched");
    }
    stream.synchronize().expect("no fault");
    let best: Vec<i32> = best.to_host().expect("copied");
    for (&index, &best) in indices.iter().zip(&best) {
        let row = &got[index as usize * HIDDEN..][..HIDDEN];
        let want = (0..HIDDEN).rev().max_by(|&a, &b| row[a].total_cmp(&row[b]));
        let values: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
        assert_eq!(Some(best as usize), want, "row {index}: {values:?}");
    }
}

#[test]
fn rows_are_sampled_each_in_its_own_way() {
    const VOCABULARY: usize = 1000;
    let Some((kernels, stream)) = load() else {
        return;
    };
    let device = kernels.device();
    let mut random = Pcg64::seed_from_u64(rand::random());
    let logits: Vec<f32> = (0..3 * VOCABULARY)
        .map(|_| random.random_range(-4.0..4.0))
        .collect();
    let row = |temperature, top_k, uniform| SampleRow {
        temperature,
        top_p: 1.0,
        top_k,
        uniform,
        ..SampleRow::default()
    };
    // Greedy; the best of one; the last of all, in order of ids.
    let how = [row(0.0, 0, 0.9), row(1.0, 1, 0.9), row(1.0, 0, 1.0 - 1e-12)];
    let d_logits = DeviceBuffer::from_host(device, &logits, "a test").expect("memory");
    let d_how = DeviceBuffer::from_host(device, &how, "a test").expect("memory");
    let tokens = DeviceBuffer::alloc_zeroed(device, 3 * 4, "a test").expect("memory");
    // SAFETY: every buffer has the shape that the launch is told, and lives until the stream is synchronised.
    unsafe {
        kernels
            .sample(
                &stream,
                tokens.ptr(),
                rows(&d_logits, VOCABULARY),
                d_how.ptr(),
                3,
                VOCABULARY as u32,
            )
            .expect("launched");
    }
    stream.synchronize().expect("no fault");
    let tokens: Vec<i32> = tokens.to_host().expect("copied");
    let best = |row: usize| {
        let row = &logits[row * VOCABULARY..][..VOCABULARY];
        (0..VOCABULARY)
            .rev()
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .expect("a row has logits") as i32
    };
    assert_eq!(tokens, [best(0), best(1), VOCABULARY as i32 - 1]);
}

#[test]
fn unpack_reads_in_the_second_round_what_the_first_wrote() {
    let Some((kernels, stream)) = load() else {
        return;
    };
    let device = kernels.device();
    let op = |kind: UnpackKind, rows, room, destination, list| UnpackOp {
        kind: kind as i32,
        rows,
        room,
        fill: -9,
        destination,
        list,
        ..UnpackOp::default()
    };
    // Lists first, then the operations: two requests of 3 and 2 tokens, of 20 and 5 keys.
    let lists = [0_i32, 3, 5, 20, 5, 0];
    let buffer =
        |room: usize| DeviceBuffer::alloc_zeroed(device, room * 4, "a test").expect("memory");
    let (starts, lens, contexts) = (buffer(3), buffer(2), buffer(4));
    let table = buffer(2);
    let ops = [
        op(UnpackKind::Values, 3, 3, starts.ptr(), 0),
        op(UnpackKind::Values, 2, 2, lens.ptr(), 12),
        op(UnpackKind::ContextLens, 2, 4, contexts.ptr(), 0),
    ];
    let d_lists = DeviceBuffer::from_host(device, &lists, "a test").expect("memory");
    let d_ops = DeviceBuffer::from_host(device, &ops, "a test").expect("memory");
    let params = UnpackParams {
        slot: d_lists.ptr(),
        ops: d_ops.ptr(),
        query_start_loc: starts.ptr(),
        seq_lens: lens.ptr(),
        block_table: table.ptr(),
        block_table_stride: 1,
        num_first_ops: 2,
        num_ops: 3,
        num_reqs: 2,
        num_tokens: 5,
        table_width: 1,
        block_size: 16,
        dcp_world_size: 1,
        dcp_interleave: 1,
        ..UnpackParams::default()
    };
    // SAFETY: every destination has its operation's room, every list its rows, and all live until the stream is synchronised.
    unsafe { kernels.unpack(&stream, &params) }.expect("launched");
    stream.synchronize().expect("no fault");
    assert_eq!(starts.to_host::<i32>(), Ok(vec![0, 3, 5]));
    assert_eq!(contexts.to_host::<i32>(), Ok(vec![17, 3, -9, -9]));
}
