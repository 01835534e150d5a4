//! Matrix products of activations with weights, by cuBLASLt: `out[m, n] = x[m, k] · weight[n, k]ᵀ (+ bias[n])`. It must never
//! know which layer multiplies.
//!
//! Sums are f32 always, f32 inputs without TF32. An algorithm is chosen once per class of shapes and kept, among those that
//! never add in an order that timing decides and never in less than f32, so the same input gives the same bits. Afterwards
//! nothing is allocated, on the host or the device, and products may be captured in graphs.
//!
//! The class has the number of rows in it, so a row's bits depend on how many there are, unless products are batch-invariant:
//! then one algorithm, which splits no sum, serves every number of rows.

mod fallible;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys::{
    self, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t, cudaDataType_t,
};

use crate::driver::{Device, DeviceBuffer, DevicePtr, Stream};
use crate::error::{CudaError, Result};
use crate::libraries::Library;
use fallible::{Layouts, Matrices, Refused};

/// The library, by the name the loader knows.
const LIBRARY: &str = "libcublasLt.so.13";

/// Bytes of workspace with which the library has all its algorithms on Hopper.
pub const USUAL_WORKSPACE: usize = 32 << 20;

/// Rows that a batch-invariant product's algorithm is chosen for: enough for the tensor cores, few enough for decodes.
const INVARIANT_ROWS: usize = 64;

/// `CUBLAS_OP_T` of cuBLAS's header, which the bindings of cuBLASLt lack.
const TRANSPOSED: i32 = 1;

/// Proposals that are asked for; the best that fits is taken.
const PROPOSALS: usize = 8;

/// Dtype of a product's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// f32, multiplied in full precision.
    F32,
}

impl GemmDtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    const fn raw(self) -> cudaDataType_t {
        match self {
            Self::Bf16 => cudaDataType_t::CUDA_R_16BF,
            Self::F16 => cudaDataType_t::CUDA_R_16F,
            Self::F32 => cudaDataType_t::CUDA_R_32F,
        }
    }
}

/// Dtype of a product's output, and of its bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GemmOut {
    /// That of the inputs.
    #[default]
    Same,
    /// f32, whatever the inputs are: for logits.
    F32,
}

/// What is multiplied. Strides are elements from one row to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Rows of `x` and `out`: tokens.
    pub m: usize,
    /// Rows of `weight`, columns of `out`.
    pub n: usize,
    /// Columns of `x` and `weight`.
    pub k: usize,
    /// From a row of `x` to the next; `k` or more.
    pub x_stride: usize,
    /// From a row of `out` to the next; `n` or more.
    pub out_stride: usize,
    /// Of `x` and `weight`.
    pub dtype: GemmDtype,
    /// Of `out` and `bias`.
    pub out: GemmOut,
}

impl GemmShape {
    /// A product of dense matrices, with output of the same dtype.
    pub const fn new(m: usize, n: usize, k: usize, dtype: GemmDtype) -> Self {
        Self {
            m,
            n,
            k,
            x_stride: k,
            out_stride: n,
            dtype,
            out: GemmOut::Same,
        }
    }

    /// Dtype of `out` and `bias`.
    pub const fn out_dtype(&self) -> GemmDtype {
        match self.out {
            GemmOut::Same => self.dtype,
            GemmOut::F32 => GemmDtype::F32,
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |what, remedy| {
            Err(CudaError::Invalid {
                what,
                value: self.to_string(),
                remedy,
            })
        };
        if self.n == 0 || self.k == 0 {
            return invalid("a matrix product", "n and k are at least 1");
        }
        if self.x_stride < self.k || self.out_stride < self.n {
            return invalid(
                "a matrix product's strides",
                "x_stride is at least k, out_stride at least n",
            );
        }
        let most = i32::MAX as usize;
        if [self.m, self.n, self.k]
            .into_iter()
            .any(|dimension| dimension > most)
        {
            return invalid("a matrix product", "dimensions are below 2^31");
        }
        Ok(())
    }
}

impl fmt::Display for GemmShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            m,
            n,
            k,
            x_stride,
            out_stride,
            dtype,
            ..
        } = self;
        let out = self.out_dtype();
        write!(
            f,
            "[{m}, {k}] {dtype:?} by [{n}, {k}] to {out:?}, row strides {x_stride} and {out_stride}"
        )
    }
}

