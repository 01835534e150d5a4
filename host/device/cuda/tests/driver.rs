//! The driver's objects and matrix products on a real device. Without a driver each test checks that this is what is said.

use std::ffi::c_void;
use std::sync::mpsc;

use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use timetable_device_cuda::CudaError;
use timetable_device_cuda::blas::{
    Gemm, GemmDtype, GemmOperands, GemmOut, GemmShape, USUAL_WORKSPACE,
};
use timetable_device_cuda::driver::{
    CaptureMode, Device, DeviceBuffer, DevicePtr, Event, Launch, Module, PinnedBuffer, Stream,
};

/// One global, a kernel that adds `step` to each of `n` ints, and one that a grid of any size may run cooperatively.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .s32 answer = 42;
.visible .entry add(.param .u64 p_data, .param .s32 p_n, .param .s32 p_step) {
    .reg .pred %p<2>;
    .reg .s32 %r<8>;
    .reg .s64 %rd<4>;
    ld.param.u64 %rd1, [p_data];
    ld.param.s32 %r1, [p_n];
    ld.param.s32 %r2, [p_step];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.s32 %p1, %r6, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.s32 %rd2, %r6, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.s32 %r7, [%rd3];
    add.s32 %r7, %r7, %r2;
    st.global.s32 [%rd3], %r7;
done:
    ret;
}
";

fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ (CudaError::NoDriver | CudaError::NoDevice { count: 0, .. })) => {
            assert!(
                error.to_string().contains("run on the CPU device"),
                "{error}"
            );
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn module(device: &Device) -> Module {
    let mut image = PTX.as_bytes().to_vec();
    image.push(0);
    Module::load(device, &image).unwrap()
}

#[test]
fn a_device_says_what_it_is() {
    let Some(device) = device() else { return };
    assert!(!device.name().is_empty());
    assert!(device.capability().0 >= 7, "{device:?}");
    assert!(device.num_multiprocessors() > 0 && device.max_shared_per_block() >= 48 << 10);
    assert!(device.l2_bytes().unwrap() > 0 && device.driver_version() >= 13_000);
    let memory = device.memory().unwrap();
    assert!(0 < memory.free && memory.free <= memory.total, "{memory:?}");
    device.check().unwrap();
    device.synchronize().unwrap();
}

#[test]
fn buffers_keep_what_is_written_and_refuse_what_does_not_fit() {
    let Some(device) = device() else { return };
    let values: Vec<i32> = (0..1000).map(|value| value * 7 - 3).collect();
    let mut buffer = DeviceBuffer::from_host(&device, &values, "a test").unwrap();
    assert_eq!(buffer.len(), 4000);
    assert_eq!(buffer.ptr().raw() % 256, 0);
    assert_eq!(buffer.to_host::<i32>().unwrap(), values);
    buffer.write(400, &[-1_i32, -2]).unwrap();
    let mut read = [0_i32; 4];
    buffer.read(396, &mut read).unwrap();
    assert_eq!(read, [values[99], -1, -2, values[102]]);
    assert!(matches!(
        buffer.write(3996, &[0_i32; 2]),
        Err(CudaError::Invalid { .. })
    ));
    assert!(matches!(
        buffer.read(usize::MAX, &mut read),
        Err(CudaError::Invalid { .. })
    ));
    assert!(matches!(
        buffer.to_host::<[u8; 3]>(),
        Err(CudaError::Invalid { .. })
    ));
    buffer.fill(0xff).unwrap();
    assert!(
        buffer
            .to_host::<i32>()
            .unwrap()
            .iter()
            .all(|value| *value == -1)
    );
    let zero = DeviceBuffer::alloc_zeroed(&device, 12, "a test").unwrap();
    assert_eq!(zero.to_host::<u8>().unwrap(), [0; 12]);
    let none = DeviceBuffer::from_host::<u8>(&device, &[], "a test").unwrap();
    assert!(none.is_empty() && none.ptr().is_null() && none.to_host::<u8>().unwrap().is_empty());
}

#[test]
fn more_memory_than_there_is_is_refused_with_the_numbers() {
    let Some(device) = device() else { return };
    let asked = device.memory().unwrap().total * 2;
    let error = DeviceBuffer::alloc(&device, asked, "the KV cache")
        .unwrap_err()
        .with_remedy("lower the setting");
    let CudaError::OutOfMemory {
        what,
        asked: found,
        free,
        total,
        remedy,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(
        (*what, *found, *remedy),
        ("the KV cache", asked, "lower the setting")
    );
    assert!(*free > 0 && free <= total && *total == asked / 2);
    assert!(!error.is_fatal());
    device.check().unwrap();
}

#[test]
fn streams_copy_in_order_and_events_mark_it() {
    let Some(device) = device() else { return };
    let (one, two) = (
        Stream::new(&device).unwrap(),
        Stream::high_priority(&device).unwrap(),
    );
    let mut source = PinnedBuffer::new(&device, 4096, true, "a test").unwrap();
    let target = PinnedBuffer::new(&device, 4096, false, "a test").unwrap();
    let expected: Vec<u8> = (0..4096).map(|index| (index * 31 % 251) as u8).collect();
    source.as_mut_slice().copy_from_slice(&expected);
    let buffer = DeviceBuffer::alloc(&device, 8192, "a test").unwrap();
    let (start, end) = (
        Event::new(&device, true).unwrap(),
        Event::new(&device, true).unwrap(),
    );
    // SAFETY: everything lives until both streams are waited for, and the ranges are within the buffers.
    unsafe {
        one.record(&start).unwrap();
        one.fill(buffer.ptr(), 0xee, 8192).unwrap();
        one.copy_to_device(buffer.ptr(), &source, 0..4096).unwrap();
        one.copy_device(buffer.ptr().offset(4096), buffer.ptr(), 4096)
            .unwrap();
        one.record(&end).unwrap();
        two.wait(&end).unwrap();
        two.copy_to_host(&target, 0..4000, buffer.ptr().offset(4096))
            .unwrap();
        assert!(
            one.copy_to_device(buffer.ptr(), &source, 4000..4097)
                .is_err()
        );
    }
    two.synchronize().unwrap();
    assert_eq!(target.as_slice()[..4000], expected[..4000]);
    assert!(target.as_slice()[4000..].iter().all(|byte| *byte == 0));
    assert!(end.query().unwrap() && one.query().unwrap());
    let elapsed = start.elapsed_us(&end).unwrap();
    assert!(elapsed > 0.0 && elapsed < 1e6, "{elapsed} µs");
    let untimed = Event::new(&device, false).unwrap();
    one.record(&untimed).unwrap();
    untimed.synchronize().unwrap();
    assert!(start.elapsed_us(&untimed).is_err());
}

#[test]
fn kernels_launch_with_their_arguments_and_report_what_they_are() {
    let Some(device) = device() else { return };
    let module = module(&device);
    assert_eq!(module.global_i32("answer").unwrap(), 42);
    let missing = module.function("no_such_kernel").unwrap_err().to_string();
    assert!(
        missing.contains("(no_such_kernel)") && missing.contains("NOT_FOUND"),
        "{missing}"
    );
    let add = module.function("add").unwrap();
    drop(module);
    assert!(add.registers().unwrap() > 0 && add.max_threads().unwrap() >= 256);
    assert_eq!(
        (add.local_bytes().unwrap(), add.static_shared().unwrap()),
        (0, 0)
    );
    add.set_max_shared(96 << 10).unwrap();
    assert!(matches!(
        add.set_max_shared(16 << 20),
        Err(CudaError::Unsupported { .. })
    ));
    let stream = Stream::new(&device).unwrap();
    let buffer = DeviceBuffer::alloc_zeroed(&device, 4 * 1000, "a test").unwrap();
    let (mut data, mut n, mut step) = (buffer.ptr(), 999_i32, 5_i32);
    let mut args: [*mut c_void; 3] = [
        (&raw mut data).cast(),
        (&raw mut n).cast(),
        (&raw mut step).cast(),
    ];
    let launch = |grid, cooperative| Launch {
        grid: (grid, 1, 1),
        block: (256, 1, 1),
        shared: 0,
        cooperative,
    };
    let most = add.max_blocks_per_multiprocessor(256, 0).unwrap() * device.num_multiprocessors();
    // SAFETY: the arguments are the kernel's, and the buffer lives until the stream is waited for.
    unsafe {
        stream.launch(&add, launch(4, false), &mut args).unwrap();
        *args[2].cast::<i32>() = 2;
        stream.launch(&add, launch(4, true), &mut args).unwrap();
        let error = stream
            .launch(&add, launch(most + 1, true), &mut args)
            .unwrap_err();
        assert!(
            error.to_string().contains("COOPERATIVE_LAUNCH_TOO_LARGE"),
            "{error}"
        );
        assert!(error.to_string().contains("add grid "), "{error}");
        assert!(!error.is_fatal());
    }
    stream.synchronize().unwrap();
    let mut expected = vec![7_i32; 999];
    expected.push(0);
    assert_eq!(buffer.to_host::<i32>().unwrap(), expected);
}

#[test]
fn a_graph_replays_with_what_its_addresses_hold_then() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let add = module(&device).function("add").unwrap();
    let mut source = PinnedBuffer::new(&device, 400, false, "a test").unwrap();
    let buffer = DeviceBuffer::alloc_zeroed(&device, 400, "a test").unwrap();
    let graph = stream
        .capture::<CudaError>(CaptureMode::ThreadLocal, |stream| {
            assert!(stream.is_capturing()?);
            let (mut data, mut n, mut step) = (buffer.ptr(), 100_i32, 3_i32);
            let mut args: [*mut c_void; 3] = [
                (&raw mut data).cast(),
                (&raw mut n).cast(),
                (&raw mut step).cast(),
            ];
            let launch = Launch {
                grid: (1, 1, 1),
                block: (128, 1, 1),
                shared: 0,
                cooperative: false,
            };
            // SAFETY: all live until the graph's last launch was waited for.
            unsafe {
                stream.copy_to_device(buffer.ptr(), &source, 0..400)?;
                stream.launch(&add, launch, &mut args)
            }
        })
        .unwrap();
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(graph.num_nodes().unwrap(), 2);
    let exec = graph.instantiate().unwrap();
    drop(graph);
    stream.upload_graph(&exec).unwrap();
    for round in 0..3_i32 {
        bytemuck::cast_slice_mut::<u8, i32>(source.as_mut_slice()).fill(round * 100);
        // SAFETY: as above.
        unsafe { stream.launch_graph(&exec) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(buffer.to_host::<i32>().unwrap(), vec![round * 100 + 3; 100]);
    }
}

#[test]
fn a_capture_ends_on_every_path_and_other_threads_serve_meanwhile() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let failed = stream.capture(CaptureMode::ThreadLocal, |_| {
        Err(CudaError::Invalid {
            what: "a test",
            value: "1".to_owned(),
            remedy: "none",
        })
    });
    assert!(matches!(failed, Err(CudaError::Invalid { .. })));
    assert!(!stream.is_capturing().unwrap());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture::<CudaError>(CaptureMode::ThreadLocal, |_| panic!("in a capture"))
    }));
    assert!(panicked.is_err() && !stream.is_capturing().unwrap());

    // While this thread captures, another allocates, copies, waits and frees.
    let buffer = DeviceBuffer::alloc_zeroed(&device, 64, "a test").unwrap();
    let (begun, wait_begun) = mpsc::channel();
    let (served, wait_served) = mpsc::channel();
    let other = std::thread::spawn(move || {
        wait_begun.recv().unwrap();
        let values = DeviceBuffer::from_host(&device, &[1_u64, 2, 3], "a test").unwrap();
        let stream = Stream::new(&device).unwrap();
        // SAFETY: the buffer lives until the stream is waited for.
        unsafe { stream.fill(values.ptr(), 1, 24) }.unwrap();
        stream.synchronize().unwrap();
        device.check().unwrap();
        let read = values.to_host::<u8>().unwrap();
        drop(values);
        served.send(read).unwrap();
    });
    let graph = stream
        .capture::<CudaError>(CaptureMode::ThreadLocal, |stream| {
            begun.send(()).unwrap();
            assert_eq!(wait_served.recv().unwrap(), [1; 24]);
            // SAFETY: the buffer lives until the graph's launch was waited for.
            unsafe { stream.fill(buffer.ptr(), 9, 64) }
        })
        .unwrap();
    other.join().unwrap();
    let exec = graph.instantiate().unwrap();
    // SAFETY: as above.
    unsafe { stream.launch_graph(&exec) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(buffer.to_host::<u8>().unwrap(), [9; 64]);
}

