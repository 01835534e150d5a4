//! Log-probabilities, and tokens that the host chooses from the device's logits: as on the CPU, beside requests that the device
//! chooses for.

use timetable_engine::{BuilderSource, EngineConfig, GenerationRequest, ModelDtype};
use timetable_tests::drive::{self, component, generate, greedy};

use super::support;

/// Every third request wants log-probabilities, every third has its tokens chosen by the host.
fn requests() -> Vec<GenerationRequest> {
    let prompts = support::prompts(9, 512);
    let request = |(index, prompt): (usize, &Vec<u32>)| {
        let mut request = greedy(prompt, 20);
        match index % 3 {
            0 => request.params.logprobs = Some(5),
            1 => {
                request.params.repetition_penalty = 1.5;
                request.params.frequency_penalty = 0.5;
                request.params.logit_bias = vec![(17, 2.0)];
                request.params.logprobs = (index == 1).then_some(2);
            }
            _ => {}
        }
        request
    };
    prompts.iter().enumerate().map(request).collect()
}

#[test]
fn logprobs_and_host_chosen_tokens_are_the_cpus() {
    let Some(ordinal) = support::device() else {
        return;
    };
    let on_cpu = EngineConfig {
        device: timetable_engine::DeviceChoice::Cpu,
        ..support::config(ordinal)
    };
    let mut cpu = drive::engine(&on_cpu, drive::tiny_llama(), &BuilderSource::Plain);
    let expected = generate(&mut cpu, requests());
    for ahead in [true, false] {
        let config = EngineConfig {
            model_dtype: ModelDtype::Float32,
            async_scheduling: Some(ahead),
            ..support::config(ordinal)
        };
        let path = drive::tiny_llama_dir();
        let mut engine = support::engine(&config, &path, &component("flash-attn"));
        let found = generate(&mut engine, requests());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(
                found.tokens, expected.tokens,
                "request {index}, ahead {ahead}"
            );
            assert_eq!(found.logprobs.len(), expected.logprobs.len());
            for (found, expected) in found.logprobs.iter().zip(&expected.logprobs) {
                assert!((found.logprob - expected.logprob).abs() < 1e-3);
                assert_eq!(found.top.len(), expected.top.len());
                for (found, expected) in found.top.iter().zip(&expected.top) {
                    assert!((found.1 - expected.1).abs() < 1e-3);
                }
            }
        }
        let stats = engine.stats();
        assert_eq!((stats.failed_steps, stats.fallback_steps), (0, 0));
    }
}
