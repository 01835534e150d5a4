//! `reload`: submits a version to the running host, and waits until it serves if that is asked.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args, ValueHint};
use serde_json::{Value, json};
use timetable_provenance::Source;
use timetable_sandbox::{Canary, Gates, ReloadPlan, TenantName};

use super::control::{short, socket};
use super::{print, print_json};
use crate::admin::{self, Request};
use crate::cli::{AdminArgs, key_value};
use crate::exit::{Exit, Failure};
use crate::provenance;

/// How often a waiting client looks.
const LOOK: Duration = Duration::from_millis(100);
/// How often it says that something is still going on.
const SAY: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct Reload {
    /// As `timetable builders` names it: FLASH_ATTN, FLASHINFER, TRITON_MLA, MAMBA2, …
    pub backend: String,

    /// The component: a path, or oci://REGISTRY/REPOSITORY@sha256:…; without it the one in service, with other options
    #[arg(value_name = "PATH", value_hint = ValueHint::FilePath, required_unless_present = "builder_option")]
    pub source: Option<Source>,

    /// The builder of this tenant's own, instead of everybody's
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<TenantName>,

    /// Its detached signature [default: PATH.minisig or PATH.sig, if there is one]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "source")]
    pub signature: Option<PathBuf>,

    /// An option of the builder's own, as KEY=VALUE, instead of all those that it has; part of its version
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub builder_option: Vec<(String, String)>,

    /// Wait until it serves; if it is withdrawn, say why and end with exit code 3
    #[arg(long)]
    pub wait: bool,

    #[command(flatten, next_help_heading = "Stages")]
    pub stages: StagesArgs,

    #[command(flatten)]
    pub admin: AdminArgs,
}

/// How a version gets into service. Without any of these the host decides, which takes it as soon as it is checked.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("stage").args(["shadow", "canary", "canary_tenant"]).multiple(true)))]
#[command(group(ArgGroup::new("canaries").args(["canary", "canary_tenant"]).multiple(true)))]
pub struct StagesArgs {
    /// Take it into service as soon as it is checked
    #[arg(long, conflicts_with = "stage")]
    pub immediate: bool,

    /// Show it that many live steps first, and compare what it builds with what served
    #[arg(long, value_name = "STEPS")]
    pub shadow: Option<u32>,

    /// Then let it serve that share of the steps, 0.1% to 100%
    #[arg(long, value_name = "PERCENT", value_parser = share)]
    pub canary: Option<u32>,

    /// Then let it serve this tenant's rows, instead of a share; may be given several times
    #[arg(long, value_name = "TENANT", conflicts_with = "canary")]
    pub canary_tenant: Vec<TenantName>,

    /// Steps that it must serve in canary
    #[arg(long, value_name = "STEPS", requires = "canaries", default_value_t = Canary::default().steps)]
    pub canary_steps: u32,

    /// Withdraw it if its median build takes more than that many times as long; `inf` is no gate
    #[arg(long, value_name = "RATIO", requires = "stage", default_value_t = Gates::default().max_build_ratio)]
    pub max_build_ratio: f64,

    /// … or that many microseconds longer
    #[arg(long, value_name = "µS", requires = "stage", default_value_t = Gates::default().max_extra_build_us)]
    pub max_extra_build_us: u32,

    /// … or uses more than that many times the fuel; `inf` is no gate
    #[arg(long, value_name = "RATIO", requires = "stage", default_value_t = Gates::default().max_fuel_ratio)]
    pub max_fuel_ratio: f64,

    /// … or means something else in more shadow steps than that
    #[arg(long, value_name = "STEPS", requires = "stage", default_value_t = Gates::default().max_differences)]
    pub max_differences: u32,

    /// … or faults more often than that
    #[arg(long, value_name = "N", requires = "stage", default_value_t = Gates::default().max_faults)]
    pub max_faults: u32,

    /// … or if less than that share of the shadow steps could be compared
    #[arg(long, value_name = "PERCENT", requires = "stage", value_parser = per_mille, default_value = "50%")]
    pub min_observed: u32,
}

impl StagesArgs {
    /// None: the host's own.
    fn plan(&self) -> Option<ReloadPlan> {
        if self.immediate {
            return Some(ReloadPlan::default());
        }
        let canary = (self.canary.is_some() || !self.canary_tenant.is_empty()).then(|| Canary {
            per_mille: self.canary.unwrap_or(0),
            tenants: self.canary_tenant.clone(),
            steps: self.canary_steps,
        });
        (self.shadow.is_some() || canary.is_some()).then(|| ReloadPlan {
            shadow_steps: self.shadow.unwrap_or(0),
            canary,
            gates: Gates {
                max_build_ratio: self.max_build_ratio,
                max_extra_build_us: self.max_extra_build_us,
                max_fuel_ratio: self.max_fuel_ratio,
                max_differences: self.max_differences,
                max_faults: self.max_faults,
                min_observed_per_mille: self.min_observed,
            },
        })
    }
}

