//! A `MetadataBuilder` that is a component: one store, one instance, one builder resource.
//!
//! Must never know: what happens after a fault. Its own answer is that the instance is dead.

use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, ErrorKind,
    Family, LaunchPromise, Metadata,
};
use wasmtime::{Store, component::ResourceAny};

use crate::{
    Component, ContentHash, Sandbox,
    abi::{self, Built, Calls, CommonView, Needs},
    alive::Alive,
    fault,
    sandbox::StoreState,
    version::version_hash,
};

/// One constructed builder in its own store. Any error but a declined batch is fatal to it: the store may be half-way through
/// a call, so every later call fails at once. Drop it off the step thread: wiping a used memory takes up to milliseconds.
pub struct WasmBuilder {
    sandbox: Sandbox,
    store: Store<StoreState>,
    calls: Box<dyn Calls>,
    this: ResourceAny,
    info: BuilderInfo,
    needs: Needs,
    family: Family,
    version: ContentHash,
    component: ContentHash,
    calls_begun: u64,
    /// What the last call was given.
    fuel: u64,
    dead: bool,
    _alive: Alive,
}

impl WasmBuilder {
    /// Instantiates `component` and constructs its builder with `config`. Takes about 40 µs.
    ///
    /// # Errors
    /// `Constructor` if the guest refuses the configuration; otherwise what went wrong in instantiation, construction or
    /// `info`.
    pub fn new(component: &Component, config: &BuilderConfig) -> Result<WasmBuilder, BuildFault> {
        let inner = &component.inner;
        let sandbox = component.sandbox().clone();
        let limits = sandbox.limits();
        let fuel = limits.fuel_fixed;
        let version = version_hash(component.hash(), config);
        let mut store = sandbox.store();

        let arm = |store: &mut Store<StoreState>| {
            sandbox
                .arm(store, fuel)
                .map_err(|message| BuildFault::Fault {
                    kind: FaultKind::Watchdog,
                    message,
                })
        };
        let fault = |error: &wasmtime::Error, store: &Store<StoreState>| {
            let (kind, message) = fault::classify(error, store.data(), limits);
            BuildFault::Fault { kind, message }
        };

        arm(&mut store)?;
        let instance = inner
            .pre
            .instantiate(&mut store)
            .map_err(|error| fault(&error, &store))?;
        let calls =
            abi::calls(inner.family, &mut store, &instance, &inner.exports).map_err(|wrong| {
                BuildFault::Fault {
                    kind: FaultKind::Constructor,
                    message: format!("{}: {}", wrong.function, wrong.detail),
                }
            })?;
        arm(&mut store)?;
        let this = calls
            .create(&mut store, config)
            .map_err(|error| fault(&error, &store))?
            .map_err(|error| BuildFault::Fault {
                kind: FaultKind::Constructor,
                message: format!(
                    "the builder refuses its configuration: {}",
                    fault::cut(&error.message, limits.max_text_bytes)
                ),
            })?;
        arm(&mut store)?;
        let mut info = calls
            .info(&mut store, this)
            .map_err(|error| fault(&error, &store))?;
        info.name = fault::cut(&info.name, limits.max_text_bytes);
        info.needs.sort_unstable();
        info.needs.dedup();

        let alive = sandbox.census().born(version);
        Ok(WasmBuilder {
            needs: Needs::of(&info.needs),
            info,
            calls,
            this,
            store,
            family: inner.family,
            version,
            component: component.hash(),
            sandbox,
            calls_begun: 0,
            fuel: 0,
            dead: false,
            _alive: alive,
        })
    }

    /// The hash of component and configuration.
    pub fn version(&self) -> ContentHash {
        self.version
    }

    /// The hash of the component.
    pub fn component(&self) -> ContentHash {
        self.component
    }

