//! Requests that go through several steps of a layer, each step by metadata of the plain builder and of the reference builder, and
//! by random metadata made here. Whatever a step may not read is NaN.

#[path = "../support/builder_config.rs"]
pub mod builder_config;
#[path = "by_hand.rs"]
mod by_hand;

use std::{ops::Range, sync::Mutex};

use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use timetable_attention::{
    Grant, StepInputs, Verifier, VerifyContext,
    batch::{GroupStep, StepTensors},
    plain_builder,
};
use timetable_device::{
    cpu::mamba::{MambaImpl, MambaStates, MambaStepMetadata},
    reference::{mamba::Recurrence, max_relative_error},
};
use timetable_reference::native_twin;
use timetable_types::{
    BuilderConfig, Extra, ExtraValue, Family, KvCacheSpec, KvCacheSpecKind, MambaCacheMode,
    MambaSpec, MambaType, Metadata,
};

use crate::{
    layers::{Layer, Token, random_config},
    support::{normal, pick, rng},
};

/// What `make` gives, in order.
pub const PLAIN: usize = 0;
pub const BY_HAND: usize = 1;
pub const REFERENCE: usize = 2;

const REQUESTS: usize = 6;
const BLOCK_SIZE: usize = 16;
/// Columns of a table whose blocks each have a state.
const ALIGNED_COLUMNS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Decode,
    Verify,
    Prefill,
}

/// A request's part of a step.
#[derive(Clone, Debug)]
pub struct Row {
    pub request: usize,
    pub kind: Kind,
    pub tokens: Vec<Token>,
    /// How many of the tokens count afterwards.
    pub accepted: usize,
}

struct Request {
    /// Those that counted.
    tokens: Vec<Token>,
    /// How many of the last step's.
    accepted: usize,
    /// How many of the last step's did not count.
    rejected: usize,
    /// Where its states begin in its row of the table.
    column: usize,
    /// Blocks.
    table: Vec<i32>,
}

pub struct World {
    pub layer: Layer,
    implementation: MambaImpl,
    config: BuilderConfig,
    mode: MambaCacheMode,
    drafts: usize,
    requests: Vec<Request>,
    states: MambaStates,
    rng: Pcg64Mcg,
    /// From step to step the same.
    prepared: Mutex<MambaStepMetadata>,
    /// (rows, tokens) of no request, one of which a step has.
    pub padding: &'static [(usize, usize)],
    /// Does the host not know yet what the last step rejected? Then its lengths are bounds.
    pub lengths_are_bounds: bool,
}

/// What a step should give.
pub struct Expected {
    pub output: Vec<f64>,
    /// States that are kept, by id.
    kept: Vec<(usize, Recurrence)>,
}

/// A step that is ready to run.
pub struct Made {
    pub metadata: Metadata,
    pub step: GroupStep,
    accepted: Vec<i32>,
    pub tensors: Vec<Vec<f32>>,
}

impl Made {
    pub fn inputs<'a>(&'a self, extras: &'a [(&'a str, &'a [i32])]) -> StepInputs<'a> {
        StepInputs {
            extras,
            ..self.step.tensors.inputs()
        }
    }
}

impl World {
    pub fn random(mamba_type: MambaType, seed: u64) -> Self {
        let random = &mut rng(seed);
        let takes_drafts = !matches!(mamba_type, MambaType::Mamba1 | MambaType::Linear);
        let drafts = match takes_drafts {
            true => *pick(random, &[0, 0, 1, 3]),
            false => 0,
        };
        let mode = match mamba_type == MambaType::Linear {
            true => MambaCacheMode::None,
            false => *pick(random, MambaCacheMode::ALL),
        };
        World::new(mamba_type, seed, drafts, mode)
    }

