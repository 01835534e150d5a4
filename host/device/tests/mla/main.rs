//! Latent attention on the CPU device: every part of its metadata executed, against f64.

mod batch;
mod cache;
mod field_cases;
mod layer;
mod metadata;
mod random;
mod ranks;
mod ubatch;
