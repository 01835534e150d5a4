//! The engine: scheduler, KV blocks, persistent batch, step loop, and the model's layers other than attention.
//!
//! - [`engine::Engine`] is the step loop; [`handle::EngineHandle`] runs one on a thread of its own.
//! - [`scheduler`], [`kv`] and [`batch`] make each step's rows, blocks and host tensors.
//! - [`AttentionPlan`] puts the rule book's questions: backend, groups, block sizes; `startup` the rest, and reports.
//! - `tenants` says who requests belong to, and what each tenant is entitled to.
//! - [`speculation`] proposes tokens that a step verifies all at once.
//! - [`executor`] is what the step loop asks of a device; [`cpu`] answers on the host, [`simulated`] computes nothing.
//! - `attention` holds each attention group's builder and verifier, whatever the device.
//! - [`timings`] and [`histogram`] count; [`timeline`] keeps the last steps' times; [`spans`] are what a tracing subscriber sees of a step.
//! - [`model`], [`tokenizer`], [`chat`] and [`sampling`] are everything that is not attention.
//!
//! The engine must never know how a builder makes its metadata, nor what a backend's kernels do with it.

mod attention;
pub mod batch;
pub mod chat;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod engine;
pub mod executor;
pub mod handle;
pub mod histogram;
pub mod kv;
pub mod memory;
pub mod model;
pub mod output;
pub mod request;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod simulated;
pub mod spans;
pub mod speculation;
mod startup;
mod tenants;
pub mod timeline;
pub mod timings;
pub mod tokenizer;

pub use attention::{AttentionPlan, StepError, backend_name};
pub use config::{
    BuilderSource, Builders, CacheSize, DeviceChoice, EngineConfig, EngineError, FamilyBuilder,
    KvCacheDtype, ModelDtype,
};
pub use cpu::CpuExecutor;
pub use engine::Engine;
pub use executor::Executor;
pub use handle::{EngineHandle, RequestEvent, RequestHandle, RequestStream};
pub use output::{FinishReason, GenerationRequest, RequestError, RequestId, StepOutput};
pub use runner::ModelRunner;
pub use simulated::SimulatedExecutor;
pub use speculation::{SpeculativeConfig, SpeculativeMethod};
pub use tenants::{SlotConfig, TenantConfig, TenantStats};
pub use timeline::{StepRecord, Timeline};
pub use timings::{EngineStats, StepTimings};
