//! The builder of one attention group as the engine holds it: a component that may be replaced while requests run, and the
//! plain builder that serves whenever the component does not.
//!
//! A fault costs no step: the same step is built by the plain builder. Must never know: what a step's metadata means (the
//! verifier is the caller's), how a version is prepared, or who asked for it.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    time::Instant,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise,
    Metadata,
};

use crate::{
    BuilderStatus, Component, FaultRecord, GroupState, ReloadError, ReloadHandle, Sandbox,
    VersionInfo, WasmBuilder, metrics::VersionMetrics, reload,
};

/// Distinct faults that are remembered.
const MAX_FAULT_RECORDS: usize = 32;

/// A check of a new version before it goes into service, beside the built-in one (it constructs and builds small steps): for
/// example conformance cases through the verifier. Runs on the reload thread.
pub type Acceptance = Arc<dyn Fn(&mut dyn MetadataBuilder) -> Result<(), String> + Send + Sync>;

/// What a group's builder is made of.
pub struct GroupSetup {
    /// A name for people, unique among the engine's groups.
    pub name: String,
    /// What builders are constructed with.
    pub config: BuilderConfig,
    /// The plain builder of the backend: no splits, nothing clever. It decides the group's family.
    pub plain: Box<dyn MetadataBuilder>,
    /// A check of new versions, beside the built-in one.
    pub acceptance: Option<Acceptance>,
}

/// A version in service, or ready for it.
pub(crate) struct Version {
    pub(crate) info: VersionInfo,
    pub(crate) builder: BuilderInfo,
    pub(crate) component: Component,
    pub(crate) config: Arc<BuilderConfig>,
    pub(crate) metrics: VersionMetrics,
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

/// A place where one of step thread and reload thread leaves something for the other. The step thread never waits at it.
pub(crate) struct Mailbox<T> {
    full: AtomicBool,
    slot: Mutex<Option<T>>,
}

impl<T> Mailbox<T> {
    fn new() -> Self {
        Mailbox {
            full: AtomicBool::new(false),
            slot: Mutex::new(None),
        }
    }

    /// Leaves `value`, and returns what lay there untaken.
    pub(crate) fn put(&self, value: T) -> Option<T> {
        let old = lock(&self.slot).replace(value);
        self.full.store(true, Ordering::Release);
        old
    }

    /// For the step thread: as `put`, but gives `value` back rather than wait for somebody who is just looking.
    fn offer(&self, value: T) -> Result<Option<T>, T> {
        let Ok(mut slot) = self.slot.try_lock() else {
            return Err(value);
        };
        let old = slot.replace(value);
        self.full.store(true, Ordering::Release);
        Ok(old)
    }

    /// For the reload thread: takes it back.
    pub(crate) fn withdraw(&self) -> Option<T> {
        self.full.store(false, Ordering::Release);
        lock(&self.slot).take()
    }

    /// For the step thread: one load if there is nothing; if somebody is just looking at it, the next step takes it.
    fn take(&self) -> Option<T> {
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = self.slot.try_lock().ok()?;
        self.full.store(false, Ordering::Release);
        slot.take()
    }

    pub(crate) fn peek<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        lock(&self.slot).as_ref().map(look)
    }
}

/// No invariant of ours spans a panic while a lock is held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the step thread, the reload thread and those who ask for the status share.
pub(crate) struct Shared {
    pub(crate) sandbox: Sandbox,
    pub(crate) name: String,
    pub(crate) family: Family,
    /// What the next version is constructed with.
    pub(crate) config: ArcSwap<BuilderConfig>,
    pub(crate) acceptance: Option<Acceptance>,
    pub(crate) active: ArcSwapOption<Version>,
    pub(crate) pending: Mailbox<Ready>,
    pub(crate) spares: Mailbox<(Arc<Version>, WasmBuilder)>,
    /// What went out of service at the last swap, until the reload thread looks. Waking that thread would cost the step
    /// thread several microseconds.
    pub(crate) retired: Mailbox<Retired>,
    pub(crate) previous: Mutex<Option<Ready>>,
    state: AtomicU8,
    plain_steps: AtomicU64,
    fault_records: Mutex<VecDeque<FaultRecord>>,
}

