//! The verifier's rules: plain builders always pass, every field's rule is broken once, random corruptions are refused or
//! inert.

mod clever;
mod flash_attn_fields;
mod flash_mla_fields;
mod flashinfer_fields;
mod mamba_fields;
mod mamba_steps;
mod meaning;
mod mutations;
mod plain;
mod step_fields;
mod support;
mod triton_attn_fields;
mod trtllm_fields;