/// A product's case: random operands in `dtype`, their f64 product, and its buffers.
struct Case {
    shape: GemmShape,
    expected: Vec<f64>,
    /// Σ|x·w| + |bias|, for the bound of rounding.
    magnitude: Vec<f64>,
    x: DeviceBuffer,
    weight: DeviceBuffer,
    bias: DeviceBuffer,
    out: DeviceBuffer,
}

fn encode(dtype: GemmDtype, values: &mut [f64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        match dtype {
            GemmDtype::Bf16 => {
                let rounded = bf16::from_f64(*value);
                *value = rounded.to_f64();
                bytes.extend_from_slice(&rounded.to_le_bytes());
            }
            GemmDtype::F16 => {
                let rounded = f16::from_f64(*value);
                *value = rounded.to_f64();
                bytes.extend_from_slice(&rounded.to_le_bytes());
            }
            GemmDtype::F32 => {
                let rounded = *value as f32;
                *value = f64::from(rounded);
                bytes.extend_from_slice(&rounded.to_le_bytes());
            }
        }
    }
    bytes
}

fn decode(dtype: GemmDtype, bytes: &[u8]) -> Vec<f64> {
    let pair = |bytes: &[u8]| [bytes[0], bytes[1]];
    match dtype {
        GemmDtype::Bf16 => bytes
            .chunks(2)
            .map(|bytes| bf16::from_le_bytes(pair(bytes)).to_f64())
            .collect(),
        GemmDtype::F16 => bytes
            .chunks(2)
            .map(|bytes| f16::from_le_bytes(pair(bytes)).to_f64())
            .collect(),
        GemmDtype::F32 => bytes
            .chunks(4)
            .map(|bytes| f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])))
            .collect(),
    }
}

