//! One layer's forward pass over prepared metadata: the convolution unit by unit, then the recurrence unit by unit. It must never
//! know how metadata was built.

use std::cell::RefCell;

use rayon::prelude::*;
use timetable_types::MambaType;

use super::{
    MambaConfig, MambaInputs, MambaStates, MambaStepMetadata,
    conv::{self, Conv},
    gdn, linear, mamba1, mamba2,
    recurrence::Carried,
    states::{Bank, CHANNELS},
    step::{Place, Runs},
};
use crate::cpu::{ImplError, kernel::on_best};

/// Below this many multiply-adds (some tens of microseconds) a second thread costs more than it saves.
const SEQUENTIAL_COST: usize = 1 << 18;

/// What one forward call needs beside its tensors: kept by the calling thread from layer to layer.
#[derive(Default)]
struct Scratch {
    convolved: Vec<f64>,
    outputs: Vec<f64>,
    projected: Vec<f64>,
    row: Vec<f64>,
}

/// One thread's, from unit to unit.
#[derive(Default)]
struct Workspace {
    conv: Vec<f32>,
    state: Vec<f64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// The convolution's outputs: for each unit of channels `[T, width]`.
#[derive(Clone, Copy)]
pub(super) struct Convolved<'a> {
    data: &'a [f64],
    tokens: usize,
}

impl<'a> Convolved<'a> {
    /// A token's channels of the unit that begins at channel `first`.
    #[inline(always)]
    pub(super) fn row(&self, first: usize, width: usize, place: &Place) -> &'a [f64] {
        &self.data[self.tokens * first + place.token as usize * width..][..width]
    }
}

/// One layer of the Mamba family on this device.
#[derive(Clone, Debug)]
pub struct MambaImpl {
    config: MambaConfig,
}

impl MambaImpl {
    /// For a layer.
    ///
    /// # Errors
    /// [`ImplError::Config`] for sizes that no layer has.
    pub fn new(config: MambaConfig) -> Result<Self, ImplError> {
        let at_least = |name, value: usize, least: usize| match value >= least {
            true => Ok(()),
            false => Err(ImplError::Config {
                name,
                value: value.to_string(),
                remedy: if least == 2 {
                    "it must be at least 2"
                } else {
                    "it must be at least 1"
                },
            }),
        };
        let multiple = |name, value: usize, of: usize, remedy| match value.is_multiple_of(of) {
            true => Ok(()),
            false => Err(ImplError::Config {
                name,
                value: value.to_string(),
                remedy,
            }),
        };
        if config.mamba_type() != MambaType::Linear {
            at_least("conv_kernel", config.conv_kernel(), 2)?;
        }
        match &config {
            MambaConfig::Mamba2(c) => {
                at_least("num_heads", c.num_heads, 1)?;
                at_least("head_dim", c.head_dim, 1)?;
                at_least("n_groups", c.n_groups, 1)?;
                at_least("state_size", c.state_size, 1)?;
                let remedy = "it must be a multiple of n_groups";
                multiple("num_heads", c.num_heads, c.n_groups, remedy)?;
            }
            MambaConfig::Gdn(c) => {
                at_least("num_k_heads", c.num_k_heads, 1)?;
                at_least("num_v_heads", c.num_v_heads, 1)?;
                at_least("head_k_dim", c.head_k_dim, 1)?;
                at_least("head_v_dim", c.head_v_dim, 1)?;
                let remedy = "it must be a multiple of num_k_heads";
                multiple("num_v_heads", c.num_v_heads, c.num_k_heads, remedy)?;
            }
            MambaConfig::Mamba1(c) => {
                at_least("intermediate_size", c.intermediate_size, 1)?;
                at_least("state_size", c.state_size, 1)?;
                at_least("time_step_rank", c.time_step_rank, 1)?;
            }
            MambaConfig::ShortConv(c) => at_least("conv_dim", c.conv_dim, 1)?,
            MambaConfig::Linear(c) => {
                at_least("num_heads", c.num_heads, 1)?;
                at_least("head_dim", c.head_dim, 1)?;
            }
        }
        Ok(MambaImpl { config })
    }

    /// The layer.
    pub fn config(&self) -> &MambaConfig {
        &self.config
    }

