//! A device that is lost while requests run: every request ends with an error, new ones are refused, nothing hangs. In a process
//! of its own, since no CUDA call of the process succeeds afterwards.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use timetable_device_cuda::driver::{Device, Launch, Module, Stream};
use timetable_engine::{
    EngineHandle, FinishReason, ModelDtype, RequestError, RequestEvent, RequestStream,
};
use timetable_tests::drive::{component, greedy, tiny_llama_dir};

use super::support;

/// Set in the process that loses its device.
const CHILD: &str = "TIMETABLE_TEST_LOSES_ITS_DEVICE";
/// A hang is longer than this.
const LONGEST: Duration = Duration::from_secs(60);

/// Stops with a fault.
const FAULT: &[u8] = b"
.version 8.0
.target sm_80
.address_size 64
.visible .entry fault() {
    trap;
    ret;
}
\0";

#[test]
fn a_lost_device_ends_every_request_and_hangs_nothing() {
    let Some(ordinal) = support::device() else {
        return;
    };
    if std::env::var_os(CHILD).is_some() {
        lose_it(ordinal);
        return;
    }
    let program = std::env::current_exe().expect("the test program's own path");
    let mut child = Command::new(program)
        .args([
            "--exact",
            "fatal::a_lost_device_ends_every_request_and_hangs_nothing",
            "--nocapture",
        ])
        .env(CHILD, "1")
        .stdout(Stdio::inherit())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("the test program runs again");
    let started = Instant::now();
    let status = loop {
        match child.try_wait().expect("the child is ours") {
            Some(status) => break status,
            None if started.elapsed() > LONGEST => {
                child.kill().expect("the child is ours");
                panic!("the process hangs after its device was lost");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{status}");
}

fn last(stream: RequestStream) -> (FinishReason, Option<RequestError>) {
    match stream.last() {
        Some(RequestEvent::Finished { reason, error }) => (reason, error),
        other => panic!("a stream ends with Finished, not {other:?}"),
    }
}

fn lose_it(ordinal: usize) {
    let config = timetable_engine::EngineConfig {
        model_dtype: ModelDtype::Float32,
        ..support::config(ordinal)
    };
    let engine = support::engine(&config, &tiny_llama_dir(), &component("flash-attn"));
    let handle = EngineHandle::spawn(engine).expect("a thread");
    let mut streams: Vec<RequestStream> = (0..4)
        .map(|request| handle.submit(greedy(&[5 + request; 9], 490)))
        .collect();
    for stream in &mut streams {
        let first = stream.next();
        assert!(
            matches!(first, Some(RequestEvent::Token { .. })),
            "{first:?}"
        );
    }
    // The process has one context for each device: what faults in it takes the engine's with it.
    let device = Device::open(ordinal as u32).expect("the device opens again");
    let fault = Module::load(&device, FAULT)
        .and_then(|module| module.function("fault"))
        .expect("the fault is loaded");
    let stream = Stream::new(&device).expect("a stream");
    let launch = Launch {
        grid: (1, 1, 1),
        block: (32, 1, 1),
        shared: 0,
        cooperative: false,
    };
    // SAFETY: the kernel has no argument.
    unsafe { stream.launch(&fault, launch, &mut []) }.expect("it is launched");
    for stream in streams {
        let (reason, error) = last(stream);
        assert_eq!(reason, FinishReason::Error);
        let error = error.expect("the reason");
        assert!(matches!(error, RequestError::Device(_)), "{error:?}");
        println!("ended with: {error}");
    }
    let (reason, error) = last(handle.submit(greedy(&[5; 9], 3)));
    assert_eq!(reason, FinishReason::Error);
    assert!(matches!(error, Some(RequestError::Device(_))), "{error:?}");
    handle.shutdown();
}
