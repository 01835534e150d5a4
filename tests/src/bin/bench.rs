//! The measuring program: `bench [NAME…] [--json] [--list]`. `cargo xtask bench` builds it for this machine's own CPU,
//! fetches the model, and runs it.
//!
//! Environment: `TIMETABLE_MODEL`, the default model's file; `TIMETABLE_BENCH_VENV`, the Python environment that has or gets
//! the peer, `target/bench-venv` if it is not set; `TIMETABLE_PROGRAM`, the binary `timetable`, and for `serve`
//! `TIMETABLE_SOAK_SECONDS` and `TIMETABLE_SOAK_CLIENTS`.

use std::process::ExitCode;

use timetable_tests::bench::{self, Benchmark};

fn main() -> ExitCode {
    let mut json = false;
    let mut names = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--json" => json = true,
            "--list" => {
                for benchmark in &bench::BENCHMARKS {
                    println!("{:10} {}", benchmark.name, benchmark.what);
                }
                return ExitCode::SUCCESS;
            }
            "--help" | "-h" => {
                println!("Usage: bench [NAME…] [--json] [--list]");
                return ExitCode::SUCCESS;
            }
            _ => names.push(argument),
        }
    }
    let chosen: Vec<&Benchmark> = match bench::choose(&names) {
        Ok(chosen) => chosen,
        Err(message) => {
            eprintln!("bench: {message}");
            return ExitCode::from(2);
        }
    };
    eprintln!("{}", bench::machine());
    let mut all = Vec::new();
    for benchmark in chosen {
        eprintln!("measuring {}: {}", benchmark.name, benchmark.what);
        let rows = (benchmark.measure)();
        if !json {
            print!("{}", bench::table(&rows));
        }
        all.extend(rows);
    }
    if json {
        match serde_json::to_string_pretty(&all) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("bench: the rows could not be written as JSON: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    match all.iter().any(|row| row.broken) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}
