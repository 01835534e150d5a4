//! The stages that a version goes through before it serves, and the numbers that an operator sets for them.
//!
//! submitted → checked → shadow → canary → active; what served becomes previous. A version that fails a gate is withdrawn, and
//! what served goes on. Everything is counted in steps. Must never know: instances, threads, or how a version is tried.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};
use timetable_attention::FaultKind;

use crate::TenantName;

/// Differences of build time below this are the machine's, not the builder's.
const NOISE: Duration = Duration::from_micros(5);

/// Where a version stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Stage {
    /// Its bytes are here.
    Submitted = 0,
    /// It loads, constructs, builds small steps, and the host's own check took it.
    Checked = 1,
    /// It builds live steps beside the one that serves; nothing that it builds is executed.
    Shadow = 2,
    /// It serves a share of the steps, or some tenants.
    Canary = 3,
    /// It serves.
    Active = 4,
    /// It served before, and is kept ready.
    Previous = 5,
    /// It was a candidate and will not serve.
    Withdrawn = 6,
}

impl Stage {
    pub(crate) fn from_u8(value: u8) -> Stage {
        match value {
            1 => Stage::Checked,
            2 => Stage::Shadow,
            3 => Stage::Canary,
            4 => Stage::Active,
            5 => Stage::Previous,
            6 => Stage::Withdrawn,
            _ => Stage::Submitted,
        }
    }

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Submitted => "submitted",
            Stage::Checked => "checked",
            Stage::Shadow => "shadow",
            Stage::Canary => "canary",
            Stage::Active => "active",
            Stage::Previous => "previous",
            Stage::Withdrawn => "withdrawn",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a version gets into service. The default takes it at the next step boundary, once it is checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadPlan {
    /// Live steps that it is shown. Unit: steps that were served. Default: 0, no shadow. Cost: a copy of each step's input and
    /// output on the step thread, about 20 µs for 256 decodes; two builds on another thread.
    pub shadow_steps: u32,
    /// What it serves before it serves everything. Default: none.
    pub canary: Option<Canary>,
    /// What it must keep to in both.
    pub gates: Gates,
}

/// What a candidate serves before it serves everything: a share of the steps, or all steps of some tenants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Canary {
    /// Whole steps, evenly spread. Unit: of a thousand steps. Default: 0. Cost: none.
    pub per_mille: u32,
    /// Instead of a share: the tenants whose rows it builds. Default: none. Cost: a segment of its own for them.
    pub tenants: Vec<TenantName>,
    /// How many steps it must build. Unit: steps. Default: 100.
    pub steps: u32,
}

impl Default for Canary {
    fn default() -> Self {
        Canary {
            per_mille: 0,
            tenants: Vec::new(),
            steps: 100,
        }
    }
}

/// What a candidate must keep to, in numbers. A gate that it fails withdraws it; nothing else changes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gates {
    /// Median build time over that of the version in service: in shadow on the same steps in turn, in canary each on its own.
    /// Unit: ratio; less than 5 µs more is never too much. Default: 2; `inf` is no gate.
    #[serde(with = "ratio")]
    pub max_build_ratio: f64,
    /// Median build time beyond that of the version in service, or beyond 0 if the plain builder serves. Unit: microseconds.
    /// Default: 100.
    pub max_extra_build_us: u32,
    /// Fuel of all shadow steps over that of the version in service for the same steps: a count that no machine disturbs.
    /// Unit: ratio. Default: 4; `inf` is no gate.
    #[serde(with = "ratio")]
    pub max_fuel_ratio: f64,
    /// Shadow steps whose metadata mean something else than what was served. Default: 0.
    pub max_differences: u32,
    /// Faults in shadow and canary together. Default: 0.
    pub max_faults: u32,
    /// Shadow steps that must have been compared: not dropped while the comparison was behind, not too large, not declined.
    /// Unit: of a thousand. Default: 500.
    pub min_observed_per_mille: u32,
}

