//! The contract's functions, typed, for one family each.
//!
//! One generic implementation serves all families, so that the records of `timetable-types` are used as they are and nothing
//! is generated. Must never know: limits, faults, versions.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, Causal, CommonAttentionMetadata,
    DcpInputs, EncoderInputs, Extra, Family, FastPrefillInputs, HostInput, LaunchPromise, Metadata,
    MmDocRange, flash_attn, flash_mla, flashinfer, mamba, triton_attn,
};
use wasmtime::{
    Store,
    component::{
        ComponentExportIndex, ComponentNamedList, ComponentType, Instance, Lift, Lower,
        ResourceAny, TypedFunc,
    },
};

use crate::sandbox::StoreState;

/// The functions of a family's interface, in the order of `Exports`.
pub(crate) const FUNCTIONS: [&str; 7] = [
    "[static]builder.create",
    "[method]builder.info",
    "[method]builder.launch-promise",
    "[method]builder.build",
    "[method]builder.build-for-cudagraph-capture",
    "[method]builder.build-for-drafting",
    "[method]builder.update-block-table",
];

/// Where the functions are in a component, looked up once per component. In the order of `FUNCTIONS`.
pub(crate) type Exports = [ComponentExportIndex; 7];

/// A family's metadata record and its place in `Metadata`.
trait FamilyAbi: 'static {
    type Record: ComponentType + Lift + Lower + Send + Sync + 'static;
    fn wrap(record: Self::Record) -> Metadata;
    fn peel(metadata: &Metadata) -> Option<&Self::Record>;
}

macro_rules! family_abi {
    ($($name:ident: $record:ty;)*) => {$(
        struct $name;
        impl FamilyAbi for $name {
            type Record = $record;
            fn wrap(record: $record) -> Metadata {
                Metadata::$name(record)
            }
            fn peel(metadata: &Metadata) -> Option<&$record> {
                match metadata {
                    Metadata::$name(record) => Some(record),
                    _ => None,
                }
            }
        }
    )*};
}

family_abi! {
    FlashAttn: flash_attn::Metadata;
    Flashinfer: flashinfer::Metadata;
    TritonAttn: triton_attn::Metadata;
    FlashMla: flash_mla::Metadata;
    Mamba: mamba::Metadata;
}

/// Which host vectors a builder asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs(u16);

impl Needs {
    pub(crate) fn of(inputs: &[HostInput]) -> Needs {
        Needs(
            inputs
                .iter()
                .fold(0, |bits, input| bits | 1 << *input as u16),
        )
    }

    fn has(self, input: HostInput) -> bool {
        self.0 & (1 << input as u16) != 0
    }

    fn list<T>(self, input: HostInput, list: &[T]) -> &[T] {
        if self.has(input) { list } else { &[] }
    }
}

/// `CommonAttentionMetadata` with its lists borrowed: what is not needed is empty, what is needed is copied once, from the
/// host's vector into the guest's memory.
///
/// The same WIT record as `timetable_types::CommonAttentionMetadata`; the type check at load compares the two by name.
#[derive(Clone, Copy, ComponentType, Lower)]
#[component(record)]
pub(crate) struct CommonView<'a> {
    #[component(name = "num-reqs")]
    num_reqs: u32,
    #[component(name = "num-actual-tokens")]
    num_actual_tokens: u32,
    #[component(name = "max-query-len")]
    max_query_len: u32,
    #[component(name = "max-seq-len")]
    max_seq_len: u32,
    #[component(name = "causal")]
    causal: &'a Causal,
    #[component(name = "block-table-width")]
    block_table_width: u32,
    #[component(name = "slot-mapping-len")]
    slot_mapping_len: u32,
    #[component(name = "query-start-loc-cpu")]
    query_start_loc_cpu: &'a [i32],
    #[component(name = "seq-lens-cpu-upper-bound")]
    seq_lens_cpu_upper_bound: &'a [i32],
    #[component(name = "is-prefilling")]
    is_prefilling: &'a [u8],
    #[component(name = "dcp")]
    dcp: Option<&'a DcpInputs>,
    #[component(name = "encoder")]
    encoder: Option<&'a EncoderInputs>,
    #[component(name = "fast-prefill")]
    fast_prefill: Option<&'a FastPrefillInputs>,
    #[component(name = "req-idx")]
    req_idx: &'a [u32],
    #[component(name = "mm-req-doc-ranges")]
    mm_req_doc_ranges: &'a [MmDocRange],
    #[component(name = "replayssm-decode-base-cpu")]
    replayssm_decode_base_cpu: &'a [i32],
    #[component(name = "extras")]
    extras: &'a [Extra],
}