impl Case {
    fn new(device: &Device, shape: GemmShape, with_bias: bool, seed: u64) -> Self {
        let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(seed);
        let mut values = |count: usize| -> Vec<f64> {
            (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
        };
        let (mut x, mut weight) = (values(shape.m * shape.x_stride), values(shape.n * shape.k));
        let mut bias = values(shape.n);
        // What is between the rows must not count.
        for row in x.chunks_mut(shape.x_stride) {
            row[shape.k..].fill(f64::NAN);
        }
        let (x_bytes, weight_bytes) = (
            encode(shape.dtype, &mut x),
            encode(shape.dtype, &mut weight),
        );
        let bias_bytes = encode(shape.out_dtype(), &mut bias);
        let (mut expected, mut magnitude) = (Vec::new(), Vec::new());
        for row in x.chunks(shape.x_stride) {
            for (column, bias) in weight.chunks(shape.k).zip(&bias) {
                let bias = if with_bias { *bias } else { 0.0 };
                let products = || row.iter().zip(column).map(|(x, w)| x * w);
                expected.push(products().sum::<f64>() + bias);
                magnitude.push(products().map(f64::abs).sum::<f64>() + bias.abs());
            }
        }
        let out = vec![0xff_u8; shape.m * shape.out_stride * shape.out_dtype().size()];
        let buffer = |bytes: &[u8]| DeviceBuffer::from_host(device, bytes, "a test").unwrap();
        Self {
            shape,
            expected,
            magnitude,
            x: buffer(&x_bytes),
            weight: buffer(&weight_bytes),
            bias: buffer(&bias_bytes),
            out: buffer(&out),
        }
    }

    fn operands(&self, with_bias: bool) -> GemmOperands {
        GemmOperands {
            x: self.x.ptr(),
            weight: self.weight.ptr(),
            bias: with_bias.then_some(self.bias.ptr()),
            out: self.out.ptr(),
        }
    }

    /// Every element within the rounding of its dtype; every byte between the rows untouched.
    fn check(&self) {
        let Self {
            shape,
            expected,
            magnitude,
            ..
        } = self;
        let dtype = shape.out_dtype();
        let bytes = self.out.to_host::<u8>().unwrap();
        let rounding = match dtype {
            GemmDtype::Bf16 => 2_f64.powi(-8),
            GemmDtype::F16 => 2_f64.powi(-11),
            GemmDtype::F32 => 2_f64.powi(-24),
        };
        for (row, bytes) in bytes.chunks(shape.out_stride * dtype.size()).enumerate() {
            let (used, between) = bytes.split_at(shape.n * dtype.size());
            assert!(
                between.iter().all(|byte| *byte == 0xff),
                "{shape}: wrote between rows"
            );
            for (column, found) in decode(dtype, used).into_iter().enumerate() {
                let at = row * shape.n + column;
                // A sum of k terms in f32, and one rounding to the output.
                let bound = magnitude[at] * 2e-6 + expected[at].abs() * rounding * 1.01;
                let error = (found - expected[at]).abs();
                assert!(
                    error <= bound,
                    "{shape} [{row}, {column}]: {found} for {}, off by {error:e}",
                    expected[at]
                );
            }
        }
    }
}

#[test]
fn products_are_right_in_every_dtype_shape_and_stride() {
    let Some(device) = device() else { return };
    let gemm = Gemm::new(&device, USUAL_WORKSPACE).unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut seed = 0;
    for dtype in [GemmDtype::Bf16, GemmDtype::F16, GemmDtype::F32] {
        for out in [GemmOut::Same, GemmOut::F32] {
            for (m, n, k, x_pad, out_pad) in [
                (1, 576, 576, 0, 0),
                (7, 192, 576, 0, 0),
                (16, 64, 1536, 8, 16),
                (33, 96, 128, 0, 32),
                (130, 48, 64, 64, 0),
                (5, 33, 40, 0, 7),
            ] {
                for with_bias in [false, true] {
                    seed += 1;
                    let shape = GemmShape {
                        x_stride: k + x_pad,
                        out_stride: n + out_pad,
                        out,
                        ..GemmShape::new(m, n, k, dtype)
                    };
                    let case = Case::new(&device, shape, with_bias, seed);
                    // SAFETY: the case lives until the stream is waited for.
                    unsafe { gemm.gemm(&stream, shape, case.operands(with_bias)) }
                        .unwrap_or_else(|error| panic!("{error}, bias {with_bias}"));
                    stream.synchronize().unwrap();
                    case.check();
                }
            }
        }
    }
    // No row: nothing to do, whatever the addresses are.
    let none = GemmOperands {
        x: DevicePtr::NULL,
        weight: DevicePtr::NULL,
        bias: None,
        out: DevicePtr::NULL,
    };
    // SAFETY: nothing is read or written.
    unsafe { gemm.gemm(&stream, GemmShape::new(0, 8, 8, GemmDtype::Bf16), none) }.unwrap();
}

#[test]
fn a_rows_bits_do_not_depend_on_the_other_rows_where_products_are_batch_invariant() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device).unwrap();
    let products = |batch_invariant| {
        Gemm::new(&device, USUAL_WORKSPACE)
            .unwrap()
            .with_batch_invariance(batch_invariant)
    };
    let (usual, invariant) = (products(false), products(true));
    for (dtype, out, n, k) in [
        (GemmDtype::Bf16, GemmOut::Same, 576, 1536),
        (GemmDtype::Bf16, GemmOut::F32, 1024, 576),
        (GemmDtype::F16, GemmOut::Same, 192, 4096),
        (GemmDtype::F32, GemmOut::Same, 192, 576),
    ] {
        let shape = |m| GemmShape {
            out,
            ..GemmShape::new(m, n, k, dtype)
        };
        let rows = 300;
        let case = Case::new(&device, shape(rows), true, 7);
        let run = |gemm: &Gemm, first: usize, m: usize| {
            let operands = GemmOperands {
                x: case.x.ptr().offset(first * k * dtype.size()),
                ..case.operands(true)
            };
            // SAFETY: the case lives until the stream is waited for, and has rows [first, first + m).
            unsafe { gemm.gemm(&stream, shape(m), operands) }.unwrap();
            stream.synchronize().unwrap();
            let bytes = case.out.to_host::<u8>().unwrap();
            bytes[..m * n * shape(m).out_dtype().size()].to_vec()
        };
        let row_bytes = n * shape(1).out_dtype().size();
        let all = run(&invariant, 0, rows);
        case.check();
        let all_usual = run(&usual, 0, rows);
        let (mut compared, mut others) = (0, 0);
        for m in [1, 2, 3, 8, 16, 17, 33, 64, 65, 128, 200, 299] {
            for first in [0, rows - m] {
                let range = first * row_bytes..(first + m) * row_bytes;
                assert!(
                    run(&invariant, first, m) == all[range.clone()],
                    "{}: rows from {first} have other bits alone",
                    shape(m)
                );
                let usual = run(&usual, first, m);
                let pairs = usual
                    .chunks(row_bytes)
                    .zip(all_usual[range].chunks(row_bytes));
                others += pairs.filter(|(a, b)| a != b).count();
                compared += m;
            }
        }
        println!(
            "{}: without the mode {others} of {compared} rows have other bits",
            shape(rows)
        );
    }
}

