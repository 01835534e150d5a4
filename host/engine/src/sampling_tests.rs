use super::*;

fn sampler(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Sampler {
    let params = SamplingParams {
        temperature,
        top_k,
        top_p,
        seed: Some(seed),
        ..SamplingParams::default()
    };
    Sampler::new(&params).expect("valid parameters")
}

/// Counts of 20,000 draws.
fn histogram(sampler: &mut Sampler, logits: &[f32]) -> Vec<f64> {
    let draws = 20_000;
    let mut counts = vec![0f64; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits).expect("numbers") as usize] += 1.0 / f64::from(draws);
    }
    counts
}

#[test]
fn greedy_takes_the_lowest_of_equal_maxima_and_skips_nan() {
    let mut sampler = sampler(0.0, 0, 1.0, 0);
    assert_eq!(sampler.sample(&[1.0, 3.0, f32::NAN, 3.0]), Ok(1));
    assert_eq!(
        sampler.sample(&[f32::NEG_INFINITY, f32::NEG_INFINITY]),
        Ok(0)
    );
    assert_eq!(
        sampler.sample(&[f32::NAN; 3]),
        Err(SamplingError::Logits(3))
    );
    assert_eq!(sampler.sample(&[]), Err(SamplingError::Logits(0)));
}

#[test]
fn temperature_gives_the_softmax() {
    let logits = [0.0, 1.0, 2.0, -1.0];
    for temperature in [0.5f32, 1.0, 2.0] {
        let weights: Vec<f64> = logits
            .iter()
            .map(|l| (f64::from(*l) / f64::from(temperature)).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let counts = histogram(&mut sampler(temperature, 0, 1.0, 7), &logits);
        for (count, weight) in counts.iter().zip(weights) {
            assert!(
                (count - weight / total).abs() < 0.015,
                "{count} against {}",
                weight / total
            );
        }
    }
}

#[test]
fn top_k_and_top_p_leave_the_right_tokens() {
    let logits = [0.0, 3.0, 2.0, 2.0, -5.0];
    let drawn = |s: &mut Sampler| -> Vec<usize> {
        histogram(s, &logits)
            .iter()
            .enumerate()
            .filter(|(_, c)| **c > 0.0)
            .map(|(i, _)| i)
            .collect()
    };
    assert_eq!(drawn(&mut sampler(1.0, 1, 1.0, 1)), [1]);
    // Of the tied tokens the lower id is kept.
    assert_eq!(drawn(&mut sampler(1.0, 2, 1.0, 1)), [1, 2]);
    // Probabilities: 0.55, 0.20, 0.20, 0.03, 0.0002.
    assert_eq!(drawn(&mut sampler(1.0, 0, 0.5, 1)), [1]);
    assert_eq!(drawn(&mut sampler(1.0, 0, 0.6, 1)), [1, 2]);
    assert_eq!(drawn(&mut sampler(1.0, 0, 0.9, 1)), [1, 2, 3]);
    assert_eq!(drawn(&mut sampler(1.0, 2, 0.99, 1)), [1, 2]);
    assert_eq!(
        drawn(&mut sampler(1e-6, 0, 1.0, 1)),
        [1],
        "a tiny temperature is greedy"
    );
}

#[test]
fn a_seed_repeats_whatever_else_is_sampled() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
    let draw = |s: &mut Sampler| s.sample(&logits).expect("numbers");
    let alone: Vec<u32> = {
        let mut s = sampler(1.0, 40, 0.95, 42);
        (0..50).map(|_| draw(&mut s)).collect()
    };
    let (mut a, mut b) = (sampler(1.0, 40, 0.95, 42), sampler(1.0, 40, 0.95, 43));
    let mut with_other = Vec::new();
    let mut other = Vec::new();
    for _ in 0..50 {
        with_other.push(draw(&mut a));
        other.push(draw(&mut b));
    }
    assert_eq!(alone, with_other);
    assert_ne!(alone, other);
}

/// The number and the choice are apart, so that another device can choose by the same number.
#[test]
fn a_token_is_a_function_of_its_logits_and_one_number() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 1.3).cos() * 3.0).collect();
    for (top_k, top_p) in [(0, 1.0), (7, 1.0), (0, 0.8), (20, 0.6)] {
        let (mut whole, mut split) = (sampler(0.9, top_k, top_p, 3), sampler(0.9, top_k, top_p, 3));
        for _ in 0..200 {
            let uniform = split.draw();
            assert!((0.0..1.0).contains(&uniform));
            let token = split.sample_with(&logits, uniform);
            assert_eq!(token, split.sample_with(&logits, uniform));
            assert_eq!(token, whole.sample(&logits));
        }
    }
    assert_eq!(sampler(0.0, 0, 1.0, 3).draw(), 0.0, "greedy draws nothing");
}