/// A number; or `"inf"`, which JSON has no number for.
mod ratio {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
    }

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(ratio: &f64, to: S) -> Result<S::Ok, S::Error> {
        match ratio.is_finite() {
            true => to.serialize_f64(*ratio),
            false => to.collect_str(ratio),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        match Written::deserialize(from)? {
            Written::Number(ratio) => Ok(ratio),
            Written::Text(text) => text
                .parse()
                .map_err(|_| D::Error::custom(format!("{text:?} is neither a number nor \"inf\""))),
        }
    }
}

impl Default for Gates {
    fn default() -> Self {
        Gates {
            max_build_ratio: 2.0,
            max_extra_build_us: 100,
            max_fuel_ratio: 4.0,
            max_differences: 0,
            max_faults: 0,
            min_observed_per_mille: 500,
        }
    }
}

impl ReloadPlan {
    /// Does a version serve as soon as it is checked?
    pub fn is_immediate(&self) -> bool {
        self.shadow_steps == 0 && self.canary.is_none()
    }

    /// What is wrong with this plan, if anything: field, value, remedy.
    pub fn problem(&self) -> Option<String> {
        let Gates {
            max_build_ratio,
            max_fuel_ratio,
            min_observed_per_mille,
            max_extra_build_us: _,
            max_differences: _,
            max_faults: _,
        } = self.gates;
        for (name, ratio) in [
            ("max_build_ratio", max_build_ratio),
            ("max_fuel_ratio", max_fuel_ratio),
        ] {
            if ratio.is_nan() || ratio <= 0.0 {
                return Some(format!("gates.{name} is {ratio}; use a number above 0"));
            }
        }
        if min_observed_per_mille > 1000 {
            return Some(format!(
                "gates.min_observed_per_mille is {min_observed_per_mille}; use 0 to 1,000"
            ));
        }
        let canary = self.canary.as_ref()?;
        match (canary.per_mille, canary.tenants.is_empty()) {
            (1..=1000, true) | (0, false) => {}
            (0, true) => {
                return Some(
                    "canary has no share and no tenants; give it a share of 0.1% to 100%, or tenants"
                        .to_owned(),
                );
            }
            (1..=1000, false) => {
                return Some(format!(
                    "canary has a share of {} ‰ and {} tenants; give one of them",
                    canary.per_mille,
                    canary.tenants.len()
                ));
            }
            (per_mille, _) => {
                return Some(format!("canary.per_mille is {per_mille}; use 1 to 1,000"));
            }
        }
        (canary.steps == 0).then(|| "canary.steps is 0; use at least 1, or no canary".to_owned())
    }
}

/// Why a candidate will not serve. Numbers only, so that the step thread can say it; the text is made when somebody asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Withdrawal {
    /// Somebody rolled back.
    RolledBack,
    /// Another version was submitted.
    Replaced,
    /// Another group's candidate of the same reload was withdrawn.
    Companion,
    /// The group's steps ended.
    Ended,
    /// It faulted more often than the gate allows.
    Faults {
        /// Where it was.
        stage: Stage,
        /// What it did last.
        kind: FaultKind,
        /// How often it faulted.
        faults: u64,
        /// The gate.
        most: u32,
    },
    /// What it built meant something else.
    Differences {
        /// In how many steps.
        steps: u64,
        /// The gate.
        most: u32,
    },
    /// Too few of the shadow steps could be compared.
    NotObserved {
        /// Compared.
        observed: u64,
        /// Shown.
        steps: u64,
        /// The gate.
        per_mille: u32,
    },
    /// Its builds take too long.
    BuildTime {
        /// Where it was.
        stage: Stage,
        /// Median of the version in service, in nanoseconds.
        active_ns: u64,
        /// Its own.
        candidate_ns: u64,
        /// The gate.
        max_ratio: f64,
        /// The other gate.
        max_extra_us: u32,
    },
    /// Its builds take too much fuel.
    Fuel {
        /// Of the version in service, for all steps compared.
        active: u64,
        /// Its own.
        candidate: u64,
        /// The gate.
        max_ratio: f64,
    },
    /// No instance of it could be made any more.
    NoInstance,
}