// That dcp or encoder inputs exist is part of the step's shape and is told even where their lists are not needed.
static NO_DCP_LENGTHS: DcpInputs = DcpInputs {
    dcp_local_seq_lens_cpu_upper_bound: Vec::new(),
};
static NO_ENCODER_LENGTHS: EncoderInputs = EncoderInputs {
    encoder_seq_lens_cpu: Vec::new(),
};

impl<'a> CommonView<'a> {
    pub(crate) fn new(common: &'a CommonAttentionMetadata, needs: Needs) -> CommonView<'a> {
        let dcp = common.dcp.as_ref().map(|dcp| {
            if needs.has(HostInput::DcpLocalSeqLensCpuUpperBound) {
                dcp
            } else {
                &NO_DCP_LENGTHS
            }
        });
        let encoder = common.encoder.as_ref().map(|encoder| {
            if needs.has(HostInput::EncoderSeqLensCpu) {
                encoder
            } else {
                &NO_ENCODER_LENGTHS
            }
        });
        CommonView {
            num_reqs: common.num_reqs,
            num_actual_tokens: common.num_actual_tokens,
            max_query_len: common.max_query_len,
            max_seq_len: common.max_seq_len,
            causal: &common.causal,
            block_table_width: common.block_table_width,
            slot_mapping_len: common.slot_mapping_len,
            query_start_loc_cpu: needs
                .list(HostInput::QueryStartLocCpu, &common.query_start_loc_cpu),
            seq_lens_cpu_upper_bound: needs.list(
                HostInput::SeqLensCpuUpperBound,
                &common.seq_lens_cpu_upper_bound,
            ),
            is_prefilling: needs.list(HostInput::IsPrefilling, &common.is_prefilling),
            dcp,
            encoder,
            fast_prefill: common.fast_prefill.as_ref(),
            req_idx: needs.list(HostInput::ReqIdx, &common.req_idx),
            mm_req_doc_ranges: needs.list(HostInput::MmReqDocRanges, &common.mm_req_doc_ranges),
            replayssm_decode_base_cpu: needs.list(
                HostInput::ReplayssmDecodeBaseCpu,
                &common.replayssm_decode_base_cpu,
            ),
            extras: needs.list(HostInput::Extras, &common.extras),
        }
    }
}

/// What a build call gives: an error of the call (trap, limit, lifting), or the guest's own answer.
pub(crate) type Built = wasmtime::Result<Result<Metadata, BuildError>>;

type GuestStore = Store<StoreState>;

/// One instance's functions, looked up and type-checked once.
pub(crate) trait Calls: Send {
    fn create(
        &self,
        store: &mut GuestStore,
        config: &BuilderConfig,
    ) -> wasmtime::Result<Result<ResourceAny, BuildError>>;
    fn info(&self, store: &mut GuestStore, this: ResourceAny) -> wasmtime::Result<BuilderInfo>;
    fn launch_promise(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        shape: &CaptureShape,
    ) -> wasmtime::Result<LaunchPromise>;
    fn build(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
        fast_build: bool,
    ) -> Built;
    fn build_for_cudagraph_capture(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
    ) -> Built;
    fn build_for_drafting(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
        draft_index: u32,
    ) -> Built;
    /// None if `metadata` is of another family.
    fn update_block_table(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        metadata: &Metadata,
        common: CommonView<'_>,
    ) -> Option<Built>;
}

/// A function that was looked up but has another type than the contract's.
pub(crate) struct WrongType {
    pub(crate) function: &'static str,
    pub(crate) detail: String,
}

/// Looks a family's functions up in `instance` and checks their types.
pub(crate) fn calls(
    family: Family,
    store: &mut GuestStore,
    instance: &Instance,
    exports: &Exports,
) -> Result<Box<dyn Calls>, WrongType> {
    Ok(match family {
        Family::FlashAttn => Box::new(TypedCalls::<FlashAttn>::find(store, instance, exports)?),
        Family::Flashinfer => Box::new(TypedCalls::<Flashinfer>::find(store, instance, exports)?),
        Family::TritonAttn => Box::new(TypedCalls::<TritonAttn>::find(store, instance, exports)?),
        Family::FlashMla => Box::new(TypedCalls::<FlashMla>::find(store, instance, exports)?),
        Family::Mamba => Box::new(TypedCalls::<Mamba>::find(store, instance, exports)?),
    })
}

type BuildResult<F> = (Result<<F as FamilyAbi>::Record, BuildError>,);
type View = CommonView<'static>;

// `TypedFunc` is covariant in its parameters, so a function typed for `'static` arguments is called with borrowed ones.
struct TypedCalls<F: FamilyAbi> {
    create: TypedFunc<(&'static BuilderConfig,), (Result<ResourceAny, BuildError>,)>,
    info: TypedFunc<(ResourceAny,), (BuilderInfo,)>,
    launch_promise: TypedFunc<(ResourceAny, &'static CaptureShape), (LaunchPromise,)>,
    build: TypedFunc<(ResourceAny, View, bool), BuildResult<F>>,
    build_for_cudagraph_capture: TypedFunc<(ResourceAny, View), BuildResult<F>>,
    build_for_drafting: TypedFunc<(ResourceAny, View, u32), BuildResult<F>>,
    update_block_table: TypedFunc<(ResourceAny, &'static F::Record, View), BuildResult<F>>,
}

impl<F: FamilyAbi> TypedCalls<F> {
    fn find(
        store: &mut GuestStore,
        instance: &Instance,
        exports: &Exports,
    ) -> Result<Self, WrongType> {
        fn typed<P, R>(
            store: &mut GuestStore,
            instance: &Instance,
            exports: &Exports,
            function: usize,
        ) -> Result<TypedFunc<P, R>, WrongType>
        where
            P: ComponentNamedList + Lower,
            R: ComponentNamedList + Lift,
        {
            instance
                .get_typed_func::<P, R>(&mut *store, &exports[function])
                .map_err(|error| WrongType {
                    function: FUNCTIONS[function],
                    detail: format!("{error:#}"),
                })
        }
        Ok(TypedCalls {
            create: typed(store, instance, exports, 0)?,
            info: typed(store, instance, exports, 1)?,
            launch_promise: typed(store, instance, exports, 2)?,
            build: typed(store, instance, exports, 3)?,
            build_for_cudagraph_capture: typed(store, instance, exports, 4)?,
            build_for_drafting: typed(store, instance, exports, 5)?,
            update_block_table: typed(store, instance, exports, 6)?,
        })
    }
}

fn wrap<F: FamilyAbi>(result: wasmtime::Result<BuildResult<F>>) -> Built {
    result.map(|(answer,)| answer.map(F::wrap))
}

impl<F: FamilyAbi> Calls for TypedCalls<F> {
    fn create(
        &self,
        store: &mut GuestStore,
        config: &BuilderConfig,
    ) -> wasmtime::Result<Result<ResourceAny, BuildError>> {
        let create: TypedFunc<(&BuilderConfig,), _> = self.create;
        create.call(store, (config,)).map(|(answer,)| answer)
    }

    fn info(&self, store: &mut GuestStore, this: ResourceAny) -> wasmtime::Result<BuilderInfo> {
        self.info.call(store, (this,)).map(|(info,)| info)
    }

    fn launch_promise(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        shape: &CaptureShape,
    ) -> wasmtime::Result<LaunchPromise> {
        let launch_promise: TypedFunc<(ResourceAny, &CaptureShape), _> = self.launch_promise;
        launch_promise
            .call(store, (this, shape))
            .map(|(promise,)| promise)
    }

    fn build(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
        fast_build: bool,
    ) -> Built {
        let build: TypedFunc<(ResourceAny, CommonView<'_>, bool), BuildResult<F>> = self.build;
        wrap::<F>(build.call(store, (this, common, fast_build)))
    }

    fn build_for_cudagraph_capture(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
    ) -> Built {
        let build: TypedFunc<(ResourceAny, CommonView<'_>), BuildResult<F>> =
            self.build_for_cudagraph_capture;
        wrap::<F>(build.call(store, (this, common)))
    }

    fn build_for_drafting(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        common: CommonView<'_>,
        draft_index: u32,
    ) -> Built {
        let build: TypedFunc<(ResourceAny, CommonView<'_>, u32), BuildResult<F>> =
            self.build_for_drafting;
        wrap::<F>(build.call(store, (this, common, draft_index)))
    }

    fn update_block_table(
        &self,
        store: &mut GuestStore,
        this: ResourceAny,
        metadata: &Metadata,
        common: CommonView<'_>,
    ) -> Option<Built> {
        let record = F::peel(metadata)?;
        let update: TypedFunc<(ResourceAny, &F::Record, CommonView<'_>), BuildResult<F>> =
            self.update_block_table;
        Some(wrap::<F>(update.call(store, (this, record, common))))
    }
}
