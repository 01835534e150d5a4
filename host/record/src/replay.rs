//! Replaying a recording: the recorded builders run again and must build what they built, bit for bit; another builder runs on the
//! same steps, and what it builds is verified and compared with what served, in meaning and in cost.
//!
//! A recording may come from anybody: its components run in the sandbox, its limits cut to what a stranger gets. Must never know:
//! the command line.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;
use sha2::{Digest, Sha256};
use timetable_attention::{
    BuildFault, FaultKind, Grant, MetadataBuilder, Verifier, VerifyContext, meaning, plain_builder,
    verify_step,
};
use timetable_sandbox::{
    BuiltBy, Component, ContentHash, LatencyHistogram, LoadError, Sandbox, SandboxError, SeenFault,
    WasmBuilder, limits_for_replay,
};
use timetable_types::{BuilderConfig, CommonAttentionMetadata, Family, Metadata};

use crate::{
    entry::{RecordedStep, RecordedVersion, Slot, metadata_bytes},
    reader::{Missing, Recording, RecordingError},
};

/// Components and instances that are kept; with more versions than that, they are made again when needed.
const MAX_KEPT: usize = 32;

/// A component to try on a recording.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Where it came from, for people.
    pub origin: String,
    /// Options of its own instead of the recorded builder's. The rest of the configuration is the recorded one.
    pub options: Option<Vec<(String, String)>>,
    /// What it is granted instead of what the recorded builder was.
    pub grant: Option<Grant>,
}

/// What is replayed.
#[derive(Clone, Debug)]
pub struct ReplayOptions<'a> {
    /// Tried beside the recorded builders. None: those alone.
    pub candidate: Option<&'a Candidate>,
    /// Only slots whose name is this, or begins with it and `/` or `@`.
    pub group: Option<&'a str>,
    /// Steps at most.
    pub limit: Option<u64>,
    /// Differences that are told, at most; all are counted.
    pub max_differences: usize,
}

/// Why there is no replay, or not further.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The recording does not read.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// Its limits are refused here.
    #[error("the recording's limits are refused: {0}")]
    Sandbox(#[from] SandboxError),
    /// A recorded component does not load here.
    #[error("the recorded component {component} does not load: {error}")]
    Recorded {
        /// Its hash.
        component: ContentHash,
        /// Why not.
        error: LoadError,
    },
    /// The candidate does not load.
    #[error("component {origin}: {error}")]
    Candidate {
        /// Where it came from.
        origin: String,
        /// Why not.
        error: LoadError,
    },
    /// No slot's steps are for this replay.
    #[error("{what}; it has steps of {slots}")]
    Nothing {
        /// What was looked for.
        what: String,
        /// The slots that there are.
        slots: String,
    },
    /// A step that no host served.
    #[error("step {number} contradicts itself: {what}; the recording was put together by hand")]
    Inconsistent {
        /// The step's number.
        number: u64,
        /// In what.
        what: String,
    },
}

/// What a builder's calls cost here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BuilderCost {
    /// Calls.
    pub calls: u64,
    /// Median time of a call, in nanoseconds.
    pub build_p50_ns: Option<u64>,
    /// 99th percentile.
    pub build_p99_ns: Option<u64>,
    /// Median fuel of a call.
    pub fuel_p50: Option<u64>,
    /// 99th percentile.
    pub fuel_p99: Option<u64>,
    /// Fuel of all calls.
    pub fuel: u64,
}

/// What became of a step, compared with what was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Bit for bit what served.
    Identical,
    /// Divided otherwise; the same keys, and the same numbers.
    SameMeaning,
    /// Something else.
    Different,
    /// The verifier refuses it.
    Refused,
    /// The builder declined the batch: a host has the plain builder serve it.
    Declined,
    /// The builder faulted.
    Fault,
}

/// A step in which something other than what served was built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The step's number in its recording.
    pub step: u64,
    /// Its slot.
    pub slot: String,
    /// What kind.
    pub verdict: Verdict,
    /// The field with both values, the refusal, the fault.
    pub what: String,
}

