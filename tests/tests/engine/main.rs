//! The engine, from its blocks to its answers.

mod batch;
mod blocks;
mod counts;
mod families;
mod hybrid;
mod invariance;
mod recorded;
mod reload;
mod sampling;
mod scheduler;
mod speculation;
mod tenants;
mod tenants_scheduler;
mod tiny_llama;
mod two_in_flight;
mod windows;