    /// Convolution and recurrence of the step's tokens, from and into `states`, into `output` (f32 [T, output_size]). A token that
    /// the metadata do not cover becomes zeros, and so does one of a row at the null state. No metadata (a profile run): all of
    /// `output` becomes zeros.
    ///
    /// # Errors
    /// Inputs, states or metadata of another layer or type, tensors that are too short, and metadata that name states that
    /// there are not. Nothing has been written then.
    pub fn forward(
        &self,
        inputs: &MambaInputs<'_>,
        states: &mut MambaStates,
        metadata: Option<&MambaStepMetadata>,
        output: &mut [f32],
    ) -> Result<(), ImplError> {
        let Some(step) = metadata else {
            output.fill(0.0);
            return Ok(());
        };
        self.check(inputs, states, step, output)?;
        output.fill(0.0);
        let tokens = step.num_tokens;
        if tokens == 0 {
            return Ok(());
        }
        let mut scratch = SCRATCH.take();
        let Scratch {
            convolved, outputs, ..
        } = &mut scratch;
        convolved.clear();
        convolved.resize(tokens * self.config.conv_dim(), 0.0);
        if let Some(conv) = self.conv(inputs) {
            convolve(&conv, states, step, convolved);
        }
        let size = self.config.output_size();
        let of_units = match inputs {
            MambaInputs::ShortConv(_) => &*convolved,
            _ => {
                outputs.clear();
                outputs.resize(tokens * size, 0.0);
                self.recur(inputs, states, step, &mut scratch);
                &scratch.outputs
            }
        };
        let width = states.recurrent.segments[0].1;
        for (unit, of_unit) in of_units.chunks(tokens * width).enumerate() {
            let rows = of_unit.chunks_exact(of_unit.len() / tokens);
            for (own, row) in rows.zip(output.chunks_exact_mut(size)) {
                let row = row[unit * width..].iter_mut();
                row.zip(own).for_each(|(x, &own)| *x = own as f32);
            }
        }
        SCRATCH.set(scratch);
        Ok(())
    }