/// `5%` is 50 of a thousand.
fn per_mille(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    let wrong = || "use 0% to 100% in steps of 0.1%, as 5% or 0.5%".to_owned();
    let per_mille = 10.0 * number.parse::<f64>().map_err(|_| wrong())?;
    let rounded = per_mille.round();
    if (0.0..=1000.0).contains(&per_mille) && (per_mille - rounded).abs() < 1e-6 {
        Ok(rounded as u32)
    } else {
        Err(wrong())
    }
}

/// As `per_mille`, of something.
fn share(text: &str) -> Result<u32, String> {
    match per_mille(text) {
        Ok(1..) => per_mille(text),
        _ => Err("use 0.1% to 100% in steps of 0.1%, as 5% or 0.5%".to_owned()),
    }
}

/// Sends a component, or other options for the one in service, to the running host.
pub fn reload(arguments: &Reload) -> Result<(), Failure> {
    let fetched = arguments
        .source
        .as_ref()
        .map(|source| {
            let signature = arguments.signature.as_deref();
            provenance::fetch(source, signature, admin::component_bytes_max())
        })
        .transpose()?;
    let (component, signature) = match fetched {
        Some(fetched) => (fetched.component, fetched.signature.unwrap_or_default()),
        None => (Vec::new(), Vec::new()),
    };
    let options = &arguments.builder_option;
    let request = Request::Reload {
        backend: arguments.backend.clone(),
        tenant: arguments.tenant.clone(),
        origin: arguments
            .source
            .as_ref()
            .map_or_else(String::new, ToString::to_string),
        component_bytes: component.len() as u64,
        signature_bytes: signature.len() as u64,
        options: (!options.is_empty()).then(|| options.clone()),
        plan: arguments.stages.plan(),
    };
    let payload = [component, signature].concat();
    let socket = socket(&arguments.admin);
    let mut answer = admin::call(&socket, &request, &payload)?;
    let json = arguments.admin.json;
    if !json {
        print(accepted(&arguments.backend, &answer).as_bytes())?;
    }
    if arguments.wait {
        let version = answer["version"].as_str().unwrap_or_default().to_owned();
        let versions = answer["versions"].as_array().into_iter().flatten();
        let versions: Vec<String> = versions
            .filter_map(|version| version.as_str().map(str::to_owned))
            .collect();
        let look = || admin::call(&socket, &Request::Builders, &[]);
        let whose = (arguments.backend.as_str(), arguments.tenant.as_ref());
        let submitted = Submitted {
            versions: &versions,
            in_stages: answer["stage"] != "checked",
        };
        answer["candidates"] = wait(whose, submitted, !json, look)?;
        if !json {
            print(format!("{}: {} serves\n", arguments.backend, short(&version)).as_bytes())?;
        }
    }
    if json { print_json(&answer) } else { Ok(()) }
}

fn accepted(backend: &str, answer: &Value) -> String {
    let text = |key: &str| answer[key].as_str().unwrap_or("?");
    let next = match text("stage") {
        "checked" => "takes over at the next step".to_owned(),
        _ => "is checked and being tried; `timetable builders` shows how far it is".to_owned(),
    };
    format!(
        "{backend}: {} ({}) {next}, from {}\n",
        short(text("version")),
        text("name"),
        text("origin")
    )
}

/// What was submitted.
#[derive(Clone, Copy)]
struct Submitted<'a> {
    /// One for each group: their configurations differ.
    versions: &'a [String],
    /// It is a candidate first.
    in_stages: bool,
}

/// Looks until every group of the backend is served by what was submitted. Returns what the groups' candidates came to.
fn wait(
    (backend, tenant): (&str, Option<&TenantName>),
    submitted: Submitted<'_>,
    say: bool,
    look: impl Fn() -> Result<Value, Failure>,
) -> Result<Value, Failure> {
    let (mut said, mut when) = (String::new(), Instant::now());
    loop {
        let table = look()?;
        let groups: Vec<&Value> = table["builders"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|group| {
                let name = group["backend"].as_str().unwrap_or_default();
                let whose = group["tenant"].as_str();
                name.eq_ignore_ascii_case(backend) && whose == tenant.map(TenantName::as_str)
            })
            .collect();
        let mut going = Vec::new();
        for group in &groups {
            match come(group, submitted) {
                Come::Serves => {}
                Come::Going(how) => going.push(how),
                Come::Withdrawn(why) => {
                    return Err(Failure::new(
                        Exit::Refused,
                        format!(
                            "{backend}: {} will not serve: {why}",
                            short(submitted.versions.first().map_or("?", String::as_str))
                        ),
                    ));
                }
            }
        }
        if going.is_empty() {
            let candidates = groups.iter().map(|group| group["candidate"].clone());
            return Ok(json!(candidates.collect::<Vec<Value>>()));
        }
        let now = going.join("\n");
        if say && now != said && (said.is_empty() || when.elapsed() > SAY) {
            eprintln!("{now}");
            (said, when) = (now, Instant::now());
        }
        std::thread::sleep(LOOK);
    }
}

