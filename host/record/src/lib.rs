//! Recordings of steps, and public request traces.
//!
//! - [`record`] gives a [`Recorder`], which an engine tells of every served step: it copies the step into memory that is used
//!   again and hands it to a thread that writes. A [`RecorderHandle`] says what became of them.
//! - [`Recording`] reads what was written: [`RecordedStep`]s, and what is missing.
//! - [`replay`] runs the recorded builders again, or another one, and says what differs and what it costs.
//! - [`trace`] reads public request traces and makes prompts whose blocks repeat as the trace says.
//!
//! Must never know: a device, a model, a scheduler, or the command line.

mod entry;
mod frame;
mod pack;
mod reader;
mod recorder;
mod replay;
pub mod trace;
mod writer;

pub use entry::{RecordedStep, RecordedVersion, Slot};
pub use frame::FORMAT;
pub use reader::{Missing, Recording, RecordingError, Steps};
pub use recorder::{
    Behind, RecordError, Recorder, RecorderFigures, RecorderHandle, RecorderOptions, record,
};
pub use replay::{
    BuilderCost, BuilderReport, Candidate, Difference, MetadataDigest, ReplayError, ReplayOptions,
    ReplayReport, Verdict, replay,
};
