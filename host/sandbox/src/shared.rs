//! What the step thread, the reload thread and those who ask for the status share of one group.
//!
//! Must never know: the step thread's own state.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};
use timetable_attention::{BuildFault, FaultKind, VerifyContext};
use timetable_types::{BuilderConfig, BuilderInfo, CommonAttentionMetadata, Family, Metadata};

use crate::{
    BuilderCall, BuilderStatus, Component, FaultPolicy, FaultRecord, GroupState, Sandbox, Stage,
    VersionFigures, VersionInfo, WasmBuilder,
    bundle::{Again, FaultBundle, FaultHeader, SeenFault, StepRecord, WrittenBy, unix_time},
    candidate::Candidate,
    group::{Acceptance, Trial},
    mailbox::{Mailbox, lock},
    metrics::{FallbackCounts, FaultCounts, VersionMetrics},
    reload,
};

/// Distinct faults that are remembered.
const MAX_FAULT_RECORDS: usize = 32;

/// A version in service, or ready for it.
pub(crate) struct Version {
    pub(crate) info: VersionInfo,
    pub(crate) builder: BuilderInfo,
    pub(crate) component: Component,
    pub(crate) config: Arc<BuilderConfig>,
    pub(crate) metrics: VersionMetrics,
    /// Its faults took it out of service: nobody returns to it unasked.
    pub(crate) quarantined: AtomicBool,
}

/// A version with instances, made off the step thread.
pub(crate) struct Ready {
    pub(crate) version: Arc<Version>,
    pub(crate) instance: WasmBuilder,
    pub(crate) spare: Option<WasmBuilder>,
}

/// A version that went out of service, with an instance if one lives.
pub(crate) struct Retired {
    pub(crate) version: Arc<Version>,
    pub(crate) instance: Option<WasmBuilder>,
    pub(crate) spare: Option<WasmBuilder>,
}

/// A fault of a version that was found after its step was served.
pub(crate) struct Finding {
    pub(crate) version: Arc<Version>,
    pub(crate) fault: BuildFault,
}

/// What happened to a group, whatever the version. Counts.
#[derive(Default)]
pub(crate) struct GroupCounts {
    pub(crate) plain_steps: AtomicU64,
    pub(crate) fallbacks: FallbackCounts,
    pub(crate) failed_steps: AtomicU64,
    pub(crate) backoff_steps: AtomicU64,
    pub(crate) quarantines: AtomicU64,
    pub(crate) returns: AtomicU64,
    pub(crate) reruns: AtomicU64,
    pub(crate) activations: AtomicU64,
    pub(crate) withdrawals: AtomicU64,
    pub(crate) faults: FaultCounts,
}

/// Told that what serves, or what is tried, has changed by itself. Runs on the reload thread or a shadow's.
pub(crate) type OnChange = Box<dyn Fn() + Send>;

/// One group's shared part.
pub(crate) struct Shared {
    pub(crate) sandbox: Sandbox,
    pub(crate) name: String,
    pub(crate) family: Family,
    /// What the next version is constructed with.
    pub(crate) config: ArcSwap<BuilderConfig>,
    pub(crate) policy: ArcSwap<FaultPolicy>,
    pub(crate) acceptance: Option<Acceptance>,
    pub(crate) active: ArcSwapOption<Version>,
    pub(crate) pending: Mailbox<Ready>,
    pub(crate) spares: Mailbox<(Arc<Version>, WasmBuilder)>,
    /// What went out of service at the last swap, until the reload thread looks. Waking that thread would cost the step
    /// thread several microseconds.
    pub(crate) retired: Mailbox<Retired>,
    pub(crate) findings: Mailbox<Finding>,
    pub(crate) previous: Mutex<Option<Ready>>,
    /// The version that is being tried, or was tried last.
    pub(crate) candidate: ArcSwapOption<Candidate>,
    /// A candidate that enters shadow or canary, or has passed.
    pub(crate) trials: Mailbox<Trial>,
    pub(crate) candidate_spares: Mailbox<(Arc<Version>, WasmBuilder)>,
    pub(crate) on_change: Mutex<Option<OnChange>>,
    /// A sampled step is being built again.
    pub(crate) rerunning: AtomicBool,
    pub(crate) counts: GroupCounts,
    pub(crate) state: AtomicU8,
    fault_records: Mutex<VecDeque<FaultRecord>>,
}

/// A call that went wrong, as the step thread has it.
pub(crate) struct Evidence<'a> {
    pub(crate) call: &'a BuilderCall<'a>,
    pub(crate) common: Option<&'a CommonAttentionMetadata>,
    pub(crate) context: Option<&'a VerifyContext<'a>>,
    pub(crate) metadata: Option<Metadata>,
    pub(crate) instance_calls: u64,
}

