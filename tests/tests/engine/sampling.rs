//! Log-probabilities, and tokens that the host chooses: penalties, biases, min-p. The logits they are compared with are those
//! that the engine's observer sees; the formulas are written out here once more.

use timetable_engine::{
    BuilderSource, CacheSize, Engine, EngineConfig, GenerationRequest,
    sampling::{SamplingParams, TokenLogprobs},
};
use timetable_tests::{
    drive::{self, Answer, generate, greedy},
    trace,
    two_in_flight::{self, Behaviour},
};

fn config(tokens: usize, rows: usize, blocks: usize) -> EngineConfig {
    EngineConfig {
        batch_invariant: true,
        max_num_seqs: rows,
        max_num_batched_tokens: tokens,
        max_model_len: Some(512),
        cache_size: CacheSize::Blocks(blocks),
        num_workers: 4,
        ..EngineConfig::default()
    }
}

fn engine(config: &EngineConfig) -> Engine {
    drive::engine(config, drive::tiny_llama(), &BuilderSource::Plain)
}

/// The recorded prompts; every third wants no log-probabilities, the others 0, 1 or up to 5.
fn with_logprobs() -> Vec<GenerationRequest> {
    let prompts = trace::load("llama_mrv2_f32").prompts;
    let request = |(index, prompt): (usize, &Vec<u32>)| {
        let mut request = greedy(prompt, 12);
        request.params.logprobs = [None, Some(index as u32 % 2), Some(index as u32 % 6)][index % 3];
        request
    };
    prompts.iter().enumerate().map(request).collect()
}

/// The natural logarithm of a token's share of a row, in f64.
fn log_softmax(logits: &[f32], token: u32) -> f64 {
    let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    f64::from(logits[token as usize]) - total.ln()
}

/// Token ids, the largest logit first.
fn order(logits: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    order
}

/// Of each request's tokens, as bits.
fn bits(answer: &Answer) -> Vec<(u32, Vec<(u32, u32)>)> {
    let of = |found: &TokenLogprobs| {
        let top = found
            .top
            .iter()
            .map(|(token, value)| (*token, value.to_bits()));
        (found.logprob.to_bits(), top.collect())
    };
    answer.logprobs.iter().map(of).collect()
}

#[test]
fn logprobs_are_those_of_the_models_logits() {
    let mut engine = engine(&config(64, 8, 256));
    let requests = with_logprobs();
    let rows = drive::logits(&mut engine, requests.clone());
    let answers = generate(&mut engine, requests.clone());
    let plain = generate(
        &mut engine,
        trace::load("llama_mrv2_f32")
            .prompts
            .iter()
            .map(|prompt| greedy(prompt, 12))
            .collect(),
    );
    for (index, (answer, request)) in answers.iter().zip(&requests).enumerate() {
        assert_eq!(
            answer.tokens, plain[index].tokens,
            "the tokens stay as they are"
        );
        let Some(count) = request.params.logprobs else {
            assert!(answer.logprobs.is_empty(), "nobody asked");
            continue;
        };
        assert_eq!(answer.logprobs.len(), answer.tokens.len());
        let of_tokens = answer.logprobs.iter().zip(&answer.tokens);
        for ((found, &token), logits) in of_tokens.zip(&rows[index]) {
            assert!((f64::from(found.logprob) - log_softmax(logits, token)).abs() < 1e-5);
            let tokens: Vec<u32> = found.top.iter().map(|top| top.0).collect();
            assert_eq!(tokens, order(logits)[..count as usize]);
            for &(token, value) in &found.top {
                assert!((f64::from(value) - log_softmax(logits, token)).abs() < 1e-5);
            }
            // Greedy: the token that came is the likeliest.
            assert!(
                found
                    .top
                    .first()
                    .is_none_or(|top| *top == (token, found.logprob))
            );
        }
    }
}

#[test]
fn logprobs_of_a_request_alone_are_those_in_a_batch_in_any_chunks_and_after_preemption() {
    let mut alone = engine(&config(512, 1, 256));
    let expected: Vec<Answer> = with_logprobs()
        .into_iter()
        .flat_map(|request| generate(&mut alone, vec![request]))
        .collect();
    for (tokens, rows, blocks) in [(512, 12, 256), (37, 5, 256), (64, 8, 16)] {
        let mut engine = engine(&config(tokens, rows, blocks));
        let found = generate(&mut engine, with_logprobs());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(
                bits(found),
                bits(expected),
                "request {index}, {tokens} tokens"
            );
        }
        assert_eq!(engine.stats().preemptions > 0, blocks == 16);
    }
}

/// One request for each thing that the host does, and all of them together.
fn host_chosen() -> Vec<GenerationRequest> {
    let prompts = trace::load("llama_mrv2_f32").prompts;
    let base = |index: usize| SamplingParams {
        max_tokens: 24,
        ignore_eos: true,
        seed: Some(index as u64),
        ..SamplingParams::default()
    };
    let params = [
        SamplingParams {
            repetition_penalty: 1.8,
            ..base(0)
        },
        SamplingParams {
            presence_penalty: 2.0,
            ..base(1)
        },
        SamplingParams {
            // The token that the bias brings loses it again, time after time.
            logit_bias: vec![(17, 12.0)],
            frequency_penalty: 2.0,
            ..base(2)
        },
        SamplingParams {
            logit_bias: vec![(17, 30.0), (400, -100.0)],
            ..base(3)
        },
        SamplingParams {
            min_p: 0.4,
            temperature: 1.5,
            ..base(4)
        },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: -0.5,
            frequency_penalty: 0.7,
            logit_bias: vec![(17, 1.0)],
            min_p: 0.05,
            temperature: 0.9,
            top_p: 0.9,
            top_k: 40,
            logprobs: Some(3),
            ..base(5)
        },
    ];
    let with_prompt = params.into_iter().zip(&prompts);
    with_prompt
        .map(|(params, prompt)| GenerationRequest {
            prompt: prompt.clone(),
            params,
            ..GenerationRequest::default()
        })
        .collect()
}

