//! What the verifier lets through is right: every field of every record of every family with rules is broken in every way, and
//! arbitrary records are tried. What is not refused runs on the CPU device with everything that is not the request's own
//! poisoned, and must give the right answer.
//!
//! A new family adds its good records to `bases`; a family with rules and none there fails `suites`.

mod arbitrary;
mod bases;
mod bench;
mod case;
mod mutate;
mod reading;
mod recurrent;
mod suites;