impl Shared {
    pub(crate) fn new(
        sandbox: &Sandbox,
        name: String,
        family: Family,
        config: BuilderConfig,
        acceptance: Option<Acceptance>,
    ) -> Shared {
        Shared {
            sandbox: sandbox.clone(),
            name,
            family,
            config: ArcSwap::from_pointee(config),
            policy: ArcSwap::from_pointee(FaultPolicy::default()),
            acceptance,
            active: ArcSwapOption::empty(),
            pending: Mailbox::new(),
            spares: Mailbox::new(),
            retired: Mailbox::new(),
            findings: Mailbox::new(),
            previous: Mutex::new(None),
            candidate: ArcSwapOption::empty(),
            trials: Mailbox::new(),
            candidate_spares: Mailbox::new(),
            on_change: Mutex::new(None),
            rerunning: AtomicBool::new(false),
            counts: GroupCounts::default(),
            state: AtomicU8::new(GroupState::Plain as u8),
            fault_records: Mutex::new(VecDeque::new()),
        }
    }

    pub(crate) fn in_service(&self, version: &Arc<Version>) -> bool {
        let active = self.active.load();
        active
            .as_ref()
            .is_some_and(|active| Arc::ptr_eq(active, version))
    }

    /// Is this the version in service, whatever its instances?
    pub(crate) fn serves(&self, info: &VersionInfo) -> bool {
        let active = self.active.load();
        active
            .as_ref()
            .is_some_and(|active| active.info.version == info.version)
    }

    /// Is `version` being tried?
    pub(crate) fn tries(&self, version: &Arc<Version>) -> bool {
        let candidate = self.candidate.load();
        candidate.as_ref().is_some_and(|candidate| {
            Arc::ptr_eq(&candidate.version, version) && candidate.is_tried()
        })
    }

    /// Tells whoever wants to know that something changed by itself.
    pub(crate) fn tell(&self) {
        if let Some(told) = lock(&self.on_change).as_ref() {
            told();
        }
    }

    pub(crate) fn status(&self) -> BuilderStatus {
        // First, for what is not found here any more is found in `active`.
        let pending = self.pending.peek(|ready| ready.version.info.clone());
        let version = self.active.load_full();
        let active = version.as_ref().map(|version| version.info.clone());
        let metrics = version.as_ref().map(|version| &version.metrics);
        let watchdog = self.sandbox.watchdog();
        BuilderStatus {
            group: self.name.clone(),
            family: self.family,
            state: GroupState::from_u8(self.state.load(Relaxed)),
            policy: **self.policy.load(),
            pending: pending.filter(|pending| active.as_ref() != Some(pending)),
            active,
            previous: self
                .retired
                .peek(|retired| retired.version.info.clone())
                .filter(|retired| !self.serves(retired))
                .or_else(|| {
                    lock(&self.previous)
                        .as_ref()
                        .map(|ready| ready.version.info.clone())
                }),
            candidate: self
                .candidate
                .load()
                .as_ref()
                .map(|candidate| candidate.status()),
            activations: self.counts.activations.load(Relaxed),
            withdrawals: self.counts.withdrawals.load(Relaxed),
            steps: metrics.map_or(0, |metrics| metrics.steps.load(Relaxed)),
            plain_steps: self.counts.plain_steps.load(Relaxed),
            fallbacks: self.counts.fallbacks.by_name(),
            versions: self.versions(),
            failed_steps: self.counts.failed_steps.load(Relaxed),
            backoff_steps: self.counts.backoff_steps.load(Relaxed),
            quarantines: self.counts.quarantines.load(Relaxed),
            returns: self.counts.returns.load(Relaxed),
            reruns: self.counts.reruns.load(Relaxed),
            build_p50_ns: metrics.and_then(|metrics| metrics.build_ns.quantile(0.5)),
            build_p99_ns: metrics.and_then(|metrics| metrics.build_ns.quantile(0.99)),
            verify_p50_ns: metrics.and_then(|metrics| metrics.verify_ns.quantile(0.5)),
            verify_p99_ns: metrics.and_then(|metrics| metrics.verify_ns.quantile(0.99)),
            splits: metrics
                .map(|metrics| metrics.splits.get())
                .unwrap_or_default(),
            work_items: metrics
                .map(|metrics| metrics.work_items.get())
                .unwrap_or_default(),
            faults: metrics
                .map(|metrics| metrics.faults.by_name())
                .unwrap_or_default(),
            all_faults: self.counts.faults.by_name(),
            fault_records: lock(&self.fault_records).iter().cloned().collect(),
            bundles: self
                .sandbox
                .bundles()
                .map(|bundles| bundles.figures())
                .unwrap_or_default(),
            watchdog_restarts: watchdog.restarts(),
            watchdog_stalls: watchdog.stalls(),
        }
    }

    /// What the versions that are here did: the one in service, the one being tried, and the one before.
    fn versions(&self) -> Vec<VersionFigures> {
        let active = self.active.load_full();
        let candidate = self.candidate.load();
        let candidate = candidate.as_ref().filter(|candidate| candidate.is_tried());
        let previous = self
            .retired
            .peek(|retired| retired.version.clone())
            .filter(|retired| !self.serves(&retired.info))
            .or_else(|| {
                lock(&self.previous)
                    .as_ref()
                    .map(|ready| ready.version.clone())
            });
        [
            active.map(|version| (version, Stage::Active)),
            candidate.map(|candidate| (candidate.version.clone(), candidate.stage())),
            previous.map(|version| (version, Stage::Previous)),
        ]
        .into_iter()
        .flatten()
        .map(|(version, stage)| version.figures(stage))
        .collect()
    }

