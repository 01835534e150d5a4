//! Metadata from the real components, through the sandbox and past the verifier, for steps that no engine made. It must never
//! know a device.

use timetable_attention::{
    Grant, MetadataBuilder, StepInputs, Verifier, VerifyContext, batch::GroupStep, verify_step,
};
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};
use timetable_types::{BuilderConfig, CaptureShape, LaunchPromise, Metadata};

/// A component's builder, and what judges it.
pub struct Builder {
    builder: WasmBuilder,
    verifier: Verifier,
    config: BuilderConfig,
}

/// Why there is no metadata. One line.
pub type Refused = String;

impl Builder {
    /// The embedded component called `name` for a group of that configuration.
    ///
    /// # Errors
    /// It cannot be loaded, or declines the configuration.
    pub fn new(sandbox: &Sandbox, name: &str, config: BuilderConfig) -> Result<Self, Refused> {
        let embedded = timetable_reference::component(name)
            .ok_or_else(|| format!("there is no embedded component {name}"))?;
        let component = sandbox
            .load(embedded.bytes)
            .map_err(|error| format!("{name}: {error}"))?;
        let builder =
            WasmBuilder::new(&component, &config).map_err(|error| format!("{name}: {error}"))?;
        Ok(Builder {
            builder,
            verifier: Verifier::new(),
            config,
        })
    }

    /// What the builder was made of.
    pub fn config(&self) -> &BuilderConfig {
        &self.config
    }

    /// What the builder promises for a graph of that shape.
    ///
    /// # Errors
    /// It promises nothing.
    pub fn promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, Refused> {
        self.builder
            .launch_promise(shape)
            .map_err(|fault| format!("no launch promise: {fault}"))
    }

    /// What a step and its metadata are judged in.
    pub fn context<'a>(
        &'a self,
        step: &'a GroupStep,
        inputs: &'a StepInputs<'a>,
        num_blocks: usize,
        promise: Option<&'a LaunchPromise>,
    ) -> VerifyContext<'a> {
        VerifyContext {
            config: &self.config,
            common: &step.cam,
            inputs,
            promise,
            grant: Grant::Exact,
            num_blocks: num_blocks as u32,
        }
    }

    /// The step's metadata, verified as the engine would.
    ///
    /// # Errors
    /// The step itself, the build or the metadata was refused.
    pub fn build(
        &mut self,
        step: &GroupStep,
        num_blocks: usize,
        promise: Option<&LaunchPromise>,
    ) -> Result<Metadata, Refused> {
        let inputs = step.tensors.inputs();
        let context = VerifyContext {
            config: &self.config,
            common: &step.cam,
            inputs: &inputs,
            promise,
            grant: Grant::Exact,
            num_blocks: num_blocks as u32,
        };
        verify_step(&context).map_err(|refusal| format!("the step was refused: {refusal}"))?;
        let metadata = self
            .builder
            .build(&step.cam, false)
            .map_err(|fault| format!("no metadata: {fault}"))?;
        self.verifier
            .verify(&metadata, &context)
            .map_err(|refusal| format!("the metadata was refused: {refusal}"))?;
        Ok(metadata)
    }
}

/// A sandbox with the usual limits.
///
/// # Errors
/// wasmtime does not start.
pub fn sandbox() -> Result<Sandbox, Refused> {
    Sandbox::new(Limits::default()).map_err(|error| error.to_string())
}
