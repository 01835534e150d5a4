//! Recorded steps: what the recorded engine made of its rows, our batch makes of them, field by field; and what it scheduled,
//! our scheduler schedules, block by block.

use timetable_engine::{
    batch::{BatchRow, BatchShape, InputBatch},
    kv::KvCacheManager,
    scheduler::{Scheduler, SchedulerLimits},
    speculation::{SpeculativeConfig, SpeculativeMethod, TokenIndex},
};

use timetable_tests::trace::{self, Config, Step, Trace};

fn shape(config: &Config) -> BatchShape {
    BatchShape {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: config.max_model_len,
        block_size: config.block_size,
        kernel_block_size: config.block_size,
    }
}

/// Compares and counts.
#[derive(Default)]
struct Tally {
    passed: usize,
    total: usize,
    failures: Vec<String>,
}

impl Tally {
    fn check<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, ours: &T, recorded: &T) {
        self.total += 1;
        if ours == recorded {
            self.passed += 1;
        } else {
            self.failures
                .push(format!("{what}: ours {ours:?}, recorded {recorded:?}"));
        }
    }

    fn finish(&self, name: &str) {
        println!("{name}: {}/{} fields equal", self.passed, self.total);
        assert!(
            self.failures.is_empty(),
            "{name}: {}",
            self.failures.join("\n")
        );
        assert!(self.total > 0, "{name}: nothing was compared");
    }
}

/// The batch's fields against a recorded step's.
fn compare(tally: &mut Tally, at: &str, batch: &InputBatch, step: &Step, block_size: usize) {
    let common = batch.common();
    let inputs = batch.inputs();
    let mut check =
        |field: &str, ours: &dyn Fn(&mut Tally, &str)| ours(tally, &format!("{at} {field}"));
    macro_rules! field {
        ($name:literal, $ours:expr, $recorded:expr) => {
            check($name, &|tally, what| tally.check(what, &$ours, &$recorded))
        };
    }
    field!(
        "query_start_loc",
        inputs.query_start_loc,
        &step.query_start_loc[..]
    );
    field!(
        "query_start_loc_cpu",
        common.query_start_loc_cpu,
        step.query_start_loc_cpu
    );
    field!("seq_lens", inputs.seq_lens, &step.seq_lens[..]);
    field!("num_reqs", common.num_reqs, step.num_reqs);
    field!(
        "num_actual_tokens",
        common.num_actual_tokens,
        step.num_actual_tokens
    );
    field!("max_query_len", common.max_query_len, step.max_query_len);
    field!("max_seq_len", common.max_seq_len, step.max_seq_len);
    field!("slot_mapping", inputs.slot_mapping, &step.slot_mapping[..]);
    field!("positions", inputs.positions, &step.positions[..]);
    field!(
        "seq_lens_cpu_upper_bound",
        common.seq_lens_cpu_upper_bound,
        step.seq_lens_cpu_upper_bound
    );
    field!(
        "is_prefilling",
        common
            .is_prefilling
            .iter()
            .map(|&flag| flag == 1)
            .collect::<Vec<_>>(),
        step.is_prefilling
    );
    field!(
        "causal",
        common.causal,
        timetable_types::Causal::All(step.causal)
    );
    field!(
        "block_table_shape",
        (inputs.block_table.rows(), inputs.block_table.width),
        step.block_table_shape
    );
    for (index, recorded) in step.block_table_tensor.iter().enumerate() {
        let used = (step.seq_lens[index] as usize).div_ceil(block_size);
        field!(
            "block_table",
            &inputs.block_table.row(index)[..used],
            &recorded[..used]
        );
    }
    if let Some(req_idx) = &step.req_idx {
        field!("req_idx", common.req_idx, *req_idx);
    }
}

/// From the recorded rows (requests, scheduled and computed tokens, tables) to the recorded metadata. One batch for the whole
/// run, so that its rows are changed in place from step to step.
fn build_from_recorded_rows(name: &str) {
    let trace = trace::load(name);
    let mut batch = InputBatch::new(shape(&trace.config)).unwrap();
    let mut tally = Tally::default();
    for (number, step) in trace.steps.iter().enumerate() {
        batch.begin();
        for (row, &num_tokens) in step.query_lens.iter().enumerate() {
            let seq_len = step.seq_lens[row] as usize;
            let used = seq_len.div_ceil(trace.config.block_size);
            let blocks: Vec<u32> = step.block_table_tensor[row][..used]
                .iter()
                .map(|&block| block as u32)
                .collect();
            // The first block identifies the occupant of a row, except where a prefix is shared: then rows are rewritten.
            let epoch = if trace.args.prefix {
                number as u64 + 1
            } else {
                u64::from(blocks[0])
            };
            let tokens = vec![0; num_tokens];
            batch.push(&BatchRow {
                req_idx: step.req_idx.as_ref().map_or(0, |req_idx| req_idx[row]),
                state: 0,
                epoch,
                num_computed: seq_len - num_tokens,
                tokens: &tokens,
                feed: None,
                drafts: &[],
                blocks: &blocks,
                is_prefilling: step.is_prefilling[row],
                wants_logits: true,
            });
        }
        assert_eq!(batch.check(), Ok(()));
        compare(
            &mut tally,
            &format!("step {number}"),
            &batch,
            step,
            trace.config.block_size,
        );
    }
    tally.finish(name);
}