    /// Ends this instance by a fault, before any of its code runs: what the host needs for a fault (the trap's backtrace, the
    /// names of functions) is then in memory, and the first real one does not pay milliseconds for it on the step thread.
    pub(crate) fn fault_on_purpose(mut self) {
        let shape = CaptureShape {
            num_tokens: 1,
            num_reqs: 1,
            max_query_len: 1,
            uniform_query_len: None,
        };
        let rehearsed = self.guarded(0, |calls, store, this| {
            calls.launch_promise(store, this, &shape)
        });
        if rehearsed.is_ok() {
            tracing::debug!("a call without fuel ended well");
        }
    }

    /// Calls that give metadata or a promise, begun so far, test builds included.
    pub fn calls(&self) -> u64 {
        self.calls_begun
    }

    /// Did a fault end this instance?
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Fuel left of the last call's, for sizing limits.
    pub fn fuel_left(&self) -> u64 {
        self.store.get_fuel().unwrap_or(0)
    }

    /// Fuel that the last call used.
    pub fn fuel_used(&self) -> u64 {
        self.fuel.saturating_sub(self.fuel_left())
    }

    /// Linear memory in use. It grows and never shrinks.
    pub fn memory_bytes(&self) -> usize {
        self.store.data().memory_bytes
    }

    fn guarded<T>(
        &mut self,
        fuel: u64,
        call: impl FnOnce(&dyn Calls, &mut Store<StoreState>, ResourceAny) -> wasmtime::Result<T>,
    ) -> Result<T, BuildFault> {
        if self.dead {
            return Err(BuildFault::Fault {
                kind: FaultKind::Trap,
                message: "this instance died of an earlier fault; make a new one".to_owned(),
            });
        }
        self.sandbox
            .arm(&mut self.store, fuel)
            .map_err(|message| BuildFault::Fault {
                kind: FaultKind::Watchdog,
                message,
            })?;
        self.calls_begun += 1;
        self.fuel = fuel;
        call(&*self.calls, &mut self.store, self.this).map_err(|error| {
            self.dead = true;
            let (kind, message) = fault::classify(&error, self.store.data(), self.sandbox.limits());
            BuildFault::Fault { kind, message }
        })
    }

    fn built(
        &mut self,
        common: &CommonAttentionMetadata,
        call: impl FnOnce(&dyn Calls, &mut Store<StoreState>, ResourceAny, CommonView<'_>) -> Built,
    ) -> Result<Metadata, BuildFault> {
        let fuel = self
            .sandbox
            .limits()
            .fuel_for_batch(common.num_reqs, common.num_actual_tokens);
        let view = CommonView::new(common, self.needs);
        let answer = self.guarded(fuel, |calls, store, this| call(calls, store, this, view))?;
        answer.map_err(|mut error| {
            error.message = fault::cut(&error.message, self.sandbox.limits().max_text_bytes);
            BuildFault::Declined(error)
        })
    }
}

impl MetadataBuilder for WasmBuilder {
    fn family(&self) -> Family {
        self.family
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let fuel = self.sandbox.limits().fuel_fixed;
        self.guarded(fuel, |calls, store, this| {
            calls.launch_promise(store, this, shape)
        })
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        self.built(common, |calls, store, this, view| {
            calls.build(store, this, view, fast_build)
        })
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.built(common, |calls, store, this, view| {
            calls.build_for_cudagraph_capture(store, this, view)
        })
    }

    fn build_for_drafting(
        &mut self,
        common: &CommonAttentionMetadata,
        draft_index: u32,
    ) -> Result<Metadata, BuildFault> {
        self.built(common, |calls, store, this, view| {
            calls.build_for_drafting(store, this, view, draft_index)
        })
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        if metadata.family() != self.family {
            return Err(BuildFault::Declined(BuildError {
                kind: ErrorKind::InvalidValue,
                message: format!(
                    "metadata of {} was given to a builder of {}; use the builder of its own group",
                    metadata.family().interface(),
                    self.family.interface()
                ),
            }));
        }
        self.built(common, |calls, store, this, view| {
            calls
                .update_block_table(store, this, metadata, view)
                .unwrap_or_else(|| Err(wasmtime::Error::msg("metadata of another family")))
        })
    }
}
