//! A small layer that keeps states, and a step of it: every request's tokens and states its own, whatever else may not be read NaN,
//! and what is right afterwards in float64, of tokens and of states. It must never know how metadata was built or broken.

#[path = "../support/mamba.rs"]
mod layers;

use layers::{Layer, Token};
use timetable_attention::StepInputs;
use timetable_device::cpu::mamba::{
    GdnConfig, LinearConfig, Mamba1Config, Mamba2Config, MambaConfig, MambaImpl, MambaStates,
    MambaStepMetadata, ShortConvConfig,
};
use timetable_types::{MambaCacheMode, MambaType, Metadata};

use crate::case::{Case, Random};

/// What rounding may do to an f32 result.
const BOUND: f64 = 2e-6;
/// Tokens that a state in the middle of a request remembers here.
const REMEMBERED: usize = 5;

pub struct Recurrent {
    layer: Layer,
    implementation: MambaImpl,
    tensors: Vec<Vec<f32>>,
    states: MambaStates,
    /// f64 [tokens of requests, output_size]
    output: Vec<f64>,
    /// States that are kept: window and recurrence.
    kept: Vec<(usize, Vec<f64>, Vec<f64>)>,
}

/// Two of everything that there are several of.
fn small(mamba_type: MambaType) -> MambaConfig {
    let conv_kernel = 4;
    match mamba_type {
        MambaType::Mamba2 => MambaConfig::Mamba2(Mamba2Config {
            num_heads: 2,
            head_dim: 4,
            n_groups: 2,
            state_size: 3,
            conv_kernel,
            chunk_size: 16,
            time_step_limit: (0.0, f32::INFINITY),
        }),
        MambaType::Gdn => MambaConfig::Gdn(GdnConfig {
            num_k_heads: 1,
            num_v_heads: 2,
            head_k_dim: 3,
            head_v_dim: 4,
            conv_kernel,
        }),
        MambaType::Mamba1 => MambaConfig::Mamba1(Mamba1Config {
            intermediate_size: 6,
            state_size: 3,
            conv_kernel,
            time_step_rank: 1,
        }),
        MambaType::ShortConv => MambaConfig::ShortConv(ShortConvConfig {
            conv_dim: 6,
            conv_kernel,
        }),
        MambaType::Linear => MambaConfig::Linear(LinearConfig {
            num_heads: 2,
            head_dim: 3,
        }),
    }
}

