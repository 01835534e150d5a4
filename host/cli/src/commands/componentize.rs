//! `componentize`: a core module becomes a component.

use std::io::Read;

use super::print;
use crate::cli::Componentize;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Componentize) -> Result<(), Failure> {
    let wrong = |what: &dyn std::fmt::Display| {
        Failure::new(
            Exit::BadInput,
            format!("module {}: {what}", arguments.module.display()),
        )
    };
    let cannot = |error: std::io::Error| {
        wrong(&format!(
            "cannot be read ({error}); give what the compiler wrote, target/wasm32-unknown-unknown/release/NAME.wasm"
        ))
    };
    // Asked before it is opened: opening a pipe would wait for its other end.
    if !std::fs::metadata(&arguments.module)
        .map_err(cannot)?
        .is_file()
    {
        return Err(wrong(&"is not a regular file; give a module (.wasm)"));
    }
    let max = crate::admin::component_bytes_max();
    let mut core = Vec::new();
    std::fs::File::open(&arguments.module)
        .and_then(|file| file.take(max + 1).read_to_end(&mut core))
        .map_err(cannot)?;
    if core.len() as u64 > max {
        return Err(wrong(&format!(
            "has more than the {max} bytes that a component may have; compile it with --release"
        )));
    }
    let component =
        timetable_componentize::wrap(&core).map_err(|error| wrong(&format!("{error:#}")))?;
    let output = arguments.output.display();
    std::fs::write(&arguments.output, &component).map_err(|error| {
        Failure::new(
            Exit::BadInput,
            format!("{output}: cannot be written ({error}); give a path with -o PATH"),
        )
    })?;
    print(format!("{output}: {} bytes\n", component.len()).as_bytes())
}
