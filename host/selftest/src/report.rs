//! What was checked, how far off the worst was, and what failed. It must never know a kernel.

use serde::Serialize;

/// Failures that are told in full; the rest are counted.
const TOLD: usize = 5;

/// The checks of one kernel or property.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// `scatter bf16`, `attention decode f16 fp8`, …
    pub name: String,
    /// Checks made; each compares every element of a result.
    pub checks: u64,
    /// Of those, failed.
    pub failed: u64,
    /// The worst relative error, where errors are measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<f64>,
    /// The largest that passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bar: Option<f64>,
    /// The first failures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<String>,
}

impl Group {
    /// Nothing checked yet.
    pub fn new(name: impl Into<String>) -> Self {
        Group {
            name: name.into(),
            checks: 0,
            failed: 0,
            worst: None,
            bar: None,
            failures: Vec::new(),
        }
    }

    /// As [`Group::new`], for results that are compared within a relative error.
    pub fn with_bar(name: impl Into<String>, bar: f64) -> Self {
        Group {
            bar: Some(bar),
            ..Group::new(name)
        }
    }

    /// Counts a check; `what` says what failed.
    pub fn check(&mut self, good: bool, what: impl FnOnce() -> String) {
        self.checks += 1;
        if !good {
            self.failed += 1;
            if self.failures.len() < TOLD {
                self.failures.push(what());
            }
        }
    }

    /// Counts an error of a result: it passes up to the bar.
    pub fn error(&mut self, error: f64, what: impl FnOnce() -> String) {
        let bar = self.bar.unwrap_or(0.0);
        self.worst = Some(self.worst.map_or(error, |worst| worst.max(error)));
        self.check(error <= bar, || {
            format!("{}: relative error {error:.2e}, at most {bar:.0e}", what())
        });
    }

    /// Compares two results that must be equal; says where they first differ.
    pub fn equal<T: PartialEq + std::fmt::Debug>(
        &mut self,
        got: &[T],
        want: &[T],
        what: impl FnOnce() -> String,
    ) {
        let differ = got.iter().zip(want).filter(|(a, b)| a != b).count();
        self.check(got.len() == want.len() && differ == 0, || {
            let at = got.iter().zip(want).position(|(a, b)| a != b);
            match at {
                Some(at) => format!(
                    "{}: {differ} of {} differ, first at {at}: {:?} where {:?} was wanted",
                    what(),
                    want.len(),
                    got[at],
                    want[at]
                ),
                None => format!(
                    "{}: {} elements where {} were wanted",
                    what(),
                    got.len(),
                    want.len()
                ),
            }
        });
    }
}

/// Everything that one run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device's name.
    pub device: String,
    /// Its compute capability.
    pub capability: String,
    /// The seed of every input: `--seed` repeats the run.
    pub seed: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// The groups, in the order of the run.
    pub groups: Vec<Group>,
}

impl Report {
    /// Checks of all groups.
    pub fn checks(&self) -> u64 {
        self.groups.iter().map(|group| group.checks).sum()
    }

    /// Failed checks of all groups.
    pub fn failed(&self) -> u64 {
        self.groups.iter().map(|group| group.failed).sum()
    }
}

/// The line of a group, for people.
pub fn line(group: &Group) -> String {
    let verdict = if group.failed == 0 { "ok  " } else { "FAIL" };
    let mut line = format!("{verdict} {:<34} {:>7} checks", group.name, group.checks);
    if let (Some(worst), Some(bar)) = (group.worst, group.bar) {
        line.push_str(&format!("   worst {worst:.2e} of {bar:.0e}"));
    }
    if group.failed > 0 {
        line.push_str(&format!("   {} FAILED", group.failed));
    }
    for failure in &group.failures {
        line.push_str("\n       ");
        line.push_str(failure);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted_and_the_first_are_told() {
        let mut group = Group::with_bar("rope f32", 1e-6);
        group.error(1e-7, || unreachable!());
        group.error(f64::NAN, || "case 2".into());
        group.equal(&[1, 2, 3], &[1, 5, 4], || "case 3".into());
        assert_eq!((group.checks, group.failed), (3, 2));
        assert!(group.failures[1].contains("2 of 3 differ, first at 1: 2 where 5"));
        assert!(line(&group).starts_with("FAIL rope f32"));
    }
}
