//! What can go wrong on a CUDA device, in words that name the call, the value and the remedy. It must never know who
//! asked: settings are named by the caller ([`CudaError::with_remedy`]).

use std::time::Duration;

use cudarc::driver::sys::CUresult;

/// The driver version this crate needs, as the driver counts it: 1000 · major + 10 · minor.
pub const NEEDED_DRIVER: i32 = 13_000;

/// Why a CUDA call did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The machine has no NVIDIA driver that the loader can find.
    #[error(
        "no NVIDIA driver: libcuda.so.1 was not found by the loader: install the driver (580 or newer), in a container pass the GPU through, \
         or run on the CPU device"
    )]
    NoDriver,
    /// The driver is older than the CUDA version the kernels are built for. Both as the driver counts: 1000 · major + 10 · minor.
    #[error(
        "the NVIDIA driver is too old: it serves CUDA {}, and CUDA {} is needed: install driver 580 or newer, or run on the CPU device",
        version(*.found), version(*.needed)
    )]
    DriverTooOld {
        /// What the driver serves.
        found: i32,
        /// What is needed.
        needed: i32,
    },
    /// No device of this ordinal.
    #[error("no CUDA device {ordinal}: the driver shows {count}: {}", no_device_remedy(*.count))]
    NoDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// Devices that the driver shows.
        count: u32,
    },
    /// None of the embedded kernel images runs on this device.
    #[error(
        "no kernel image for compute capability {}.{}: this build embeds {}: build with a CUDA compiler for it \
         (cargo xtask kernels), or run on the CPU device",
        capability.0, capability.1, list(embedded)
    )]
    NoKernelImage {
        /// The device's compute capability: major, minor.
        capability: (u32, u32),
        /// The images that the build embeds, by architecture; empty: none.
        embedded: Vec<String>,
    },
    /// The device's memory, or the pinned memory of the host, does not hold what was asked for.
    #[error("out of device memory for {what}: asked {}, free {} of {}: {remedy}", bytes(*.asked), bytes(*.free), bytes(*.total))]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for; 0: the driver did not say.
        asked: usize,
        /// Bytes free on the device.
        free: usize,
        /// Bytes of the device.
        total: usize,
        /// What to do, with the name of the setting.
        remedy: &'static str,
    },
    /// The device or its context is gone: every later call fails the same way. [`CudaError::is_fatal`].
    #[error(
        "the CUDA device was lost: {call} reported {name} ({code}): end the process and start it again; if it happens again, look at `dmesg` for an Xid"
    )]
    Lost {
        /// The call that reported it; the fault may be an earlier kernel's.
        call: String,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: String,
    },
    /// Work does not end: the device, or a kernel on it, hangs.
    #[error(
        "the CUDA device did not finish its work within {} s: end the process and start it again; if it happens again, look at \
         `dmesg` for an Xid",
        .waited.as_secs_f32()
    )]
    Hung {
        /// How long it was waited for.
        waited: Duration,
    },
    /// A call failed; the context still serves.
    #[error("{call} failed: {name} ({code}){}", hint(*.code))]
    Call {
        /// The call, and what it was for.
        call: String,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: String,
    },
    /// A library that is loaded at run time is not there.
    #[error(
        "{library} was not found: looked in the loader's paths (LD_LIBRARY_PATH), TIMETABLE_CUDA_LIBRARY_PATH and python3's nvidia packages: {remedy}"
    )]
    NoLibrary {
        /// Its file name.
        library: &'static str,
        /// How to get it.
        remedy: &'static str,
    },
    /// A call of cuBLASLt failed.
    #[error("{call} failed: {name} ({code}) for {shape}")]
    Blas {
        /// The call.
        call: &'static str,
        /// The library's code.
        code: u32,
        /// The code's name.
        name: String,
        /// What was multiplied.
        shape: String,
    },
    /// An argument that no device accepts.
    #[error("{what} is {value}: {remedy}")]
    Invalid {
        /// Which.
        what: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        remedy: &'static str,
    },
    /// This device does not do it.
    #[error("{what} is not supported on {device}: {remedy}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// The device's name.
        device: String,
        /// What to do instead.
        remedy: &'static str,
    },
}

/// The usual result of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

