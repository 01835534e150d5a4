//! One call of attention for the whole step, with the host's own tensors: the fields that FLASH_ATTN and TRITON_ATTN share, and
//! one rule for each. It must never know how either divides its work.

use timetable_types::{Causal, Input, KvCacheSpecKind, Tensor};

use super::{
    VerifyContext, lanes, reference,
    refusal::{Refusal, absent, between, configured, equal},
};

/// The arguments of the call.
pub(super) struct Call<'m> {
    pub num_actual_tokens: u32,
    pub max_query_len: u32,
    pub query_start_loc: &'m Tensor,
    pub max_seq_len: u32,
    pub seq_lens: &'m Tensor,
    pub block_table: &'m Tensor,
    pub slot_mapping: &'m Tensor,
    pub causal: &'m Causal,
}

impl Call<'_> {
    pub(super) fn verify(&self, ctx: &VerifyContext<'_>) -> Result<(), Refusal> {
        let common = ctx.common;
        let cross = ctx.config.kv_cache_spec.kind == KvCacheSpecKind::CrossAttention
            && common.encoder.is_some();
        // The padded token count: output beyond it stays unwritten, beyond the batch there is none.
        equal(
            "num_actual_tokens",
            self.num_actual_tokens,
            common.num_actual_tokens,
        )?;
        // At least the longest query (less leaves output unwritten), at most what the launch was promised.
        let (longest, _) = lanes::steps(ctx.inputs.query_start_loc);
        between(
            "max_query_len",
            self.max_query_len,
            longest,
            ctx.max_query_bound(),
        )?;
        reference(
            "query_start_loc",
            self.query_start_loc,
            Input::QueryStartLoc,
        )?;
        // At least the longest keys (less leaves keys out), at most the longest sequence served.
        let key_lens = match ctx.inputs.encoder_seq_lens {
            Some(lens) if cross => lens,
            _ => ctx.inputs.seq_lens,
        };
        let longest_keys = lanes::max_i32(key_lens);
        between(
            "max_seq_len",
            self.max_seq_len,
            longest_keys,
            ctx.max_len_bound().max(longest_keys.into()),
        )?;
        let key_input = if cross {
            Input::EncoderSeqLens
        } else {
            Input::SeqLens
        };
        reference("seq_lens", self.seq_lens, key_input)?;
        reference("block_table", self.block_table, Input::BlockTable)?;
        reference("slot_mapping", self.slot_mapping, Input::SlotMapping)?;
        // The batch's own flag, or its rows' flags by reference.
        configured(
            "causal",
            *self.causal == common.causal,
            flag(self.causal),
            flag(&common.causal),
        )
    }
}

/// The prompt lengths by reference, where the model uses them and only there.
pub(super) fn rswa(
    ctx: &VerifyContext<'_>,
    prefix_lens: Option<&Tensor>,
    window: u32,
) -> Result<(), Refusal> {
    let attention = &ctx.config.attention;
    if attention.use_rswa {
        let lens = prefix_lens.ok_or(Refusal::missing("rswa_prefix_lens"))?;
        reference("rswa_prefix_lens", lens, Input::RswaPrefixLens)?;
        equal("rswa_window", window, attention.rswa_window)
    } else {
        absent("rswa_prefix_lens", prefix_lens.is_some())?;
        // Without prefix lengths the window means nothing; the field still shows the model's.
        let shown = window == 0 || window == attention.rswa_window;
        configured(
            "rswa_window",
            shown,
            window.into(),
            attention.rswa_window.into(),
        )
    }
}

fn flag(causal: &Causal) -> i64 {
    match causal {
        Causal::All(flag) => i64::from(*flag),
        Causal::PerRequest => 2,
    }
}
