//! Making a fault happen again, from its bundle alone: another machine, no model, no GPU.
//!
//! A bundle may come from anybody: the component runs in the sandbox, and the limits that the bundle asks for are cut to what
//! this machine should give a stranger. Must never know: where the bundle lay.

use std::time::{Duration, Instant};

use serde::Serialize;
use timetable_attention::{BuildFault, FaultKind, MetadataBuilder, Verifier, verify_step};
use timetable_types::{CommonAttentionMetadata, Metadata};

use super::{FaultBundle, SeenFault};
use crate::{BuilderCall, Limits, LoadError, Sandbox, SandboxError, WasmBuilder, call::identical};

/// Time that repeating a call on one instance may take altogether.
const PATIENCE: Duration = Duration::from_secs(20);
/// Calls on one instance, at most.
const MAX_CALLS: u64 = 1_000_000;
/// What the limits of a bundle are cut to.
const MAX_MEMORY: usize = 1 << 30;
const MAX_FUEL: u64 = 100_000_000_000;
const MAX_WATCHDOG: Duration = Duration::from_secs(10);

/// What came of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The same kind of fault happened here.
    Reproduced,
    /// It should have happened and did not.
    NotReproduced,
    /// Faults of this kind, or this bundle, cannot be made to happen again; what happened here instead is told.
    DoesNotReplay,
}

/// A replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replay {
    /// What came of it.
    pub outcome: Outcome,
    /// What happened here. None: the call succeeded, and the verifier had nothing against its result.
    pub here: Option<SeenFault>,
    /// Calls of one fresh instance until then.
    pub calls: u64,
    /// Is what came back bit for bit what the bundle has? None where nothing came back here or there.
    pub same_metadata: Option<bool>,
    /// What to make of it, for people.
    pub remarks: Vec<String>,
}

