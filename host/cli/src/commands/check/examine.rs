//! A component in one configuration: built, verified, built again elsewhere and compared, held to its launch promise. It must
//! never know what a good builder would choose.

use serde_json::{Value, json};
use timetable_attention::batch::{GroupStep, PaddingValues, capture_batch, pad_step};
use timetable_attention::meaning::compare;
use timetable_attention::{
    BuildFault, FaultKind, Grant, MetadataBuilder, Refusal, Verifier, VerifyContext, verify::Rule,
    verify_step,
};
use timetable_reference::native_twin;
use timetable_sandbox::{Component, WasmBuilder};
use timetable_types::{CaptureShape, CudagraphSupport, LaunchPromise, Metadata};

use super::batches::{self, CAPTURE_SIZES, Case, Configuration, MAX_MODEL_LEN, NUM_BLOCKS};
use super::report::{Finding, Report, Severity, Tried};

/// Each so many cases are built by an instance that builds nothing else, and by the calls that are rarer than `build`.
const SAMPLE: usize = 8;
/// A call that needs more of its fuel than this is near the limit.
const NEAR_PERCENT: f64 = 75.0;

const REMEDY_VERIFIER: &str = "return what the rule asks for; --json has the step, which `timetable build --input` builds again";
const REMEDY_GRANT: &str = "then check it with --grant subset";
const REMEDY_DETERMINISM: &str = "what build returns must be a function of the configuration and the call: keep nothing between calls but a cache";
const REMEDY_PROMISE: &str = "promise more in launch_promise, or choose less: a captured graph has room for the promise only";
const REMEDY_DECLINED: &str =
    "the plain builder serves what is declined; build it if it should be yours";

/// What to do about a fault.
fn remedy(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::Fuel => {
            "do less for each row and token, without loops over keys; docs/builders-guide.md says what a call may use"
        }
        FaultKind::Memory => "give back what a call used, and keep only what is bounded",
        FaultKind::Watchdog => "the call hardly ended: look for an endless loop",
        FaultKind::StackDepth => "recurse less",
        FaultKind::LiftBound => "return lists no longer than the rows, tokens or items of the step",
        FaultKind::Constructor => {
            "serve this configuration in create, or say in its error which one is meant"
        }
        _ => {
            "the guest panicked or reached outside its memory: try the same step natively, with cargo test"
        }
    }
}

/// A component and a configuration.
pub struct Examination<'a> {
    pub component: &'a Component,
    /// Name of the reference builder.
    pub reference: &'a str,
    pub configuration: &'a Configuration,
    pub grant: Grant,
    pub report: &'a mut Report,
}