impl CudaError {
    /// Whether the device is lost: no later call on it can succeed, and the process has to end.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Hung { .. })
    }

    /// The same error with the remedy of whoever asked for the memory: the setting to lower, by name. Other errors stay as they are.
    #[must_use]
    pub fn with_remedy(mut self, text: &'static str) -> Self {
        if let Self::OutOfMemory { remedy, .. } = &mut self {
            *remedy = text;
        }
        self
    }

    /// The same error with the images that the build embeds. Errors other than [`CudaError::NoKernelImage`] stay as they are.
    #[must_use]
    pub fn with_embedded(mut self, images: Vec<String>) -> Self {
        if let Self::NoKernelImage { embedded, .. } = &mut self {
            *embedded = images;
        }
        self
    }

    /// The same error with what the call was for, such as the name of a kernel. Errors that name no call stay as they are.
    #[must_use]
    pub fn about(mut self, what: &str) -> Self {
        if let Self::Lost { call, .. } | Self::Call { call, .. } = &mut self {
            *call = format!("{call} ({what})");
        }
        self
    }

    /// The error of a driver call that returned `code`, which is not success.
    pub(crate) fn of_call(call: &'static str, code: CUresult) -> Self {
        let (call, name, number) = (call.to_owned(), format!("{code:?}"), code as u32);
        if is_sticky(code) {
            Self::Lost {
                call,
                code: number,
                name,
            }
        } else {
            Self::Call {
                call,
                code: number,
                name,
            }
        }
    }

    /// Whether this is the driver's answer `code`.
    pub(crate) fn is_code(&self, code: CUresult) -> bool {
        matches!(self, Self::Lost { code: found, .. } | Self::Call { code: found, .. } if *found == code as u32)
    }
}

/// Codes after which the context never works again: a fault on the device, or a device that is gone.
fn is_sticky(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// "13.0" of 13000.
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn no_device_remedy(count: u32) -> &'static str {
    if count == 0 {
        "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run on the CPU device"
    } else {
        "devices count from 0: choose one of them, or look at CUDA_VISIBLE_DEVICES"
    }
}

fn list(images: &[String]) -> String {
    if images.is_empty() {
        "no image that the driver accepts".to_owned()
    } else {
        images.join(", ")
    }
}

/// Bytes in the unit that reads best.
fn bytes(number: usize) -> String {
    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;
    match number {
        0 => "an unknown number of bytes".to_owned(),
        n if n >= GIB => format!("{:.2} GiB", n as f64 / GIB as f64),
        n if n >= MIB => format!("{:.1} MiB", n as f64 / MIB as f64),
        n => format!("{n} bytes"),
    }
}

/// What usually is behind a code that its name does not explain.
fn hint(code: u32) -> &'static str {
    match code {
        2 => ": the device is out of memory: end other programs that use it, or reserve less of it",
        701 => ": the launch asks for more registers, threads or shared memory than the device has",
        720 => ": a cooperative grid must fit on the device at once: use fewer blocks",
        802 => ": the system's fabric manager is not running yet",
        803 => ": the driver and its kernel module differ: restart the machine after an update",
        804 => {
            ": the CUDA compatibility package does not serve this device: use the driver's own libcuda"
        }
        900..=908 => ": the call is not allowed while a stream is captured",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_names_what_was_asked_and_the_callers_setting() {
        let error = CudaError::OutOfMemory {
            what: "the KV cache",
            asked: 3 << 30,
            free: 512 << 20,
            total: 139 << 30,
            remedy: "free memory",
        }
        .with_remedy("lower --gpu-memory-utilization");
        assert_eq!(
            error.to_string(),
            "out of device memory for the KV cache: asked 3.00 GiB, free 512.0 MiB of 139.00 GiB: lower --gpu-memory-utilization"
        );
        assert!(!error.is_fatal());
    }

    #[test]
    fn a_fault_on_the_device_is_fatal_and_names_call_and_code() {
        let error = CudaError::of_call("cuStreamSynchronize", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
            .about("step 7");
        assert!(error.is_fatal());
        assert!(
            error
                .to_string()
                .contains("cuStreamSynchronize (step 7) reported CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
            "{error}"
        );
    }

    #[test]
    fn a_refused_call_is_not_fatal_and_explains_itself() {
        let full = CudaError::of_call("cuModuleLoadDataEx", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert!(
            !full.is_fatal() && full.to_string().ends_with("or reserve less of it"),
            "{full}"
        );
        let error = CudaError::of_call(
            "cuLaunchCooperativeKernel",
            CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        )
        .about("tt_unpack");
        assert!(!error.is_fatal());
        assert_eq!(
            error.to_string(),
            "cuLaunchCooperativeKernel (tt_unpack) failed: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (720): a cooperative grid must fit on the device at once: use fewer blocks"
        );
    }

    #[test]
    fn versions_and_images_read_as_people_write_them() {
        let old = CudaError::DriverTooOld {
            found: 12_080,
            needed: NEEDED_DRIVER,
        };
        assert!(
            old.to_string()
                .contains("serves CUDA 12.8, and CUDA 13.0 is needed"),
            "{old}"
        );
        let image = CudaError::NoKernelImage {
            capability: (7, 5),
            embedded: Vec::new(),
        };
        assert!(
            image
                .to_string()
                .contains("capability 7.5: this build embeds no image"),
            "{image}"
        );
        let image = image.with_embedded(vec!["sm_90a".to_owned(), "PTX".to_owned()]);
        assert!(image.to_string().contains("embeds sm_90a, PTX:"), "{image}");
        let none = CudaError::NoDevice {
            ordinal: 3,
            count: 1,
        };
        assert!(
            none.to_string()
                .starts_with("no CUDA device 3: the driver shows 1: "),
            "{none}"
        );
    }
}