/// A builder on the recorded steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BuilderReport {
    /// Steps that it was asked for.
    pub steps: u64,
    /// Of those, by verdict.
    pub identical: u64,
    /// Divided otherwise.
    pub same_meaning: u64,
    /// Otherwise different.
    pub different: u64,
    /// Refused by the verifier.
    pub refused: u64,
    /// Declined by the builder.
    pub declined: u64,
    /// Faults of the builder.
    pub faults: BTreeMap<&'static str, u64>,
    /// What its calls cost.
    pub cost: BuilderCost,
    /// The first differences.
    pub differences: Vec<Difference>,
}

/// What a replay came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Steps that were replayed.
    pub steps: u64,
    /// Of those, served by the plain builder.
    pub plain_steps: u64,
    /// Steps of each slot.
    pub slots: BTreeMap<String, u64>,
    /// Faults that the recording has, by kind.
    pub recorded_faults: BTreeMap<&'static str, u64>,
    /// Of those, that happened again.
    pub faults_again: u64,
    /// Of those, of a kind that does not replay.
    pub faults_that_do_not_replay: u64,
    /// The recorded builders, run again: what served must come back.
    pub recorded: BuilderReport,
    /// The candidate.
    pub candidate: Option<BuilderReport>,
    /// A digest of all metadata that served.
    pub recorded_digest: String,
    /// A digest of what the recorded builders built here: equal where everything is identical.
    pub digest: String,
    /// A digest of what the candidate built.
    pub candidate_digest: Option<String>,
    /// What the recording does not have.
    pub missing: Missing,
}

impl ReplayReport {
    /// Did the recorded builders build what they built then, and fault where they did?
    pub fn reproduced(&self) -> bool {
        let faults: u64 = self.recorded_faults.values().sum();
        self.recorded.identical == self.recorded.steps
            && self.faults_again + self.faults_that_do_not_replay == faults
    }
}

/// A digest of metadata in order, each with its slot: equal for equal metadata, on every machine.
#[derive(Clone, Debug, Default)]
pub struct MetadataDigest(Sha256);

impl MetadataDigest {
    /// Adds a step's metadata. Metadata that has no form in bytes, which no record of the contract lacks, adds its debug form.
    pub fn add(&mut self, slot: &str, metadata: &Metadata) {
        let bytes = metadata_bytes(metadata).unwrap_or_else(|_| format!("{metadata:?}").into());
        self.add_bytes(slot, &bytes);
    }

    fn add_bytes(&mut self, slot: &str, bytes: &[u8]) {
        for part in [slot.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// 64 hexadecimal digits.
    pub fn finish(self) -> String {
        ContentHash(self.0.finalize().into()).to_hex()
    }
}

/// Replays a recording. `progress` is told how many steps are done.
///
/// # Errors
/// If the recording or a component cannot be used. What went before the error is lost with it: look at `limit`.
pub fn replay(
    recording: &Recording,
    options: &ReplayOptions<'_>,
    mut progress: impl FnMut(u64),
) -> Result<ReplayReport, ReplayError> {
    let limits = limits_for_replay(recording.limits(), 2 * MAX_KEPT as u32 + 8);
    let sandbox = Sandbox::new(limits)?;
    let candidate = options
        .candidate
        .map(|candidate| {
            sandbox
                .load(&candidate.bytes)
                .map_err(|error| ReplayError::Candidate {
                    origin: candidate.origin.clone(),
                    error,
                })
        })
        .transpose()?;
    let mut replaying = Replaying {
        sandbox,
        candidate_family: candidate.as_ref().map(Component::family),
        candidate: candidate.map(|component| Trial {
            component,
            options: options.candidate.and_then(|given| given.options.clone()),
            grant: options.candidate.and_then(|given| given.grant),
            tally: Tally::new(options.max_differences, false),
        }),
        recorded: Tally::new(options.max_differences, true),
        components: BTreeMap::new(),
        versions: BTreeMap::new(),
        slots: Vec::new(),
        report: ReplayReport::default(),
        recorded_digest: MetadataDigest::default(),
    };
    let mut steps = recording.steps();
    let mut others = BTreeMap::new();
    while options
        .limit
        .is_none_or(|limit| replaying.report.steps < limit)
        && let Some(step) = steps.next_step()?
    {
        let wanted = options
            .group
            .is_none_or(|group| is_of(&step.slot.name, group))
            && replaying
                .candidate_family
                .is_none_or(|family| family == step.slot.family);
        if wanted {
            replaying.step(&step)?;
            progress(replaying.report.steps);
        } else {
            others.insert(step.slot.name.clone(), step.slot.family);
        }
    }
    let missing = steps.missing().clone();
    if replaying.report.steps == 0 && !others.is_empty() {
        let slots: Vec<String> = others
            .iter()
            .map(|(name, family)| format!("{name} (`{}`)", family.interface()))
            .collect();
        return Err(ReplayError::Nothing {
            what: match (options.group, replaying.candidate_family) {
                (Some(group), _) => format!("the recording has no steps of `{group}` for this"),
                (None, Some(family)) => format!(
                    "the component builds for `{}`, and the recording has no such steps",
                    family.interface()
                ),
                (None, None) => "the recording has no steps".to_owned(),
            },
            slots: slots.join(", "),
        });
    }
    Ok(replaying.finish(missing))
}

/// Is a slot of that name meant by `group`?
fn is_of(slot: &str, group: &str) -> bool {
    slot.strip_prefix(group)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '@']))
}

