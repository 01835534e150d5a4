//! What is done about a builder's faults, in numbers that an operator sets; and the step thread's record of them.
//!
//! Everything but the build budget is counted in steps, so that it does not depend on the machine's speed and can be told
//! beforehand. Must never know: instances, versions, or what a fault looked like.

use std::{collections::VecDeque, fmt, time::Duration};

use serde::{Deserialize, Serialize};
use timetable_attention::FaultKind;

/// What becomes of a step in which the component faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFault {
    /// The plain builder builds the same step, and every step while the component has no instance ready.
    #[default]
    Fallback,
    /// The step's requests fail with the fault. The plain builder never builds in the component's place: steps for which it
    /// has no instance ready fail as well.
    FailStep,
    /// The step's requests fail with the fault, and so does every later step until a reload or a rollback. Nothing is tried
    /// again by itself.
    FailClosed,
}

impl OnFault {
    /// Every policy.
    pub const ALL: [OnFault; 3] = [OnFault::Fallback, OnFault::FailStep, OnFault::FailClosed];

    /// The name used in options, tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            OnFault::Fallback => "fallback",
            OnFault::FailStep => "fail-step",
            OnFault::FailClosed => "fail-closed",
        }
    }
}

impl fmt::Display for OnFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How much time a builder's calls may take. A balance that starts at `reserve`, gains `per_step` with each step that it
/// builds, never exceeds `reserve`, and pays the measured time of each call.
///
/// Fuel is a count and not a time: dependent loads and divisions take up to 20 times as long a unit. This bounds their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildBudget {
    /// What a builder may take for each step, in the long run. Unit: wall-clock time. Default: 250 µs; the largest reference
    /// build takes about 40 µs.
    pub per_step: Duration,
    /// What it may take beyond that, once. Unit: wall-clock time. Default: 250 ms, so that a busy machine that keeps the step
    /// thread waiting for some time slices is not charged to a healthy builder.
    pub reserve: Duration,
}

impl Default for BuildBudget {
    fn default() -> Self {
        BuildBudget {
            per_step: Duration::from_micros(250),
            reserve: Duration::from_millis(250),
        }
    }
}

/// What is done about one builder's faults. May be changed while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultPolicy {
    /// What becomes of the step. Default: `fallback`.
    pub on_fault: OnFault,
    /// Faults within the window after which the builder is quarantined: it is not called until a reload or a rollback.
    /// Default: 8. Non-determinism and an overspent build budget quarantine at once.
    pub quarantine_faults: u32,
    /// The window. Unit: steps. Default: 10,000.
    pub window_steps: u32,
    /// The longest back-off. Unit: steps. Default: 1,024; 0 is none.
    ///
    /// After the n-th fault within the window the builder is not called for 2^(n−1) − 1 steps: the spare takes over at once
    /// after the first, then 1, 3, 7 … steps are left out. So a builder that always faults costs a vanishing share of steps.
    /// Under `fail-step` there is no back-off, for it would fail good requests.
    pub max_backoff_steps: u32,
    /// Once quarantined, does the version before take over by itself, if it never was quarantined? Default: yes.
    pub return_to_last_good: bool,
    /// Every that many steps one is built again by a fresh instance, off the step thread, and the two are compared bit for
    /// bit. Default: 1,000; 0 is never. Cost on the step thread: a copy of input and output, a few microseconds.
    pub rerun_every: u32,
    /// Time that its calls may take. Overspending quarantines it.
    pub build_budget: BuildBudget,
}

impl Default for FaultPolicy {
    fn default() -> Self {
        FaultPolicy {
            on_fault: OnFault::Fallback,
            quarantine_faults: 8,
            window_steps: 10_000,
            max_backoff_steps: 1024,
            return_to_last_good: true,
            rerun_every: 1000,
            build_budget: BuildBudget::default(),
        }
    }
}

impl FaultPolicy {
    /// The first thing that is wrong with this policy, if anything: field, value, remedy.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problems().into_iter().next()
    }

    /// Everything that is wrong with this policy. Each begins with the field and its value and ends with the remedy.
    pub fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        if !(1..=1000).contains(&self.quarantine_faults) {
            found.push(format!(
                "quarantine_faults is {}; use 1 to 1,000",
                self.quarantine_faults
            ));
        }
        if self.window_steps < self.quarantine_faults {
            found.push(format!(
                "window_steps is {}, below quarantine_faults {}; that many faults never fit it",
                self.window_steps, self.quarantine_faults
            ));
        }
        if self.build_budget.per_step.is_zero()
            || self.build_budget.reserve < Duration::from_millis(1)
        {
            found.push(format!(
                "build_budget is {:?} a step and {:?} in reserve; use more than nothing, and at least 1 ms",
                self.build_budget.per_step, self.build_budget.reserve
            ));
        }
        found
    }
}