/// How far a version has come in one group.
enum Come {
    Serves,
    Going(String),
    Withdrawn(String),
}

fn come(group: &Value, submitted: Submitted<'_>) -> Come {
    let is = |info: &Value| {
        let version = info["version"].as_str();
        version.is_some_and(|version| submitted.versions.iter().any(|one| one == version))
    };
    let candidate = &group["candidate"];
    // First, for the version may serve already and be tried again all the same.
    if submitted.in_stages && is(&candidate["version"]) {
        match (candidate["stage"].as_str(), candidate["withdrawn"].as_str()) {
            (Some("withdrawn"), Some(why)) => return Come::Withdrawn(why.to_owned()),
            (Some("shadow" | "canary"), _) => return Come::Going(progress(group)),
            _ => {}
        }
    }
    if is(&group["active"]) {
        return Come::Serves;
    }
    if is(&group["pending"]) {
        return Come::Going("waits for the next step".to_owned());
    }
    match submitted.in_stages && is(&candidate["version"]) {
        true => Come::Going(progress(group)),
        false => Come::Withdrawn("another version was submitted, or it was rolled back".to_owned()),
    }
}

/// One line on a group's candidate.
pub(super) fn progress(group: &Value) -> String {
    let candidate = &group["candidate"];
    let (shadow, canary) = (&candidate["shadow"], &candidate["canary"]);
    let stage = candidate["stage"].as_str().unwrap_or("?");
    let mut line = format!(
        "{}: candidate {} ({}): {stage}",
        group["group"].as_str().unwrap_or("?"),
        short(candidate["version"]["version"].as_str().unwrap_or("?")),
        candidate["version"]["name"].as_str().unwrap_or("?"),
    );
    if let Some(why) = candidate["withdrawn"].as_str() {
        line.push_str(&format!(": {why}"));
    }
    if let Some(steps) = candidate["plan"]["shadow_steps"]
        .as_u64()
        .filter(|steps| *steps > 0)
    {
        line.push_str(&format!(
            "; shadow {} of {steps} steps, {} compared, {} differ{}{}",
            shadow["steps"],
            shadow["observed"],
            shadow["differences"],
            match shadow["first_difference"].as_str() {
                Some(first) => format!(" ({first})"),
                None => String::new(),
            },
            medians(shadow),
        ));
    }
    if let Some(steps) = candidate["plan"]["canary"]["steps"].as_u64() {
        line.push_str(&format!(
            "; canary {} of {steps} steps{}",
            canary["steps"],
            medians(canary)
        ));
        let tenants = candidate["plan"]["canary"]["tenants"].as_array();
        if tenants.is_some_and(|tenants| !tenants.is_empty()) && canary["steps"] == 0 {
            line.push_str(", no request of its tenants so far");
        }
    }
    line.push_str(&format!("; {} faults", candidate["faults"]));
    line
}

