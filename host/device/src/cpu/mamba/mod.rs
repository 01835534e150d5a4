//! Layers that keep a state per request instead of keys and values, executing the Mamba family's metadata: Mamba2, the gated
//! delta net, Mamba1, short convolutions and lightning attention. This module must never know how metadata was built.
//!
//! Metadata of every type is prepared into the same two lists of *runs*: for the convolution and for the recurrence, which
//! tokens follow each other, from which state, and after which of them a state is kept. A layer then runs unit by unit (a head,
//! or some channels), each unit through all runs in order: so no metadata makes two threads meet in a state, and a result depends
//! neither on their number nor on the rest of the batch. Sums and states under way are f64, what is kept is f32.
//!
//! A state holds its own window of the convolution. The field rolls one window of kernel − 1 + drafts inputs in a request's first
//! state instead; what is read where a verification begins is the same.

mod config;
mod conv;
mod execute;
mod gdn;
mod linear;
mod mamba1;
mod mamba2;
mod numbers;
mod recurrence;
mod states;
mod step;

pub use config::{
    GdnConfig, GdnInputs, LinearConfig, LinearInputs, Mamba1Config, Mamba1Inputs, Mamba2Config,
    Mamba2Inputs, MambaConfig, MambaInputs, ShortConvConfig, ShortConvInputs,
};
pub use execute::MambaImpl;
pub use states::MambaStates;
pub use step::MambaStepMetadata;
