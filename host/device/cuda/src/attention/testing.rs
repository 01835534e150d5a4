//! Groups for tests.

use timetable_types::Family;

use super::config::GroupConfig;
use crate::cache::CacheDtype;
use crate::kernels::Element;
use crate::upload::{StepLimits, testing};

/// A bf16 group of 8 query heads, 2 KV heads, head 64, blocks of 16.
pub(crate) fn group(family: Family) -> GroupConfig {
    let config = testing::config(16, 8, 2, 64);
    let limits = StepLimits {
        max_num_reqs: 64,
        max_num_tokens: 1024,
        table_width: 40,
        max_num_logits: 64,
    };
    GroupConfig::new(
        family,
        &config,
        Element::Bf16,
        CacheDtype::Bf16,
        limits,
        132,
    )
    .expect("a good group")
}
