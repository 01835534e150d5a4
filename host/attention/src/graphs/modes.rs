//! Properties of the five modes, and the weakest support over attention groups. It must never know a configuration.

use timetable_types::{CudagraphMode, CudagraphSupport};

use super::RuntimeMode;

/// Questions about a CUDA graph mode. (vLLM 0.33 `CUDAGraphMode`.)
pub trait GraphModes: Copy {
    /// How uniform decode batches run.
    fn decode_mode(self) -> RuntimeMode;
    /// How other batches run.
    fn mixed_mode(self) -> RuntimeMode;
    /// Are decodes captured apart from mixed batches?
    fn separate_routine(self) -> bool;
    /// Is any batch one graph?
    fn has_full_cudagraphs(self) -> bool;
    /// Is any batch captured piecewise?
    fn has_piecewise_cudagraphs(self) -> bool;
    /// Must the model be cut at attention?
    fn requires_piecewise_compilation(self) -> bool;
    /// What is left where piecewise capture is not to be had.
    fn without_piecewise(self) -> CudagraphMode;
    /// Is it also the mode of a single batch?
    fn is_valid_runtime_mode(self) -> bool;
    /// The field's name.
    fn name(self) -> &'static str;
}

impl GraphModes for CudagraphMode {
    fn decode_mode(self) -> RuntimeMode {
        match self {
            CudagraphMode::None => RuntimeMode::None,
            CudagraphMode::Piecewise => RuntimeMode::Piecewise,
            CudagraphMode::Full
            | CudagraphMode::FullDecodeOnly
            | CudagraphMode::FullAndPiecewise => RuntimeMode::Full,
        }
    }

    fn mixed_mode(self) -> RuntimeMode {
        match self {
            CudagraphMode::None | CudagraphMode::FullDecodeOnly => RuntimeMode::None,
            CudagraphMode::Piecewise | CudagraphMode::FullAndPiecewise => RuntimeMode::Piecewise,
            CudagraphMode::Full => RuntimeMode::Full,
        }
    }

    fn separate_routine(self) -> bool {
        matches!(
            self,
            CudagraphMode::FullDecodeOnly | CudagraphMode::FullAndPiecewise
        )
    }

    fn has_full_cudagraphs(self) -> bool {
        self.decode_mode() == RuntimeMode::Full
    }

    fn has_piecewise_cudagraphs(self) -> bool {
        self.requires_piecewise_compilation()
    }

    fn requires_piecewise_compilation(self) -> bool {
        self.decode_mode() == RuntimeMode::Piecewise || self.mixed_mode() == RuntimeMode::Piecewise
    }

    fn without_piecewise(self) -> CudagraphMode {
        match self {
            CudagraphMode::Piecewise => CudagraphMode::None,
            CudagraphMode::FullAndPiecewise => CudagraphMode::FullDecodeOnly,
            other => other,
        }
    }

    fn is_valid_runtime_mode(self) -> bool {
        !self.separate_routine()
    }

    fn name(self) -> &'static str {
        match self {
            CudagraphMode::None => "NONE",
            CudagraphMode::Piecewise => "PIECEWISE",
            CudagraphMode::Full => "FULL",
            CudagraphMode::FullDecodeOnly => "FULL_DECODE_ONLY",
            CudagraphMode::FullAndPiecewise => "FULL_AND_PIECEWISE",
        }
    }
}

/// The field's name of a support level.
#[must_use]
pub fn support_name(support: CudagraphSupport) -> &'static str {
    match support {
        CudagraphSupport::Never => "NEVER",
        CudagraphSupport::UniformSingleTokenDecode => "UNIFORM_SINGLE_TOKEN_DECODE",
        CudagraphSupport::UniformBatch => "UNIFORM_BATCH",
        CudagraphSupport::Always => "ALWAYS",
    }
}

/// The weakest support, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeakestSupport {
    /// The support level.
    pub support: CudagraphSupport,
    /// Index of the first group that has it; `None` if every group is at ALWAYS.
    pub group: Option<usize>,
}

/// The weakest support over attention groups: the first that is strictly weaker than those before it wins.
#[must_use]
pub fn weakest_support(supports: impl IntoIterator<Item = CudagraphSupport>) -> WeakestSupport {
    let mut weakest = WeakestSupport {
        support: CudagraphSupport::Always,
        group: None,
    };
    for (group, support) in supports.into_iter().enumerate() {
        if support < weakest.support {
            weakest = WeakestSupport {
                support,
                group: Some(group),
            };
        }
    }
    weakest
}
