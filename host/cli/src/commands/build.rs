//! `build`: one build outside the engine, verified, its symbolic tensors resolved.

use std::io::Read;
use std::path::Path;

use serde_json::json;
use timetable_attention::describe::{DescribedStep, StepDescription, metadata_to_json};
use timetable_attention::{BuildFault, MetadataBuilder, Resolver, Verifier};
use timetable_sandbox::{Limits, Sandbox, WasmBuilder};

use super::{embedded, print, print_json, read_component};
use crate::cli::Build;
use crate::exit::{Exit, Failure};

pub fn run(arguments: &Build) -> Result<(), Failure> {
    let step = describe(&arguments.input)?;
    let (origin, bytes) = match &arguments.builder {
        Some(path) => (path.display().to_string(), read_component(path)?),
        None => (
            arguments.backend.clone(),
            embedded(&arguments.backend)?.bytes.to_vec(),
        ),
    };
    let sandbox = Sandbox::new(Limits::default()).map_err(Failure::of(Exit::Failure))?;
    let component = sandbox
        .load(&bytes)
        .map_err(|error| Failure::new(Exit::BadInput, format!("component {origin}: {error}")))?;
    let mut builder =
        WasmBuilder::new(&component, &step.config).map_err(|fault| refused(&origin, &fault))?;
    let metadata = builder
        .build(&step.step.cam, false)
        .map_err(|fault| refused(&origin, &fault))?;

    let extras = step.borrowed_extras();
    let inputs = step.inputs(&extras);
    Verifier::new()
        .verify(&metadata, &step.context(&inputs))
        .map_err(|refusal| {
            Failure::new(
                Exit::Refused,
                format!("component {origin}: refused: {refusal}"),
            )
        })?;
    let resolver = Resolver::new(&step.config, &step.step.cam, inputs);
    let metadata = metadata_to_json(&metadata, &resolver).map_err(Failure::of(Exit::Failure))?;
    let answer = json!({
        "builder": { "name": builder.info().name, "component": component.hash().to_hex(), "origin": origin },
        "metadata": metadata,
    });
    if arguments.json {
        return print_json(&answer);
    }
    print(format!("{answer:#}\n").as_bytes())
}

/// Reads and checks the step.
fn describe(path: &Path) -> Result<DescribedStep, Failure> {
    let wrong = |what: &dyn std::fmt::Display| {
        Failure::new(Exit::BadInput, format!("step {}: {what}", path.display()))
    };
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text))
    }
    .map_err(|error| {
        wrong(&format!(
            "cannot be read ({error}); give the path of a JSON file, or - for standard input"
        ))
    })?;
    StepDescription::from_json(&text)
        .and_then(|description| description.validate())
        .map_err(|error| wrong(&error))
}

fn refused(origin: &str, fault: &BuildFault) -> Failure {
    Failure::new(Exit::Refused, format!("component {origin}: {fault}"))
}