/// A replay under way.
struct Replaying {
    sandbox: Sandbox,
    candidate_family: Option<Family>,
    candidate: Option<Trial>,
    recorded: Tally,
    components: BTreeMap<ContentHash, Component>,
    versions: BTreeMap<ContentHash, Instance>,
    slots: Vec<(Arc<Slot>, OfSlot)>,
    report: ReplayReport,
    recorded_digest: MetadataDigest,
}

/// What each slot has of its own.
struct OfSlot {
    plain: Box<dyn MetadataBuilder>,
    verifier: Verifier,
    candidate: Option<Instance>,
}

/// The candidate, over all slots.
struct Trial {
    component: Component,
    options: Option<Vec<(String, String)>>,
    grant: Option<Grant>,
    tally: Tally,
}

/// A component with its instance, made again after a fault.
struct Instance {
    component: Component,
    config: BuilderConfig,
    instance: Option<WasmBuilder>,
}

/// The recorded builders on a step.
struct Again {
    /// The version's call, if it was asked then.
    call: Option<Call>,
    /// The plain builder's metadata, if that served then.
    plain: Option<Result<Metadata, BuildFault>>,
}

/// A call and what it cost.
struct Call {
    built: Result<Metadata, BuildFault>,
    time: Duration,
    fuel: u64,
}

impl Instance {
    fn new(component: &Component, config: &BuilderConfig) -> Instance {
        Instance {
            component: component.clone(),
            config: config.clone(),
            instance: None,
        }
    }

    fn build(&mut self, common: &CommonAttentionMetadata) -> Call {
        if self.instance.as_ref().is_none_or(WasmBuilder::is_dead) {
            // The dead one first: there are so many instances.
            self.instance = None;
            match WasmBuilder::new(&self.component, &self.config) {
                Ok(instance) => self.instance = Some(instance),
                Err(fault) => return Call::without(fault),
            }
        }
        let Some(instance) = &mut self.instance else {
            return Call::without(BuildFault::Fault {
                kind: FaultKind::Constructor,
                message: "there is no instance".to_owned(),
            });
        };
        let start = Instant::now();
        let built = instance.build(common, false);
        Call {
            time: start.elapsed(),
            fuel: instance.fuel_used(),
            built,
        }
    }
}

impl Call {
    fn without(fault: BuildFault) -> Call {
        Call {
            built: Err(fault),
            time: Duration::ZERO,
            fuel: 0,
        }
    }
}

/// A builder's report while it is made.
struct Tally {
    report: BuilderReport,
    build_ns: LatencyHistogram,
    fuel: LatencyHistogram,
    digest: MetadataDigest,
    max_differences: usize,
    /// Nothing but the same bits will do.
    exact: bool,
}

impl Tally {
    fn new(max_differences: usize, exact: bool) -> Tally {
        Tally {
            report: BuilderReport::default(),
            build_ns: LatencyHistogram::default(),
            fuel: LatencyHistogram::default(),
            digest: MetadataDigest::default(),
            max_differences,
            exact,
        }
    }