/// What a fault means for the builder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The next instance takes over, after the back-off.
    GoOn,
    /// It is not called again until a reload or a rollback.
    Quarantine,
    /// Nor is anything else.
    Close,
}

/// The record of the version in service, kept by the step thread.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Steps since it came into service.
    step: u64,
    /// The steps of the last faults, oldest first; at most as many as lead to quarantine.
    faults: VecDeque<u64>,
    backoff_left: u32,
    /// Nanoseconds left of the build budget.
    balance: i64,
    out: Option<Verdict>,
}

impl Standing {
    pub(crate) fn new(policy: &FaultPolicy) -> Standing {
        Standing {
            step: 0,
            faults: VecDeque::new(),
            backoff_left: 0,
            balance: nanoseconds(policy.build_budget.reserve),
            out: None,
        }
    }

    /// Why it is out of service for good, if it is.
    pub(crate) fn out(&self) -> Option<Verdict> {
        self.out
    }

    pub(crate) fn backing_off(&self) -> bool {
        self.backoff_left > 0
    }

    /// A step begins. May the builder be called in it?
    pub(crate) fn begin_step(&mut self) -> bool {
        self.step += 1;
        if self.backoff_left > 0 {
            self.backoff_left -= 1;
            return false;
        }
        self.out.is_none()
    }

    /// May the builder be called outside steps (for a draft, a capture)?
    pub(crate) fn may_be_called(&self) -> bool {
        self.out.is_none() && self.backoff_left == 0
    }

    /// Is this step one that is built again?
    pub(crate) fn is_sample(&self, policy: &FaultPolicy) -> bool {
        policy.rerun_every > 0 && self.step.is_multiple_of(u64::from(policy.rerun_every))
    }

    /// Pays for a call that took `elapsed`. False if that is more than the balance.
    pub(crate) fn pay(&mut self, elapsed: Duration, budget: &BuildBudget) -> bool {
        let reserve = nanoseconds(budget.reserve);
        self.balance = self
            .balance
            .saturating_add(nanoseconds(budget.per_step))
            .min(reserve)
            .saturating_sub(nanoseconds(elapsed));
        self.balance >= 0
    }

    /// A fault of `kind`, which is not a declined batch.
    pub(crate) fn fault(&mut self, kind: FaultKind, policy: &FaultPolicy) -> Verdict {
        let window_begins = self.step.saturating_sub(u64::from(policy.window_steps));
        while self.faults.front().is_some_and(|step| {
            *step < window_begins || self.faults.len() >= policy.quarantine_faults as usize
        }) {
            self.faults.pop_front();
        }
        self.faults.push_back(self.step);
        let at_once = matches!(kind, FaultKind::NonDeterminism | FaultKind::BuildBudget);
        let verdict = if policy.on_fault == OnFault::FailClosed {
            Verdict::Close
        } else if at_once || self.faults.len() >= policy.quarantine_faults as usize {
            Verdict::Quarantine
        } else {
            Verdict::GoOn
        };
        match verdict {
            Verdict::GoOn if policy.on_fault == OnFault::Fallback => {
                let doublings = u32::try_from(self.faults.len() - 1).unwrap_or(31).min(31);
                self.backoff_left = ((1_u32 << doublings) - 1).min(policy.max_backoff_steps);
            }
            Verdict::GoOn => {}
            Verdict::Quarantine | Verdict::Close => self.out = Some(verdict),
        }
        verdict
    }

    /// Faults within the window, when the last one was seen.
    pub(crate) fn recent_faults(&self) -> usize {
        self.faults.len()
    }
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps until the builder is called again, at most 5,000.
    fn steps_left_out(standing: &mut Standing) -> u32 {
        (0..5000)
            .find(|_| standing.begin_step())
            .expect("it is called again")
    }