#[test]
fn products_give_the_same_bits_every_time_and_in_a_graph() {
    let Some(device) = device() else { return };
    let gemm = Gemm::new(&device, USUAL_WORKSPACE).unwrap();
    let stream = Stream::new(&device).unwrap();
    // Few rows and a long sum: where libraries split sums.
    for dtype in [GemmDtype::Bf16, GemmDtype::F32] {
        let shape = GemmShape::new(3, 128, 8192, dtype);
        gemm.prepare(shape, true).unwrap();
        let mut case = Case::new(&device, shape, true, 99);
        let mut run = || {
            // SAFETY: the case lives until the stream is waited for.
            unsafe { gemm.gemm(&stream, shape, case.operands(true)) }.unwrap();
            stream.synchronize().unwrap();
            let bits = case.out.to_host::<u8>().unwrap();
            case.out.fill(0xff).unwrap();
            bits
        };
        let first = run();
        for _ in 0..20 {
            assert_eq!(run(), first, "{shape}");
        }
        let graph = stream
            .capture::<CudaError>(CaptureMode::ThreadLocal, |stream| {
                // SAFETY: the case and the workspace live until the graph's launch was waited for.
                unsafe { gemm.gemm(stream, shape, case.operands(true)) }
            })
            .unwrap();
        let exec = graph.instantiate().unwrap();
        // SAFETY: as above.
        unsafe { stream.launch_graph(&exec) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(
            case.out.to_host::<u8>().unwrap(),
            first,
            "{shape} in a graph"
        );
        case.check();
    }
}
