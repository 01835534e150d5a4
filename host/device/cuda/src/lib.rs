//! The CUDA device.

pub mod images;
pub mod params;
