//! The rule book against the cases recorded from the real implementation, one function per vectors file; against the field's
//! cases, by number; and its properties.

mod backends;
mod caches;
mod chunks;
mod field_cases;
mod graphs;
mod harness;
mod properties;
mod rows;
mod rules;
mod splits;
mod steps;
mod summary;
mod tables;