    pub fn new(mamba_type: MambaType, seed: u64, drafts: usize, mode: MambaCacheMode) -> Self {
        let mut rng = rng(seed ^ 0x5eed);
        let sizes = random_config(mamba_type, &mut |of| *pick(&mut rng, of));
        let layer = Layer::new(sizes, &mut || normal(&mut rng));
        let mut config = builder_config::config();
        config.kv_cache_spec.kind = KvCacheSpecKind::Mamba;
        config.kv_cache_spec.block_size = BLOCK_SIZE as u32;
        config.kv_cache_spec.mamba = Some(MambaSpec {
            mamba_type,
            cache_mode: mode,
            num_speculative_blocks: drafts as u32,
            chunk_size: *pick(&mut rng, &[1, 8, 16, 64, 64]),
        });
        config.scheduler.num_speculative_tokens = drafts as u32;
        config.scheduler.max_num_batched_tokens = 1024;
        config.scheduler.max_model_len = 2048;
        let width = drafts
            + match mode {
                MambaCacheMode::None => 1,
                MambaCacheMode::Align => ALIGNED_COLUMNS,
            };
        let mut blocks: Vec<i32> = (1..=(REQUESTS * width) as i32).collect();
        blocks.shuffle(&mut rng);
        let requests = blocks
            .chunks(width)
            .map(|table| Request {
                tokens: Vec::new(),
                accepted: 1,
                rejected: 0,
                column: 0,
                table: table.to_vec(),
            })
            .collect();
        let mut states = MambaStates::new(1 + blocks.len(), &layer.config);
        states.fill(f32::NAN);
        World {
            implementation: MambaImpl::new(layer.config).expect("an impl"),
            layer,
            config,
            mode,
            drafts,
            requests,
            states,
            rng,
            prepared: Mutex::default(),
            padding: &[(0, 0), (0, 0), (1, 1), (2, 5)],
            lengths_are_bounds: false,
        }
    }

    pub fn spec(&self) -> &KvCacheSpec {
        &self.config.kv_cache_spec
    }

    /// Those before the next step.
    pub fn states(&self) -> &MambaStates {
        &self.states
    }

    /// A request's tokens that counted so far.
    pub fn history(&self, request: usize) -> &[Token] {
        &self.requests[request].tokens
    }

    fn is_gdn(&self) -> bool {
        self.mamba_type() == MambaType::Gdn
    }

    fn mamba_type(&self) -> MambaType {
        self.layer.config.mamba_type()
    }

    pub fn row(&mut self, request: usize, kind: Kind, tokens: usize, accepted: usize) -> Row {
        let rng = &mut self.rng;
        let tokens: Vec<Token> = (0..tokens)
            .map(|_| self.layer.token(&mut || normal(rng)))
            .collect();
        Row {
            request,
            kind,
            accepted: if kind == Kind::Verify {
                accepted
            } else {
                tokens.len()
            },
            tokens,
        }
    }

    /// Some requests go on, decodes first; others begin.
    pub fn random_step(&mut self) -> Vec<Row> {
        let mut order: Vec<usize> = (0..REQUESTS).collect();
        order.shuffle(&mut self.rng);
        order.truncate(self.rng.random_range(1..=REQUESTS));
        let (mut rows, mut prefills) = (Vec::new(), Vec::new());
        for request in order {
            let done = self.requests[request].tokens.len();
            let room = ALIGNED_COLUMNS * BLOCK_SIZE - done;
            if room < 8 {
                continue;
            }
            let has_verified = self.requests[request].accepted > 1;
            if done > 0 && (has_verified || self.rng.random_bool(0.6)) {
                let tokens = 1 + self.rng.random_range(0..=self.drafts);
                let accepted = self.rng.random_range(1..=tokens);
                // Where drafts are made, every row that decodes verifies.
                let kind = if self.drafts > 0 {
                    Kind::Verify
                } else {
                    Kind::Decode
                };
                rows.push(self.row(request, kind, tokens, accepted));
            } else {
                // A prompt's first chunk may be one token; a later one of one token is a decode.
                let least = if done > 0 { 2 + self.drafts } else { 1 };
                let most = *pick(&mut self.rng, &[4, 20, 70]);
                let tokens = self.rng.random_range(least..=(least + most).min(room));
                prefills.push(self.row(request, Kind::Prefill, tokens, 0));
            }
        }
        rows.append(&mut prefills);
        if self.is_gdn() && self.drafts > 0 {
            rows.shuffle(&mut self.rng);
        }
        if rows.is_empty() {
            self.requests[0].tokens.clear();
            self.requests[0].accepted = 1;
            rows.push(self.row(0, Kind::Prefill, 5, 0));
        }
        rows
    }