impl fmt::Display for Withdrawal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Withdrawal::RolledBack => f.write_str("it was rolled back"),
            Withdrawal::Replaced => f.write_str("another version was submitted"),
            Withdrawal::Companion => {
                f.write_str("the candidate of another group of this backend was withdrawn")
            }
            Withdrawal::Ended => f.write_str("the host ended"),
            Withdrawal::Faults {
                stage,
                kind,
                faults,
                most,
            } => write!(
                f,
                "{faults} faults by the end of {stage}, the last one {kind}; its gate is max_faults {most}"
            ),
            Withdrawal::Differences { steps, most } => write!(
                f,
                "in {steps} shadow steps its metadata meant something else than what was served; its gate is max_differences {most}"
            ),
            Withdrawal::NotObserved {
                observed,
                steps,
                per_mille,
            } => write!(
                f,
                "only {observed} of {steps} shadow steps were compared; its gate is min_observed_per_mille {per_mille}; \
                 give it more shadow steps, or lower the gate"
            ),
            Withdrawal::BuildTime {
                stage,
                active_ns,
                candidate_ns,
                max_ratio,
                max_extra_us,
            } => write!(
                f,
                "in {stage} its median build takes {:.1} µs, and {:.1} µs that of the version in service; its gates are \
                 max_build_ratio {max_ratio} and max_extra_build_us {max_extra_us}",
                *candidate_ns as f64 / 1e3,
                *active_ns as f64 / 1e3
            ),
            Withdrawal::Fuel {
                active,
                candidate,
                max_ratio,
            } => write!(
                f,
                "its builds took {candidate} fuel in shadow, and {active} those of the version in service; its gate is \
                 max_fuel_ratio {max_ratio}"
            ),
            Withdrawal::NoInstance => f.write_str(
                "no instance of it could be made any more; see the host's log, and Limits::max_instances",
            ),
        }
    }
}

impl Gates {
    /// Medians in nanoseconds. `active` is None where the plain builder serves, or nothing was measured.
    pub(crate) fn judge_time(
        &self,
        stage: Stage,
        active: Option<u64>,
        candidate: Option<u64>,
    ) -> Option<Withdrawal> {
        let candidate_ns = candidate?;
        let active_ns = active.unwrap_or(0);
        let extra = Duration::from_nanos(candidate_ns.saturating_sub(active_ns));
        let slower = active.is_some_and(|active| {
            extra > NOISE && candidate_ns as f64 > self.max_build_ratio * active as f64
        });
        let longer = extra > Duration::from_micros(self.max_extra_build_us.into());
        (slower || longer).then_some(Withdrawal::BuildTime {
            stage,
            active_ns,
            candidate_ns,
            max_ratio: self.max_build_ratio,
            max_extra_us: self.max_extra_build_us,
        })
    }

    /// Fuel of the same builds; 0 for `active` where there is none to compare with.
    pub(crate) fn judge_fuel(&self, active: u64, candidate: u64) -> Option<Withdrawal> {
        let above = active > 0 && candidate as f64 > self.max_fuel_ratio * active as f64;
        above.then_some(Withdrawal::Fuel {
            active,
            candidate,
            max_ratio: self.max_fuel_ratio,
        })
    }
}

