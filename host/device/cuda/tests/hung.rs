//! A device that hangs. In a process of its own, which never comes to free what the device still uses.

use std::process::Command;
use std::time::{Duration, Instant};

use timetable_device_cuda::CudaError;
use timetable_device_cuda::driver::{Device, Event, Launch, Module, Stream};

/// Never ends.
const PTX: &[u8] = b"
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin() {
again:
    bra.uni again;
}
\0";

/// Set in the child.
const CHILD: &str = "TIMETABLE_TEST_HUNG_CHILD";

#[test]
fn a_kernel_that_never_ends_is_given_up_on_and_the_process_can_end() {
    if std::env::var_os(CHILD).is_some() {
        hang();
    }
    match Device::open(0) {
        Ok(_) => {}
        Err(error) => {
            assert!(
                matches!(error, CudaError::NoDriver | CudaError::NoDevice { .. }),
                "{error}"
            );
            return;
        }
    }
    let began = Instant::now();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_kernel_that_never_ends_is_given_up_on_and_the_process_can_end",
        ])
        .env(CHILD, "1")
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(6));
    assert!(began.elapsed() < Duration::from_secs(60));
}

fn hang() -> ! {
    let device = Device::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device, true).unwrap();
    let spin = Module::load(&device, PTX)
        .unwrap()
        .function("spin")
        .unwrap();
    let launch = Launch {
        grid: (1, 1, 1),
        block: (32, 1, 1),
        shared: 0,
        cooperative: false,
    };
    // SAFETY: the kernel has no argument.
    unsafe { stream.launch(&spin, launch, &mut []) }.unwrap();
    stream.record(&event).unwrap();
    let limit = Duration::from_millis(300);
    let hung = |result: Result<(), CudaError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, CudaError::Hung { .. }), "{error}");
        assert!(error.is_fatal());
    };
    hung(event.synchronize_within(limit));
    hung(stream.synchronize_within(limit));
    std::process::exit(6);
}
