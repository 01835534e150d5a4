//! What a build costs in fuel, time and memory, beside the reference component in the same run. It must never know what a good
//! figure is, only what a host allows.

use std::hint::black_box;
use std::time::{Duration, Instant};

use timetable_attention::MetadataBuilder;
use timetable_sandbox::{Component, FaultPolicy, WasmBuilder, measure::interleaved};
use timetable_types::BuilderConfig;

use super::batches::{MAX_MODEL_LEN, decodes};
use super::report::{Cost, Finding, Headroom, Report, Severity};

const ROWS: [u32; 4] = [1, 64, 256, 1_024];
/// Samples at most and at least, each the mean of so many calls, and the time that they should take together.
const ROUNDS: (f64, f64) = (200.0, 5.0);
const CALLS: u32 = 10;
const PATIENCE: Duration = Duration::from_millis(500);
/// Builds until memory should be as large as it gets, and builds after that; fewer where they take long.
const WARM_UP: u32 = 500;
const BUILDS: u32 = 4_000;

/// Adds cost and memory to `report`. A component that fails here was found failing before.
///
/// # Errors
/// If the reference component fails.
pub fn measure(
    component: &Component,
    reference: &[u8],
    config: &BuilderConfig,
    report: &mut Report,
) -> Result<(), String> {
    let sandbox = component.sandbox();
    let reference = sandbox.load(reference).map_err(|error| error.to_string())?;
    let mut beside = config.clone();
    beside.options.clear();
    for rows in ROWS {
        let common = decodes(config, rows, MAX_MODEL_LEN, rows.into()).cam;
        let Ok(mut builder) = WasmBuilder::new(component, config) else {
            return Ok(());
        };
        let begun = Instant::now();
        if builder.build(&common, false).is_err() {
            continue;
        }
        let round = begun.elapsed().as_secs_f64() * f64::from(CALLS);
        let rounds = (PATIENCE.as_secs_f64() / round).clamp(ROUNDS.1, ROUNDS.0) as usize;
        let limit = sandbox.limits().fuel_for(rows);
        let fuel = builder.fuel_used();
        let mut reference =
            WasmBuilder::new(&reference, &beside).map_err(|fault| fault.to_string())?;
        let times = interleaved(
            rounds,
            CALLS,
            &mut [
                &mut || drop(black_box(builder.build(&common, false))),
                &mut || drop(black_box(reference.build(&common, false))),
            ],
        );
        // Failing is faster than building: no figure at all is better.
        if builder.is_dead() {
            continue;
        }
        let allowed = FaultPolicy::default().build_budget.per_step;
        if times[0].median_ns > allowed.as_nanos() as f64 {
            report.find(Finding {
                severity: Severity::Refused,
                check: "build budget",
                configurations: vec!["gpu"],
                times: 1,
                what: format!(
                    "a build of {rows} rows takes {:.0} µs here, where a host allows {:.0} µs a step in the long run",
                    times[0].median_ns / 1e3,
                    allowed.as_secs_f64() * 1e6
                ),
                remedy: "a host takes out of service what overspends: do less, above all fewer divisions and dependent loads",
                step: None,
                key: "time".to_owned(),
            });
        }
        report.cost.push(Cost {
            rows,
            fuel,
            fuel_percent: fuel as f64 / limit as f64 * 100.0,
            p50_ns: times[0].median_ns,
            p99_ns: times[0].p99_ns,
            reference_p50_ns: times[1].median_ns,
        });
    }
    memory(component, config, report);
    Ok(())
}

fn memory(component: &Component, config: &BuilderConfig, report: &mut Report) {
    let Ok(mut builder) = WasmBuilder::new(component, config) else {
        return;
    };
    let steps: Vec<_> = [1, 64, 256]
        .map(|rows| decodes(config, rows, MAX_MODEL_LEN, rows.into()).cam)
        .into();
    let (begun, mut warm, mut builds) = (Instant::now(), 0, 0);
    for build in 0..WARM_UP + BUILDS {
        if build > 2 * WARM_UP && begun.elapsed() > 6 * PATIENCE {
            break;
        }
        builds = build.saturating_sub(WARM_UP) + 1;
        if build == WARM_UP {
            warm = builder.memory_bytes();
        }
        if let Err(fault) = builder.build(&steps[build as usize % steps.len()], false)
            && builder.is_dead()
        {
            report.find(Finding {
                severity: Severity::Refused,
                check: "memory",
                configurations: vec!["gpu"],
                times: 1,
                what: format!("build {} of one instance: {fault}", build + 1),
                remedy: "a builder lives as long as its host: keep only what is bounded, and fail no call that went well before",
                step: None,
                key: "fault".to_owned(),
            });
            return;
        }
    }
    let cap = component.sandbox().limits().max_memory_bytes;
    let (bytes, growth) = (builder.memory_bytes(), builder.memory_bytes() - warm);
    let room = &mut report.headroom;
    *room = Headroom {
        memory_bytes: bytes,
        memory_percent: bytes as f64 / cap as f64 * 100.0,
        memory_growth_bytes: growth,
        builds,
        ..std::mem::take(room)
    };
    if growth > 0 {
        report.find(Finding {
            severity: Severity::Warning,
            check: "memory",
            configurations: vec!["gpu"],
            times: 1,
            what: format!("memory grew by {growth} bytes over {builds} builds of equal steps, to {bytes} of {cap}"),
            remedy: "a builder that keeps growing traps at the cap: keep only what is bounded",
            step: None,
            key: "growth".to_owned(),
        });
    }
}
