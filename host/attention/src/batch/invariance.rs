//! Batch invariance: a request's numbers must not depend on what else is in the batch. It must never know how a
//! backend keeps that.
//!
//! Source: vLLM 0.33 `init_attn_backend` (`vllm/v1/worker/gpu/attn_utils.py`); one split is ours.

use core::fmt;

/// What batch invariance changes, or why it cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvarianceFinding {
    /// A backend cannot. Start-up is refused.
    Unsupported {
        /// The backend's name.
        backend: String,
    },
    /// Prefix caching must be off with this backend: a cached prefix was computed in chunks of another size.
    DisablePrefixCaching {
        /// The backend's name.
        backend: String,
    },
    /// Requests are not split: a merge of partial results rounds differently from one pass.
    OneSplit {
        /// The limit as configured.
        configured: u32,
    },
}

impl InvarianceFinding {
    /// Must start-up be refused?
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, InvarianceFinding::Unsupported { .. })
    }
}

impl fmt::Display for InvarianceFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvarianceFinding::Unsupported { backend } => {
                write!(f, "VLLM batch_invariant mode is not supported for {backend}.")
            }
            InvarianceFinding::DisablePrefixCaching { backend: _ } => f.write_str(
                "Disabling prefix caching for FLASHINFER/TRITON_MLA with batch invariance, as it is not yet supported.",
            ),
            InvarianceFinding::OneSplit { configured } => {
                write!(f, "batch invariance: max_num_splits is 1 (configured: {configured}); requests are not split")
            }
        }
    }
}

/// What batch invariance means for these backends, (name, `supports_batch_invariance`), one per attention group. A refusal,
/// where there is one, comes first.
#[must_use]
pub fn check_batch_invariance(
    backends: &[(&str, bool)],
    prefix_caching: bool,
    max_num_splits: u32,
) -> Vec<InvarianceFinding> {
    if let Some((backend, _)) = backends.iter().find(|(_, supported)| !supported) {
        return vec![InvarianceFinding::Unsupported {
            backend: (*backend).into(),
        }];
    }
    let mut findings = Vec::new();
    let uncached = backends
        .iter()
        .find(|(backend, _)| matches!(*backend, "FLASHINFER" | "TRITON_MLA"));
    if let (Some((backend, _)), true) = (uncached, prefix_caching) {
        findings.push(InvarianceFinding::DisablePrefixCaching {
            backend: (*backend).into(),
        });
    }
    if max_num_splits > 1 {
        findings.push(InvarianceFinding::OneSplit {
            configured: max_num_splits,
        });
    }
    findings
}
