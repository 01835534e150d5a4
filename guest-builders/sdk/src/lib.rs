//! The guest SDK: what a metadata builder needs to become a component of `timetable:attention`.
//!
//! A builder implements [`Builder`] and names itself once, with `export_flash_attn!(MyBuilder)` or its sibling for another
//! family. On wasm32 the macro emits the component's exports, and this crate brings the canonical ABI (derived where the
//! records are defined, so nothing is converted) and the allocator: a bump arena that is rewound after every call, beside a
//! heap for what the builder keeps (`heap`). On any other target the same crate is an ordinary library: the builder's native
//! twin.
//!
//! Build with simd128 and LLVM's unroll count of 8 (`guest-builders/.cargo/config.toml`): fuel metering puts a check into
//! every loop, and narrow SIMD loops double in cost without unrolling.
//!
//! This crate must never know a backend's policy, the host, or WASI: a component built with it imports types only.

#[cfg(target_arch = "wasm32")]
#[doc(hidden)]
pub mod abi;
mod builder;
pub mod flash_attn;
pub mod flash_mla;
pub mod flashinfer;
#[cfg_attr(
    not(target_arch = "wasm32"),
    allow(dead_code, reason = "natively only its tests use it")
)]
mod heap;
pub mod mamba;
pub mod testing;
pub mod triton_attn;

pub use builder::{Builder, FamilyMetadata, decline, option};
pub use timetable_types as types;
pub use timetable_types::batch;

/// Exports a `Builder<Metadata = flash_attn::Metadata>` as `timetable:attention/flash-attn`.
#[macro_export]
macro_rules! export_flash_attn {
    ($builder:ty) => {
        $crate::__export!(
            $builder,
            flash_attn,
            "timetable:attention/flash-attn@0.1.0",
            "[export]timetable:attention/flash-attn@0.1.0"
        );
    };
}

/// Exports a `Builder<Metadata = flashinfer::Metadata>` as `timetable:attention/flashinfer`.
#[macro_export]
macro_rules! export_flashinfer {
    ($builder:ty) => {
        $crate::__export!(
            $builder,
            flashinfer,
            "timetable:attention/flashinfer@0.1.0",
            "[export]timetable:attention/flashinfer@0.1.0"
        );
    };
}

/// Exports a `Builder<Metadata = triton_attn::Metadata>` as `timetable:attention/triton-attn`.
#[macro_export]
macro_rules! export_triton_attn {
    ($builder:ty) => {
        $crate::__export!(
            $builder,
            triton_attn,
            "timetable:attention/triton-attn@0.1.0",
            "[export]timetable:attention/triton-attn@0.1.0"
        );
    };
}

/// Exports a `Builder<Metadata = flash_mla::Metadata>` as `timetable:attention/flash-mla`.
#[macro_export]
macro_rules! export_flash_mla {
    ($builder:ty) => {
        $crate::__export!(
            $builder,
            flash_mla,
            "timetable:attention/flash-mla@0.1.0",
            "[export]timetable:attention/flash-mla@0.1.0"
        );
    };
}

/// Exports a `Builder<Metadata = mamba::Metadata>` as `timetable:attention/mamba`.
#[macro_export]
macro_rules! export_mamba {
    ($builder:ty) => {
        $crate::__export!(
            $builder,
            mamba,
            "timetable:attention/mamba@0.1.0",
            "[export]timetable:attention/mamba@0.1.0"
        );
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($builder:ty, $family:ident, $interface:literal, $intrinsics:literal) => {
        const _: () = {
            const fn of_the_family<B: $crate::Builder<Metadata = $crate::types::$family::Metadata>>() {}
            of_the_family::<$builder>();
        };

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            use $crate::abi;

            #[link(wasm_import_module = $intrinsics)]
            unsafe extern "C" {
                #[link_name = "[resource-new]builder"]
                fn new_handle(builder: usize) -> u32;
            }

            #[unsafe(export_name = concat!($interface, "#[static]builder.create"))]
            unsafe extern "C" fn create(config: *mut u8) -> *mut u8 {
                // SAFETY: the host calls this as the contract says, with a lowered builder-config.
                unsafe { abi::create::<$builder>(config, |builder| new_handle(builder)) }
            }

            #[unsafe(export_name = concat!($interface, "#[dtor]builder"))]
            unsafe extern "C" fn destroy(builder: *mut u8) {
                // SAFETY: the host drops a handle once.
                unsafe { abi::destroy::<$builder>(builder) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.info"))]
            unsafe extern "C" fn info(builder: *mut u8) -> *mut u8 {
                // SAFETY: the handle is live.
                unsafe { abi::info::<$builder>(builder) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.launch-promise"))]
            unsafe extern "C" fn launch_promise(
                builder: *mut u8,
                num_tokens: u32,
                num_reqs: u32,
                max_query_len: u32,
                is_uniform: u32,
                uniform_query_len: u32,
            ) -> *mut u8 {
                let shape = $crate::types::CaptureShape {
                    num_tokens,
                    num_reqs,
                    max_query_len,
                    uniform_query_len: (is_uniform != 0).then_some(uniform_query_len),
                };
                // SAFETY: the handle is live.
                unsafe { abi::launch_promise::<$builder>(builder, &shape) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.build"))]
            unsafe extern "C" fn build(arguments: *mut u8) -> *mut u8 {
                // SAFETY: the host calls this as the contract says, with lowered arguments.
                unsafe { abi::build::<$builder>(arguments) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.build-for-cudagraph-capture"))]
            unsafe extern "C" fn build_for_cudagraph_capture(arguments: *mut u8) -> *mut u8 {
                // SAFETY: as for `build`.
                unsafe { abi::build_for_cudagraph_capture::<$builder>(arguments) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.build-for-drafting"))]
            unsafe extern "C" fn build_for_drafting(arguments: *mut u8) -> *mut u8 {
                // SAFETY: as for `build`.
                unsafe { abi::build_for_drafting::<$builder>(arguments) }
            }

            #[unsafe(export_name = concat!($interface, "#[method]builder.update-block-table"))]
            unsafe extern "C" fn update_block_table(arguments: *mut u8) -> *mut u8 {
                // SAFETY: as for `build`.
                unsafe { abi::update_block_table::<$builder>(arguments) }
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[static]builder.create"))]
            unsafe extern "C" fn after_create(_result: *mut u8) {
                abi::after_create();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.info"))]
            unsafe extern "C" fn after_info(_result: *mut u8) {
                abi::after_call();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.launch-promise"))]
            unsafe extern "C" fn after_launch_promise(_result: *mut u8) {
                abi::after_call();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.build"))]
            unsafe extern "C" fn after_build(_result: *mut u8) {
                abi::after_call();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.build-for-cudagraph-capture"))]
            unsafe extern "C" fn after_build_for_cudagraph_capture(_result: *mut u8) {
                abi::after_call();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.build-for-drafting"))]
            unsafe extern "C" fn after_build_for_drafting(_result: *mut u8) {
                abi::after_call();
            }

            #[unsafe(export_name = concat!("cabi_post_", $interface, "#[method]builder.update-block-table"))]
            unsafe extern "C" fn after_update_block_table(_result: *mut u8) {
                abi::after_call();
            }
        };
    };
}
