//! `check`: would a host take this component, and what would it cost? Without a host, a model or a device.

mod batches;
mod cost;
mod examine;
mod report;

use serde_json::json;
use timetable_attention::Grant;
use timetable_sandbox::{Limits, Sandbox};

use super::{print, print_json, read_component};
use crate::cli::{Check, GrantArg};
use crate::exit::{Exit, Failure};
use report::{Headroom, Report};

pub fn run(arguments: &Check) -> Result<(), Failure> {
    let origin = arguments.path.display().to_string();
    let bytes = read_component(&arguments.path)?;
    let wrong = |what: &dyn std::fmt::Display| {
        Failure::new(Exit::BadInput, format!("component {origin}: {what}"))
    };
    let sandbox = Sandbox::new(Limits::default()).map_err(Failure::of(Exit::Failure))?;
    let component = sandbox.load(&bytes).map_err(|error| wrong(&error))?;
    let of_family: Vec<_> = timetable_reference::components()
        .iter()
        .filter(|known| known.default && known.family == component.family())
        .collect();
    // A family may serve several backends: the first, unless another is named.
    let reference = match &arguments.backend {
        None => of_family.first(),
        Some(backend) => of_family.iter().find(|known| known.backend == backend),
    };
    let Some(&reference) = reference else {
        let there: Vec<&str> = of_family.iter().map(|known| known.backend).collect();
        return Err(wrong(&match (there.is_empty(), &arguments.backend) {
            (false, Some(backend)) => format!(
                "it builds for {}, not for {backend}; build it against that backend's interface, or leave --backend out",
                there.join(" or ")
            ),
            _ => format!(
                "it exports {}, a family that this host has no rules for and runs no builders of; build for {}",
                component.family().interface(),
                backends().join(" or ")
            ),
        }));
    };

    let mut report = Report {
        path: origin.clone(),
        bytes: bytes.len(),
        component: component.hash().to_hex(),
        contract: "timetable:attention@0.1.0",
        interface: component.family().interface(),
        backend: reference.backend,
        grant: match arguments.grant {
            GrantArg::Exact => "exact",
            GrantArg::Subset => "subset",
        },
        seed: arguments.seed,
        builder: None,
        configurations: Vec::new(),
        promises_held: 0,
        compared_calls: 0,
        cost: Vec::new(),
        headroom: Headroom::default(),
        findings: Vec::new(),
    };
    let grant = match arguments.grant {
        GrantArg::Exact => Grant::Exact,
        GrantArg::Subset => Grant::Subset,
    };
    for configuration in batches::configurations(component.family(), &arguments.builder_option) {
        let cases = batches::cases(&configuration.config, arguments.seed, arguments.batches);
        examine::Examination {
            component: &component,
            reference: reference.name,
            configuration: &configuration,
            grant,
            report: &mut report,
        }
        .run(&cases)
        .map_err(Failure::of(Exit::Failure))?;
    }
    let config = batches::gpu(component.family(), &arguments.builder_option);
    cost::measure(&component, reference.bytes, &config, &mut report)
        .map_err(Failure::of(Exit::Failure))?;

    if arguments.json {
        let mut answer = json!(report);
        answer["passes"] = json!(report.passes());
        print_json(&answer)?;
    } else {
        print(report.text().as_bytes())?;
    }
    if report.passes() {
        return Ok(());
    }
    let refused = report
        .findings
        .iter()
        .find(|finding| finding.severity == report::Severity::Refused);
    let first = refused.map_or("", |finding| finding.what.as_str());
    Err(Failure::new(
        Exit::Refused,
        format!(
            "component {origin}: a host would refuse it: {first}; the report has every finding and its remedy"
        ),
    ))
}

/// Backends that this host runs builders of.
fn backends() -> Vec<&'static str> {
    let components = timetable_reference::components().iter();
    components
        .filter(|known| known.default)
        .map(|known| known.backend)
        .collect()
}