    /// Counts and remembers a fault.
    pub(crate) fn note(&self, version: &Version, kind: FaultKind, message: &str) {
        version.metrics.faults.add(kind);
        self.counts.faults.add(kind);
        let mut records = lock(&self.fault_records);
        let same = |record: &&mut FaultRecord| {
            record.kind == kind
                && record.version == version.info.version
                && record.message == message
        };
        if let Some(record) = records.iter_mut().find(same) {
            record.count += 1;
            return;
        }
        if records.len() == MAX_FAULT_RECORDS {
            records.pop_front();
        }
        records.push_back(FaultRecord {
            kind,
            message: message.to_owned(),
            version: version.info.version,
            count: 1,
        });
    }

    /// Takes a version out of service after its faults; the last good one may take over.
    #[cold]
    pub(crate) fn quarantine(
        self: &Arc<Self>,
        version: &Arc<Version>,
        kind: FaultKind,
        faults: usize,
        policy: &FaultPolicy,
    ) {
        version.quarantined.store(true, Relaxed);
        self.counts.quarantines.fetch_add(1, Relaxed);
        tracing::warn!(
            group = %self.name, version = %version.info.version, %kind, faults,
            "builder quarantined: it is not called until a reload or a rollback"
        );
        if policy.return_to_last_good {
            let (shared, version) = (self.clone(), version.clone());
            self.sandbox
                .workshop()
                .run(move || reload::return_to_last_good(&shared, &version));
        }
    }

    /// Keeps a fault as a bundle, if there is a directory for bundles and room for one more of its kind. Copies what the fault
    /// depends on; everything else happens on the reload thread.
    pub(crate) fn keep(&self, version: &Arc<Version>, fault: &BuildFault, evidence: Evidence<'_>) {
        let Some(bundles) = self.sandbox.bundles() else {
            return;
        };
        let fault = SeenFault::of(fault);
        if !bundles.admit(version.info.version, fault.kind) {
            return;
        }
        let limits = bundles.limits();
        let max_bytes = if fault.kind == FaultKind::Refused {
            limits.max_refused_step_bytes
        } else {
            limits.max_step_bytes
        };
        let step = evidence
            .context
            .and_then(|context| StepRecord::of(context, max_bytes));
        let (common, call) = (evidence.common.cloned(), evidence.call.to_owned());
        let (metadata, instance_calls) = (evidence.metadata, evidence.instance_calls);
        let (version, group) = (version.clone(), self.name.clone());
        self.sandbox.workshop().run(move || {
            let case = Case {
                fault,
                call,
                instance_calls,
                common,
                step,
                metadata,
                again: None,
            };
            bundles.write(version.bundle(group, case));
        });
    }
}

/// What a bundle says beside the version.
pub(crate) struct Case {
    pub(crate) fault: SeenFault,
    pub(crate) call: BuilderCall<'static>,
    pub(crate) instance_calls: u64,
    pub(crate) common: Option<CommonAttentionMetadata>,
    pub(crate) step: Option<StepRecord>,
    pub(crate) metadata: Option<Metadata>,
    pub(crate) again: Option<Again>,
}

impl Version {
    fn figures(&self, stage: Stage) -> VersionFigures {
        let metrics = &self.metrics;
        VersionFigures {
            version: self.info.version,
            name: self.info.name.clone(),
            stage,
            steps: metrics.steps.load(Relaxed),
            build: metrics.build_ns.figures(),
            verify: metrics.verify_ns.figures(),
            splits: metrics.splits.get(),
            work_items: metrics.work_items.get(),
            faults: metrics.faults.by_name(),
        }
    }

    /// A bundle of a fault of this version.
    pub(crate) fn bundle(&self, group: String, case: Case) -> FaultBundle {
        bundle(&self.info, &self.component, &self.config, group, case)
    }
}

/// A bundle of a fault of what `info` says.
pub(crate) fn bundle(
    info: &VersionInfo,
    component: &Component,
    config: &BuilderConfig,
    group: String,
    case: Case,
) -> FaultBundle {
    FaultBundle {
        header: FaultHeader {
            written_by: WrittenBy::here(),
            unix_time: unix_time(),
            group,
            family: info.family,
            version: info.version,
            component: info.component,
            name: info.name.clone(),
            origin: info.origin.clone(),
            fault: case.fault,
            call: case.call,
            instance_calls: case.instance_calls,
            config: config.clone(),
            limits: component.sandbox().limits().clone(),
            common: case.common,
            step: case.step,
            metadata: case.metadata,
            again: case.again,
        },
        component: component.bytes().to_vec(),
    }
}
