//! The engine that all components share, its configuration, and what every store carries.
//!
//! Must never know: families, versions, or steps.

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::ArcSwapOption;
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, OptLevel, PoolingAllocationConfig, ResourceLimiter,
    Store, Strategy,
};

use crate::{
    BundleFigures, CallLimits, CodeCache, Component, ContentHash, FaultDir, Limits, LoadError,
    Watchdog, alive::Census, bundle::BundleWriter, workshop::Workshop,
};

/// One wasmtime engine with its limits, watchdog and code cache. Cheap to clone; all clones are the same sandbox.
#[derive(Clone)]
pub struct Sandbox {
    pub(crate) shared: Arc<Shared>,
    limits: Arc<Limits>,
}

pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) watchdog: Watchdog,
    pub(crate) cache: Option<CodeCache>,
    bundles: ArcSwapOption<BundleWriter>,
    workshop: Workshop,
    census: Census,
}

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A limit makes no sense.
    #[error("sandbox limit {0}")]
    Limit(String),
    /// wasmtime refuses the configuration, or the address space for the pool is not to be had.
    #[error(
        "the WebAssembly engine cannot start: {0}; lower Limits::max_instances or raise the address-space limit (ulimit -v)"
    )]
    Engine(String),
    /// No thread for the watchdog or for reloads.
    #[error(
        "the watchdog's or the reload's thread cannot start: {0}; raise the process's thread limit"
    )]
    Thread(#[source] std::io::Error),
}

impl Sandbox {
    /// A sandbox without a code cache: each component is compiled when it is loaded, 15–40 ms for 30 KB.
    pub fn new(limits: Limits) -> Result<Sandbox, SandboxError> {
        Sandbox::build(limits, None)
    }

    /// A sandbox that keeps compiled code in `cache`.
    pub fn with_cache(limits: Limits, cache: CodeCache) -> Result<Sandbox, SandboxError> {
        Sandbox::build(limits, Some(cache))
    }

    fn build(limits: Limits, cache: Option<CodeCache>) -> Result<Sandbox, SandboxError> {
        if let Some(problem) = limits.problem() {
            return Err(SandboxError::Limit(problem));
        }
        let engine = Engine::new(&engine_config(&limits))
            .map_err(|error| SandboxError::Engine(format!("{error:#}")))?;
        let watchdog = Watchdog::start(engine.clone(), limits.watchdog_tick, limits.watchdog)
            .map_err(SandboxError::Thread)?;
        let workshop = Workshop::start().map_err(SandboxError::Thread)?;
        Ok(Sandbox {
            shared: Arc::new(Shared {
                engine,
                watchdog,
                cache,
                bundles: ArcSwapOption::empty(),
                workshop,
                census: Census::default(),
            }),
            limits: Arc::new(limits),
        })
    }

    /// The same sandbox (engine, instances, watchdog, cache) for builders whose calls have other bounds: a tenant's. Components
    /// that are loaded into either run in both, each under the bounds of the group that it serves.
    ///
    /// # Errors
    /// A bound that exceeds this sandbox's, or is too small for any builder.
    pub fn with_call_limits(&self, calls: &CallLimits) -> Result<Sandbox, SandboxError> {
        let limits = self.limits.with_calls(calls);
        match calls.beyond(&self.limits).or_else(|| limits.problem()) {
            Some(problem) => Err(SandboxError::Limit(problem)),
            None => Ok(Sandbox {
                shared: self.shared.clone(),
                limits: Arc::new(limits),
            }),
        }
    }

    /// Do components of one run in the other?
    pub(crate) fn shares_engine(&self, other: &Sandbox) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Checks, compiles (or takes from the cache) and type-checks a component. Nothing of it runs but its start function.
    ///
    /// Takes 15–40 ms for a reference builder; never call it on the step thread.
    pub fn load(&self, bytes: &[u8]) -> Result<Component, LoadError> {
        Component::load(self, bytes)
    }

