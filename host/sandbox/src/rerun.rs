//! The sampled re-run: a step that the component built is built again by a fresh instance, off the step thread, and the two
//! results are compared bit for bit. What a builder keeps between calls may be a cache and nothing else.
//!
//! Must never know: what a difference means for the builder; it leaves a finding for the step thread.

use std::sync::{
    Arc,
    atomic::Ordering::{AcqRel, Release},
};

use timetable_attention::{BuildFault, FaultKind};
use timetable_types::{CommonAttentionMetadata, Metadata};

use crate::{
    BuilderCall, WasmBuilder,
    bundle::{Again, SeenFault},
    call::identical,
    shared::{Case, Finding, Shared, Version},
};

/// Orders a re-run of a step, unless one is under way. For the step thread; copies input and output.
pub(crate) fn order(
    shared: &Arc<Shared>,
    version: &Arc<Version>,
    call: &BuilderCall<'_>,
    common: &CommonAttentionMetadata,
    metadata: &Metadata,
    instance_calls: u64,
) {
    if shared.rerunning.swap(true, AcqRel) {
        return;
    }
    let (shared, version) = (shared.clone(), version.clone());
    let (call, common, metadata) = (call.to_owned(), common.clone(), metadata.clone());
    shared.clone().sandbox.workshop().run(move || {
        let _done = Done(shared.clone());
        run(&shared, &version, call, common, metadata, instance_calls);
    });
}

/// Allows the next one, however this one ended.
struct Done(Arc<Shared>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.rerunning.store(false, Release);
    }
}

fn run(
    shared: &Shared,
    version: &Arc<Version>,
    call: BuilderCall<'static>,
    common: CommonAttentionMetadata,
    metadata: Metadata,
    instance_calls: u64,
) {
    let mut fresh = match WasmBuilder::new(&version.component, &version.config) {
        Ok(fresh) => fresh,
        // The host may have no instance to spare: that says nothing about the builder.
        Err(error) => {
            tracing::debug!(group = %shared.name, "a sampled step is not built again: {error}");
            return;
        }
    };
    let Some(again) = call.on(&mut fresh, &common) else {
        return;
    };
    shared
        .counts
        .reruns
        .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let (message, again) = match again {
        Ok(again) if identical(&again, &metadata) => return,
        Ok(again) => (difference(&metadata, &again), Again::Built(again)),
        // A machine that is too busy is no evidence.
        Err(BuildFault::Fault {
            kind: FaultKind::Watchdog,
            ..
        }) => return,
        Err(fault) => (
            format!("the instance in service built this step, a fresh one did not: {fault}"),
            Again::Fault(SeenFault::of(&fault)),
        ),
    };
    let fault = SeenFault {
        kind: FaultKind::NonDeterminism,
        message: message.clone(),
    };
    if let Some(bundles) = shared.sandbox.bundles()
        && bundles.admit(version.info.version, fault.kind)
    {
        let case = Case {
            fault,
            call,
            instance_calls,
            common: Some(common),
            step: None,
            metadata: Some(metadata),
            again: Some(again),
        };
        bundles.write(version.bundle(shared.name.clone(), case));
    }
    drop(shared.findings.put(Finding {
        version: version.clone(),
        fault: BuildFault::Fault {
            kind: FaultKind::NonDeterminism,
            message,
        },
    }));
}

/// The first field in which they differ, with both values.
fn difference(served: &Metadata, again: &Metadata) -> String {
    let json = |metadata| serde_json::to_value(metadata).unwrap_or_default();
    let found = first_difference("", &json(served), &json(again));
    let (field, served, again) = found.unwrap_or_default();
    format!(
        "`{field}` is {served} in service and {again} from a fresh instance, for the same call: what the builder keeps between \
         calls may be a cache only"
    )
}

type Difference = (String, String, String);

fn first_difference(at: &str, a: &serde_json::Value, b: &serde_json::Value) -> Option<Difference> {
    use serde_json::Value;
    match (a, b) {
        (Value::Object(a), Value::Object(b)) if a.len() == b.len() => {
            a.iter().find_map(|(key, value)| {
                let inner = if at.is_empty() {
                    key.clone()
                } else {
                    format!("{at}.{key}")
                };
                first_difference(&inner, value, b.get(key).unwrap_or(&Value::Null))
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(index, (a, b))| first_difference(&format!("{at}[{index}]"), a, b)),
        (Value::Array(a), Value::Array(b)) => Some((
            at.to_owned(),
            format!("{} elements", a.len()),
            format!("{} elements", b.len()),
        )),
        (a, b) if a == b => None,
        (a, b) => {
            let short = |value: &Value| crate::fault::cut(&value.to_string(), 64);
            Some((at.to_owned(), short(a), short(b)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::first_difference;
    use serde_json::json;

    #[test]
    fn the_first_difference_is_named() {
        let a = json!({ "family": "flash-attn", "schedule": { "num_splits": [1, 2, 3] }, "causal": true });
        let mut b = a.clone();
        assert_eq!(first_difference("", &a, &b), None);
        b["schedule"]["num_splits"][1] = json!(7);
        let (field, served, again) = first_difference("", &a, &b).unwrap();
        assert_eq!(
            (field.as_str(), served.as_str(), again.as_str()),
            ("schedule.num_splits[1]", "2", "7")
        );
        b["schedule"]["num_splits"] = json!([]);
        assert_eq!(first_difference("", &a, &b).unwrap().1, "3 elements");
    }
}
