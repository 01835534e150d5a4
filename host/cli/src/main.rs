//! The binary `timetable`. Thin: it reads the command line, runs one command, and turns an error into one line and an exit
//! status.

mod admin;
mod cli;
mod commands;
mod config;
mod device;
mod exit;
mod provenance;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("TIMETABLE_LOG")
                .unwrap_or_else(|_| "warn,wasmtime=error,tokenizers=error".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let result = match cli.command {
        Command::Generate(arguments) => commands::generate::run(&arguments),
        Command::Serve(arguments) => commands::serve::run(&arguments),
        Command::Reload(arguments) => commands::reload::reload(&arguments),
        Command::Rollback(arguments) => commands::control::rollback(&arguments),
        Command::Builders(arguments) => commands::control::builders(&arguments),
        Command::Top(arguments) => commands::top::run(&arguments),
        Command::Build(arguments) => commands::build::run(&arguments),
        Command::Backends(arguments) => commands::backends::run(&arguments),
        Command::ExplainGraphs(arguments) => commands::explain_graphs::run(&arguments),
        Command::Config(command) => commands::config::run(&command),
        Command::Selftest(arguments) => commands::selftest::run(&arguments),
        Command::Bench(arguments) => commands::bench::run(&arguments),
        Command::Replay(arguments) => commands::replay::run(&arguments),
        Command::ReplayBundle(arguments) => commands::replay_bundle::run(&arguments),
        Command::New(arguments) => commands::new::run(&arguments),
        Command::Componentize(arguments) => commands::componentize::run(&arguments),
        Command::Check(arguments) => commands::check::run(&arguments),
        Command::Components(arguments) => commands::components::run(&arguments),
        Command::Completions(arguments) => commands::completions(arguments.shell),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("timetable: {failure}");
            failure.code()
        }
    }
}