fn narrowed(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

impl Recurrent {
    /// For a step whose requests are `rows` of (query tokens, keys).
    pub fn new(case: &Case, rows: &[(usize, usize)]) -> Self {
        let spec = case.config.kv_cache_spec.mamba.as_ref().expect("a spec");
        let random = &mut Random(case.num_blocks.into());
        let config = small(spec.mamba_type);
        let layer = Layer::new(config, &mut || random.real());
        let mut states = MambaStates::new(case.num_blocks as usize, &config);
        states.fill(f32::NAN);
        let drafts = spec.num_speculative_blocks as usize;
        let accepted = case.extras.first().map(|(_, accepted)| accepted);
        let (mut output, mut kept) = (Vec::new(), Vec::new());
        let mut tokens: Vec<Token> = Vec::new();
        for (row, &(query, keys)) in rows.iter().enumerate() {
            let own: Vec<Token> = (0..query)
                .map(|_| layer.token(&mut || random.real()))
                .collect();
            // LINEAR takes the first column in every mode.
            let column = match spec.cache_mode {
                _ if spec.mamba_type == MambaType::Linear => 0,
                MambaCacheMode::None => 0,
                MambaCacheMode::Align => (keys - 1) / case.config.kv_cache_spec.block_size as usize,
            };
            let table = &case.step.tensors.table().row(row)[column..];
            let has_context = keys > query;
            let verifies = drafts > 0 && has_context && query <= 1 + drafts;
            let begin = match (verifies, accepted) {
                (true, Some(accepted)) => accepted[row] as usize - 1,
                _ => 0,
            };
            let mut history: Vec<Token> = Vec::new();
            if has_context {
                // Each state is of other tokens.
                for (index, &state) in table[..=drafts].iter().enumerate() {
                    let past: Vec<Token> = (0..REMEMBERED)
                        .map(|_| layer.token(&mut || random.real()))
                        .collect();
                    let of = layer.reference(&past);
                    let (window, recurrent) = (narrowed(&of.window), narrowed(&of.state));
                    states.set(state as usize, &window, &recurrent);
                    if index == begin {
                        history = past;
                    }
                }
            }
            let all = || history.iter().chain(&own);
            let of = layer.reference(all());
            output.extend_from_slice(&of.output[history.len() * config.output_size()..]);
            if verifies {
                for (index, &state) in table[..query].iter().enumerate() {
                    let of = layer.reference(all().take(history.len() + index + 1));
                    kept.push((state as usize, of.window, of.state));
                }
            } else {
                kept.push((table[0] as usize, of.window, of.state));
            }
            tokens.extend(own);
        }
        tokens.resize(case.step.cam.num_actual_tokens as usize, layer.poison());
        Recurrent {
            implementation: MambaImpl::new(config).expect("an impl"),
            tensors: layer.tensors(&tokens),
            layer,
            states,
            output,
            kept,
        }
    }

    /// Runs `metadata`: an error is why the device did not, the other what was wrong.
    pub fn run(&self, case: &Case, metadata: &Metadata) -> Result<Result<(), String>, String> {
        let mut step = MambaStepMetadata::new();
        let extras: Vec<_> = case
            .extras
            .iter()
            .map(|(name, rows)| (*name, rows.as_slice()))
            .collect();
        let inputs = StepInputs {
            extras: &extras,
            ..case.step.tensors.inputs()
        };
        step.prepare(metadata, &inputs, &case.config.kv_cache_spec)
            .map_err(|error| error.to_string())?;
        let width = self.layer.config.output_size();
        let mut output = vec![1e30; case.step.cam.num_actual_tokens as usize * width];
        let mut states = self.states.clone();
        self.implementation
            .forward(
                &self.layer.inputs(&self.tensors),
                &mut states,
                Some(&step),
                &mut output,
            )
            .map_err(|error| error.to_string())?;
        Ok(self.judge(&output, &states))
    }

    fn judge(&self, output: &[f32], states: &MambaStates) -> Result<(), String> {
        let width = self.layer.config.output_size();
        let (own, padding) = output.split_at(self.output.len());
        for (token, (found, wanted)) in own.chunks(width).zip(self.output.chunks(width)).enumerate()
        {
            close(found, wanted).map_err(|problem| format!("token {token}: {problem}"))?;
        }
        if padding.iter().any(|&x| x != 0.0) {
            return Err("a token of no request is not zeros".to_owned());
        }
        for (state, window, recurrent) in &self.kept {
            let found = states.window(*state);
            let found = close(&found, window).and_then(|()| {
                let found = states.recurrent(*state);
                close(&found, recurrent)
            });
            found.map_err(|problem| format!("state {state}: {problem}"))?;
        }
        let bits = |values: Vec<f32>| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        for state in 0..states.num_states() {
            let is_kept = self.kept.iter().any(|kept| kept.0 == state);
            let same = bits(states.window(state)) == bits(self.states.window(state))
                && bits(states.recurrent(state)) == bits(self.states.recurrent(state));
            if !is_kept && !same {
                return Err(format!("state {state} was written"));
            }
        }
        Ok(())
    }
}

fn close(found: &[f32], wanted: &[f64]) -> Result<(), String> {
    let scale = wanted.iter().fold(0.0f64, |scale, x| scale.max(x.abs()));
    for (&found, &wanted) in found.iter().zip(wanted) {
        let error = (f64::from(found) - wanted).abs();
        if error.is_nan() || error > BOUND * scale.max(1e-3) {
            return Err(format!("{found} where {wanted} was right"));
        }
    }
    Ok(())
}