impl Examination<'_> {
    /// Tries every case.
    ///
    /// # Errors
    /// If a case is no valid step: a mistake of this program.
    pub fn run(mut self, cases: &[Case]) -> Result<(), String> {
        let mut tried = Tried {
            configuration: self.configuration.name,
            batches: cases.len() as u32,
            built: 0,
            declined: 0,
            refused: 0,
            as_reference: 0,
            same_meaning: 0,
            no_builder: None,
        };
        match WasmBuilder::new(self.component, &self.configuration.config) {
            Ok(builder) => {
                if self.configuration.name == "gpu" {
                    self.report.builder = Some(json!(builder.info()));
                }
                let built = self.forward(builder, cases, &mut tried)?;
                self.again(cases, &built);
                self.promise()?;
            }
            Err(fault) => {
                tried.batches = 0;
                tried.no_builder = Some(fault.to_string());
                if self.configuration.required {
                    self.fault("construction", &fault, None, Severity::Refused);
                }
            }
        }
        self.report.configurations.push(tried);
        Ok(())
    }

    fn context<'s>(
        &'s self,
        step: &'s GroupStep,
        inputs: &'s timetable_attention::StepInputs<'s>,
        promise: Option<&'s LaunchPromise>,
    ) -> VerifyContext<'s> {
        VerifyContext {
            config: &self.configuration.config,
            common: &step.cam,
            inputs,
            promise,
            grant: self.grant,
            num_blocks: NUM_BLOCKS,
        }
    }

    fn verify(
        &self,
        metadata: &Metadata,
        step: &GroupStep,
        promise: Option<&LaunchPromise>,
    ) -> Result<(), Refusal> {
        let inputs = step.tensors.inputs();
        Verifier::new().verify(metadata, &self.context(step, &inputs, promise))
    }

    /// Every case in order, by one instance as long as it lives; what was built and verified.
    fn forward(
        &mut self,
        mut builder: WasmBuilder,
        cases: &[Case],
        tried: &mut Tried,
    ) -> Result<Vec<Option<Metadata>>, String> {
        let mut twin = native_twin(self.reference, &self.configuration.config).ok();
        let mut all = Vec::with_capacity(cases.len());
        for (index, case) in cases.iter().enumerate() {
            let step = &case.step;
            let inputs = step.tensors.inputs();
            verify_step(&self.context(step, &inputs, None))
                .map_err(|refusal| format!("a step of {} is none: {refusal}", case.kind))?;
            let built = builder.build(&step.cam, false);
            self.fuel(&builder, case);
            let kept = match built {
                Ok(metadata) => match self.verify(&metadata, step, None) {
                    Ok(()) => {
                        tried.built += 1;
                        let reference = twin.as_mut().map(|twin| twin.build(&step.cam, false));
                        if let Some(Ok(reference)) = reference {
                            let context = self.context(step, &inputs, None);
                            tried.as_reference += u32::from(reference == metadata);
                            tried.same_meaning +=
                                u32::from(compare(&reference, &metadata, &context).is_ok());
                        }
                        Some(metadata)
                    }
                    Err(refusal) => {
                        tried.refused += 1;
                        self.refusal("verifier", &refusal, case);
                        None
                    }
                },
                Err(fault @ BuildFault::Declined(_)) => {
                    tried.declined += 1;
                    self.fault("build", &fault, Some(case), Severity::Warning);
                    None
                }
                Err(fault) => {
                    tried.refused += 1;
                    self.fault("build", &fault, Some(case), Severity::Refused);
                    None
                }
            };
            if index % SAMPLE == 0
                && let Some(metadata) = &kept
                && !builder.is_dead()
            {
                self.rarer_calls(&mut builder, metadata, case);
            }
            all.push(kept);
            if builder.is_dead() {
                builder = match WasmBuilder::new(self.component, &self.configuration.config) {
                    Ok(builder) => builder,
                    Err(fault) => {
                        self.fault("construction", &fault, None, Severity::Refused);
                        break;
                    }
                };
            }
        }
        all.resize(cases.len(), None);
        Ok(all)
    }

    /// Fast builds, drafts, and updates of the block table, held to the same rules.
    fn rarer_calls(&mut self, builder: &mut WasmBuilder, metadata: &Metadata, case: &Case) {
        let cam = &case.step.cam;
        let updates = builder.info().supports_update_block_table;
        for (call, name) in [
            (Call::Fast, "build with fast-build"),
            (Call::Drafting, "build-for-drafting"),
            (Call::Update, "update-block-table"),
        ] {
            let built = match call {
                Call::Fast => builder.build(cam, true),
                Call::Drafting => builder.build_for_drafting(cam, 0),
                Call::Update if updates => builder.update_block_table(metadata, cam),
                Call::Update => return,
            };
            match built {
                Ok(metadata) => {
                    if let Err(refusal) = self.verify(&metadata, &case.step, None) {
                        self.refusal(name, &refusal, case);
                    }
                }
                Err(fault @ BuildFault::Declined(_)) => {
                    self.fault(name, &fault, Some(case), Severity::Warning);
                }
                Err(fault) => {
                    self.fault(name, &fault, Some(case), Severity::Refused);
                    return;
                }
            }
        }
    }

    /// The same calls in the other order, and some of them first of all: what comes back must be the same.
    fn again(&mut self, cases: &[Case], built: &[Option<Metadata>]) {
        let Ok(mut backward) = WasmBuilder::new(self.component, &self.configuration.config) else {
            return;
        };
        let pairs = cases.iter().zip(built).enumerate().rev();
        for (index, (case, expected)) in pairs.filter_map(|(index, (case, expected))| {
            expected.as_ref().map(|expected| (index, (case, expected)))
        }) {
            let again = backward.build(&case.step.cam, false);
            self.compare("in another order", again, expected, case);
            if index % SAMPLE == 0 {
                let again = backward.build(&case.step.cam, false);
                self.compare("twice in a row", again, expected, case);
                if let Ok(mut fresh) = WasmBuilder::new(self.component, &self.configuration.config)
                {
                    let again = fresh.build(&case.step.cam, false);
                    self.compare("by a fresh instance", again, expected, case);
                }
            }
            if backward.is_dead() {
                return;
            }
        }
    }

    fn compare(
        &mut self,
        how: &str,
        again: Result<Metadata, BuildFault>,
        expected: &Metadata,
        case: &Case,
    ) {
        self.report.compared_calls += 1;
        let what = match again {
            Ok(again) if again == *expected => return,
            Ok(_) => format!("built {how}, a step of {} is another", case.kind),
            Err(fault) => format!("built {how}, a step of {} fails: {fault}", case.kind),
        };
        self.find(
            Severity::Refused,
            "determinism",
            how.to_owned(),
            what,
            REMEDY_DETERMINISM,
            Some(&case.step),
        );
    }

    /// Captured shapes, and steps that replay them.
    fn promise(&mut self) -> Result<(), String> {
        let config = &self.configuration.config;
        if config.cudagraph.capture_sizes.is_empty() {
            return Ok(());
        }
        let Ok(mut builder) = WasmBuilder::new(self.component, config) else {
            return Ok(());
        };
        if builder.info().cudagraph_support == CudagraphSupport::Never {
            return Ok(());
        }
        let width = config.scheduler.max_num_blocks_per_req as usize;
        for (seed, size) in CAPTURE_SIZES.into_iter().enumerate() {
            let shape = CaptureShape {
                num_tokens: size,
                num_reqs: size,
                max_query_len: 1,
                uniform_query_len: Some(1),
            };
            let promise = match builder.launch_promise(&shape) {
                Ok(promise) => promise,
                Err(fault) => {
                    self.fault("launch promise", &fault, None, Severity::Refused);
                    return Ok(());
                }
            };
            let captured = capture_batch(&shape, width, MAX_MODEL_LEN)
                .map_err(|error| format!("shape of {size} rows: {error}"))?;
            let mut steps = vec![("capture", captured)];
            for (index, rows) in [size, size.div_ceil(2), 1].into_iter().enumerate() {
                let seed = (seed * 3 + index) as u64;
                let step = batches::decodes(config, rows, MAX_MODEL_LEN, seed);
                let padding = PaddingValues {
                    seq_len: 0,
                    ..PaddingValues::default()
                };
                let padded = pad_step(&step, size, size, padding)
                    .map_err(|error| format!("{rows} rows padded to {size}: {error}"))?;
                steps.push(("replay", padded));
            }
            for (kind, step) in steps {
                let case = Case { kind, step };
                let built = match kind {
                    "capture" => builder.build_for_cudagraph_capture(&case.step.cam),
                    _ => builder.build(&case.step.cam, false),
                };
                match built {
                    Ok(metadata) => match self.verify(&metadata, &case.step, Some(&promise)) {
                        Ok(()) => self.report.promises_held += 1,
                        Err(refusal) => self.refusal("launch promise", &refusal, &case),
                    },
                    Err(fault @ BuildFault::Declined(_)) => {
                        self.fault("launch promise", &fault, Some(&case), Severity::Warning);
                    }
                    Err(fault) => {
                        self.fault("launch promise", &fault, Some(&case), Severity::Refused);
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn fuel(&mut self, builder: &WasmBuilder, case: &Case) {
        let cam = &case.step.cam;
        let limits = self.component.sandbox().limits();
        let limit = limits.fuel_for_batch(cam.num_reqs, cam.num_actual_tokens);
        let percent = builder.fuel_used() as f64 / limit as f64 * 100.0;
        let room = &mut self.report.headroom;
        if percent > room.fuel_percent {
            room.fuel_percent = percent;
            room.fuel_of = format!(
                "{}, {}: {} rows, {} tokens",
                self.configuration.name, case.kind, cam.num_reqs, cam.num_actual_tokens
            );
        }
        if percent > NEAR_PERCENT && !builder.is_dead() {
            self.find(
                Severity::Warning,
                "fuel",
                case.kind.to_owned(),
                format!("a step of {} used {percent:.0} % of its fuel", case.kind),
                "another step may run out of it: do less for each row and token",
                None,
            );
        }
    }

    fn refusal(&mut self, check: &'static str, refusal: &Refusal, case: &Case) {
        let remedy = match refusal.rule {
            Rule::Granted => REMEDY_GRANT,
            _ if check == "launch promise" => REMEDY_PROMISE,
            _ => REMEDY_VERIFIER,
        };
        self.find(
            Severity::Refused,
            check,
            refusal.field.to_owned(),
            format!("a step of {}: {refusal}", case.kind),
            remedy,
            Some(&case.step),
        );
    }

    fn fault(
        &mut self,
        check: &'static str,
        fault: &BuildFault,
        case: Option<&Case>,
        severity: Severity,
    ) {
        let (key, remedy) = match fault {
            BuildFault::Declined(_) => ("declined", REMEDY_DECLINED),
            BuildFault::Fault { kind, .. } => (kind.name(), remedy(*kind)),
        };
        let of = case.map_or(String::new(), |case| format!("a step of {}: ", case.kind));
        self.find(
            severity,
            check,
            key.to_owned(),
            format!("{of}{fault}"),
            remedy,
            case.map(|case| &case.step),
        );
    }

    fn find(
        &mut self,
        severity: Severity,
        check: &'static str,
        key: String,
        what: String,
        remedy: &'static str,
        step: Option<&GroupStep>,
    ) {
        let known = |finding: &Finding| {
            (finding.severity, finding.check, &finding.key) == (severity, check, &key)
        };
        // Described once: a long table is much text.
        let step = match self.report.findings.iter().any(known) {
            true => None,
            false => step.map(|step| self.describe(step)),
        };
        self.report.find(Finding {
            severity,
            check,
            configurations: vec![self.configuration.name],
            times: 1,
            what,
            remedy,
            step,
            key,
        });
    }

    /// As `timetable build --input` reads it.
    fn describe(&self, step: &GroupStep) -> Value {
        let (cam, tensors) = (&step.cam, &step.tensors);
        let mut config = json!(self.configuration.config);
        let spec = config["kv_cache_spec"].take();
        if let Some(config) = config.as_object_mut() {
            config.remove("kv_cache_spec");
        }
        let table: Vec<&[i32]> = tensors
            .block_table
            .chunks(tensors.block_table_width.max(1))
            .collect();
        let mut described = json!({
            "query_start_loc": tensors.query_start_loc,
            "seq_lens": tensors.seq_lens,
            "seq_lens_cpu_upper_bound": cam.seq_lens_cpu_upper_bound,
            "num_reqs": cam.num_reqs,
            "num_actual_tokens": cam.num_actual_tokens,
            "max_query_len": cam.max_query_len,
            "max_seq_len": cam.max_seq_len,
            "block_table": table,
            "slot_mapping": tensors.slot_mapping,
            "is_prefilling": cam.is_prefilling,
            "num_blocks": NUM_BLOCKS,
            "kv_cache_spec": spec,
            "config": config,
        });
        if let Some(lens) = &tensors.dcp_local_seq_lens {
            described["dcp_local_seq_lens"] = json!(lens);
        }
        described
    }
}

/// The calls that are rarer than `build`.
enum Call {
    Fast,
    Drafting,
    Update,
}
