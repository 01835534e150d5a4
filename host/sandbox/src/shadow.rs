//! Shadow: a candidate builds live steps on a thread of its own, with an instance of its own, and nothing of it is executed.
//!
//! The step thread copies a step's input and what was served into a queue, and drops the step if the queue is full or the step
//! too large: it never waits. The shadow thread builds the step with the version in service and with the candidate, in turn, so
//! that their cost is compared side by side; the candidate's metadata is verified and its meaning compared with what was
//! served. Must never know: what becomes of a candidate that passes.

use std::{
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed, Release},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use timetable_attention::{
    BuildFault, FaultKind, Refusal, Verifier, VerifyContext,
    meaning::{self, Difference},
};
use timetable_types::{CommonAttentionMetadata, Metadata};

use crate::{
    BuilderCall, Stage, StepRecord, WasmBuilder, Withdrawal,
    bundle::SeenFault,
    candidate::{self, Candidate},
    group::Trial,
    mailbox::lock,
    reload,
    shared::{Case, Ready, Shared, Version},
    workshop,
};

/// Steps that wait to be looked at. Unit: steps. Beyond it a step is skipped and counted. Cost: memory, a step's size each.
const QUEUE: usize = 16;
/// The largest step that is copied. Unit: bytes of its tensors. A larger one is skipped and counted. Cost: about 80 µs on the
/// step thread.
const MAX_SAMPLE_BYTES: usize = 1 << 20;
/// How often the thread looks whether it is still wanted, while no step comes. A wake-up each.
const PATIENCE: Duration = Duration::from_millis(50);

/// A step as the shadow thread gets it.
struct Sample {
    call: BuilderCall<'static>,
    common: CommonAttentionMetadata,
    step: StepRecord,
    served: Metadata,
}

/// The step thread's end of a shadow.
pub(crate) struct Tap {
    pub(crate) candidate: Arc<Candidate>,
    samples: Sender<Sample>,
}

impl Tap {
    /// Has it shown as many steps as the plan asks?
    pub(crate) fn is_done(&self) -> bool {
        self.candidate.shadow.steps.load(Relaxed) >= u64::from(self.candidate.plan.shadow_steps)
    }

    /// A step was served: `served` are its metadata. Without a context nothing could be verified, so the step is skipped.
    pub(crate) fn show(
        &self,
        call: &BuilderCall<'_>,
        context: Option<&VerifyContext<'_>>,
        served: &Metadata,
    ) {
        if self.is_done() {
            return;
        }
        let counts = &self.candidate.shadow;
        let sample = context
            .filter(|_| !self.samples.is_full())
            .and_then(|context| {
                Some(Sample {
                    step: StepRecord::of(context, MAX_SAMPLE_BYTES)?,
                    call: call.to_owned(),
                    common: context.common.clone(),
                    served: served.clone(),
                })
            });
        let taken = sample.is_some_and(|sample| self.samples.try_send(sample).is_ok());
        if !taken {
            counts.skipped.fetch_add(1, Relaxed);
        }
        // Last, so that whoever sees all steps counted finds them in the queue.
        counts.steps.fetch_add(1, Release);
    }
}

/// Starts the thread, which owns `ready` until the candidate has passed or is withdrawn.
pub(crate) fn start(
    shared: &Arc<Shared>,
    candidate: &Arc<Candidate>,
    ready: Ready,
) -> std::io::Result<()> {
    let (samples, taken) = bounded(QUEUE);
    let (group, tried) = (shared.clone(), candidate.clone());
    std::thread::Builder::new()
        .name("timetable-shadow".into())
        .spawn(move || {
            workshop::lower_priority();
            let mut shadow = Shadow {
                shared: group,
                candidate: tried,
                instance: Some(ready.instance),
                active: None,
                verifier: Verifier::new(),
                parity: false,
            };
            if shadow.watch(&taken) {
                shadow.pass(ready.version, ready.spare);
            } else if !matches!(shadow.candidate.stage(), Stage::Active) {
                candidate::tell(&shadow.shared, &shadow.candidate);
            }
        })?;
    if candidate.advance(Stage::Shadow) {
        candidate::tell(shared, candidate);
        drop(shared.trials.put(Trial::Shadow(Tap {
            candidate: candidate.clone(),
            samples,
        })));
    }
    Ok(())
}

