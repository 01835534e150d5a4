//! The trait that a builder implements, whatever its family. It must never know how it is called: as a component, or as a
//! native twin.

use timetable_types::{
    BuildError, BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, ErrorKind,
    Family, LaunchPromise, Metadata, flash_attn, flash_mla, flashinfer, mamba, triton_attn,
};

/// A metadata record of one family.
pub trait FamilyMetadata: Sized {
    /// The family.
    const FAMILY: Family;

    /// As a value of any family.
    fn wrap(self) -> Metadata;

    /// Back from any family; the value itself where it is of another.
    ///
    /// # Errors
    /// `metadata`, unchanged, if it belongs to another family.
    #[allow(
        clippy::result_large_err,
        reason = "the error is the argument, handed back"
    )]
    fn unwrap(metadata: Metadata) -> Result<Self, Metadata>;
}

macro_rules! family {
    ($($module:ident $case:ident),*) => {$(
        impl FamilyMetadata for $module::Metadata {
            const FAMILY: Family = Family::$case;

            fn wrap(self) -> Metadata {
                Metadata::$case(self)
            }

            fn unwrap(metadata: Metadata) -> Result<Self, Metadata> {
                match metadata {
                    Metadata::$case(metadata) => Ok(metadata),
                    other => Err(other),
                }
            }
        }
    )*};
}

family!(flash_attn FlashAttn, flashinfer Flashinfer, triton_attn TritonAttn, flash_mla FlashMla, mamba Mamba);

/// Turns each step's common attention metadata into one backend's metadata.
///
/// What a call returns is a function of the configuration and of that call alone: what a builder keeps between calls is a
/// cache. The host replays steps on fresh instances and treats a difference as a fault.
pub trait Builder: Sized {
    /// The family's metadata record.
    type Metadata: FamilyMetadata;

    /// A builder for one attention group.
    ///
    /// # Errors
    /// If the configuration is one that this builder cannot serve.
    fn create(config: BuilderConfig) -> Result<Self, BuildError>;

    /// What the builder says of itself. Constant after construction.
    fn info(&self) -> BuilderInfo;

    /// What a graph captured with `shape` may rely on.
    fn launch_promise(&self, shape: &CaptureShape) -> LaunchPromise;

    /// This step's metadata; `fast_build` asks for a cheap build rather than the best schedule.
    ///
    /// # Errors
    /// If this batch is one that the builder declines.
    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Self::Metadata, BuildError>;

    /// Metadata for capturing a CUDA graph with this batch's shape.
    ///
    /// # Errors
    /// As for `build`.
    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Self::Metadata, BuildError> {
        self.build(common, false)
    }

    /// Metadata for step `draft_index` of a drafter.
    ///
    /// # Errors
    /// As for `build`.
    fn build_for_drafting(
        &mut self,
        common: &CommonAttentionMetadata,
        _draft_index: u32,
    ) -> Result<Self::Metadata, BuildError> {
        self.build(common, true)
    }

    /// `metadata`, of an equal group, for the block table and slots that `common` describes.
    ///
    /// # Errors
    /// Always, unless the builder says `supports_update_block_table` and overrides this.
    fn update_block_table(
        &mut self,
        _metadata: Self::Metadata,
        _common: &CommonAttentionMetadata,
    ) -> Result<Self::Metadata, BuildError> {
        Err(decline(
            ErrorKind::NotImplemented,
            "update_block_table is not supported by this builder; build the metadata anew",
        ))
    }
}

/// A refusal of this batch or configuration.
#[cold]
pub fn decline(kind: ErrorKind, message: impl Into<String>) -> BuildError {
    BuildError {
        kind,
        message: message.into(),
    }
}

/// The operator's option `name` as a number, `default` where it is not given.
///
/// # Errors
/// If the value is not a number of the range.
pub fn option(
    config: &BuilderConfig,
    name: &str,
    default: u32,
    range: std::ops::RangeInclusive<u32>,
) -> Result<u32, BuildError> {
    let Some((_, value)) = config.options.iter().find(|(key, _)| key == name) else {
        return Ok(default);
    };
    match value.parse::<u32>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(decline(
            ErrorKind::InvalidValue,
            format!(
                "option {name}={value:?} is not a whole number from {} to {}; correct it or leave it out (default {default})",
                range.start(),
                range.end()
            ),
        )),
    }
}