#[test]
fn recorded_rows_give_the_recorded_metadata() {
    for name in trace::NAMES {
        build_from_recorded_rows(name);
    }
}

/// How the recorded drafts were made: PROVENANCE.md says how that is known.
fn speculative(trace: &Trace) -> Option<SpeculativeConfig> {
    (trace.args.spec > 0).then_some(SpeculativeConfig {
        method: SpeculativeMethod::NgramGpu,
        num_speculative_tokens: trace.args.spec,
        prompt_lookup_min: 1,
        prompt_lookup_max: 3,
    })
}

fn recorded_scheduler(trace: &Trace) -> Scheduler {
    let Config {
        block_size,
        num_gpu_blocks,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
    } = trace.config;
    Scheduler::new(
        SchedulerLimits {
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            num_speculative_tokens: trace.args.spec,
        },
        KvCacheManager::new(num_gpu_blocks, block_size, trace.args.prefix),
    )
}

/// Our scheduler and block manager, given the recorded prompts and the recorded answers, against every recorded step: rows,
/// their order, chunk sizes, request indexes, blocks.
fn replay(name: &str) {
    let trace = trace::load(name);
    assert!(trace.model_runner_v2);
    let lookup = speculative(&trace);
    let mut indexes: Vec<Option<TokenIndex>> = Vec::new();
    let mut drafts = Vec::new();
    let mut scheduler = recorded_scheduler(&trace);
    let mut batch = InputBatch::new(shape(&trace.config)).unwrap();
    let mut tally = Tally::default();
    for (prompt, output) in trace.prompts.iter().zip(&trace.outputs) {
        scheduler.add(prompt.clone(), Some(output.len())).unwrap();
        indexes.push(lookup.map(|lookup| TokenIndex::new(&lookup, prompt.len())));
    }
    for (number, step) in trace.steps.iter().enumerate() {
        let rows = scheduler.schedule().rows.clone();
        batch.begin();
        for row in &rows {
            batch.push_scheduled(scheduler.request(row.key), row);
        }
        compare(
            &mut tally,
            &format!("step {number}"),
            &batch,
            step,
            trace.config.block_size,
        );
        if let Some(recorded) = &step.token_ids {
            let at = format!("step {number} token_ids");
            tally.check(&at, &batch.token_ids(), &recorded.as_slice());
        }
        scheduler.complete();
        let mut order = rows;
        order.sort_by_key(|row| row.key);
        for row in order {
            let request = scheduler.request(row.key);
            if request.num_computed() < request.tokens().len() {
                continue;
            }
            let output = &trace.outputs[row.key.index()][request.output().len()..];
            let drafted = &request.drafts()[..row.num_drafts];
            let accepted = drafted.iter().zip(output).take_while(|(a, b)| a == b);
            let num_accepted = accepted.count();
            scheduler.settle_drafts(row.key, row.num_drafts, num_accepted);
            for &token in &output[..=num_accepted.min(output.len() - 1)] {
                scheduler.append(row.key, token);
            }
            let request = scheduler.request(row.key);
            if request.is_at_limit() {
                scheduler.finish(row.key);
            } else if let (Some(lookup), Some(index)) = (&lookup, &mut indexes[row.key.index()]) {
                let most = trace.config.max_model_len - request.tokens().len();
                lookup.propose(index, request.tokens(), most, &mut drafts);
                scheduler.set_drafts(row.key, &drafts);
            }
        }
    }
    assert!(
        scheduler.schedule().rows.is_empty(),
        "{name}: more steps than recorded"
    );
    tally.finish(name);
}

#[test]
fn the_scheduler_schedules_what_was_recorded() {
    replay("llama_mrv2_f32");
    replay("llama_mrv2_f32_prefix");
    replay("llama_mrv2_f32_spec3");
}