/// The kernel's order (`kernels/src/sampling.cu`): one number must pick the same token on every device.
#[test]
fn the_running_sum_has_the_order_that_the_kernel_has() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 1.3).cos() * 3.0).collect();
    for (top_k, top_p) in [(0, 1.0), (7, 1.0), (0, 0.8), (20, 0.6)] {
        let mut sampler = sampler(0.9, top_k, top_p, 3);
        let picks: Vec<u32> = (0..1000)
            .map(|i| {
                sampler
                    .sample_with(&logits, f64::from(i) / 1000.0)
                    .expect("numbers")
            })
            .collect();
        if top_p == 1.0 {
            assert!(picks.is_sorted(), "in the order of the ids");
        } else {
            let logit = |token: &u32| logits[*token as usize];
            assert!(
                picks
                    .windows(2)
                    .all(|pair| logit(&pair[0]) >= logit(&pair[1])),
                "likeliest first"
            );
            assert!(!picks.is_sorted(), "which is not the order of the ids here");
        }
    }
}

#[test]
fn bad_parameters_are_named_with_their_value() {
    let check = |change: &dyn Fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate().expect_err("out of range").to_string()
    };
    assert!(check(&|p| p.temperature = -0.5).contains("-0.5"));
    assert!(check(&|p| p.temperature = f32::NAN).contains("NaN"));
    assert!(check(&|p| p.top_p = 0.0).contains("top_p is 0"));
    assert!(check(&|p| p.top_p = 1.5).contains("1.5"));
    assert!(check(&|p| p.max_tokens = 0).contains("max_tokens"));
    assert!(check(&|p| p.stop = vec!["a".into(), String::new()]).contains("stop string 1"));
    assert!(check(&|p| p.min_p = -0.1).contains("min_p is -0.1"));
    assert!(check(&|p| p.min_p = f32::NAN).contains("min_p is NaN"));
    assert!(check(&|p| p.presence_penalty = 2.5).contains("presence_penalty is 2.5"));
    assert!(check(&|p| p.frequency_penalty = -3.0).contains("frequency_penalty is -3"));
    assert!(check(&|p| p.repetition_penalty = 0.0).contains("repetition_penalty is 0"));
    assert!(check(&|p| p.repetition_penalty = f32::INFINITY).contains("repetition_penalty is inf"));
    assert!(check(&|p| p.logit_bias = vec![(7, 101.0)]).contains("token 7 is 101"));
    assert!(check(&|p| p.logit_bias = vec![(7, f32::NAN)]).contains("token 7 is NaN"));
    assert!(
        check(&|p| p.logit_bias = vec![(7, 1.0), (3, 1.0), (7, 2.0)]).contains("token 7 twice")
    );
    assert!(check(&|p| p.logprobs = Some(21)).contains("logprobs is 21"));
    assert_eq!(SamplingParams::default().validate(), Ok(()));
}

#[test]
fn min_p_leaves_what_is_likely_beside_the_likeliest() {
    // Probabilities beside the likeliest one's: 1, 0.5, 0.25, 0.01.
    let logits = [0.25f32.ln(), 0.0, 0.5f32.ln(), 0.01f32.ln()];
    let drawn = |min_p, temperature, top_p| {
        let params = SamplingParams {
            temperature,
            top_p,
            min_p,
            seed: Some(5),
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(&params).expect("valid parameters");
        let counts = histogram(&mut sampler, &logits);
        (0..4).filter(|&i| counts[i] > 0.0).collect::<Vec<usize>>()
    };
    assert_eq!(drawn(0.0, 1.0, 1.0), [0, 1, 2, 3]);
    assert_eq!(drawn(0.1, 1.0, 1.0), [0, 1, 2]);
    assert_eq!(drawn(0.3, 1.0, 1.0), [1, 2]);
    assert_eq!(drawn(1.0, 1.0, 1.0), [1]);
    // After the temperature: at 0.5 the quarter is a sixteenth. Before top-p: of 1 and 0.5, the first two thirds.
    assert_eq!(drawn(0.1, 0.5, 1.0), [1, 2]);
    assert_eq!(drawn(0.3, 1.0, 0.6), [1]);
}

#[test]
fn stop_tokens() {
    let mut params = SamplingParams {
        stop_token_ids: vec![9],
        ..SamplingParams::default()
    };
    assert!(
        params.is_stop_token(2, &[2])
            && params.is_stop_token(9, &[2])
            && !params.is_stop_token(3, &[2])
    );
    params.ignore_eos = true;
    assert!(!params.is_stop_token(2, &[2]) && params.is_stop_token(9, &[2]));
}

#[test]
fn stop_strings_are_found_across_pieces_and_never_shown() {
    let stops = ["STOP".to_owned(), "é!".to_owned()];
    for text in ["abcSTOPdef", "aSTSTOP", "xSTOé!STOP", "no stop: STO", "é"] {
        let end = stops
            .iter()
            .filter_map(|s| text.find(s))
            .min()
            .unwrap_or(text.len());
        let mut matcher = StopMatcher::new(&stops);
        let mut shown = String::new();
        let mut stopped = None;
        for c in text.chars() {
            let outcome = matcher.push(c.encode_utf8(&mut [0; 4]));
            shown += &outcome.text;
            stopped = outcome.stopped;
            if stopped.is_some() {
                break;
            }
        }
        shown += &matcher.finish();
        assert_eq!(shown, text[..end], "{text}");
        assert_eq!(stopped.is_some(), end < text.len());
    }
}