/// Where a product's matrices are, row-major on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmOperands {
    /// `[m, k]`, rows `x_stride` apart.
    pub x: DevicePtr,
    /// `[n, k]`, dense.
    pub weight: DevicePtr,
    /// `[n]` of the output's dtype, added to every row.
    pub bias: Option<DevicePtr>,
    /// `[m, n]`, rows `out_stride` apart; written, never read.
    pub out: DevicePtr,
}

/// Products on one device. All that are begun through one `Gemm` share its workspace, so they are on one stream, or ordered by
/// events; a graph that was captured with it runs in that order too, and not after the `Gemm` is dropped.
pub struct Gemm {
    device: Device,
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer,
    batch_invariant: bool,
    plans: Mutex<HashMap<Class, Plan>>,
}

// SAFETY: the library's handle may be used by any thread; descriptors are changed under the lock.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// Loads the library and allocates `workspace` bytes on the device ([`USUAL_WORKSPACE`]).
    ///
    /// # Errors
    /// [`CudaError::NoLibrary`], [`CudaError::OutOfMemory`], or what the library says.
    pub fn new(device: &Device, workspace: usize) -> Result<Self> {
        load_library()?;
        device.bind()?;
        let workspace = DeviceBuffer::alloc(device, workspace, "the workspace of matrix products")?;
        // SAFETY: the library is present and the context current.
        let handle = unsafe { fallible::create() }
            .map_err(|refused| refusal(device, refused, &"a handle"))?;
        Ok(Self {
            device: device.clone(),
            handle,
            workspace,
            batch_invariant: false,
            plans: Mutex::default(),
        })
    }

    /// Whether a row's results are the same bits whatever the number of rows and its place among them. Slower: one algorithm
    /// serves decodes and prefills, without a workspace and without parts of a sum that are added up later.
    #[must_use]
    pub fn with_batch_invariance(mut self, batch_invariant: bool) -> Self {
        self.batch_invariant = batch_invariant;
        self.plans = Mutex::default();
        self
    }

    /// The shapes that share this one's algorithm.
    fn class(&self, shape: GemmShape, bias: bool, alignment: u32) -> Class {
        let class = Class::of(shape, bias, alignment);
        if self.batch_invariant {
            class.of_any_rows()
        } else {
            class
        }
    }

    /// Bytes that algorithms may use.
    fn usable_workspace(&self) -> usize {
        if self.batch_invariant {
            0
        } else {
            self.workspace.len()
        }
    }

    /// Chooses the algorithm of this shape's class now, so that the first product allocates nothing; buffers are taken to be aligned
    /// to 256 bytes. The library still loads the algorithm's kernel at its first product: run one before a capture.
    ///
    /// # Errors
    /// [`CudaError::Invalid`], or what the library says.
    pub fn prepare(&self, shape: GemmShape, bias: bool) -> Result<()> {
        shape.check()?;
        self.device.bind()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        self.plan(&mut plans, self.class(shape, bias, 256))
            .map(|_| ())
    }

    /// Begins `out = x · weightᵀ (+ bias)` in the stream's order. No row: nothing to do.
    ///
    /// # Errors
    /// [`CudaError::Invalid`], or what the library says.
    ///
    /// # Safety
    /// Until the stream has passed the product: the operands have what `shape` says, `out` overlaps no other, and no product of
    /// this `Gemm` runs at the same time on another stream. In a capture: at every launch of the graph.
    pub unsafe fn gemm(
        &self,
        stream: &Stream,
        shape: GemmShape,
        operands: GemmOperands,
    ) -> Result<()> {
        shape.check()?;
        if shape.m == 0 {
            return Ok(());
        }
        let alignment = alignment(shape, operands)?;
        self.device.bind()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let class = self.class(shape, operands.bias.is_some(), alignment);
        // SAFETY: the caller's.
        let begun = unsafe { self.run(self.plan(&mut plans, class)?, stream, shape.m, operands) };
        let begun = match begun {
            // The class's algorithm does not take this number of rows: choose one for exactly this number.
            Err((
                _,
                cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
            )) if shape.m != class.rows && !self.batch_invariant => {
                let class = Class {
                    rows: shape.m,
                    exact: true,
                    ..class
                };
                // SAFETY: the caller's.
                unsafe { self.run(self.plan(&mut plans, class)?, stream, shape.m, operands) }
            }
            begun => begun,
        };
        begun.map_err(|refused| refusal(&self.device, refused, &shape))
    }

    /// # Safety
    /// As [`Gemm::gemm`].
    unsafe fn run(
        &self,
        plan: &Plan,
        stream: &Stream,
        rows: usize,
        operands: GemmOperands,
    ) -> Result<(), Refused> {
        let rows = rows as u64;
        let layouts = plan.layouts();
        let matrices = Matrices {
            a: pointer(operands.weight),
            b: pointer(operands.x),
            d: pointer(operands.out),
        };
        // SAFETY: the plan's descriptors are live and, under the lock, changed by nobody else; the rest is the caller's.
        unsafe {
            for layout in [layouts.b, layouts.d] {
                set(
                    |value, bytes| {
                        fallible::layout_set(
                            layout,
                            LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_COLS,
                            value,
                            bytes,
                        )
                    },
                    &rows,
                )?;
            }
            if let Some(bias) = operands.bias {
                let attribute = DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                set(
                    |value, bytes| fallible::desc_set(plan.desc.0, attribute, value, bytes),
                    &bias.raw(),
                )?;
            }
            fallible::matmul(
                self.handle,
                plan.desc.0,
                layouts,
                matrices,
                &plan.algorithm,
                (pointer(self.workspace.ptr()), self.usable_workspace()),
                stream.handle().cast(),
            )
        }
    }

    /// The class's plan, made at its first use.
    fn plan<'a>(&self, plans: &'a mut HashMap<Class, Plan>, class: Class) -> Result<&'a Plan> {
        use std::collections::hash_map::Entry;
        match plans.entry(class) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let plan = Plan::new(self.handle, class, self.usable_workspace())
                    .map_err(|refused| refusal(&self.device, refused, &class.shape()))?;
                tracing::debug!(shape = %class.shape(), algorithm = ?plan.algorithm.data, "chose a matrix product");
                Ok(entry.insert(plan))
            }
        }
    }
}