impl Shared {
    pub(crate) fn status(&self) -> BuilderStatus {
        let version = self.active.load_full();
        let metrics = version.as_ref().map(|version| &version.metrics);
        BuilderStatus {
            group: self.name.clone(),
            family: self.family,
            state: GroupState::from_u8(self.state.load(Ordering::Relaxed)),
            active: version.as_ref().map(|version| version.info.clone()),
            pending: self.pending.peek(|ready| ready.version.info.clone()),
            previous: self
                .retired
                .peek(|retired| retired.version.info.clone())
                .or_else(|| {
                    lock(&self.previous)
                        .as_ref()
                        .map(|ready| ready.version.info.clone())
                }),
            steps: metrics.map_or(0, |metrics| metrics.steps.load(Ordering::Relaxed)),
            plain_steps: self.plain_steps.load(Ordering::Relaxed),
            build_p50_ns: metrics.and_then(|metrics| metrics.build_ns.quantile(0.5)),
            build_p99_ns: metrics.and_then(|metrics| metrics.build_ns.quantile(0.99)),
            splits: metrics
                .map(|metrics| metrics.splits.get())
                .unwrap_or_default(),
            work_items: metrics
                .map(|metrics| metrics.work_items.get())
                .unwrap_or_default(),
            faults: metrics
                .map(|metrics| {
                    metrics
                        .faults()
                        .map(|(kind, count)| (kind.name(), count))
                        .collect()
                })
                .unwrap_or_default(),
            fault_records: lock(&self.fault_records).iter().cloned().collect(),
        }
    }

    fn note(&self, version: &Version, kind: FaultKind, message: &str) {
        version.metrics.fault(kind);
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
}

/// A version in service, with what the step thread owns of it.
struct Current {
    version: Arc<Version>,
    /// None while the next instance is being prepared.
    instance: Option<WasmBuilder>,
    spare: Option<WasmBuilder>,
    faults_in_a_row: u32,
    suspended: bool,
}

/// The builder of one attention group (and micro-batch). Owned by the step thread.
pub struct GroupBuilder {
    shared: Arc<Shared>,
    plain: Box<dyn MetadataBuilder>,
    current: Option<Current>,
}

/// Who built a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuiltBy {
    /// The component.
    Component,
    /// The plain builder.
    Plain,
}

/// A step's metadata, verified.
#[derive(Clone, Debug)]
pub struct StepMetadata {
    /// The metadata.
    pub metadata: Metadata,
    /// Who built it.
    pub built_by: BuiltBy,
    /// What the component did wrong in this very step, if it did.
    pub fault: Option<BuildFault>,
}

/// A step without metadata: its requests fail with this error, the process lives.
#[derive(Clone, Debug, thiserror::Error)]
pub struct StepError {
    /// What the component did wrong in this step. None if it was not asked.
    pub component: Option<BuildFault>,
    /// What the plain builder did wrong.
    pub plain: BuildFault,
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this step has no metadata: the plain builder: {}",
            self.plain
        )?;
        match &self.component {
            Some(fault) => write!(f, "; before it, the component: {fault}"),
            None => Ok(()),
        }
    }
}

/// One call, made on whichever builder serves.
type Call<'a> = &'a dyn Fn(&mut dyn MetadataBuilder) -> Result<Metadata, BuildFault>;

impl GroupBuilder {
    /// A group that its plain builder serves until a component is loaded through `handle`.
    pub fn plain(sandbox: &Sandbox, setup: GroupSetup) -> GroupBuilder {
        let GroupSetup {
            name,
            config,
            plain,
            acceptance,
        } = setup;
        GroupBuilder {
            shared: Arc::new(Shared {
                sandbox: sandbox.clone(),
                name,
                family: plain.family(),
                config: ArcSwap::from_pointee(config),
                acceptance,
                active: ArcSwapOption::empty(),
                pending: Mailbox::new(),
                spares: Mailbox::new(),
                retired: Mailbox::new(),
                previous: Mutex::new(None),
                state: AtomicU8::new(GroupState::Plain as u8),
                plain_steps: AtomicU64::new(0),
                fault_records: Mutex::new(VecDeque::new()),
            }),
            plain,
            current: None,
        }
    }

    /// A group that `component` serves from the first step on. Prepares it on the calling thread, about 100 µs.
    ///
    /// # Errors
    /// As a reload of that component.
    pub fn new(
        sandbox: &Sandbox,
        setup: GroupSetup,
        component: &Component,
        origin: &str,
    ) -> Result<GroupBuilder, ReloadError> {
        let mut group = GroupBuilder::plain(sandbox, setup);
        let config = group.shared.config.load_full();
        let ready = reload::prepare(&group.shared, component, &config, origin)?;
        group.install(ready);
        Ok(group)
    }

