//! The recorded runs of `vectors/engine`, read. It must never know a test.
#![allow(missing_docs, reason = "the fields are the recorded engine's")]

use serde::Deserialize;

/// One recorded run.
#[derive(Deserialize)]
pub struct Trace {
    pub model_runner_v2: bool,
    pub args: Args,
    pub config: Config,
    pub prompts: Vec<Vec<u32>>,
    pub outputs: Vec<Vec<u32>>,
    pub steps: Vec<Step>,
}

#[derive(Deserialize)]
pub struct Args {
    pub prefix: bool,
    pub spec: usize,
}

#[derive(Deserialize)]
pub struct Config {
    pub block_size: usize,
    pub num_gpu_blocks: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_model_len: usize,
}

/// One recorded step. Table rows hold the kept columns only; MRV2 rows may end in entries of a former occupant.
#[derive(Deserialize)]
pub struct Step {
    pub query_lens: Vec<usize>,
    pub query_start_loc: Vec<i32>,
    pub query_start_loc_cpu: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub num_reqs: u32,
    pub num_actual_tokens: u32,
    pub max_query_len: u32,
    pub max_seq_len: u32,
    pub block_table_shape: (usize, usize),
    pub block_table_tensor: Vec<Vec<i32>>,
    pub slot_mapping: Vec<i64>,
    pub causal: bool,
    pub positions: Vec<i64>,
    /// Drafts included, of some steps of the run with drafts.
    pub token_ids: Option<Vec<i32>>,
    pub is_prefilling: Vec<bool>,
    pub seq_lens_cpu_upper_bound: Vec<i32>,
    pub req_idx: Option<Vec<u32>>,
}

/// Every recorded run, with its name.
pub const NAMES: [&str; 4] = [
    "llama_cpu_f32",
    "llama_mrv2_f32",
    "llama_mrv2_f32_prefix",
    "llama_mrv2_f32_spec3",
];

/// Reads a run.
pub fn load(name: &str) -> Trace {
    let path = crate::drive::tests_dir().join(format!("vectors/engine/{name}.json"));
    let at = path.display();
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{at}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{at}: {error}"))
}