/// Is step `step` (counted from 0) one of `per_mille` of a thousand, evenly spread?
pub(crate) fn in_share(step: u64, per_mille: u32) -> bool {
    let per_mille = u64::from(per_mille);
    let done = |steps: u64| steps.saturating_mul(per_mille) / 1000;
    done(step.saturating_add(1)) > done(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_spread_evenly() {
        for (per_mille, steps) in [(50, 20), (1000, 1), (1, 1000), (333, 3)] {
            let chosen: Vec<u64> = (0..100_000)
                .filter(|step| in_share(*step, per_mille))
                .collect();
            assert_eq!(chosen.len() as u32, per_mille * 100);
            for pair in chosen.windows(2) {
                assert!(
                    (steps..=steps + 1).contains(&(pair[1] - pair[0])),
                    "{pair:?}"
                );
            }
        }
        assert!(!(0..10_000).any(|step| in_share(step, 0)));
    }

    #[test]
    fn a_plan_is_read_with_its_defaults_and_nothing_else() {
        let plan: ReloadPlan = serde_json::from_str("{}").unwrap();
        assert_eq!(plan, ReloadPlan::default());
        assert!(plan.is_immediate());
        let plan: ReloadPlan = serde_json::from_str(
            r#"{ "shadow_steps": 9, "canary": { "per_mille": 50 }, "gates": { "max_faults": 1 } }"#,
        )
        .unwrap();
        assert_eq!(plan.problem(), None);
        assert_eq!(plan.canary.unwrap().steps, 100);
        assert_eq!(
            (plan.gates.max_faults, plan.gates.max_build_ratio),
            (1, 2.0)
        );
        let open = Gates {
            max_build_ratio: f64::INFINITY,
            ..Gates::default()
        };
        let text = serde_json::to_string(&open).unwrap();
        assert_eq!(
            serde_json::from_str::<Gates>(&text).unwrap(),
            open,
            "{text}"
        );
        for unknown in [
            r#"{"shadow": 9}"#,
            r#"{"canary": {"share": 1}}"#,
            r#"{"gates": {"x": 1}}"#,
        ] {
            assert!(
                serde_json::from_str::<ReloadPlan>(unknown).is_err(),
                "{unknown}"
            );
        }
    }

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let canary = |canary| ReloadPlan {
            canary: Some(canary),
            ..ReloadPlan::default()
        };
        let tenant = || vec![TenantName::new("a").unwrap()];
        let gates = |gates| ReloadPlan {
            gates,
            ..ReloadPlan::default()
        };
        for (plan, part) in [
            (canary(Canary::default()), "no share and no tenants"),
            (
                canary(Canary {
                    per_mille: 1001,
                    ..Canary::default()
                }),
                "canary.per_mille is 1001",
            ),
            (
                canary(Canary {
                    per_mille: 5,
                    tenants: tenant(),
                    ..Canary::default()
                }),
                "a share of 5 ‰ and 1 tenants",
            ),
            (
                canary(Canary {
                    per_mille: 5,
                    steps: 0,
                    ..Canary::default()
                }),
                "canary.steps is 0",
            ),
            (
                gates(Gates {
                    max_build_ratio: f64::NAN,
                    ..Gates::default()
                }),
                "max_build_ratio is NaN",
            ),
            (
                gates(Gates {
                    max_fuel_ratio: 0.0,
                    ..Gates::default()
                }),
                "max_fuel_ratio is 0",
            ),
            (
                gates(Gates {
                    min_observed_per_mille: 1001,
                    ..Gates::default()
                }),
                "min_observed_per_mille is 1001",
            ),
        ] {
            let problem = plan.problem().expect("refused");
            assert!(problem.contains(part), "{problem}");
        }
        assert_eq!(
            canary(Canary {
                tenants: tenant(),
                ..Canary::default()
            })
            .problem(),
            None
        );
    }

    #[test]
    fn cost_gates_are_the_numbers_that_they_say() {
        let gates = Gates {
            max_build_ratio: 2.0,
            max_extra_build_us: 100,
            max_fuel_ratio: 1.5,
            ..Gates::default()
        };
        let judge =
            |active, candidate| gates.judge_time(Stage::Shadow, active, candidate).is_some();
        assert!(!judge(Some(10_000), Some(20_000)));
        assert!(judge(Some(10_000), Some(20_001)));
        // Three times as long, and 4 µs.
        assert!(!judge(Some(2_000), Some(6_000)));
        assert!(!judge(Some(200_000), Some(300_000)));
        assert!(judge(Some(200_000), Some(300_001)));
        // The plain builder serves: only the microseconds count.
        assert!(!judge(None, Some(100_000)));
        assert!(judge(None, Some(100_001)));
        assert!(!judge(Some(10), None));
        assert_eq!(gates.judge_fuel(100, 150), None);
        assert!(gates.judge_fuel(100, 151).is_some());
        assert_eq!(gates.judge_fuel(0, 151), None);
        let open = Gates {
            max_build_ratio: f64::INFINITY,
            max_fuel_ratio: f64::INFINITY,
            ..gates
        };
        assert_eq!(open.judge_time(Stage::Canary, Some(1), Some(90_000)), None);
        assert_eq!(open.judge_fuel(1, u64::MAX), None);
    }
}