    /// For those who reload, roll back, or look: any thread.
    pub fn handle(&self) -> ReloadHandle {
        ReloadHandle::new(self.shared.clone())
    }

    /// The family whose metadata this group reads.
    pub fn family(&self) -> Family {
        self.shared.family
    }

    /// What the version in service said of itself; the plain builder's word if there is none. Changes only in
    /// `step_boundary`, never because of a fault.
    pub fn info(&self) -> &BuilderInfo {
        match &self.current {
            Some(current) => &current.version.builder,
            None => self.plain.info(),
        }
    }

    /// Takes a version that is ready into service, and a spare that was made. True if the version changed: `info` and launch
    /// promises are then to be asked for again. Without news it costs two loads; a swap less than a microsecond.
    ///
    /// `build` does this itself; call it before if the batch's order depends on `info`.
    pub fn step_boundary(&mut self) -> bool {
        if let Some(ready) = self.shared.pending.take() {
            self.install(ready);
            return true;
        }
        if let Some((version, spare)) = self.shared.spares.take() {
            match &mut self.current {
                Some(current)
                    if Arc::ptr_eq(&current.version, &version) && current.spare.is_none() =>
                {
                    current.spare = Some(spare);
                    if current.instance.is_none() && !current.suspended {
                        current.instance = current.spare.take();
                        self.set_state(GroupState::Active);
                        self.order_spare();
                    }
                }
                _ => self.bury(spare),
            }
        }
        false
    }

