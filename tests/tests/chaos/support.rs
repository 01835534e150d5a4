//! A host for the chaos builder: one attention group, steps with their tensors, a fault directory.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;
use timetable_attention::{
    describe::{DescribedStep, StepDescription},
    plain_builder, verify, verify_step,
};
use timetable_sandbox::{
    BundleLimits, Component, FaultBundle, FaultDir, FaultPolicy, GroupBuilder, GroupSetup, Limits,
    ReloadError, Sandbox, StepMetadata,
};
use timetable_types::{BuilderConfig, Family, Metadata};

pub const FAMILIES: [Family; 2] = [Family::FlashAttn, Family::Flashinfer];

/// Batches with fewer rows are built well: those that a new version is tried with have at most 8.
pub const MIN_ROWS: usize = 9;

/// A step of rows (query tokens, keys), decodes first, in blocks of 16.
pub fn step(rows: &[(usize, usize)]) -> DescribedStep {
    let width = rows
        .iter()
        .map(|(_, keys)| keys.div_ceil(16))
        .max()
        .unwrap_or(1);
    let (mut starts, mut table, mut slots, mut positions) =
        (vec![0], Vec::new(), Vec::new(), Vec::new());
    for (row, (tokens, keys)) in rows.iter().enumerate() {
        starts.push(starts[row] + tokens);
        let blocks: Vec<usize> = (0..width).map(|column| 1 + row * width + column).collect();
        for position in keys - tokens..*keys {
            slots.push(blocks[position / 16] * 16 + position % 16);
            positions.push(position);
        }
        table.push(blocks);
    }
    let lens: Vec<usize> = rows.iter().map(|(_, keys)| *keys).collect();
    let description = json!({
        "query_start_loc": starts,
        "seq_lens": lens,
        "num_reqs": rows.len(),
        "num_actual_tokens": positions.len(),
        "max_query_len": rows.iter().map(|(tokens, _)| tokens).max(),
        "max_seq_len": lens.iter().max(),
        "block_table": table,
        "slot_mapping": slots,
        "positions": positions,
        "is_prefilling": rows.iter().map(|(tokens, _)| *tokens > 1).collect::<Vec<_>>(),
        "kv_cache_spec": { "block_size": 16, "num_kv_heads": 2, "head_size": 64 },
        "config": { "attention": { "num_heads": 8 }, "device": { "num_workers": 4 } },
    });
    StepDescription::from_value(description)
        .and_then(|description| description.validate())
        .expect("a good step")
}

/// Nine decodes and three prefills.
pub fn mixed() -> DescribedStep {
    let decodes = (0..9).map(|row| (1, 1 + 37 * row));
    let prefills = (0..3).map(|row| (20 + 9 * row, 25 + 40 * row));
    step(&decodes.chain(prefills).collect::<Vec<_>>())
}

/// `rows` decodes of rising lengths.
pub fn decodes(rows: usize) -> DescribedStep {
    step(&(0..rows).map(|row| (1, 1 + 7 * row)).collect::<Vec<_>>())
}

/// The step's configuration, with options.
pub fn config(step: &DescribedStep, options: &[(&str, &str)]) -> BuilderConfig {
    let mut config = step.config.clone();
    config.options = options
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect();
    config
}

/// A sandbox with the chaos builder of a family.
pub struct Host {
    pub family: Family,
    pub sandbox: Sandbox,
    component: Component,
    faults: Option<(tempfile::TempDir, PathBuf)>,
}

impl Host {
    pub fn new(family: Family, keeps_faults: bool) -> Host {
        // Groups come and go here faster than the thread that drops instances follows.
        let limits = Limits {
            max_instances: 1024,
            ..Limits::default()
        };
        let sandbox = Sandbox::new(limits).expect("a sandbox");
        let bytes = timetable_reference::chaos(family).expect("a chaos builder");
        let component = sandbox.load(bytes).expect("it loads");
        let faults = keeps_faults.then(|| {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("faults");
            let limits = BundleLimits {
                max_files: 10_000,
                ..BundleLimits::default()
            };
            sandbox.keep_faults_in(FaultDir::open(&path, limits).expect("a fault directory"));
            (dir, path)
        });
        Host {
            family,
            sandbox,
            component,
            faults,
        }
    }

    /// A group whose builder is told `options`. Its policy never leaves it alone.
    pub fn group(
        &self,
        step: &DescribedStep,
        options: &[(&str, &str)],
    ) -> Result<GroupBuilder, ReloadError> {
        let config = config(step, options);
        let setup = GroupSetup {
            name: format!("{}/0", self.family.interface()),
            plain: plain_builder(self.family, &config).expect("a plain builder"),
            config,
            acceptance: None,
        };
        let group = GroupBuilder::new(&self.sandbox, setup, &self.component, "chaos.wasm")?;
        group.handle().set_policy(patient()).expect("a policy");
        Ok(group)
    }

    /// What the plain builder makes of a step.
    pub fn plain(&self, step: &DescribedStep) -> Metadata {
        plain_builder(self.family, &step.config)
            .expect("a plain builder")
            .build(&step.step.cam, false)
            .expect("plain metadata")
    }

    pub fn bundles(&self) -> Vec<FaultBundle> {
        let Some((_, path)) = &self.faults else {
            return Vec::new();
        };
        FaultDir::open(path, BundleLimits::default())
            .and_then(|dir| dir.bundles())
            .expect("the fault directory")
            .iter()
            .map(|path| FaultBundle::from_bytes(&std::fs::read(path).expect("a file")))
            .collect::<Result<_, _>>()
            .expect("bundles")
    }

    /// Waits until so many bundles are written.
    #[track_caller]
    pub fn wait_for_bundles(&self, count: u64) {
        wait("bundles", || {
            self.sandbox.bundle_figures().is_some_and(|figures| {
                assert_eq!(figures.failed, 0, "a bundle could not be written");
                figures.written >= count
            })
        });
    }
}

/// Faults have no consequences but the dead instance.
pub fn patient() -> FaultPolicy {
    FaultPolicy {
        quarantine_faults: 1000,
        max_backoff_steps: 0,
        rerun_every: 0,
        ..FaultPolicy::default()
    }
}

/// One step through the verifier.
#[track_caller]
pub fn build(group: &mut GroupBuilder, step: &DescribedStep) -> StepMetadata {
    let inputs = step.inputs(&[]);
    let context = step.context(&inputs);
    verify_step(&context).expect("a good step");
    group.step_boundary();
    let built = group
        .build_in_context(&context, false, |metadata| verify(metadata, &context))
        .expect("the step is served");
    verify(&built.metadata, &context).expect("what is served is verified");
    built
}

#[track_caller]
pub fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "no {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