    fn call(&mut self, call: &Call) {
        self.build_ns
            .record(u64::try_from(call.time.as_nanos()).unwrap_or(u64::MAX));
        self.fuel.record(call.fuel);
        self.report.cost.calls += 1;
        self.report.cost.fuel = self.report.cost.fuel.saturating_add(call.fuel);
    }

    fn judge(&mut self, step: &RecordedStep, verdict: Verdict, what: impl FnOnce() -> String) {
        let report = &mut self.report;
        report.steps += 1;
        match verdict {
            Verdict::Identical => report.identical += 1,
            Verdict::SameMeaning => report.same_meaning += 1,
            Verdict::Different => report.different += 1,
            Verdict::Refused => report.refused += 1,
            Verdict::Declined => report.declined += 1,
            Verdict::Fault => {}
        }
        let told = match verdict {
            Verdict::Identical => false,
            Verdict::SameMeaning => self.exact,
            _ => true,
        };
        if told && report.differences.len() < self.max_differences {
            report.differences.push(Difference {
                step: step.number,
                slot: step.slot.name.clone(),
                verdict,
                what: what(),
            });
        }
    }

    /// A step for which the builder has no metadata.
    fn fault(&mut self, step: &RecordedStep, fault: &BuildFault) {
        match fault {
            BuildFault::Declined(_) => self.judge(step, Verdict::Declined, || fault.to_string()),
            BuildFault::Fault { kind, .. } => {
                *self.report.faults.entry(kind.name()).or_default() += 1;
                self.judge(step, Verdict::Fault, || fault.to_string());
            }
        }
    }

    fn finish(self) -> (BuilderReport, String) {
        let mut report = self.report;
        report.cost.build_p50_ns = self.build_ns.quantile(0.5);
        report.cost.build_p99_ns = self.build_ns.quantile(0.99);
        report.cost.fuel_p50 = self.fuel.quantile(0.5);
        report.cost.fuel_p99 = self.fuel.quantile(0.99);
        (report, self.digest.finish())
    }
}

impl Replaying {
    fn step(&mut self, step: &RecordedStep) -> Result<(), ReplayError> {
        let inconsistent = |what: String| ReplayError::Inconsistent {
            number: step.number,
            what,
        };
        let report = &mut self.report;
        report.steps += 1;
        report.plain_steps += u64::from(step.built_by == BuiltBy::Plain);
        *report.slots.entry(step.slot.name.clone()).or_default() += 1;
        if let Some(fault) = &step.fault {
            *report.recorded_faults.entry(fault.kind.name()).or_default() += 1;
        }
        self.recorded_digest.add(&step.slot.name, &step.metadata);
        let slot = self.slot(&step.slot).map_err(inconsistent)?;
        let config = &step.slot.config;
        step.tensors
            .with_context(config, &step.common, |context| {
                // Before anything is built: the plain builder, like the verifier, relies on a step that is one.
                verify_step(context).map_err(|refusal| inconsistent(refusal.to_string()))?;
                // The candidate goes first in every other step: what one warms, the other finds warm.
                let first = step.number.is_multiple_of(2);
                let mut tried = None;
                if first {
                    tried = self.candidate(slot, step);
                }
                let again = self.recorded(slot, step)?;
                if !first {
                    tried = self.candidate(slot, step);
                }
                self.judge(slot, step, context, again, tried);
                Ok(())
            })
            .map_err(inconsistent)?
    }

    fn candidate(&mut self, slot: usize, step: &RecordedStep) -> Option<Call> {
        let instance = self.slots[slot].1.candidate.as_mut()?;
        Some(instance.build(&step.common))
    }

    /// The slot's place, with builders for it.
    fn slot(&mut self, slot: &Arc<Slot>) -> Result<usize, String> {
        let known = &self.slots;
        if let Some(place) = known.iter().position(|(known, _)| Arc::ptr_eq(known, slot)) {
            return Ok(place);
        }
        let plain = plain_builder(slot.family, &slot.config).map_err(|error| error.message)?;
        let candidate = self.candidate.as_ref().map(|trial| {
            let mut config = slot.config.clone();
            if let Some(options) = &trial.options {
                config.options.clone_from(options);
            }
            Instance::new(&trial.component, &config)
        });
        self.slots.push((
            Arc::clone(slot),
            OfSlot {
                plain,
                verifier: Verifier::new(),
                candidate,
            },
        ));
        Ok(self.slots.len() - 1)
    }