/// Why there is no replay at all.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The limits are refused here.
    #[error("its limits are refused: {0}")]
    Sandbox(#[from] SandboxError),
    /// The component does not load here.
    #[error("its component does not load: {0}")]
    Load(#[from] LoadError),
    /// The bundle contradicts itself.
    #[error("it contradicts itself: {0}; it was put together by hand")]
    Inconsistent(String),
}

/// What one call led to.
struct Attempt {
    fault: Option<SeenFault>,
    metadata: Option<Metadata>,
}

impl FaultBundle {
    /// Makes the fault happen again.
    ///
    /// # Errors
    /// If the component does not load here, or the bundle contradicts itself.
    pub fn replay(&self) -> Result<Replay, ReplayError> {
        let header = &self.header;
        let (limits, mut remarks) = cut(&header.limits);
        let sandbox = Sandbox::new(limits)?;
        let component = sandbox.load(&self.component)?;
        if component.family() != header.family {
            return Err(ReplayError::Inconsistent(format!(
                "its component builds for {}, its header says {}",
                component.family().interface(),
                header.family.interface()
            )));
        }
        let mut instance = match WasmBuilder::new(&component, &header.config) {
            Ok(instance) => instance,
            Err(fault) => {
                let constructed = header.call == BuilderCall::Create;
                return Ok(self.judge(
                    &Attempt {
                        fault: Some(SeenFault::of(&fault)),
                        metadata: None,
                    },
                    u64::from(constructed),
                    remarks,
                ));
            }
        };
        let kind = header.fault.kind;
        let needs_step = matches!(kind, FaultKind::Refused);
        if needs_step && header.step.is_none() {
            remarks.push(
                "the step's own tensors are not in the bundle, so that its result cannot be verified"
                    .to_owned(),
            );
        }
        // A fresh instance must do. If it does not, the past of the one that faulted may: as many calls as that one had.
        let most = if kind.replays() {
            header.instance_calls.clamp(1, MAX_CALLS) + 2
        } else {
            1
        };
        let began = Instant::now();
        let mut calls = 0;
        let mut last = None;
        while calls < most && (calls == 0 || began.elapsed() < PATIENCE) {
            calls += 1;
            let attempt = self.attempt(&mut instance)?;
            let done = self.is_it(&attempt) || instance.is_dead();
            last = Some(attempt);
            if done {
                break;
            }
        }
        let last = last.unwrap_or(Attempt {
            fault: None,
            metadata: None,
        });
        Ok(self.judge(&last, calls, remarks))
    }

    fn attempt(&self, instance: &mut WasmBuilder) -> Result<Attempt, ReplayError> {
        let header = &self.header;
        let failed = |fault: &BuildFault| Attempt {
            fault: Some(SeenFault::of(fault)),
            metadata: None,
        };
        match &header.call {
            BuilderCall::Create => {
                return Ok(Attempt {
                    fault: None,
                    metadata: None,
                });
            }
            BuilderCall::LaunchPromise(shape) => {
                return Ok(match instance.launch_promise(shape) {
                    Ok(_) => Attempt {
                        fault: None,
                        metadata: None,
                    },
                    Err(fault) => failed(&fault),
                });
            }
            _ => {}
        }
        let common = header.common.as_ref().ok_or_else(|| {
            ReplayError::Inconsistent("a call that takes a batch has none".to_owned())
        })?;
        match header.call.on(instance, common) {
            Some(Ok(metadata)) => {
                let fault = self.refusal(common, &metadata)?;
                Ok(Attempt {
                    fault,
                    metadata: Some(metadata),
                })
            }
            Some(Err(fault)) => Ok(failed(&fault)),
            None => Err(ReplayError::Inconsistent(
                "its call gives no metadata".to_owned(),
            )),
        }
    }

    /// What the verifier has against `metadata`, if the bundle says what to hold it against.
    fn refusal(
        &self,
        common: &CommonAttentionMetadata,
        metadata: &Metadata,
    ) -> Result<Option<SeenFault>, ReplayError> {
        let Some(step) = &self.header.step else {
            return Ok(None);
        };
        step.with_context(&self.header.config, common, |context| {
            // The verifier relies on the step itself, as in a host.
            verify_step(context).map_err(|refusal| refusal.to_string())?;
            Ok(Verifier::new()
                .verify(metadata, context)
                .err()
                .map(|refusal| SeenFault {
                    kind: FaultKind::Refused,
                    message: refusal.to_string(),
                }))
        })
        .and_then(|verified| verified)
        .map_err(|problem| ReplayError::Inconsistent(format!("its step is refused: {problem}")))
    }

    /// Did the fault happen?
    fn is_it(&self, attempt: &Attempt) -> bool {
        let header = &self.header;
        match header.fault.kind {
            // What came back there was another instance's; a fresh one that builds something else, or does not build, is the
            // fault.
            FaultKind::NonDeterminism => match (&attempt.metadata, &header.metadata) {
                (Some(here), Some(there)) => !identical(here, there),
                (None, Some(_)) => attempt.fault.is_some(),
                _ => false,
            },
            kind => attempt
                .fault
                .as_ref()
                .is_some_and(|fault| fault.kind == kind),
        }
    }

    fn judge(&self, attempt: &Attempt, calls: u64, mut remarks: Vec<String>) -> Replay {
        let header = &self.header;
        let kind = header.fault.kind;
        let happened = self.is_it(attempt);
        let verifiable = kind != FaultKind::Refused || header.step.is_some();
        let outcome = match (kind.replays() && verifiable, happened) {
            (false, _) => Outcome::DoesNotReplay,
            (true, true) => Outcome::Reproduced,
            (true, false) => Outcome::NotReproduced,
        };
        match (kind, happened) {
            (FaultKind::Watchdog, _) => remarks.push(
                "watchdog: it depends on wall-clock time, so that it does not replay; raise the limit or look at the time of \
                 a call (`timetable build`)"
                    .to_owned(),
            ),
            (FaultKind::StackDepth, _) => remarks.push(
                "stack depth: how deep calls go before the stack ends depends on the machine's compiled code, so that it \
                 does not replay for certain"
                    .to_owned(),
            ),
            (FaultKind::BuildBudget, _) => remarks.push(
                "build budget: it was spent by many calls' wall-clock time, so that it does not replay".to_owned(),
            ),
            (FaultKind::Refused, false) if verifiable && attempt.metadata.is_some() => remarks.push(
                "the verifier accepts what is built here; the host that wrote the bundle may have refused it for a reason of \
                 its own (its device), or the metadata depended on the instance's past"
                    .to_owned(),
            ),
            _ => {}
        }
        if kind.replays() && happened && calls > 1 {
            remarks.push(format!(
                "a fresh instance does not fault at once, but in its call {calls}: the builder keeps state from call to call"
            ));
        }
        if !kind.replays() && happened {
            remarks.push("here it happened all the same".to_owned());
        }
        let there = &header.written_by;
        let here = super::WrittenBy::here();
        if outcome == Outcome::NotReproduced && *there != here {
            remarks.push(format!(
                "it was seen with wasmtime {} on {} ({}); here is wasmtime {} on {} ({})",
                there.wasmtime, there.cpu, there.arch, here.wasmtime, here.cpu, here.arch
            ));
        }
        let same_metadata = match (&attempt.metadata, &header.metadata) {
            (Some(here), Some(there)) => Some(identical(here, there)),
            _ => None,
        };
        let here = match (&attempt.fault, kind) {
            (None, FaultKind::NonDeterminism) if happened => Some(SeenFault {
                kind,
                message: "a fresh instance builds other metadata than the bundle has".to_owned(),
            }),
            (fault, _) => fault.clone(),
        };
        Replay {
            outcome,
            here,
            calls,
            same_metadata,
            remarks,
        }
    }
}

/// The limits that a file asks for, cut to what a stranger's component gets here, with `max_instances`.
pub fn limits_for_replay(limits: &Limits, max_instances: u32) -> Limits {
    Limits {
        max_instances,
        max_memory_bytes: limits.max_memory_bytes.min(MAX_MEMORY),
        memory_reservation_bytes: limits.memory_reservation_bytes.min(MAX_MEMORY as u64),
        fuel_per_call: limits.fuel_per_call.min(MAX_FUEL),
        fuel_per_row: limits.fuel_per_row.min(MAX_FUEL),
        fuel_per_token: limits.fuel_per_token.min(MAX_FUEL),
        fuel_fixed: limits.fuel_fixed.min(MAX_FUEL),
        watchdog: limits.watchdog.min(MAX_WATCHDOG),
        watchdog_tick: limits.watchdog_tick.min(MAX_WATCHDOG),
        max_lifted_bytes: limits.max_lifted_bytes.min(MAX_MEMORY),
        max_text_bytes: limits.max_text_bytes.min(1 << 16),
        max_wasm_stack_bytes: limits.max_wasm_stack_bytes.min(1 << 20),
        max_component_bytes: limits.max_component_bytes.min(256 << 20),
        max_table_elements: limits.max_table_elements.min(1 << 20),
    }
}

/// The bundle's limits, cut.
fn cut(limits: &Limits) -> (Limits, Vec<String>) {
    let cut = limits_for_replay(limits, 2);
    let asked = Limits {
        max_instances: cut.max_instances,
        ..limits.clone()
    };
    let remarks = if asked == cut {
        Vec::new()
    } else {
        vec!["the bundle's limits are above what is given here, and were cut".to_owned()]
    };
    (cut, remarks)
}
