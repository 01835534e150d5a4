//! Launch promises: the numbers that a captured graph has frozen in. It must never know what a builder does to keep one.
//!
//! Ours: the field has no such record; its graphs rely on numbers that each builder keeps by convention.

use thiserror::Error;
use timetable_types::LaunchPromise;

/// A captured graph and the promise it was captured under. The promise is taken once, at capture; schedules are checked
/// against this value and kernels are launched with it, so that capture, schedule and kernel use one number.
#[derive(Clone, Debug, PartialEq)]
pub struct CapturedGraph<D> {
    /// What the graph is found by.
    pub descriptor: D,
    /// What every step that it replays keeps to.
    pub promise: LaunchPromise,
}

/// A promise exceeds what a graph was captured for: the graph must be captured again.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "launch promise: {what} {offered} exceeds the captured {captured}: capture the graph again"
)]
pub struct PromiseError {
    /// Which number.
    pub what: &'static str,
    /// What the builder promises.
    pub offered: u64,
    /// What the graph was captured for.
    pub captured: u64,
}

/// The smallest promise that covers both.
#[must_use]
pub fn covering(a: &LaunchPromise, b: &LaunchPromise) -> LaunchPromise {
    LaunchPromise {
        max_num_splits: a.max_num_splits.max(b.max_num_splits),
        max_work_items: a.max_work_items.max(b.max_work_items),
        scratch_bytes: a.scratch_bytes.max(b.scratch_bytes),
        max_query_len: a.max_query_len.max(b.max_query_len),
        uniform_query_len: a
            .uniform_query_len
            .filter(|_| a.uniform_query_len == b.uniform_query_len),
    }
}

/// Does a graph captured under `captured` stay valid for a builder that promises `offered`? All bounds must be within it, and a
/// graph of uniform queries keeps its query length.
///
/// # Errors
/// Names the first number that does not fit.
pub fn promise_fits(captured: &LaunchPromise, offered: &LaunchPromise) -> Result<(), PromiseError> {
    let bounds = [
        (
            "max_num_splits",
            u64::from(offered.max_num_splits),
            u64::from(captured.max_num_splits),
        ),
        (
            "max_work_items",
            u64::from(offered.max_work_items),
            u64::from(captured.max_work_items),
        ),
        (
            "scratch_bytes",
            offered.scratch_bytes,
            captured.scratch_bytes,
        ),
        (
            "max_query_len",
            u64::from(offered.max_query_len),
            u64::from(captured.max_query_len),
        ),
    ];
    if let Some(&(what, offered, captured)) = bounds
        .iter()
        .find(|(_, offered, captured)| offered > captured)
    {
        return Err(PromiseError {
            what,
            offered,
            captured,
        });
    }
    if captured.uniform_query_len.is_some()
        && offered.uniform_query_len != captured.uniform_query_len
    {
        return Err(PromiseError {
            what: "uniform_query_len",
            offered: offered.uniform_query_len.map_or(u64::MAX, u64::from),
            captured: captured.uniform_query_len.map_or(0, u64::from),
        });
    }
    Ok(())
}