impl fmt::Debug for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gemm")
            .field("device", &self.device)
            .field("workspace", &self.workspace.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.plans
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        // SAFETY: the handle is live and ours.
        let ended = self
            .device
            .bind()
            .map(|()| unsafe { fallible::destroy(self.handle) });
        if !matches!(ended, Ok(Ok(()))) {
            tracing::debug!(?ended, "cuBLASLt's handle was not released");
        }
    }
}

/// The bindings panic at first use when the library is missing, so this comes first. They load it by its name, under which the
/// loader finds what is loaded already.
fn load_library() -> Result<()> {
    Library::load(LIBRARY);
    // Also where the loader has only another version of it, which serves too.
    if fallible::is_present() {
        return Ok(());
    }
    Err(CudaError::NoLibrary {
        library: LIBRARY,
        remedy: "install CUDA 13's cuBLAS or the PyPI package nvidia-cublas, or name the library's directory in TIMETABLE_CUDA_LIBRARY_PATH",
    })
}

/// Shapes that share an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Class {
    /// The most rows of the class.
    rows: usize,
    /// Whether it has only shapes of so many rows.
    exact: bool,
    /// Whether it has shapes of any number of rows, which must not change a row's bits.
    any_rows: bool,
    n: usize,
    k: usize,
    x_stride: usize,
    out_stride: usize,
    dtype: GemmDtype,
    out: GemmOut,
    bias: bool,
    /// Bytes to which every operand is aligned at least.
    alignment: u32,
}

