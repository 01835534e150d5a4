//! What the CUDA commands say on a machine without a GPU, and what each device refuses.

mod support;

use support::{run, tiny_llama};
use timetable_device_cuda::driver::Device;

/// Runs `generate` on the small model.
fn generate(extra: &[&str]) -> support::Ran {
    let model = tiny_llama();
    let mut arguments = vec!["generate", "--model", model.to_str().unwrap()];
    arguments.extend(["--admin", "none", "--prompt", "t40", "--max-tokens", "2"]);
    arguments.extend(["--num-gpu-blocks-override", "64"]);
    arguments.extend(extra);
    run(&arguments)
}

#[test]
fn without_a_gpu_every_cuda_command_says_so() {
    let Err(error) = Device::open(0) else {
        println!("skipped: this machine has a GPU");
        return;
    };
    let message = error.to_string();
    generate(&["--device", "cuda"]).fails(6, &[&message]);
    generate(&["--device", "cuda:0", "--dtype", "float32"]).fails(6, &[&message]);
    run(&["selftest", "--device", "cuda", "--quick"]).fails(6, &[&message]);
    run(&["bench", "--device", "cuda", "--json"]).fails(6, &[&message]);
}

#[test]
fn an_ordinal_that_no_machine_has_is_refused() {
    let ran = generate(&["--device", "cuda:4096"]);
    assert_eq!(ran.code, 6, "{}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
}

#[test]
fn what_a_device_does_not_run_is_refused_with_the_remedy() {
    generate(&["--kv-cache-dtype", "fp8"]).fails(4, &["kv_cache_dtype"]);
    generate(&["--async-scheduling"]).fails(4, &["async_scheduling"]);
    generate(&["--no-async-scheduling"]).succeeds();
    generate(&["--dtype", "float32"]).succeeds();
    generate(&["--batch-invariant"]).succeeds();
    generate(&["--dtype", "float16"]).fails(4, &["float16"]);
    for device in ["gpu", "cuda:", "cpu:1"] {
        let ran = generate(&["--device", device]);
        assert_eq!(ran.code, 2, "{device}: {}", ran.stderr);
    }
    run(&["selftest", "--device", "cpu"]).fails(2, &["--device cpu"]);
    run(&["bench", "--only", "tea"]).fails(2, &["tea", "decode", "gap"]);
    if Device::open(0).is_ok() {
        run(&["selftest", "--only", "tea"]).fails(2, &["tea", "scatter"]);
    }
}
