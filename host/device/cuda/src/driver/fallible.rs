//! The driver's functions as `Result`s, one line each: nothing is decided here, nothing is owned. It must never be called by
//! anything but the safe types of this module's parent.
//!
//! Safety, for all of them: handles are live, pointers are valid for what the driver's documentation says, and the context
//! is current where the call needs one. The driver library is present and new enough (checked by `Device::open`): the
//! bindings look symbols up at first use and panic when one is missing.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::error::{CudaError, Result};

/// `Ok` of success, else the error with the call's name.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::of_call(call, code)),
    }
}

/// Whether the driver library can be loaded; every other function here needs it.
pub(crate) fn is_present() -> bool {
    // SAFETY: loads and unloads a library by name; the driver's initialisers have no preconditions.
    unsafe { sys::is_culib_present() }
}

macro_rules! calls {
    () => {};
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $raw:ident($($pass:expr),* $(,)?); $($rest:tt)*) => {
        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub(crate) unsafe fn $name($($arg: $ty),*) -> Result<()> {
            // SAFETY: the caller's, as the module says.
            check(stringify!($raw), unsafe { sys::$raw($($pass),*) })
        }
        calls! { $($rest)* }
    };
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ident: $out_ty:ty = $raw:ident($($pass:expr),* $(,)?); $($rest:tt)*) => {
        #[allow(clippy::missing_safety_doc)]
        pub(crate) unsafe fn $name($($arg: $ty),*) -> Result<$out_ty> {
            let mut slot = MaybeUninit::<$out_ty>::zeroed();
            let $out = slot.as_mut_ptr();
            // SAFETY: the caller's, as the module says; the slot is writable.
            check(stringify!($raw), unsafe { sys::$raw($($pass),*) })?;
            // SAFETY: an integer or a pointer, for which zeroed is a value, or which the driver has written.
            Ok(unsafe { slot.assume_init() })
        }
        calls! { $($rest)* }
    };
}

