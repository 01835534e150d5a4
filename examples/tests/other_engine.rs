//! Example 05 does what it says: the same function, run.

#[path = "../examples/05_other_engine.rs"]
mod other_engine;

#[test]
fn an_engine_of_its_own_keeps_every_request_through_reload_fault_and_rollback() {
    let outcome = other_engine::run().expect("the example runs");
    let text = &outcome.text;
    let [admitted, finished] = outcome.requests;
    assert!(admitted > 0 && admitted == finished, "{text}");
    let [first, reloaded, faulted, rolled_back] = outcome.states.as_slice() else {
        panic!("{text}");
    };
    let origin = |status: &timetable_sandbox::BuilderStatus| {
        status.active.as_ref().map(|version| version.origin.clone())
    };
    assert_eq!(origin(first).as_deref(), Some("embedded"));
    assert_eq!(origin(reloaded).as_deref(), Some("fixed-split"));
    assert_eq!((first.plain_steps, reloaded.plain_steps), (0, 0), "{text}");
    assert!(faulted.all_faults["trap"] >= 1, "{text}");
    assert_eq!(
        origin(rolled_back).as_deref(),
        Some("fixed-split"),
        "{text}"
    );
    // No step was lost: those that the chaos builder did not build, the plain one did.
    assert_eq!(rolled_back.failed_steps, 0, "{text}");
    assert!(
        outcome.steps[1] >= 1 && outcome.steps[1] < outcome.steps[0],
        "{text}"
    );
}