/// The thread's own state.
struct Shadow {
    shared: Arc<Shared>,
    candidate: Arc<Candidate>,
    /// The candidate's. None after a fault until the next is made.
    instance: Option<WasmBuilder>,
    /// One of the version in service, to compare the cost with.
    active: Option<(Arc<Version>, WasmBuilder)>,
    verifier: Verifier,
    /// Who builds first: it alternates, for the second finds the input in the cache.
    parity: bool,
}

/// What is to be said of metadata that the candidate built.
enum Unlike {
    Refused(Refusal),
    Differs(Difference),
}

impl Shadow {
    /// Looks at samples until all steps were shown. False if the candidate was withdrawn.
    fn watch(&mut self, samples: &Receiver<Sample>) -> bool {
        let steps = u64::from(self.candidate.plan.shadow_steps);
        loop {
            let sample = samples.recv_timeout(PATIENCE);
            if !self.candidate.is_tried() {
                return false;
            }
            match sample {
                Ok(sample) => self.look(sample),
                Err(RecvTimeoutError::Timeout) => {
                    let all = self.candidate.shadow.steps.load(Acquire) >= steps;
                    if all && samples.is_empty() {
                        break;
                    }
                }
                // The step thread has shown all of them.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match self.judge() {
            Some(why) => {
                self.candidate.withdraw(why);
                false
            }
            None => self.candidate.is_tried(),
        }
    }

    /// Builds the step twice and compares.
    fn look(&mut self, sample: Sample) {
        if self.instance.is_none() && !self.revive() {
            return;
        }
        self.follow_active();
        self.parity = !self.parity;
        let mut active = None;
        if self.parity {
            active = self.active_build(&sample);
        }
        let Some(instance) = &mut self.instance else {
            return;
        };
        let (built, ns, fuel) = timed(instance, &sample);
        if !self.parity {
            active = self.active_build(&sample);
        }
        let counts = &self.candidate.shadow;
        let metadata = match built {
            Ok(metadata) => metadata,
            Err(BuildFault::Declined(_)) => {
                counts.declined.fetch_add(1, Relaxed);
                return;
            }
            Err(fault) => return self.fault(&fault, sample, None),
        };
        counts.costs.candidate.record(ns);
        if let Some((active_ns, active_fuel)) = active {
            counts.costs.active.record(active_ns);
            counts.active_fuel.fetch_add(active_fuel, Relaxed);
            counts.candidate_fuel.fetch_add(fuel, Relaxed);
        }
        let config = &self.candidate.version.config;
        let verifier = &mut self.verifier;
        let judged = sample.step.with_context(config, &sample.common, |context| {
            judge(verifier, &sample.served, &metadata, context)
        });
        match judged {
            Ok(Ok(())) => {
                counts.observed.fetch_add(1, Relaxed);
            }
            Ok(Err(Unlike::Differs(difference))) => {
                counts.observed.fetch_add(1, Relaxed);
                self.differs(&difference);
            }
            Ok(Err(Unlike::Refused(refusal))) => {
                let fault = BuildFault::Fault {
                    kind: FaultKind::Refused,
                    message: refusal.to_string(),
                };
                self.fault(&fault, sample, Some(metadata));
            }
            // The host's own record: nothing that the candidate could be blamed for.
            Err(problem) => {
                tracing::debug!(group = %self.shared.name, "a shadow step is left out: {problem}");
            }
        }
    }

    fn differs(&self, difference: &Difference) {
        let counts = &self.candidate.shadow;
        let steps = counts.differences.fetch_add(1, Relaxed) + 1;
        lock(&counts.first_difference).get_or_insert_with(|| difference.to_string());
        let most = self.candidate.gates().max_differences;
        if steps > u64::from(most) {
            self.candidate
                .withdraw(Withdrawal::Differences { steps, most });
        }
    }

    /// As in service, any fault ends the instance; here its gate decides about the rest.
    fn fault(&mut self, fault: &BuildFault, sample: Sample, metadata: Option<Metadata>) {
        let version = &self.candidate.version;
        let seen = SeenFault::of(fault);
        self.shared.note(version, seen.kind, &seen.message);
        let dead = self.instance.take();
        if let Some(bundles) = self.shared.sandbox.bundles()
            && bundles.admit(version.info.version, seen.kind)
        {
            let case = Case {
                fault: seen.clone(),
                call: sample.call,
                instance_calls: dead.as_ref().map_or(0, WasmBuilder::calls),
                common: Some(sample.common),
                step: Some(sample.step),
                metadata,
                again: None,
            };
            bundles.write(version.bundle(self.shared.name.clone(), case));
        }
        self.candidate.forgives(Stage::Shadow, seen.kind, true);
    }

    /// After a fault that the gate forgave. False if there is no other instance.
    fn revive(&mut self) -> bool {
        let version = &self.candidate.version;
        match reload::make(&self.shared, &version.component, &version.config) {
            Ok(instance) => {
                self.instance = Some(instance);
                true
            }
            Err(error) => {
                tracing::warn!(group = %self.shared.name, version = %version.info.version, "no instance for the shadow: {error}");
                self.candidate.withdraw(Withdrawal::NoInstance);
                false
            }
        }
    }

    /// Has an instance of whatever version is in service now.
    fn follow_active(&mut self) {
        let active = self.shared.active.load_full();
        match (&active, &self.active) {
            (Some(version), Some((known, _))) if Arc::ptr_eq(version, known) => {}
            (None, None) => {}
            _ => {
                // Without one, only the candidate's own time is known.
                self.active = active.and_then(|version| {
                    let instance = reload::make(&self.shared, &version.component, &version.config);
                    instance.ok().map(|instance| (version, instance))
                });
            }
        }
    }

    /// Time and fuel of the version in service for this step.
    fn active_build(&mut self, sample: &Sample) -> Option<(u64, u64)> {
        let (_, instance) = self.active.as_mut()?;
        match timed(instance, sample) {
            (Ok(_), ns, fuel) => Some((ns, fuel)),
            // A fault of its own is found where it serves.
            (Err(BuildFault::Declined(_)), ..) => None,
            (Err(_), ..) => {
                self.active = None;
                None
            }
        }
    }

    /// All steps were shown: why not to go on, if anything.
    fn judge(&self) -> Option<Withdrawal> {
        let (counts, gates) = (&self.candidate.shadow, self.candidate.gates());
        let (observed, steps) = (counts.observed.load(Relaxed), counts.steps.load(Relaxed));
        let per_mille = gates.min_observed_per_mille;
        if observed * 1000 < steps * u64::from(per_mille) {
            return Some(Withdrawal::NotObserved {
                observed,
                steps,
                per_mille,
            });
        }
        let median = |histogram: &crate::LatencyHistogram| histogram.quantile(0.5);
        let (active, own) = (
            median(&counts.costs.active),
            median(&counts.costs.candidate),
        );
        let fuel = |count: &std::sync::atomic::AtomicU64| count.load(Relaxed);
        gates
            .judge_time(Stage::Shadow, active, own)
            .or_else(|| gates.judge_fuel(fuel(&counts.active_fuel), fuel(&counts.candidate_fuel)))
    }

    /// Hands the candidate on to the step thread.
    fn pass(mut self, version: Arc<Version>, spare: Option<WasmBuilder>) {
        if self.instance.is_none() && !self.revive() {
            candidate::tell(&self.shared, &self.candidate);
            return;
        }
        let Some(instance) = self.instance else {
            return;
        };
        let ready = Ready {
            version,
            instance,
            spare,
        };
        reload::try_in_service(&self.shared, &self.candidate, ready);
    }
}

fn timed(instance: &mut WasmBuilder, sample: &Sample) -> (Result<Metadata, BuildFault>, u64, u64) {
    let start = Instant::now();
    let built = sample.call.on(instance, &sample.common);
    let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let fuel = instance.fuel_used();
    let built = built.unwrap_or_else(|| {
        Err(BuildFault::Fault {
            kind: FaultKind::LiftBound,
            message: "the call gives no metadata".to_owned(),
        })
    });
    (built, ns, fuel)
}

fn judge(
    verifier: &mut Verifier,
    served: &Metadata,
    built: &Metadata,
    context: &VerifyContext<'_>,
) -> Result<(), Unlike> {
    verifier.verify(built, context).map_err(Unlike::Refused)?;
    meaning::compare(served, built, context).map_err(Unlike::Differs)
}
