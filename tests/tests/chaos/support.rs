//! A host for the chaos builder: one attention group of any family, steps with their tensors, a fault directory.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use timetable_attention::{
    describe::{DescribedStep, StepDescription},
    plain_builder, verify, verify_step,
};
use timetable_sandbox::{
    BundleLimits, Component, FaultBundle, FaultDir, FaultPolicy, GroupBuilder, GroupSetup, Limits,
    ReloadError, Sandbox, StepMetadata,
};
use timetable_types::{BuilderConfig, Family, Metadata};

/// A kind of group, whose records the chaos builder of its family makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    pub name: &'static str,
    pub family: Family,
    /// The type of its states, if it keeps any.
    mamba_type: Option<&'static str>,
    /// Drafts that a row may verify.
    drafts: usize,
}

const fn paged(name: &'static str, family: Family) -> Backend {
    Backend {
        name,
        family,
        mamba_type: None,
        drafts: 0,
    }
}

const fn recurrent(name: &'static str, mamba_type: &'static str, drafts: usize) -> Backend {
    Backend {
        name,
        family: Family::Mamba,
        mamba_type: Some(mamba_type),
        drafts,
    }
}

/// One of every family, and two of those that keep states.
pub const BACKENDS: [Backend; 6] = [
    paged("FLASH_ATTN", Family::FlashAttn),
    paged("FLASHINFER", Family::Flashinfer),
    paged("TRITON_ATTN", Family::TritonAttn),
    paged("TRITON_MLA", Family::FlashMla),
    recurrent("MAMBA2", "mamba2", 0),
    recurrent("GDN_ATTN", "gdn", 0),
];

/// More forms of records, so that every field is in one.
pub const MORE_RECORDS: [Backend; 5] = [
    recurrent("MAMBA1", "mamba1", 0),
    recurrent("SHORT_CONV", "short_conv", 2),
    recurrent("LINEAR", "linear", 0),
    recurrent("MAMBA2", "mamba2", 3),
    recurrent("GDN_ATTN", "gdn", 3),
];

/// Batches with fewer rows are built well: those that a new version is tried with have at most 8.
pub const MIN_ROWS: usize = 9;

impl Backend {
    /// A count that every record of the backend has, and that has one right value.
    pub fn counted(&self) -> &'static str {
        match self.family {
            Family::Mamba => "num_decode_tokens",
            _ => "num_actual_tokens",
        }
    }

    /// A step of rows (query tokens, keys), decodes first, in blocks of 16.
    pub fn step(&self, rows: &[(usize, usize)]) -> DescribedStep {
        let blocks_of_row = rows.iter().map(|(_, keys)| keys.div_ceil(16)).max();
        let width = blocks_of_row.unwrap_or(1) + self.drafts;
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
        let decodes = |(tokens, keys): &(usize, usize)| keys > tokens && *tokens <= 1 + self.drafts;
        let (spec, attention) = self.config();
        let mut description = json!({
            "query_start_loc": starts,
            "seq_lens": lens,
            "num_reqs": rows.len(),
            "num_actual_tokens": positions.len(),
            "max_query_len": rows.iter().map(|(tokens, _)| tokens).max(),
            "max_seq_len": lens.iter().max(),
            "block_table": table,
            "slot_mapping": slots,
            "positions": positions,
            "is_prefilling": rows.iter().map(|row| !decodes(row)).collect::<Vec<_>>(),
            "kv_cache_spec": spec,
            "config": {
                "attention": attention,
                "scheduler": { "num_speculative_tokens": self.drafts },
                "device": { "num_workers": 4 },
            },
        });
        if self.drafts > 0 {
            let drafts = rows.iter().map(|row| match decodes(row) {
                true => row.0 as i64 - 1,
                false => -1,
            });
            description["extras"] = json!({
                "num_accepted_tokens": { "device": vec![1; rows.len()] },
                "num_decode_draft_tokens_cpu": { "host": drafts.collect::<Vec<_>>() },
            });
        }
        StepDescription::from_value(description)
            .and_then(|description| description.validate())
            .expect("a good step")
    }

    /// `kv_cache_spec` and `config.attention`.
    fn config(&self) -> (Value, Value) {
        let heads = json!({ "num_heads": 8 });
        match (self.family, self.mamba_type) {
            (Family::FlashMla, _) => (
                json!({
                    "kind": "MLA_ATTENTION", "block_size": 16, "num_kv_heads": 1, "head_size": 576, "head_size_v": 0,
                }),
                json!({ "num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64 }),
            ),
            (_, Some(mamba_type)) => {
                let states = json!({
                    "mamba_type": mamba_type, "cache_mode": "none",
                    "num_speculative_blocks": self.drafts, "chunk_size": 16,
                });
                let spec = json!({
                    "kind": "MAMBA", "block_size": 16, "num_kv_heads": 1, "head_size": 64, "mamba": states,
                });
                (spec, heads)
            }
            _ => (
                json!({ "block_size": 16, "num_kv_heads": 2, "head_size": 64 }),
                heads,
            ),
        }
    }

    /// Nine decodes, which verify drafts where there are any, and three prefills, the first of a new request.
    pub fn mixed(&self) -> DescribedStep {
        let tokens = |row: usize| match self.drafts {
            0 => 1,
            drafts => 2 + row % drafts,
        };
        let decodes = (0..9).map(|row| (tokens(row), tokens(row) + 1 + 37 * row));
        let prefills = (0..3).map(|row| (20 + 9 * row, 20 + 40 * row));
        self.step(&decodes.chain(prefills).collect::<Vec<_>>())
    }

    /// `rows` decodes of rising lengths.
    pub fn decodes(&self, rows: usize) -> DescribedStep {
        self.step(&(0..rows).map(|row| (1, 2 + 7 * row)).collect::<Vec<_>>())
    }
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

/// A sandbox with the chaos builder of a backend's family.
pub struct Host {
    pub backend: Backend,
    pub sandbox: Sandbox,
    component: Component,
    faults: Option<(tempfile::TempDir, PathBuf)>,
}

impl Host {
    pub fn new(backend: Backend, keeps_faults: bool) -> Host {
        // Groups come and go here faster than the thread that drops instances follows.
        let limits = Limits {
            max_instances: 1024,
            ..Limits::default()
        };
        let sandbox = Sandbox::new(limits).expect("a sandbox");
        let bytes = timetable_reference::chaos(backend.family).expect("a chaos builder");
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
            backend,
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
            name: format!("{}/0", self.backend.name),
            plain: plain_builder(self.backend.family, &config).expect("a plain builder"),
            config,
            acceptance: None,
        };
        let group = GroupBuilder::new(&self.sandbox, setup, &self.component, "chaos.wasm")?;
        group.handle().set_policy(patient()).expect("a policy");
        Ok(group)
    }

    /// Waits until the instances that groups left behind are gone: the pool has room for so many.
    pub fn settle(&self) {
        assert!(
            self.sandbox.settle(Duration::from_secs(120)),
            "it is still busy"
        );
    }

    /// What the plain builder makes of a step.
    pub fn plain(&self, step: &DescribedStep) -> Metadata {
        plain_builder(self.backend.family, &step.config)
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
    let extras = step.borrowed_extras();
    let inputs = step.inputs(&extras);
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
