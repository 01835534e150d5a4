//! A device that faults. In its own process: nothing works there afterwards.

use timetable_device_cuda::CudaError;
use timetable_device_cuda::driver::{Device, DeviceBuffer, Event, Launch, Module, Stream};

/// Stops with a fault.
const PTX: &[u8] = b"
.version 8.0
.target sm_80
.address_size 64
.visible .entry fault() {
    trap;
    ret;
}
\0";

#[test]
fn a_fault_is_fatal_is_reported_by_every_later_call_and_drops_quietly() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            assert!(
                matches!(error, CudaError::NoDriver | CudaError::NoDevice { .. }),
                "{error}"
            );
            return;
        }
    };
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device, true).unwrap();
    let buffer = DeviceBuffer::alloc_zeroed(&device, 1 << 20, "a test").unwrap();
    let fault = Module::load(&device, PTX)
        .unwrap()
        .function("fault")
        .unwrap();
    let launch = Launch {
        grid: (1, 1, 1),
        block: (32, 1, 1),
        shared: 0,
        cooperative: false,
    };
    // SAFETY: the kernel has no argument.
    unsafe { stream.launch(&fault, launch, &mut []) }.unwrap();
    stream.record(&event).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(error.is_fatal(), "{error}");
    assert!(
        error
            .to_string()
            .contains("the CUDA device was lost: cuStreamSynchronize"),
        "{error}"
    );
    assert!(device.check().unwrap_err().is_fatal());
    assert!(event.synchronize().unwrap_err().is_fatal());
    assert!(buffer.to_host::<u8>().unwrap_err().is_fatal());
    assert!(
        DeviceBuffer::alloc(&device, 64, "a test")
            .unwrap_err()
            .is_fatal()
    );
    drop((buffer, event, fault, stream, device));
}
