//! Commands of those who write builders.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use super::key_value;

#[derive(Debug, Args)]
pub struct New {
    /// The crate's name: a lower-case letter, then lower-case letters, digits, `-` and `_`
    pub name: String,

    /// The attention backend that it builds for: FLASH_ATTN, FLASHINFER
    #[arg(long, value_name = "NAME", default_value = "FLASH_ATTN")]
    pub backend: String,

    /// The directory to make [default: ./NAME]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub path: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Componentize {
    /// The core module that a compiler wrote for wasm32-unknown-unknown
    #[arg(value_name = "MODULE", value_hint = ValueHint::FilePath)]
    pub module: PathBuf,

    /// The component to write
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
}

/// What an operator allows a builder to attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GrantArg {
    /// Every key of every request
    #[default]
    Exact,
    /// Whole pages of a request's context may be left out
    Subset,
}

#[derive(Debug, Args)]
pub struct Check {
    /// The component
    #[arg(value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    /// The backend that it must build for [default: the one that it exports]
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,

    /// What the operator will grant it
    #[arg(long, value_enum, default_value_t = GrantArg::Exact)]
    pub grant: GrantArg,

    /// An option of the builder's own, as KEY=VALUE
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub builder_option: Vec<(String, String)>,

    /// Random batches of each configuration
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub batches: u32,

    /// Seed of the batches: the same seed gives the same batches
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
