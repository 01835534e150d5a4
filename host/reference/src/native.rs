//! Native twins: a builder's own logic as a `MetadataBuilder`, without a sandbox. It must never know a particular builder's
//! policy.

use timetable_attention::{BuildFault, FaultKind, MetadataBuilder};
use timetable_guest::{Builder, FamilyMetadata};
use timetable_types::{
    BuilderConfig, BuilderInfo, CaptureShape, CommonAttentionMetadata, Family, LaunchPromise,
    Metadata,
};

/// A guest builder, called directly.
#[derive(Debug)]
pub struct Native<B> {
    builder: B,
    info: BuilderInfo,
}

impl<B: Builder> Native<B> {
    /// The builder for one attention group.
    ///
    /// # Errors
    /// If the builder declines the configuration.
    pub fn create(config: &BuilderConfig) -> Result<Self, BuildFault> {
        let builder = B::create(config.clone()).map_err(BuildFault::Declined)?;
        Ok(Self {
            info: builder.info(),
            builder,
        })
    }
}

impl<B: Builder + Send> MetadataBuilder for Native<B> {
    fn family(&self) -> Family {
        B::Metadata::FAMILY
    }

    fn info(&self) -> &BuilderInfo {
        &self.info
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        Ok(self.builder.launch_promise(shape))
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        self.builder
            .build(common, fast_build)
            .map(FamilyMetadata::wrap)
            .map_err(BuildFault::Declined)
    }

    fn build_for_cudagraph_capture(
        &mut self,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.builder
            .build_for_cudagraph_capture(common)
            .map(FamilyMetadata::wrap)
            .map_err(BuildFault::Declined)
    }

    fn build_for_drafting(
        &mut self,
        common: &CommonAttentionMetadata,
        draft_index: u32,
    ) -> Result<Metadata, BuildFault> {
        self.builder
            .build_for_drafting(common, draft_index)
            .map(FamilyMetadata::wrap)
            .map_err(BuildFault::Declined)
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        let metadata =
            B::Metadata::unwrap(metadata.clone()).map_err(|other| BuildFault::Fault {
                kind: FaultKind::Refused,
                message: format!(
                    "update_block_table got metadata of family {} for a builder of family {}",
                    other.family().interface(),
                    B::Metadata::FAMILY.interface()
                ),
            })?;
        self.builder
            .update_block_table(metadata, common)
            .map(FamilyMetadata::wrap)
            .map_err(BuildFault::Declined)
    }
}

/// The native twin of the embedded component called `name`.
///
/// # Errors
/// If there is no such component, or if the builder declines the configuration.
pub fn native_twin(
    name: &str,
    config: &BuilderConfig,
) -> Result<Box<dyn MetadataBuilder>, BuildFault> {
    Ok(match name {
        "flash-attn" => Box::new(Native::<flash_attn_builder::BalancedSplits>::create(
            config,
        )?),
        "flash-attn-fixed-split" => {
            Box::new(Native::<flash_attn_fixed_split_builder::FixedSplits>::create(config)?)
        }
        "flashinfer" => Box::new(Native::<flashinfer_builder::PlannedWork>::create(config)?),
        "flashinfer-window-sink" => {
            Box::new(Native::<flashinfer_window_sink_builder::WindowSink>::create(config)?)
        }
        "triton-attn" => Box::new(Native::<triton_attn_builder::SoftmaxSegments>::create(
            config,
        )?),
        "mamba" => Box::new(Native::<mamba_builder::FieldRecord>::create(config)?),
        "flash-mla" => Box::new(Native::<flash_mla_builder::EvenParts>::create(config)?),
        "flash-attn-mla" => Box::new(Native::<flash_attn_mla_builder::AheadOfTime>::create(
            config,
        )?),
        "triton-mla" => Box::new(Native::<triton_mla_builder::Common>::create(config)?),
        _ => {
            let known: Vec<&str> = crate::components().iter().map(|known| known.name).collect();
            return Err(BuildFault::Fault {
                kind: FaultKind::Constructor,
                message: format!(
                    "no reference builder is called {name:?}; there are {}",
                    known.join(", ")
                ),
            });
        }
    })
}