/// The field's formulas, with the request's tokens counted anew for each of them.
fn adjust(params: &SamplingParams, prompt: &[u32], output: &[u32], logits: &mut [f32]) {
    for &(token, bias) in &params.logit_bias {
        logits[token as usize] += bias;
    }
    for (token, logit) in logits.iter_mut().enumerate() {
        let token = token as u32;
        let count = output.iter().filter(|&&other| other == token).count();
        if count > 0 || prompt.contains(&token) {
            let penalty = params.repetition_penalty;
            *logit *= if *logit > 0.0 { 1.0 / penalty } else { penalty };
        }
        *logit -= params.frequency_penalty * count as f32;
        *logit -= params.presence_penalty * f32::from(u8::from(count > 0));
    }
}

#[test]
fn penalties_and_biases_choose_what_their_formulas_say() {
    let mut engine = engine(&config(64, 8, 256));
    let rows = drive::logits(&mut engine, host_chosen());
    let answers = generate(&mut engine, host_chosen());
    let plain = generate(
        &mut engine,
        host_chosen()
            .iter()
            .map(|request| greedy(&request.prompt, 24))
            .collect(),
    );
    for (index, request) in host_chosen().iter().enumerate() {
        let (params, output) = (&request.params, &answers[index].tokens);
        for (place, logits) in rows[index].iter().enumerate() {
            let mut adjusted = logits.clone();
            adjust(params, &request.prompt, &output[..place], &mut adjusted);
            let best = adjusted[order(&adjusted)[0] as usize];
            let chosen = adjusted[output[place] as usize];
            if params.temperature == 0.0 {
                assert!(chosen > best - 1e-4, "request {index}, token {place}");
            } else {
                let least = (chosen - best) / params.temperature;
                assert!(
                    least >= params.min_p.ln() - 1e-4,
                    "request {index}, token {place}"
                );
            }
            // Log-probabilities are the model's own all the same.
            if let Some(found) = answers[index].logprobs.get(place) {
                assert!(
                    (f64::from(found.logprob) - log_softmax(logits, output[place])).abs() < 1e-5
                );
            }
        }
        assert_ne!(
            *output, plain[index].tokens,
            "request {index} changes nothing"
        );
    }
    assert_eq!(answers[5].logprobs.len(), 24);
}

/// A device goes on before the host knows its tokens. Requests whose tokens the host chooses wait for each; the others do not.
#[test]
fn the_host_chooses_the_same_tokens_with_steps_in_flight_and_others_do_not_wait() {
    let config = config(64, 8, 256);
    let requests = || {
        let plain = greedy(&trace::load("llama_mrv2_f32").prompts[7], 30);
        let mut requests = host_chosen();
        requests.push(plain);
        requests
    };
    let expected = generate(&mut engine(&config), requests());
    let mut ahead = two_in_flight::engine(
        &config,
        drive::tiny_llama(),
        Behaviour::default(),
        None,
        &BuilderSource::Plain,
    );
    let found = generate(&mut ahead, requests());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.tokens, expected.tokens);
        assert_eq!(bits(found), bits(expected));
    }
    // From here on one that waits runs beside one that does not, which gets a token with every step.
    let waits = host_chosen().remove(0);
    let (waits, goes_on) = (
        ahead.add_request(waits).expect("taken"),
        ahead.add_request(greedy(&[7; 20], 20)).expect("taken"),
    );
    let mut steps_of = [Vec::new(), Vec::new()];
    for step in 0.. {
        if ahead.is_idle() {
            break;
        }
        ahead.step();
        for update in ahead.take_updates() {
            steps_of[usize::from(update.id == goes_on)].push(step);
            assert!(update.id == goes_on || update.id == waits);
        }
    }
    assert_eq!(steps_of[1], (0..20).collect::<Vec<_>>());
    assert_eq!(steps_of[0].len(), 24);
    assert!(
        steps_of[0].iter().take(10).copied().eq((0..20).step_by(2)),
        "every other step while there is other work: {steps_of:?}"
    );
}

#[test]
fn a_bias_for_a_token_that_the_model_does_not_have_is_refused() {
    let mut engine = engine(&config(64, 8, 256));
    let mut request = greedy(&[5; 4], 4);
    request.params.logit_bias = vec![(3, 1.0), (512, 1.0)];
    let error = engine.add_request(request).expect_err("refused");
    let text = error.to_string();
    assert!(
        text.contains("token 512") && text.contains("vocabulary of 512"),
        "{text}"
    );
    let mut request = greedy(&[5; 4], 4);
    request.params.logprobs = Some(21);
    let error = engine.add_request(request).expect_err("refused");
    assert!(error.to_string().contains("at most 20"), "{error}");
    assert!(engine.is_idle());
}
