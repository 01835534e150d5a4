//! cuBLASLt's functions as `Result`s, one line each: nothing is decided here, nothing is owned. It must never be called by
//! anything but this module's parent.
//!
//! Safety, for all of them: descriptors are live, pointers are valid for what the library's documentation says, the device's
//! context is current, and the library is present (the bindings panic otherwise).

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
    cublasStatus_t, cudaDataType_t, cudaStream_t,
};

/// A call that the library refused: its name and its status.
pub(super) type Refused = (&'static str, cublasStatus_t);

fn check(call: &'static str, status: cublasStatus_t) -> Result<(), Refused> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err((call, status)),
    }
}

/// Whether the library can be loaded; every other function here needs it.
pub(super) fn is_present() -> bool {
    // SAFETY: loads and unloads a library by name; its initialisers have no preconditions.
    unsafe { sys::is_culib_present() }
}

macro_rules! calls {
    () => {};
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $raw:ident($($pass:expr),* $(,)?); $($rest:tt)*) => {
        #[allow(clippy::missing_safety_doc)]
        pub(super) unsafe fn $name($($arg: $ty),*) -> Result<(), Refused> {
            // SAFETY: the caller's, as the module says.
            check(stringify!($raw), unsafe { sys::$raw($($pass),*) })
        }
        calls! { $($rest)* }
    };
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ident: $out_ty:ty = $raw:ident($($pass:expr),* $(,)?); $($rest:tt)*) => {
        #[allow(clippy::missing_safety_doc)]
        pub(super) unsafe fn $name($($arg: $ty),*) -> Result<$out_ty, Refused> {
            let mut slot = MaybeUninit::<$out_ty>::zeroed();
            let $out = slot.as_mut_ptr();
            // SAFETY: the caller's, as the module says; the slot is writable.
            check(stringify!($raw), unsafe { sys::$raw($($pass),*) })?;
            // SAFETY: a pointer, for which zeroed is a value, and which the library has written.
            Ok(unsafe { slot.assume_init() })
        }
        calls! { $($rest)* }
    };
}

calls! {
    fn create() -> handle: cublasLtHandle_t = cublasLtCreate(handle);
    fn destroy(handle: cublasLtHandle_t) = cublasLtDestroy(handle);

    fn desc_create(compute: cublasComputeType_t, scale: cudaDataType_t) -> desc: cublasLtMatmulDesc_t =
        cublasLtMatmulDescCreate(desc, compute, scale);
    fn desc_set(desc: cublasLtMatmulDesc_t, attribute: cublasLtMatmulDescAttributes_t, value: *const c_void, bytes: usize) =
        cublasLtMatmulDescSetAttribute(desc, attribute, value, bytes);
    fn desc_destroy(desc: cublasLtMatmulDesc_t) = cublasLtMatmulDescDestroy(desc);

    fn layout_create(dtype: cudaDataType_t, rows: u64, columns: u64, stride: i64) -> layout: cublasLtMatrixLayout_t =
        cublasLtMatrixLayoutCreate(layout, dtype, rows, columns, stride);
    fn layout_set(layout: cublasLtMatrixLayout_t, attribute: cublasLtMatrixLayoutAttribute_t, value: *const c_void, bytes: usize) =
        cublasLtMatrixLayoutSetAttribute(layout, attribute, value, bytes);
    fn layout_destroy(layout: cublasLtMatrixLayout_t) = cublasLtMatrixLayoutDestroy(layout);

    fn preference_create() -> preference: cublasLtMatmulPreference_t = cublasLtMatmulPreferenceCreate(preference);
    fn preference_set(
        preference: cublasLtMatmulPreference_t,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) = cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes);
    fn preference_destroy(preference: cublasLtMatmulPreference_t) = cublasLtMatmulPreferenceDestroy(preference);
}

/// The layouts of a product: A, B, and D, which is C too.
#[derive(Clone, Copy)]
pub(super) struct Layouts {
    pub a: cublasLtMatrixLayout_t,
    pub b: cublasLtMatrixLayout_t,
    pub d: cublasLtMatrixLayout_t,
}

/// Where a product's matrices are.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    pub a: *const c_void,
    pub b: *const c_void,
    pub d: *mut c_void,
}

/// The library's proposals, best first, into `results`; how many it made.
pub(super) unsafe fn heuristic(
    handle: cublasLtHandle_t,
    desc: cublasLtMatmulDesc_t,
    layouts: Layouts,
    preference: cublasLtMatmulPreference_t,
    results: &mut [cublasLtMatmulHeuristicResult_t],
) -> Result<usize, Refused> {
    let mut count: c_int = 0;
    // SAFETY: the caller's, as the module says; the results are writable.
    let status = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            desc,
            layouts.a,
            layouts.b,
            layouts.d,
            layouts.d,
            preference,
            results.len() as c_int,
            results.as_mut_ptr(),
            &mut count,
        )
    };
    check("cublasLtMatmulAlgoGetHeuristic", status)?;
    Ok(usize::try_from(count).unwrap_or(0).min(results.len()))
}

/// D = A · B by `algorithm`, in the stream's order.
pub(super) unsafe fn matmul(
    handle: cublasLtHandle_t,
    desc: cublasLtMatmulDesc_t,
    layouts: Layouts,
    matrices: Matrices,
    algorithm: &cublasLtMatmulAlgo_t,
    workspace: (*mut c_void, usize),
    stream: cudaStream_t,
) -> Result<(), Refused> {
    let (alpha, beta) = (1.0_f32, 0.0_f32);
    // SAFETY: the caller's, as the module says; the factors are the host's, of the scale type f32.
    let status = unsafe {
        sys::cublasLtMatmul(
            handle,
            desc,
            (&raw const alpha).cast(),
            matrices.a,
            layouts.a,
            matrices.b,
            layouts.b,
            (&raw const beta).cast(),
            matrices.d.cast_const(),
            layouts.d,
            matrices.d,
            layouts.d,
            algorithm,
            workspace.0,
            workspace.1,
            stream,
        )
    };
    check("cublasLtMatmul", status)
}
