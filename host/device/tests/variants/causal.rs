//! Causality by group and by request, through every builder that has it.

use timetable_attention::BuildFault;
use timetable_reference::native_twin;
use timetable_types::{Causal, ErrorKind};

use crate::{
    scenario::{BUILDERS, Scenario, assert_close, random_layer},
    support::{pick, random_rows, rng},
};

#[test]
fn groups_and_requests_have_flags_of_their_own() {
    let mut worst = 0.0f64;
    for seed in 0..40 {
        let rng = &mut rng(10_000 + seed);
        let mut layer = random_layer(rng);
        layer.sliding_window = *pick(rng, &[None, None, Some(24)]);
        let (rows, _) = random_rows(rng, 150);
        let causal = pick(rng, &[Causal::All(false), Causal::PerRequest]).clone();
        let scenario = Scenario::new(rng, layer, causal.clone(), &rows, (1, 2));
        let cache = scenario.cache(|_, _| true);
        let expected = scenario.expected_whole();
        for name in BUILDERS {
            if name == "flashinfer" && causal == Causal::PerRequest {
                continue;
            }
            let served = scenario.attend(name, &cache);
            let what = format!("{name}, {causal:?}, {rows:?}");
            let error = assert_close(
                &what,
                &served.output,
                &served.lse,
                &expected,
                layer.head_size,
            );
            worst = worst.max(error);
        }
    }
    println!("40 steps: {worst:.1e}");
}

#[test]
fn flashinfer_declines_flags_per_request_and_says_who_takes_them() {
    let layer = crate::support::config(4, 2, 32);
    let scenario = Scenario::new(
        &mut rng(1),
        layer,
        Causal::PerRequest,
        &[(1, 9), (4, 20)],
        (0, 0),
    );
    let mut builder = native_twin("flashinfer", &scenario.config).expect("a builder");
    let Err(BuildFault::Declined(error)) = builder.build(&scenario.step.cam, false) else {
        panic!("it has one flag for the batch");
    };
    assert_eq!(error.kind, ErrorKind::NotImplemented);
    assert!(error.message.contains("FLASH_ATTN"), "{}", error.message);
}