    fn recorded(&mut self, slot: usize, step: &RecordedStep) -> Result<Again, ReplayError> {
        let call = match &step.version {
            Some(version) => {
                let call = self.version(version)?.build(&step.common);
                self.recorded.call(&call);
                Some(call)
            }
            None => None,
        };
        let plain = (step.built_by == BuiltBy::Plain)
            .then(|| self.slots[slot].1.plain.build(&step.common, false));
        Ok(Again { call, plain })
    }

    fn version(&mut self, version: &RecordedVersion) -> Result<&mut Instance, ReplayError> {
        if !self.versions.contains_key(&version.version) {
            if self.versions.len() >= MAX_KEPT {
                self.versions.clear();
                self.components.clear();
            }
            let component = match self.components.get(&version.component) {
                Some(component) => component.clone(),
                None => {
                    let component = self.sandbox.load(&version.bytes).map_err(|error| {
                        ReplayError::Recorded {
                            component: version.component,
                            error,
                        }
                    })?;
                    self.components.insert(version.component, component.clone());
                    component
                }
            };
            self.versions
                .insert(version.version, Instance::new(&component, &version.config));
        }
        Ok(self
            .versions
            .get_mut(&version.version)
            .expect("it was just put there"))
    }

    fn judge(
        &mut self,
        slot: usize,
        step: &RecordedStep,
        context: &VerifyContext<'_>,
        Again { call, plain }: Again,
        tried: Option<Call>,
    ) {
        let verifier = &mut self.slots[slot].1.verifier;
        if let Some(fault) = &step.fault {
            let again = call.as_ref().and_then(|call| match &call.built {
                Err(fault) => Some(SeenFault::of(fault).kind),
                Ok(metadata) => verifier
                    .verify(metadata, context)
                    .err()
                    .map(|_| FaultKind::Refused),
            });
            if again == Some(fault.kind) {
                self.report.faults_again += 1;
            } else if !fault.kind.replays() {
                self.report.faults_that_do_not_replay += 1;
            }
        }
        let served = plain.or_else(|| call.map(|call| call.built));
        match served {
            Some(built) => compare(&mut self.recorded, verifier, step, context, built),
            // A step that its component served, without the component.
            None => self.recorded.judge(step, Verdict::Different, || {
                "the recording does not say which version built it".to_owned()
            }),
        }
        if let (Some(trial), Some(call)) = (&mut self.candidate, tried) {
            trial.tally.call(&call);
            let granted = VerifyContext {
                grant: trial.grant.unwrap_or(context.grant),
                ..*context
            };
            compare(&mut trial.tally, verifier, step, &granted, call.built);
        }
    }

    fn finish(self, missing: Missing) -> ReplayReport {
        let mut report = self.report;
        report.missing = missing;
        report.recorded_digest = self.recorded_digest.finish();
        (report.recorded, report.digest) = self.recorded.finish();
        if let Some(trial) = self.candidate {
            let (of_candidate, digest) = trial.tally.finish();
            report.candidate = Some(of_candidate);
            report.candidate_digest = Some(digest);
        }
        report
    }
}

/// What was built, against what served.
fn compare(
    tally: &mut Tally,
    verifier: &mut Verifier,
    step: &RecordedStep,
    context: &VerifyContext<'_>,
    built: Result<Metadata, BuildFault>,
) {
    let metadata = match built {
        Ok(metadata) => metadata,
        Err(fault) => return tally.fault(step, &fault),
    };
    tally.digest.add(&step.slot.name, &metadata);
    let bytes = |metadata| metadata_bytes(metadata).ok();
    if let (Some(here), Some(there)) = (bytes(&metadata), bytes(&step.metadata))
        && here == there
    {
        return tally.judge(step, Verdict::Identical, String::new);
    }
    if let Err(refusal) = verifier.verify(&metadata, context) {
        return tally.judge(step, Verdict::Refused, || refusal.to_string());
    }
    match meaning::compare(&step.metadata, &metadata, context) {
        Ok(()) => tally.judge(step, Verdict::SameMeaning, || {
            "the same keys and numbers, divided otherwise".to_owned()
        }),
        Err(difference) => tally.judge(step, Verdict::Different, || difference.to_string()),
    }
}