    fn conv<'a>(&self, inputs: &MambaInputs<'a>) -> Option<Conv<'a>> {
        let (input, weight, bias) = match inputs {
            MambaInputs::Mamba2(i) => (i.hidden_states_b_c, i.conv_weight, i.conv_bias),
            MambaInputs::Gdn(i) => (i.mixed_qkv, i.conv_weight, None),
            MambaInputs::Mamba1(i) => (i.hidden_states, i.conv_weight, i.conv_bias),
            MambaInputs::ShortConv(i) => (i.b_x, i.conv_weight, i.conv_bias),
            MambaInputs::Linear(_) => return None,
        };
        Some(Conv {
            input,
            conv_dim: self.config.conv_dim(),
            kernel: self.config.conv_kernel(),
            weight,
            bias,
            silu: !matches!(inputs, MambaInputs::ShortConv(_)),
        })
    }

    fn recur(
        &self,
        inputs: &MambaInputs<'_>,
        states: &mut MambaStates,
        step: &MambaStepMetadata,
        scratch: &mut Scratch,
    ) {
        let Scratch {
            convolved,
            outputs,
            projected,
            row,
        } = scratch;
        let convolved = Convolved {
            data: &*convolved,
            tokens: step.num_tokens,
        };
        let scan = Scan {
            runs: &step.scan,
            tokens: step.num_tokens,
            num_states: states.num_states(),
        };
        let bank = &mut states.recurrent;
        match (inputs, &self.config) {
            (MambaInputs::Mamba2(inputs), MambaConfig::Mamba2(config)) => {
                scan.run(bank, outputs, 0, |unit| {
                    unit.carried.run(mamba2::Head {
                        config,
                        inputs,
                        convolved,
                        head: unit.index,
                        output: unit.output,
                    });
                });
            }
            (MambaInputs::Gdn(inputs), MambaConfig::Gdn(config)) => {
                scan.run(bank, outputs, config.head_v_dim, |unit| {
                    unit.carried.run(gdn::Head {
                        config,
                        inputs,
                        convolved,
                        head: unit.index,
                        output: unit.output,
                        delta: unit.space,
                    });
                });
            }
            (MambaInputs::Mamba1(inputs), MambaConfig::Mamba1(config)) => {
                projected.clear();
                projected.resize(step.num_tokens * mamba1::projected_size(config), 0.0);
                on_best(mamba1::Projection {
                    config,
                    inputs,
                    convolved,
                    unit: CHANNELS,
                    runs: &step.scan,
                    row,
                    projected,
                });
                scan.run(bank, outputs, CHANNELS, |unit| {
                    let width = unit.output.len() / step.num_tokens;
                    unit.carried.run(mamba1::Channels {
                        config,
                        inputs,
                        convolved,
                        projected,
                        first: unit.index * CHANNELS,
                        output: unit.output,
                        delta: &mut unit.space[..width],
                    });
                });
            }
            (MambaInputs::Linear(inputs), MambaConfig::Linear(config)) => {
                scan.run(bank, outputs, 0, |unit| {
                    unit.carried.run(linear::Head {
                        config,
                        inputs,
                        head: unit.index,
                        output: unit.output,
                    });
                });
            }
            // Without a recurrence; other pairs `check` has refused.
            _ => {}
        }
    }

    fn check(
        &self,
        inputs: &MambaInputs<'_>,
        states: &MambaStates,
        step: &MambaStepMetadata,
        output: &[f32],
    ) -> Result<(), ImplError> {
        let own = self.config.mamba_type();
        if step.mamba_type() != Some(own) {
            return Err(ImplError::WrongMetadata {
                impl_name: name(own),
                found: step.mamba_type().map_or("no type (unprepared)", name),
            });
        }
        if states.config() != &self.config {
            return Err(ImplError::Config {
                name: "states",
                value: "another layer's".into(),
                remedy: "make them with MambaStates::new and this layer's config",
            });
        }
        let at_least = |what, found: usize, expected: usize| match found >= expected {
            true => Ok(()),
            false => Err(ImplError::Shape {
                what,
                found,
                expected,
            }),
        };
        at_least("states", states.num_states(), step.num_states.max(1))?;
        let tokens = step.num_tokens;
        at_least(
            "elements of output",
            output.len(),
            tokens * self.config.output_size(),
        )?;
        let (channels, taps) = (self.config.conv_dim(), self.config.conv_kernel());
        if let Some(conv) = self.conv(inputs) {
            at_least(
                "elements of the convolution's input",
                conv.input.len(),
                tokens * channels,
            )?;
            at_least(
                "elements of conv_weight",
                conv.weight.len(),
                channels * taps,
            )?;
            if let Some(bias) = conv.bias {
                at_least("elements of conv_bias", bias.len(), channels)?;
            }
        }
        match (inputs, &self.config) {
            (MambaInputs::Mamba2(i), MambaConfig::Mamba2(c)) => {
                at_least("elements of dt", i.dt.len(), tokens * c.num_heads)?;
                at_least("elements of a", i.a.len(), c.num_heads)?;
                at_least("elements of d", i.d.len(), c.num_heads)?;
                at_least("elements of dt_bias", i.dt_bias.len(), c.num_heads)
            }
            (MambaInputs::Gdn(i), MambaConfig::Gdn(c)) => {
                at_least("elements of b", i.b.len(), tokens * c.num_v_heads)?;
                at_least("elements of a", i.a.len(), tokens * c.num_v_heads)?;
                at_least("elements of a_log", i.a_log.len(), c.num_v_heads)?;
                at_least("elements of dt_bias", i.dt_bias.len(), c.num_v_heads)
            }
            (MambaInputs::Mamba1(i), MambaConfig::Mamba1(c)) => {
                let (size, rank) = (c.intermediate_size, c.time_step_rank);
                let projected = mamba1::projected_size(c);
                at_least("elements of x_proj", i.x_proj.len(), projected * size)?;
                at_least("elements of dt_proj", i.dt_proj.len(), size * rank)?;
                at_least("elements of dt_bias", i.dt_bias.len(), size)?;
                at_least("elements of a", i.a.len(), size * c.state_size)?;
                at_least("elements of d", i.d.len(), size)
            }
            (MambaInputs::ShortConv(_), MambaConfig::ShortConv(_)) => Ok(()),
            (MambaInputs::Linear(i), MambaConfig::Linear(c)) => {
                let size = tokens * c.num_heads * c.head_dim;
                at_least("elements of query", i.query.len(), size)?;
                at_least("elements of key", i.key.len(), size)?;
                at_least("elements of value", i.value.len(), size)?;
                at_least("elements of slopes", i.slopes.len(), c.num_heads)
            }
            _ => Err(ImplError::Config {
                name: "inputs",
                value: "another type's".into(),
                remedy: "give the inputs of the layer's own type",
            }),
        }
    }
}