fn medians(stage: &Value) -> String {
    let us = |value: &Value| value.as_u64().map(|ns| ns as f64 / 1e3);
    match (us(&stage["candidate_p50_ns"]), us(&stage["active_p50_ns"])) {
        (Some(own), Some(active)) => format!(", build p50 {own:.1} µs beside {active:.1}"),
        (Some(own), None) => format!(", build p50 {own:.1} µs"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        reload: Reload,
    }

    fn parse(arguments: &[&str]) -> Result<Reload, clap::Error> {
        let all = ["timetable"].iter().chain(arguments);
        Line::try_parse_from(all).map(|line| line.reload)
    }

    #[test]
    fn stages_are_read_from_the_command_line() {
        let plan = |arguments: &[&str]| {
            let all: Vec<&str> = ["FLASH_ATTN", "x.wasm"]
                .iter()
                .chain(arguments)
                .copied()
                .collect();
            parse(&all).unwrap().stages.plan()
        };
        assert_eq!(plan(&[]), None);
        assert_eq!(plan(&["--immediate"]), Some(ReloadPlan::default()));
        let staged = plan(&["--shadow", "200", "--canary", "5%", "--max-faults", "2"]).unwrap();
        assert_eq!((staged.shadow_steps, staged.gates.max_faults), (200, 2));
        assert_eq!(staged.canary.as_ref().unwrap().per_mille, 50);
        assert_eq!(staged.gates.min_observed_per_mille, 500);
        assert_eq!(staged.problem(), None);
        let tenants = plan(&[
            "--canary-tenant",
            "a",
            "--canary-tenant",
            "b",
            "--canary-steps",
            "7",
        ]);
        let canary = tenants.unwrap().canary.unwrap();
        assert_eq!(
            (canary.tenants.len(), canary.steps, canary.per_mille),
            (2, 7, 0)
        );
        for wrong in [
            &["--immediate", "--shadow", "3"][..],
            &["--canary", "5%", "--canary-tenant", "a"],
            &["--canary", "101%"],
            &["--canary", "a few"],
            &["--canary-tenant", "Not A Name"],
            &["--max-faults", "3"],
            &["--canary-steps", "10"],
            &["--shadow", "5", "--canary-steps", "10"],
            &["--canary", "0%"],
            &["--canary", "0.05%"],
        ] {
            let all: Vec<&str> = ["FLASH_ATTN", "x.wasm"]
                .iter()
                .chain(wrong)
                .copied()
                .collect();
            assert!(parse(&all).is_err(), "{wrong:?}");
        }
        assert!(
            parse(&["FLASH_ATTN"]).is_err(),
            "neither a component nor options"
        );
        assert!(parse(&["FLASH_ATTN", "--builder-option", "a=b"]).is_ok());
    }

    fn group(stage: &str, withdrawn: Option<&str>) -> Value {
        json!({ "backend": "FLASH_ATTN", "group": "FLASH_ATTN/0", "active": { "version": "aa" }, "pending": null, "candidate": {
            "version": { "version": "bb", "name": "new" }, "stage": stage, "withdrawn": withdrawn, "faults": 0,
            "plan": { "shadow_steps": 100, "canary": { "steps": 20 } },
            "shadow": { "steps": 100, "observed": 90, "differences": 1, "first_difference": "row 3",
                "candidate_p50_ns": 2100, "active_p50_ns": 2000 },
            "canary": { "steps": 4, "candidate_p50_ns": null, "active_p50_ns": null },
        }})
    }

    #[test]
    fn a_candidate_is_one_line() {
        let line = progress(&group("canary", None));
        assert_eq!(
            line,
            "FLASH_ATTN/0: candidate bb (new): canary; shadow 100 of 100 steps, 90 compared, 1 differ (row 3), build p50 2.1 µs \
             beside 2.0; canary 4 of 20 steps; 0 faults"
        );
    }

    #[test]
    fn waiting_ends_when_it_serves_or_will_not() {
        let versions = ["bb".to_owned(), "dd".to_owned()];
        let submitted = Submitted {
            versions: &versions,
            in_stages: true,
        };
        let ends = |group: Value| {
            wait(("flash_attn", None), submitted, false, || {
                Ok(json!({ "builders": [group] }))
            })
        };
        let error = ends(group("withdrawn", Some("it was slow")))
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "FLASH_ATTN: bb will not serve: it was slow".replace("FLASH_ATTN", "flash_attn")
        );
        let mut serves = group("active", None);
        serves["active"]["version"] = json!("bb");
        assert_eq!(ends(serves.clone()).unwrap()[0]["stage"], "active");
        // The backend's other group has another version of the same component.
        let mut other = serves.clone();
        other["active"]["version"] = json!("dd");
        other["candidate"]["version"]["version"] = json!("dd");
        let both = wait(("flash_attn", None), submitted, false, || {
            Ok(json!({ "builders": [serves, other] }))
        });
        assert_eq!(both.unwrap().as_array().map(Vec::len), Some(2));
        // It serves already, and is tried again: only what becomes of the trial counts.
        let mut again = group("withdrawn", Some("it was slow"));
        again["active"]["version"] = json!("bb");
        assert!(ends(again.clone()).is_err());
        again["candidate"]["stage"] = json!("shadow");
        assert!(matches!(come(&again, submitted), Come::Going(_)));
        let at_once = Submitted {
            in_stages: false,
            ..submitted
        };
        assert!(matches!(come(&again, at_once), Come::Serves));
        let mut replaced = group("shadow", None);
        replaced["candidate"]["version"]["version"] = json!("cc");
        let error = ends(replaced).unwrap_err().to_string();
        assert!(error.contains("another version was submitted"), "{error}");
    }
}
