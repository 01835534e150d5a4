//! Several layers of one kind, with different sizes, in one KV cache group.

use super::{CacheSpec, SpecError};

/// The specs of a group's layers, by layer name. All have the same block size, sharding and base kind.
///
/// Source: vLLM `UniformTypeKVCacheSpecs` @0.32/0.33.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UniformTypeKvCacheSpecs {
    members: Vec<(String, CacheSpec)>,
}

impl UniformTypeKvCacheSpecs {
    /// Groups `members`, in their order.
    ///
    /// # Errors
    /// [`SpecError::Empty`], or [`SpecError::NotUniform`] naming the first layer that does not fit and what differs.
    pub fn new(members: Vec<(String, CacheSpec)>) -> Result<Self, SpecError> {
        let Some((first_name, first)) = members.first() else {
            return Err(SpecError::Empty);
        };
        for (name, spec) in &members {
            if let Some(what) = difference(first, spec) {
                return Err(SpecError::NotUniform {
                    layer: name.clone(),
                    first: first_name.clone(),
                    what,
                });
            }
        }
        Ok(UniformTypeKvCacheSpecs { members })
    }

    /// Layer names and specs, in the order given.
    pub fn members(&self) -> &[(String, CacheSpec)] {
        &self.members
    }

    /// The spec of `layer`, if it is a member.
    pub fn get(&self, layer: &str) -> Option<&CacheSpec> {
        self.members
            .iter()
            .find_map(|(name, spec)| (name == layer).then_some(spec))
    }

    /// Tokens of a block: the same for all.
    pub fn block_size(&self) -> u32 {
        self.first().block_size()
    }

    /// Bytes of one block of all members: their **sum**.
    pub fn page_size_bytes(&self) -> u64 {
        self.members
            .iter()
            .fold(0, |sum, (_, s)| sum.saturating_add(s.page_size_bytes()))
    }

    /// The first member; there always is one.
    pub(super) fn first(&self) -> &CacheSpec {
        &self.members[0].1
    }

    pub(super) fn set_block_size(&mut self, block_size: u32) {
        for (_, spec) in &mut self.members {
            *spec = spec.copy_with_new_block_size(block_size);
        }
    }
}

/// What keeps `a` and `b` from sharing a group, if anything. Windows must agree among sliding-window layers and chunks among
/// chunked ones; Mamba has its own rule; MLA counts as full attention; every other kind groups with itself only.
fn difference(a: &CacheSpec, b: &CacheSpec) -> Option<&'static str> {
    if a.block_size() != b.block_size() {
        return Some("block_size");
    }
    if a.dcp_sharded() != b.dcp_sharded() {
        return Some("dcp_sharded");
    }
    match (a, b) {
        // MLA is a full-attention type to the field's registry: the two may share a group.
        (
            CacheSpec::FullAttention(_) | CacheSpec::MlaAttention(_),
            CacheSpec::FullAttention(_) | CacheSpec::MlaAttention(_),
        )
        | (CacheSpec::CrossAttention(_), CacheSpec::CrossAttention(_))
        | (CacheSpec::EncoderOnlyAttention(_), CacheSpec::EncoderOnlyAttention(_)) => None,
        (CacheSpec::SlidingWindow(x), CacheSpec::SlidingWindow(y)) => {
            (x.sliding_window != y.sliding_window).then_some("sliding_window")
        }
        (CacheSpec::SlidingWindowMla(x), CacheSpec::SlidingWindowMla(y)) => {
            (x.sliding_window != y.sliding_window).then_some("sliding_window")
        }
        (CacheSpec::ChunkedLocalAttention(x), CacheSpec::ChunkedLocalAttention(y)) => {
            (x.attention_chunk_size != y.attention_chunk_size).then_some("attention_chunk_size")
        }
        (CacheSpec::Mamba(x), CacheSpec::Mamba(y)) => {
            (!x.uniform_with(y)).then_some("the Mamba state's parameters")
        }
        (CacheSpec::UniformType(_), _) | (_, CacheSpec::UniformType(_)) => {
            Some("nesting of UniformType specs")
        }
        _ => Some("the kind of spec"),
    }
}