/// What a type is called in errors: as in the contract.
fn name(mamba_type: MambaType) -> &'static str {
    match mamba_type {
        MambaType::Mamba1 => "mamba1",
        MambaType::Mamba2 => "mamba2",
        MambaType::Gdn => "gdn",
        MambaType::ShortConv => "short-conv",
        MambaType::Linear => "linear",
    }
}

/// Calls `f` with each unit's index, states and outputs.
fn each_unit(
    cost: usize,
    (states, of_unit): (&mut [f32], usize),
    (outputs, of_output): (&mut [f64], usize),
    f: impl Fn(usize, &mut [f32], &mut [f64], &mut Workspace) + Sync,
) {
    let one = |(unit, (states, output)): (usize, (&mut [f32], &mut [f64]))| {
        let mut workspace = WORKSPACE.take();
        f(unit, states, output, &mut workspace);
        WORKSPACE.set(workspace);
    };
    if cost <= SEQUENTIAL_COST {
        let states = states.chunks_mut(of_unit);
        states
            .zip(outputs.chunks_mut(of_output))
            .enumerate()
            .for_each(one);
    } else {
        let states = states.par_chunks_mut(of_unit);
        states
            .zip(outputs.par_chunks_mut(of_output))
            .enumerate()
            .for_each(one);
    }
}

fn convolve(conv: &Conv<'_>, states: &mut MambaStates, step: &MambaStepMetadata, out: &mut [f64]) {
    let (tokens, num_states) = (step.num_tokens, states.num_states());
    let Bank {
        rows,
        segments,
        data,
    } = &mut states.conv;
    let (mut data, mut out) = (data.as_mut_slice(), out);
    let mut first = 0;
    for &(channels, width) in &*segments {
        let (own, later) = data.split_at_mut(num_states * *rows * channels);
        let (own_out, later_out) = out.split_at_mut(tokens * channels);
        (data, out) = (later, later_out);
        each_unit(
            step.conv.places.len() * channels * conv.kernel,
            (own, num_states * *rows * width),
            (own_out, tokens * width),
            |unit, states, output, workspace| {
                on_best(conv::Unit {
                    conv,
                    runs: &step.conv,
                    first: first + unit * width,
                    width: output.len() / tokens,
                    states,
                    output,
                    buffer: &mut workspace.conv,
                });
            },
        );
        first += channels;
    }
}

/// A recurrence over a step.
struct Scan<'a> {
    runs: &'a Runs,
    tokens: usize,
    num_states: usize,
}

/// One unit of it.
struct Unit<'u> {
    index: usize,
    /// f64 [T, width]
    output: &'u mut [f64],
    /// What it may work in.
    space: &'u mut [f64],
    carried: Carried<'u>,
}

impl Scan<'_> {
    /// Calls `f` with each unit, which has `space` f64 to work in.
    fn run(&self, bank: &mut Bank, outputs: &mut [f64], space: usize, f: impl Fn(Unit<'_>) + Sync) {
        let width = bank.segments[0].1;
        each_unit(
            2 * self.runs.places.len() * bank.segments[0].0 * bank.rows,
            (&mut bank.data, self.num_states * bank.rows * width),
            (outputs, self.tokens * width),
            |index, states, output, workspace| {
                let size = states.len() / self.num_states;
                workspace.state.resize(size + space, 0.0);
                let (state, space) = workspace.state.split_at_mut(size);
                f(Unit {
                    index,
                    output,
                    space,
                    carried: Carried {
                        runs: self.runs,
                        states,
                        state,
                    },
                });
            },
        );
    }
}
