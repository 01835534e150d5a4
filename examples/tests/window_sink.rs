//! Example 04 does what it says: the same function, run.

#[path = "../examples/04_window_sink.rs"]
mod window_sink;

#[test]
fn a_selection_is_executed_under_the_grant_and_refused_without_it() {
    let outcome = window_sink::run().expect("the example runs");
    let (exact, subset) = (&outcome.exact, &outcome.subset);
    assert!(!exact.by_component, "{}", outcome.text);
    let fault = exact.fault.as_deref().expect("a refusal");
    assert!(
        fault.contains("paged_kv_indices") && fault.contains("grant"),
        "{fault}"
    );
    assert_eq!(exact.keys, 400 + 40 + 330);

    assert!(
        subset.by_component && subset.fault.is_none(),
        "{}",
        outcome.text
    );
    // 16 of the sink, and from the page with the first key of the window on: 336, 0, and 224.
    assert_eq!(subset.keys, 16 + (400 - 336) + 40 + 16 + (330 - 224));
    for served in [exact, subset] {
        assert!(served.error <= 2e-6, "relative error {}", served.error);
    }
}