calls! {
    fn init() = cuInit(0);
    fn driver_version() -> version: c_int = cuDriverGetVersion(version);

    fn device_count() -> count: c_int = cuDeviceGetCount(count);
    fn device(ordinal: c_int) -> device: CUdevice = cuDeviceGet(device, ordinal);
    fn device_name(name: *mut c_char, len: c_int, device: CUdevice) = cuDeviceGetName(name, len, device);
    fn device_attribute(attribute: CUdevice_attribute, device: CUdevice) -> value: c_int =
        cuDeviceGetAttribute(value, attribute, device);

    fn primary_retain(device: CUdevice) -> context: CUcontext = cuDevicePrimaryCtxRetain(context, device);
    fn primary_release(device: CUdevice) = cuDevicePrimaryCtxRelease_v2(device);
    fn set_current(context: CUcontext) = cuCtxSetCurrent(context);
    fn synchronize_context() = cuCtxSynchronize();
    fn memory_info(free: *mut usize, total: *mut usize) = cuMemGetInfo_v2(free, total);

    fn alloc(bytes: usize) -> ptr: CUdeviceptr = cuMemAlloc_v2(ptr, bytes);
    fn free(ptr: CUdeviceptr) = cuMemFree_v2(ptr);
    fn host_alloc(bytes: usize, flags: c_uint) -> ptr: *mut c_void = cuMemHostAlloc(ptr, bytes, flags);
    fn host_free(ptr: *mut c_void) = cuMemFreeHost(ptr);
    fn copy_to_device(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) =
        cuMemcpyHtoDAsync_v2(dst, src, bytes, stream);
    fn copy_to_host(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) =
        cuMemcpyDtoHAsync_v2(dst, src, bytes, stream);
    fn copy_device(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) =
        cuMemcpyDtoDAsync_v2(dst, src, bytes, stream);
    fn fill(dst: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) = cuMemsetD8Async(dst, byte, bytes, stream);

    fn stream_create(flags: c_uint, priority: c_int) -> stream: CUstream = cuStreamCreateWithPriority(stream, flags, priority);
    fn stream_priorities(least: *mut c_int, greatest: *mut c_int) = cuCtxGetStreamPriorityRange(least, greatest);
    fn stream_destroy(stream: CUstream) = cuStreamDestroy_v2(stream);
    fn stream_synchronize(stream: CUstream) = cuStreamSynchronize(stream);
    fn stream_query(stream: CUstream) = cuStreamQuery(stream);
    fn stream_wait(stream: CUstream, event: CUevent) = cuStreamWaitEvent(stream, event, 0);
    fn begin_capture(stream: CUstream, mode: CUstreamCaptureMode) = cuStreamBeginCapture_v2(stream, mode);
    fn end_capture(stream: CUstream) -> graph: CUgraph = cuStreamEndCapture(stream, graph);
    fn capture_status(stream: CUstream) -> status: CUstreamCaptureStatus = cuStreamIsCapturing(stream, status);

    fn event_create(flags: c_uint) -> event: CUevent = cuEventCreate(event, flags);
    fn event_destroy(event: CUevent) = cuEventDestroy_v2(event);
    fn event_record(event: CUevent, stream: CUstream) = cuEventRecord(event, stream);
    fn event_query(event: CUevent) = cuEventQuery(event);
    fn event_synchronize(event: CUevent) = cuEventSynchronize(event);
    fn event_elapsed(start: CUevent, end: CUevent) -> milliseconds: f32 = cuEventElapsedTime_v2(milliseconds, start, end);

    fn module_load(image: *const c_void, num_options: c_uint, options: *mut sys::CUjit_option, values: *mut *mut c_void)
        -> module: CUmodule = cuModuleLoadDataEx(module, image, num_options, options, values);
    fn module_unload(module: CUmodule) = cuModuleUnload(module);
    fn module_function(module: CUmodule, name: *const c_char) -> function: CUfunction = cuModuleGetFunction(function, module, name);
    fn module_global(module: CUmodule, name: *const c_char, bytes: *mut usize) -> ptr: CUdeviceptr =
        cuModuleGetGlobal_v2(ptr, bytes, module, name);
    fn function_load(function: CUfunction) = cuFuncLoad(function);
    fn function_attribute(attribute: CUfunction_attribute, function: CUfunction) -> value: c_int =
        cuFuncGetAttribute(value, attribute, function);
    fn function_set_attribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int) =
        cuFuncSetAttribute(function, attribute, value);
    fn function_occupancy(function: CUfunction, threads: c_int, shared: usize) -> blocks: c_int =
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
    fn launch(function: CUfunction, grid: (u32, u32, u32), block: (u32, u32, u32), shared: c_uint, stream: CUstream, args: *mut *mut c_void) =
        cuLaunchKernel(function, grid.0, grid.1, grid.2, block.0, block.1, block.2, shared, stream, args, std::ptr::null_mut());
    fn launch_cooperative(function: CUfunction, grid: (u32, u32, u32), block: (u32, u32, u32), shared: c_uint, stream: CUstream, args: *mut *mut c_void) =
        cuLaunchCooperativeKernel(function, grid.0, grid.1, grid.2, block.0, block.1, block.2, shared, stream, args);

    fn graph_instantiate(graph: CUgraph) -> exec: CUgraphExec = cuGraphInstantiateWithFlags(exec, graph, 0);
    fn graph_num_nodes(graph: CUgraph) -> count: usize = cuGraphGetNodes(graph, std::ptr::null_mut::<CUgraphNode>(), count);
    fn graph_destroy(graph: CUgraph) = cuGraphDestroy(graph);
    fn graph_upload(exec: CUgraphExec, stream: CUstream) = cuGraphUpload(exec, stream);
    fn graph_launch(exec: CUgraphExec, stream: CUstream) = cuGraphLaunch(exec, stream);
    fn graph_exec_destroy(exec: CUgraphExec) = cuGraphExecDestroy(exec);
}
