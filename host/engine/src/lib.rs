//! The engine: scheduler, KV blocks, step loop, and the model's layers other than attention.

pub mod chat;
pub mod model;
pub mod sampling;
pub mod tokenizer;