    /// Where a row's states begin in its row of the table.
    fn column(&self, row: &Row) -> usize {
        let len = self.requests[row.request].tokens.len() + row.tokens.len();
        match self.mode {
            MambaCacheMode::None => 0,
            MambaCacheMode::Align => (len - 1) / BLOCK_SIZE,
        }
    }

    /// What a cache manager does before a step: a request whose last token is in another block takes its state along.
    fn carry(&mut self, rows: &[Row]) {
        for row in rows {
            let column = self.column(row);
            let request = &mut self.requests[row.request];
            if column != request.column && !request.tokens.is_empty() {
                let state = |column: usize| request.table[column] as usize;
                let from = state(request.column + request.accepted - 1);
                self.states.copy(from, state(column));
                request.accepted = 1;
            }
            request.column = column;
        }
    }

    /// The step by the plain builder, by hand, and by the reference builder.
    pub fn make(&mut self, rows: &[Row]) -> Vec<Made> {
        self.carry(rows);
        let padding = *pick(&mut self.rng, self.padding);
        let mut tensors = StepTensors {
            query_start_loc: vec![0],
            block_table_width: self.requests[0].table.len(),
            ..StepTensors::default()
        };
        let (mut accepted, mut drafts, mut flags) = (Vec::new(), Vec::new(), Vec::new());
        let mut tokens: Vec<&Token> = Vec::new();
        for row in rows {
            let request = &self.requests[row.request];
            tokens.extend(&row.tokens);
            tensors.query_start_loc.push(tokens.len() as i32);
            tensors
                .seq_lens
                .push((request.tokens.len() + row.tokens.len()) as i32);
            tensors.block_table.extend_from_slice(&request.table);
            accepted.push(request.accepted as i32);
            drafts.push(match row.kind {
                Kind::Verify => row.tokens.len() as i32 - 1,
                _ => -1,
            });
            flags.push(u8::from(row.kind == Kind::Prefill));
        }
        let own = tokens.len();
        let poison = self.layer.poison();
        tokens.extend(std::iter::repeat_n(&poison, padding.1));
        let all = tokens.len();
        for _ in 0..padding.0 {
            tensors.query_start_loc.push(own as i32);
            tensors.seq_lens.push(0);
            accepted.push(1);
            drafts.push(-1);
        }
        let rows_all = tensors.seq_lens.len();
        tensors
            .block_table
            .resize(rows_all * tensors.block_table_width, 0);
        tensors.slot_mapping = vec![-1; all];
        tensors.positions = vec![0; all];
        let mut lens = tensors.seq_lens.clone();
        if self.lengths_are_bounds {
            for (len, row) in lens.iter_mut().zip(rows) {
                *len += self.requests[row.request].rejected as i32;
            }
        }
        let (longest, most) = (
            rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0),
            lens.iter().copied().max().unwrap_or(0),
        );
        let mut step = GroupStep::new(tensors, lens, all as u32, longest as u32, most as u32);
        step.cam.is_prefilling = flags;
        if self.drafts > 0 {
            step.cam.extras = vec![
                Extra {
                    name: "num_accepted_tokens".to_owned(),
                    value: ExtraValue::Device(rows_all as u32),
                },
                Extra {
                    name: "num_decode_draft_tokens_cpu".to_owned(),
                    value: ExtraValue::Host(drafts),
                },
            ];
        }
        let plain = self.build(PLAIN, &step);
        let reference = self.build(REFERENCE, &step);
        let tensors = self.layer.tensors(tokens.iter().copied());
        let by_hand = by_hand::metadata(
            &by_hand::Step {
                mamba_type: self.mamba_type(),
                spec: self.config.kv_cache_spec.mamba.as_ref().expect("a spec"),
                step: &step,
                rows,
                accepted: &accepted,
                columns: rows.iter().map(|row| self.column(row)).collect(),
            },
            &mut self.rng,
        );
        let made = |metadata| Made {
            metadata,
            step: step.clone(),
            accepted: accepted.clone(),
            tensors: tensors.clone(),
        };
        let all = vec![made(plain), made(by_hand), made(reference)];
        for builder in [PLAIN, REFERENCE] {
            self.verify(&all[builder])
                .expect("what builders make passes");
        }
        all
    }

    /// What the plain or the reference builder makes of a step.
    pub fn build(&self, builder: usize, step: &GroupStep) -> Metadata {
        let mut builder = match builder {
            PLAIN => plain_builder(Family::Mamba, &self.config).expect("a plain builder"),
            _ => native_twin("mamba", &self.config).expect("the reference builder"),
        };
        builder.build(&step.cam, false).expect("metadata")
    }

    /// A part of a step without drafts: tokens `range` of `whole`'s, by the metadata of `builder`.
    pub fn part(
        &self,
        whole: &Made,
        range: Range<usize>,
        step: &GroupStep,
        builder: usize,
    ) -> Made {
        let tokens = whole.step.cam.num_actual_tokens as usize;
        let cut = |tensor: &Vec<f32>| {
            let width = tensor.len() / tokens;
            tensor[range.start * width..range.end * width].to_vec()
        };
        Made {
            metadata: self.build(builder, step),
            step: step.clone(),
            accepted: vec![1; step.batch_size()],
            tensors: whole.tensors.iter().map(cut).collect(),
        }
    }

    /// Those that the row keeps.
    pub fn states_of(&self, row: &Row) -> Vec<usize> {
        let request = &self.requests[row.request];
        let count = if row.kind == Kind::Verify {
            row.tokens.len()
        } else {
            1
        };
        let own = &request.table[request.column..request.column + count];
        own.iter().map(|&state| state as usize).collect()
    }

    pub fn verify(&self, made: &Made) -> Result<(), String> {
        let extras = [("num_accepted_tokens", made.accepted.as_slice())];
        let context = VerifyContext {
            config: &self.config,
            common: &made.step.cam,
            inputs: &made.inputs(&extras),
            promise: None,
            grant: Grant::Exact,
            num_blocks: self.states.num_states() as u32,
        };
        let verified = Verifier::new().verify(&made.metadata, &context);
        verified.map(drop).map_err(|error| error.to_string())
    }

    /// Output and states, from the world's own on.
    pub fn forward(&self, made: &Made) -> (Vec<f32>, MambaStates) {
        self.forward_from(self.states.clone(), made)
    }

    /// Output and states, from `states` on.
    pub fn forward_from(&self, states: MambaStates, made: &Made) -> (Vec<f32>, MambaStates) {
        self.run_on(states, made, &made.metadata)
            .expect("a forward pass")
    }

    /// The output of any metadata in the place of the step's.
    pub fn try_forward(&self, made: &Made, metadata: &Metadata) -> Result<Vec<f32>, String> {
        Ok(self.run_on(self.states.clone(), made, metadata)?.0)
    }

    fn run_on(
        &self,
        mut states: MambaStates,
        made: &Made,
        metadata: &Metadata,
    ) -> Result<(Vec<f32>, MambaStates), String> {
        let extras = [("num_accepted_tokens", made.accepted.as_slice())];
        let mut prepared = self.prepared.lock().expect("no panic before");
        prepared
            .prepare(metadata, &made.inputs(&extras), self.spec())
            .map_err(|error| error.to_string())?;
        let tokens = made.step.cam.num_actual_tokens as usize;
        let mut output = vec![1e30; tokens * self.layer.config.output_size()];
        let inputs = self.layer.inputs(&made.tensors);
        self.implementation
            .forward(&inputs, &mut states, Some(&*prepared), &mut output)
            .map_err(|error| error.to_string())?;
        Ok((output, states))
    }

    /// By the reference, each request alone from its first token on.
    pub fn expected(&self, rows: &[Row]) -> Expected {
        let width = self.layer.config.output_size();
        let mut output = Vec::new();
        let mut kept = Vec::new();
        for row in rows {
            let before = &self.requests[row.request];
            let history = || before.tokens.iter().chain(&row.tokens);
            let done = before.tokens.len();
            let all = self.layer.reference(history());
            output.extend_from_slice(&all.output[done * width..]);
            if row.kind == Kind::Verify {
                for taken in 1..=row.tokens.len() {
                    let state = before.table[before.column + taken - 1];
                    let of = self.layer.reference(history().take(done + taken));
                    kept.push((state as usize, of));
                }
            } else {
                kept.push((before.table[before.column] as usize, all));
            }
        }
        Expected { output, kept }
    }

    /// The largest errors of outputs and states. Padding must be zeros, and nobody else's state touched.
    pub fn errors(&self, expected: &Expected, output: &[f32], states: &MambaStates) -> (f64, f64) {
        let (own, padding) = output.split_at(expected.output.len());
        let width = self.layer.config.output_size();
        let of_output = max_relative_error(own, &expected.output, width);
        assert!(padding.iter().all(|&x| x == 0.0), "padding is zeros");
        let mut of_states = 0.0f64;
        for (state, expected) in &expected.kept {
            let window = states.window(*state).into_iter().map(f64::from);
            assert!(window.eq(expected.window.iter().copied()), "a window");
            let recurrent = states.recurrent(*state);
            let size = recurrent.len().max(1);
            of_states = of_states.max(max_relative_error(&recurrent, &expected.state, size));
        }
        // Nobody else's state is touched, and the null state is not written.
        let changed = |state: &usize| {
            let bits = |states: &MambaStates| -> Vec<u32> {
                let both = states.window(*state).into_iter();
                both.chain(states.recurrent(*state))
                    .map(f32::to_bits)
                    .collect()
            };
            bits(states) != bits(&self.states)
        };
        for state in (0..states.num_states()).filter(changed) {
            let is_kept = expected.kept.iter().any(|kept| kept.0 == state);
            assert!(is_kept, "state {state} changed");
        }
        (of_output, of_states)
    }

    /// Runs the step; the largest errors of outputs and states.
    pub fn run(&mut self, rows: &[Row]) -> (f64, f64) {
        let all = self.make(rows);
        let expected = self.expected(rows);
        let mut worst = (0.0f64, 0.0f64);
        let mut after = None;
        for made in &all {
            let (output, states) = self.forward(made);
            let errors = self.errors(&expected, &output, &states);
            worst = (worst.0.max(errors.0), worst.1.max(errors.1));
            after = Some(states);
        }
        self.states = after.expect("a step that ran");
        for row in rows {
            let request = &mut self.requests[row.request];
            request
                .tokens
                .extend_from_slice(&row.tokens[..row.accepted]);
            request.rejected = row.tokens.len() - row.accepted;
            request.accepted = if row.kind == Kind::Verify {
                row.accepted
            } else {
                1
            };
        }
        worst
    }
}

/// Every state, bit by bit.
pub fn state_bits(states: &MambaStates) -> Vec<u32> {
    (0..states.num_states())
        .flat_map(|state| {
            states
                .window(state)
                .into_iter()
                .chain(states.recurrent(state))
        })
        .map(f32::to_bits)
        .collect()
}