impl Class {
    fn of(shape: GemmShape, bias: bool, alignment: u32) -> Self {
        let GemmShape {
            m,
            n,
            k,
            x_stride,
            out_stride,
            dtype,
            out,
        } = shape;
        Self {
            rows: most_rows(m),
            exact: false,
            any_rows: false,
            n,
            k,
            x_stride,
            out_stride,
            dtype,
            out,
            bias,
            alignment,
        }
    }

    /// The class of every number of rows.
    fn of_any_rows(self) -> Self {
        Self {
            rows: INVARIANT_ROWS,
            any_rows: true,
            ..self
        }
    }

    fn shape(&self) -> GemmShape {
        GemmShape {
            m: self.rows,
            n: self.n,
            k: self.k,
            x_stride: self.x_stride,
            out_stride: self.out_stride,
            dtype: self.dtype,
            out: self.out,
        }
    }
}

/// The most rows of the class of `rows`: powers of two up to 16, then four classes or fewer to each doubling.
fn most_rows(rows: usize) -> usize {
    let doubling = rows.max(1).next_power_of_two();
    if doubling <= 16 {
        doubling
    } else {
        rows.next_multiple_of((doubling / 8).max(16))
    }
}

/// Bytes to which every operand is aligned, of the alignments that algorithms differ by.
fn alignment(shape: GemmShape, operands: GemmOperands) -> Result<u32> {
    let GemmOperands {
        x,
        weight,
        bias,
        out,
    } = operands;
    let all = x.raw() | weight.raw() | out.raw() | bias.unwrap_or_default().raw();
    let out_size = shape.out_dtype().size() as u64;
    if !(x.raw() | weight.raw()).is_multiple_of(shape.dtype.size() as u64)
        || !(out.raw() | bias.unwrap_or_default().raw()).is_multiple_of(out_size)
        || [x, weight, out].into_iter().any(DevicePtr::is_null)
    {
        return Err(CudaError::Invalid {
            what: "an operand of a matrix product",
            value: format!("{operands:x?}"),
            remedy: "addresses are not null and multiples of an element's size",
        });
    }
    // A common alignment of the addresses is that of their union.
    Ok([256, 16, 8, 4]
        .into_iter()
        .find(|alignment| all.is_multiple_of(u64::from(*alignment)))
        .unwrap_or(2))
}

/// The algorithm of a class, with the descriptors it is run with. In the library's column-major words: A is the weight, transposed;
/// B is x; D is out, with a column for each token.
struct Plan {
    desc: Desc,
    a: Layout,
    b: Layout,
    d: Layout,
    algorithm: cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new(handle: cublasLtHandle_t, class: Class, workspace: usize) -> Result<Self, Refused> {
        let (inputs, output) = (class.dtype.raw(), class.shape().out_dtype().raw());
        let (rows, n, k) = (class.rows as u64, class.n as u64, class.k as u64);
        let desc = Desc::new(class.bias, output)?;
        let a = Layout::new(inputs, k, n, class.k as i64)?;
        let b = Layout::new(inputs, k, rows, class.x_stride as i64)?;
        let d = Layout::new(output, n, rows, class.out_stride as i64)?;
        let preference = Preference::new(workspace, class.alignment, class.any_rows)?;
        let layouts = Layouts {
            a: a.0,
            b: b.0,
            d: d.0,
        };
        // SAFETY: integers, floats and a status, for which zeroed is a value.
        let mut proposals: [cublasLtMatmulHeuristicResult_t; PROPOSALS] =
            unsafe { std::mem::zeroed() };
        // SAFETY: all are live.
        let count =
            unsafe { fallible::heuristic(handle, desc.0, layouts, preference.0, &mut proposals) }?;
        let best = proposals[..count].iter().find(|proposal| {
            proposal.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && proposal.workspaceSize <= workspace
        });
        match best {
            Some(best) => Ok(Self {
                desc,
                a,
                b,
                d,
                algorithm: best.algo,
            }),
            None => Err((
                "cublasLtMatmulAlgoGetHeuristic",
                cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            )),
        }
    }

