//! Example 03 does what it says: the same function, run.

#[path = "../examples/03_custom_backend.rs"]
mod custom_backend;

#[test]
fn a_third_partys_backend_is_chosen_verified_and_executed() {
    let outcome = custom_backend::run().expect("the example runs");
    let text = &outcome.text;
    assert!(text.contains("Using ACME_PAIR backend."), "{text}");
    assert!(
        text.contains(
            "Selected backend AttentionBackendEnum.ACME_PAIR is not valid for this configuration. Reason: ['sliding window not supported']"
        ),
        "{text}"
    );
    let [short, long] = &outcome.served;
    assert_eq!(short.refusal, None);
    assert_eq!(short.max_splits, 2);
    assert_eq!(
        long.refusal.as_deref(),
        Some("schedule.num_splits[1] is 4, must be at most 2")
    );
    assert_eq!(long.max_splits, 1, "the plain builder does not split");
    for served in [short, long] {
        assert!(served.error <= 2e-6, "relative error {}", served.error);
    }
}