    /// This step's metadata: of the component if it serves and `verify` accepts it, else of the plain builder, which `verify`
    /// must accept as well.
    ///
    /// # Errors
    /// If the plain builder's metadata is refused too, or it has none. The step's requests then fail; the group stays usable.
    pub fn build<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        self.step_boundary();
        self.build_current(common, fast_build, verify)
    }

    /// As `build`, without a step boundary: for a caller that went through `step_boundary` in this step, and must not see
    /// another version after it.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_current<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let call = |builder: &mut dyn MetadataBuilder| builder.build(common, fast_build);
        self.serve(Some(common.num_reqs), &call, &verify)
    }

    /// Metadata for capturing a CUDA graph with this batch's shape. No step boundary.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_for_cudagraph_capture<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let call = |builder: &mut dyn MetadataBuilder| builder.build_for_cudagraph_capture(common);
        self.serve(None, &call, &verify)
    }

    /// Metadata for step `draft_index` of a drafter. No step boundary: all drafts of a step have one version.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_for_drafting<R: fmt::Display>(
        &mut self,
        common: &CommonAttentionMetadata,
        draft_index: u32,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let call =
            |builder: &mut dyn MetadataBuilder| builder.build_for_drafting(common, draft_index);
        self.serve(None, &call, &verify)
    }

    /// `metadata`, of an equal group, for the block table and slots that `common` describes; built anew by a builder that
    /// cannot update. No step boundary.
    ///
    /// # Errors
    /// As `build`.
    pub fn update_block_table<R: fmt::Display>(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
        verify: impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let call = |builder: &mut dyn MetadataBuilder| {
            if builder.info().supports_update_block_table {
                builder.update_block_table(metadata, common)
            } else {
                builder.build(common, false)
            }
        };
        self.serve(None, &call, &verify)
    }

    /// What a graph captured with `shape` may rely on, whoever builds the step that is replayed: the larger of the
    /// component's and the plain builder's promise.
    ///
    /// # Errors
    /// If the plain builder has none. A component that faults here is treated as in `build`.
    pub fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let plain = self.plain.launch_promise(shape)?;
        let Some(instance) = self.serving() else {
            return Ok(plain);
        };
        match instance.launch_promise(shape) {
            Ok(promise) => Ok(LaunchPromise {
                max_num_splits: promise.max_num_splits.max(plain.max_num_splits),
                max_work_items: promise.max_work_items.max(plain.max_work_items),
                scratch_bytes: promise.scratch_bytes.max(plain.scratch_bytes),
                max_query_len: promise.max_query_len.max(plain.max_query_len),
                uniform_query_len: promise
                    .uniform_query_len
                    .filter(|_| promise.uniform_query_len == plain.uniform_query_len),
            }),
            Err(fault) => {
                self.fault(&fault);
                Ok(plain)
            }
        }
    }

    fn serving(&mut self) -> Option<&mut WasmBuilder> {
        let current = self.current.as_mut().filter(|current| !current.suspended)?;
        current.instance.as_mut()
    }

    fn serve<R: fmt::Display>(
        &mut self,
        step_of_rows: Option<u32>,
        call: Call<'_>,
        verify: &impl Fn(&Metadata) -> Result<(), R>,
    ) -> Result<StepMetadata, StepError> {
        let verified = |metadata: Metadata| match verify(&metadata) {
            Ok(()) => Ok(metadata),
            Err(refusal) => Err(BuildFault::Fault {
                kind: FaultKind::Refused,
                message: refusal.to_string(),
            }),
        };

        let mut fault = None;
        if let Some(instance) = self.serving() {
            let start = Instant::now();
            let built = call(instance);
            let elapsed = start.elapsed();
            match built.and_then(verified) {
                Ok(metadata) => {
                    if let Some(current) = &mut self.current {
                        current.faults_in_a_row = 0;
                        if let Some(rows) = step_of_rows {
                            let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
                            current.version.metrics.step(nanoseconds, &metadata, rows);
                        }
                    }
                    return Ok(StepMetadata {
                        metadata,
                        built_by: BuiltBy::Component,
                        fault: None,
                    });
                }
                Err(seen) => {
                    self.fault(&seen);
                    fault = Some(seen);
                }
            }
        }

        match call(&mut *self.plain).and_then(verified) {
            Ok(metadata) => {
                if step_of_rows.is_some() {
                    self.shared.plain_steps.fetch_add(1, Ordering::Relaxed);
                }
                Ok(StepMetadata {
                    metadata,
                    built_by: BuiltBy::Plain,
                    fault,
                })
            }
            Err(plain) => Err(StepError {
                component: fault,
                plain,
            }),
        }
    }

    /// Records a fault. Any but a declined batch ends the instance: the spare takes its place, and the dead one is dropped
    /// by the reload thread.
    fn fault(&mut self, fault: &BuildFault) {
        let Some(current) = &mut self.current else {
            return;
        };
        let (kind, message) = match fault {
            BuildFault::Declined(error) => (FaultKind::Declined, &error.message),
            BuildFault::Fault { kind, message } => (*kind, message),
        };
        self.shared.note(&current.version, kind, message);
        if kind == FaultKind::Declined {
            return;
        }
        let dead = current.instance.take();
        current.faults_in_a_row += 1;
        if current.faults_in_a_row >= self.shared.sandbox.limits().max_consecutive_faults {
            current.suspended = true;
            tracing::warn!(
                group = %self.shared.name, version = %current.version.info.version, faults = current.faults_in_a_row,
                "builder suspended after consecutive faults; the plain builder serves until a reload or rollback"
            );
            self.set_state(GroupState::Suspended);
        } else {
            current.instance = current.spare.take();
            let state = match current.instance {
                Some(_) => GroupState::Active,
                None => GroupState::Recovering,
            };
            self.set_state(state);
            self.order_spare();
        }
        if let Some(dead) = dead {
            self.bury(dead);
        }
    }

    /// Puts a version into service and hands the one before to the reload thread, which keeps it ready for a rollback.
    fn install(&mut self, ready: Ready) {
        self.shared.active.store(Some(ready.version.clone()));
        let before = self.current.replace(Current {
            version: ready.version,
            instance: Some(ready.instance),
            spare: ready.spare,
            faults_in_a_row: 0,
            suspended: false,
        });
        self.set_state(GroupState::Active);
        if let Some(Current {
            version,
            instance,
            spare,
            ..
        }) = before
        {
            // Taken by the next job of the reload thread. If somebody looks just now, or an older one was not taken yet,
            // that thread is woken after all: instances are not dropped here.
            match self.shared.retired.offer(Retired {
                version,
                instance,
                spare,
            }) {
                Ok(None) => {}
                Ok(Some(older)) => self.shared.sandbox.workshop().run(move || drop(older)),
                Err(retired) => {
                    let shared = self.shared.clone();
                    self.shared
                        .sandbox
                        .workshop()
                        .run(move || reload::retire(&shared, retired));
                }
            }
        }
    }

    fn set_state(&self, state: GroupState) {
        self.shared.state.store(state as u8, Ordering::Relaxed);
    }

    fn bury(&self, instance: WasmBuilder) {
        self.shared.sandbox.workshop().run(move || drop(instance));
    }

    fn order_spare(&self) {
        if let Some(current) = &self.current {
            let (shared, version) = (self.shared.clone(), current.version.clone());
            self.shared
                .sandbox
                .workshop()
                .run(move || reload::refill(&shared, &version));
        }
    }
}