    /// As `load`, on the reload thread, whose priority is below that of the step thread. Waits for it.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_aside(&self, bytes: &[u8]) -> Result<Component, LoadError> {
        let (answer, answered) = crossbeam_channel::bounded(1);
        let (sandbox, copy) = (self.clone(), bytes.to_vec());
        self.shared.workshop.run(move || {
            // Whoever asked may have gone.
            let _ = answer.send(sandbox.load(&copy));
        });
        // No answer: the job panicked, which loading here would show.
        answered.recv().unwrap_or_else(|_| self.load(bytes))
    }

    /// From here on, faults of every group are kept as bundles in `dir`.
    pub fn keep_faults_in(&self, dir: FaultDir) {
        self.shared
            .bundles
            .store(Some(Arc::new(BundleWriter::new(dir))));
    }

    /// From here on, faults are counted and not kept.
    pub fn keep_no_faults(&self) {
        self.shared.bundles.store(None);
    }

    /// What became of fault bundles so far. None: faults are not kept.
    pub fn bundle_figures(&self) -> Option<BundleFigures> {
        self.bundles().map(|bundles| bundles.figures())
    }

    pub(crate) fn bundles(&self) -> Option<Arc<BundleWriter>> {
        self.shared.bundles.load_full()
    }

    /// Waits until everything that was left to the reload thread so far is done: instances dropped, bundles written. False if
    /// that took longer than `patience`. For a process that is about to end.
    pub fn settle(&self, patience: std::time::Duration) -> bool {
        let (done, is_done) = crossbeam_channel::bounded(1);
        self.shared.workshop.run(move || {
            // Nobody waits any more: nothing to tell.
            let _ = done.send(());
        });
        is_done.recv_timeout(patience).is_ok()
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The watchdog.
    pub fn watchdog(&self) -> &Watchdog {
        &self.shared.watchdog
    }

    /// Instances that live, by version: in service, in reserve, or still to be dropped. More than a few versions, or many of one,
    /// is a leak.
    pub fn instances(&self) -> BTreeMap<ContentHash, u64> {
        self.census().count()
    }

    pub(crate) fn census(&self) -> &Census {
        &self.shared.census
    }

    pub(crate) fn workshop(&self) -> &Workshop {
        &self.shared.workshop
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    /// A store ready for instantiation: fuel and deadline set, so that a start function cannot run away.
    pub(crate) fn store(&self) -> Store<StoreState> {
        let limits = &self.limits;
        let mut store = Store::new(
            &self.shared.engine,
            StoreState {
                max_memory_bytes: limits.max_memory_bytes,
                max_table_elements: limits.max_table_elements,
                memory_bytes: 0,
                refused_bytes: None,
            },
        );
        store.limiter(|state| state);
        store.set_hostcall_fuel(limits.max_lifted_bytes);
        store
    }

    /// Before every call: the fuel and the deadline are set anew, and there is a ticker.
    pub(crate) fn arm(&self, store: &mut Store<StoreState>, fuel: u64) -> Result<(), String> {
        self.shared.watchdog.ensure_alive()?;
        store.set_epoch_deadline(self.limits.watchdog_ticks());
        store.set_fuel(fuel).map_err(|error| error.to_string())
    }
}

/// What a store carries: the memory cap, how much of it is in use, and whether it was hit.
pub(crate) struct StoreState {
    max_memory_bytes: usize,
    max_table_elements: usize,
    /// Sum over the memories.
    pub(crate) memory_bytes: usize,
    /// The size that was asked for and refused.
    pub(crate) refused_bytes: Option<usize>,
}

impl ResourceLimiter for StoreState {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired <= self.max_memory_bytes {
            self.memory_bytes += desired.saturating_sub(current);
            return Ok(true);
        }
        // An error here traps, so that no guest carries on with a failed allocation.
        self.refused_bytes = Some(desired);
        Err(wasmtime::Error::msg(format!(
            "wants {desired} bytes of memory, more than its cap of {}",
            self.max_memory_bytes
        )))
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= self.max_table_elements)
    }
}

fn engine_config(limits: &Limits) -> Config {
    // Components as wit-component makes them hold up to three core instances: the module, and a shim and its fix-up for
    // destructors. Eight leaves room for components that were linked from several modules.
    const CORE_INSTANCES: u32 = 8;
    const TABLES: u32 = 8;
    const MEMORIES: u32 = 2;
    // What a pool slot keeps resident between instances is wiped by memset instead of madvise: faster to take again.
    const KEEP_RESIDENT_BYTES: usize = 128 * 1024;

    // Slots of dropped instances that keep their pages: each reload is a new module, which would touch a slot of its own.
    const WARM_SLOTS: u32 = 8;

    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(limits.max_instances)
        .total_core_instances(limits.max_instances * CORE_INSTANCES)
        .total_memories(limits.max_instances)
        .total_tables(limits.max_instances * TABLES)
        .max_core_instances_per_component(CORE_INSTANCES)
        .max_memories_per_component(MEMORIES)
        .max_tables_per_component(TABLES)
        .max_memory_size(limits.max_memory_bytes)
        .table_elements(limits.max_table_elements)
        .linear_memory_keep_resident(KEEP_RESIDENT_BYTES)
        .max_unused_warm_slots(WARM_SLOTS);

    let mut config = Config::new();
    config
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool))
        .strategy(Strategy::Cranelift)
        .cranelift_opt_level(OptLevel::Speed)
        .memory_reservation(limits.memory_reservation_bytes)
        .memory_may_move(false)
        .max_wasm_stack(limits.max_wasm_stack_bytes)
        .consume_fuel(true)
        .epoch_interruption(true)
        // A builder's result is a function of its inputs, on every machine.
        .cranelift_nan_canonicalization(true)
        .wasm_simd(true)
        .wasm_relaxed_simd(false)
        .wasm_memory64(false)
        .wasm_multi_memory(false)
        .wasm_gc(false)
        .wasm_tail_call(false)
        .wasm_wide_arithmetic(false)
        .wasm_custom_page_sizes(false)
        .wasm_component_model(true)
        .shared_memory(false)
        .concurrency_support(false)
        .wasm_backtrace_max_frames(std::num::NonZeroUsize::new(4));
    // Threads, component-model async and parallel compilation are off because the workspace builds wasmtime without these
    // features.
    config
}