    fn layouts(&self) -> Layouts {
        Layouts {
            a: self.a.0,
            b: self.b.0,
            d: self.d.0,
        }
    }
}

struct Desc(cublasLtMatmulDesc_t);

impl Desc {
    fn new(bias: bool, output: cudaDataType_t) -> Result<Self, Refused> {
        // SAFETY: the library is present. (`COMPUTE_32F` multiplies f32 as f32: TF32 would be `COMPUTE_32F_FAST_TF32`.)
        let desc = Self(unsafe {
            fallible::desc_create(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cudaDataType_t::CUDA_R_32F,
            )
        }?);
        desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            desc.set(
                DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &(output as i32),
            )?;
        }
        Ok(desc)
    }

    fn set<T>(&self, attribute: DescAttribute, value: &T) -> Result<(), Refused> {
        // SAFETY: the descriptor is live, and the value is of the attribute's type.
        set(
            |value, bytes| unsafe { fallible::desc_set(self.0, attribute, value, bytes) },
            value,
        )
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: live and ours.
        log_drop(unsafe { fallible::desc_destroy(self.0) });
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: cudaDataType_t, rows: u64, columns: u64, stride: i64) -> Result<Self, Refused> {
        // SAFETY: the library is present.
        unsafe { fallible::layout_create(dtype, rows, columns, stride) }.map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: live and ours.
        log_drop(unsafe { fallible::layout_destroy(self.0) });
    }
}

struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize, alignment: u32, unsplit: bool) -> Result<Self, Refused> {
        use PreferenceAttribute as Attribute;
        // SAFETY: the library is present.
        let preference = Self(unsafe { fallible::preference_create() }?);
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            &(workspace as u64),
        )?;
        // Parts of a sum that is split are added in f32 or not at all: in the output's dtype they would be rounded in between.
        let reductions = if unsplit {
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE
        } else {
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
        } as u32;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            &reductions,
        )?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, &alignment)?;
        }
        Ok(preference)
    }

    fn set<T>(&self, attribute: PreferenceAttribute, value: &T) -> Result<(), Refused> {
        // SAFETY: the preference is live, and the value is of the attribute's type.
        set(
            |value, bytes| unsafe { fallible::preference_set(self.0, attribute, value, bytes) },
            value,
        )
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: live and ours.
        log_drop(unsafe { fallible::preference_destroy(self.0) });
    }
}

/// Gives `with` a value as the library takes attributes: address and size.
fn set<T>(
    with: impl FnOnce(*const c_void, usize) -> Result<(), Refused>,
    value: &T,
) -> Result<(), Refused> {
    with((&raw const *value).cast(), size_of::<T>())
}

fn pointer(address: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(address.raw() as usize)
}

fn log_drop(result: Result<(), Refused>) {
    if let Err(refused) = result {
        tracing::debug!(?refused, "a descriptor of cuBLASLt was not released");
    }
}

/// The error of a call that the library refused; that of the device, when the device is what failed.
fn refusal(device: &Device, (call, status): Refused, shape: &dyn fmt::Display) -> CudaError {
    if let Err(error) = device.check()
        && error.is_fatal()
    {
        return error.about(call);
    }
    CudaError::Blas {
        call,
        code: status as u32,
        name: format!("{status:?}"),
        shape: shape.to_string(),
    }
}

#[cfg(test)]
mod tests;