    #[test]
    fn back_off_doubles_and_is_bounded() {
        let policy = FaultPolicy {
            quarantine_faults: 20,
            max_backoff_steps: 100,
            ..FaultPolicy::default()
        };
        let mut standing = Standing::new(&policy);
        assert!(standing.begin_step());
        let waits: Vec<u32> = (0..9)
            .map(|_| {
                assert_eq!(standing.fault(FaultKind::Trap, &policy), Verdict::GoOn);
                steps_left_out(&mut standing)
            })
            .collect();
        assert_eq!(waits, [0, 1, 3, 7, 15, 31, 63, 100, 100]);
    }

    #[test]
    fn quarantine_counts_the_faults_within_its_window_only() {
        let policy = FaultPolicy {
            quarantine_faults: 3,
            window_steps: 100,
            max_backoff_steps: 0,
            ..FaultPolicy::default()
        };
        let mut standing = Standing::new(&policy);
        for _ in 0..20 {
            assert_eq!(standing.fault(FaultKind::Fuel, &policy), Verdict::GoOn);
            (0..60).for_each(|_| assert!(standing.begin_step()));
        }
        standing.fault(FaultKind::Fuel, &policy);
        assert_eq!(
            standing.fault(FaultKind::Trap, &policy),
            Verdict::Quarantine
        );
        assert!(!standing.begin_step());
        assert!(!standing.may_be_called());
    }

    #[test]
    fn what_depends_on_the_past_or_takes_too_long_is_quarantined_at_once() {
        let policy = FaultPolicy::default();
        for kind in [FaultKind::NonDeterminism, FaultKind::BuildBudget] {
            let mut standing = Standing::new(&policy);
            assert_eq!(standing.fault(kind, &policy), Verdict::Quarantine);
        }
        let closed = FaultPolicy {
            on_fault: OnFault::FailClosed,
            ..policy
        };
        let mut standing = Standing::new(&closed);
        assert_eq!(standing.fault(FaultKind::Trap, &closed), Verdict::Close);
        assert_eq!(standing.out(), Some(Verdict::Close));
    }

    #[test]
    fn a_failing_step_has_no_back_off() {
        let policy = FaultPolicy {
            on_fault: OnFault::FailStep,
            ..FaultPolicy::default()
        };
        let mut standing = Standing::new(&policy);
        for _ in 0..7 {
            assert_eq!(standing.fault(FaultKind::Trap, &policy), Verdict::GoOn);
            assert!(standing.begin_step());
        }
    }

    #[test]
    fn a_budget_forgives_one_delay_and_not_a_habit() {
        let policy = FaultPolicy::default();
        let budget = &policy.build_budget;
        let mut standing = Standing::new(&policy);
        // A healthy builder, once kept waiting by the machine for 100 ms.
        for step in 0..100_000 {
            let took = if step % 10_000 == 9_999 { 100_000 } else { 40 };
            assert!(standing.pay(Duration::from_micros(took), budget), "{step}");
        }
        // 3 ms each: 250 ms of reserve are gone after about 90 steps.
        let mut standing = Standing::new(&policy);
        let within = (0..1000)
            .take_while(|_| standing.pay(Duration::from_millis(3), budget))
            .count();
        assert!((80..=100).contains(&within), "{within}");
    }

    #[test]
    fn samples_are_every_so_many_steps() {
        let policy = FaultPolicy {
            rerun_every: 4,
            ..FaultPolicy::default()
        };
        let mut standing = Standing::new(&policy);
        let samples: Vec<u32> = (1..=12)
            .filter(|_| {
                standing.begin_step();
                standing.is_sample(&policy)
            })
            .collect();
        assert_eq!(samples, [4, 8, 12]);
        let never = FaultPolicy {
            rerun_every: 0,
            ..policy
        };
        assert!(!standing.is_sample(&never));
    }

    #[test]
    fn policies_that_make_no_sense_are_refused() {
        let refused = |policy: FaultPolicy| policy.problem().expect("refused");
        let default = FaultPolicy::default();
        assert_eq!(default.problem(), None);
        assert!(
            refused(FaultPolicy {
                quarantine_faults: 0,
                ..default
            })
            .contains("quarantine_faults is 0")
        );
        assert!(
            refused(FaultPolicy {
                window_steps: 7,
                ..default
            })
            .contains("window_steps is 7")
        );
        let nothing = BuildBudget {
            per_step: Duration::ZERO,
            ..BuildBudget::default()
        };
        assert!(
            refused(FaultPolicy {
                build_budget: nothing,
                ..default
            })
            .contains("build_budget")
        );
    }
}
