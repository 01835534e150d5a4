//! A mixture of experts: each token goes through the few that its router chooses, and one that every token shares.
//!
//! A token's result is summed over its experts in their order, whatever the rest of the batch: the same numbers alone and in
//! any batch.

use super::config::ModelConfig;
use super::error::ModelError;
use super::feed_forward::{Dense, FeedForwardScratch};
use super::layout::{ExpertTensors, ExpertsLayout, families::dense};
use super::linear::Projection;
use super::loading::Loading;
use super::ops;
use super::pool::Pool;
use super::traits::{ExpertsConfig, FeedForward, Routing};

/// The experts of one layer.
pub(super) struct Experts {
    config: ExpertsConfig,
    router: Projection,
    experts: Vec<Dense>,
    shared: Option<Dense>,
    shared_gate: Option<Projection>,
}

/// One expert of one token.
#[derive(Clone, Copy)]
struct Route {
    expert: usize,
    token: usize,
    weight: f32,
}

/// Buffers of a mixture, reused from step to step.
#[derive(Default)]
pub(super) struct ExpertsScratch {
    scores: Vec<f32>,
    chosen: Vec<(usize, f32)>,
    /// The best expert of each group.
    best: Vec<f32>,
    routes: Vec<Route>,
    /// The inputs and outputs of one expert.
    gathered: Vec<f32>,
    expert_out: Vec<f32>,
}

impl Experts {
    pub(super) fn load(
        loading: &Loading<'_>,
        layout: &ExpertsLayout,
        layer: usize,
    ) -> Result<Self, ModelError> {
        let model = loading.config;
        let hidden = model.hidden_size;
        let FeedForward::Experts(config) =
            model.traits.feed_forward(layer, model.intermediate_size)
        else {
            unreachable!("the layout follows the configuration");
        };
        let expert = |index: usize| match &layout.experts {
            ExpertTensors::Single { prefix } => {
                let prefix = format!("{prefix}.{index}");
                let layout = dense(&prefix, hidden, config.moe_intermediate_size);
                Dense::load(loading, &layout)
            }
            ExpertTensors::Stacked { gate_up, down } => {
                stacked(loading, &config, (gate_up, down), index)
            }
        };
        Ok(Self {
            config,
            router: loading.matrix(hidden, &layout.router)?,
            experts: (0..config.num_experts)
                .map(expert)
                .collect::<Result<_, _>>()?,
            shared: layout
                .shared
                .as_ref()
                .map(|shared| Dense::load(loading, shared))
                .transpose()?,
            shared_gate: layout
                .shared_gate
                .as_ref()
                .map(|gate| loading.matrix(hidden, gate))
                .transpose()?,
        })
    }

    /// `out[m, hidden]` of `x[m, hidden]`; `out` is resized.
    pub(super) fn forward(
        &self,
        pool: &Pool,
        model: &ModelConfig,
        x: &[f32],
        (scratch, buffers): (&mut ExpertsScratch, &mut FeedForwardScratch),
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let hidden = model.hidden_size;
        let m = x.len() / hidden;
        match &self.shared {
            Some(shared) => shared.forward(pool, m, x, buffers, out)?,
            None => {
                out.clear();
                out.resize(m * hidden, 0.0);
            }
        }
        let scores = &mut scratch.scores;
        if let Some(gate) = &self.shared_gate {
            gate.forward(pool, m, x, &mut buffers.projection, scores)?;
            for (row, gate) in out.chunks_exact_mut(hidden).zip(scores.iter()) {
                let gate = ops::sigmoid(*gate);
                row.iter_mut().for_each(|value| *value *= gate);
            }
        }
        self.router
            .forward(pool, m, x, &mut buffers.projection, scores)?;
        scratch.routes.clear();
        for (token, scores) in scores.chunks_exact_mut(self.config.num_experts).enumerate() {
            choose(&self.config, scores, &mut scratch.best, &mut scratch.chosen);
            let of_token = |&(expert, weight): &(usize, f32)| Route {
                expert,
                token,
                weight,
            };
            scratch.routes.extend(scratch.chosen.iter().map(of_token));
        }
        scratch
            .routes
            .sort_unstable_by_key(|route| (route.expert, route.token));
        let scales_input = self.config.routing == Routing::SigmoidOfInput;
        for routes in scratch.routes.chunk_by(|a, b| a.expert == b.expert) {
            scratch.gathered.clear();
            for route in routes {
                let row = &x[route.token * hidden..][..hidden];
                let weight = if scales_input { route.weight } else { 1.0 };
                scratch
                    .gathered
                    .extend(row.iter().map(|value| value * weight));
            }
            let expert = &self.experts[routes[0].expert];
            let expert_out = &mut scratch.expert_out;
            expert.forward(pool, routes.len(), &scratch.gathered, buffers, expert_out)?;
            for (route, row) in routes.iter().zip(expert_out.chunks_exact(hidden)) {
                let weight = if scales_input { 1.0 } else { route.weight };
                let out = &mut out[route.token * hidden..][..hidden];
                for (out, value) in out.iter_mut().zip(row) {
                    *out += weight * value;
                }
            }
        }
        Ok(())
    }
}

/// The experts of a token and their weights, of its router's `scores`, which are overwritten.
fn choose(
    config: &ExpertsConfig,
    scores: &mut [f32],
    best: &mut Vec<f32>,
    chosen: &mut Vec<(usize, f32)>,
) {
    match config.routing {
        Routing::SigmoidOfInput => {
            highest(config.num_experts_per_tok, scores, chosen);
            for (_, weight) in chosen {
                *weight = ops::sigmoid(*weight);
            }
        }
        Routing::Softmax {
            norm_topk_prob,
            scaling_factor,
            groups,
        } => {
            softmax(scores);
            if let Some((groups, kept)) = groups {
                let size = scores.len() / groups;
                let highest_of = |group: &[f32]| group.iter().copied().fold(0.0, f32::max);
                best.clear();
                best.extend(scores.chunks_exact(size).map(highest_of));
                highest(kept, best, chosen);
                for (group, scores) in scores.chunks_exact_mut(size).enumerate() {
                    if chosen.iter().all(|(kept, _)| *kept != group) {
                        scores.fill(0.0);
                    }
                }
            }
            highest(config.num_experts_per_tok, scores, chosen);
            let total: f32 = chosen.iter().map(|(_, weight)| weight).sum();
            for (_, weight) in chosen {
                if norm_topk_prob {
                    *weight /= total;
                }
                *weight *= scaling_factor;
            }
        }
    }
}

/// The indices and values of the `count` highest of `values`; of equals the first.
fn highest(count: usize, values: &[f32], chosen: &mut Vec<(usize, f32)>) {
    chosen.clear();
    for (index, &value) in values.iter().enumerate() {
        let place = chosen.partition_point(|(_, better)| *better >= value);
        if place < count {
            chosen.truncate(count - 1);
            chosen.insert(place, (index, value));
        }
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        total += *score;
    }
    scores.iter_mut().for_each(|score| *score /= total);
}

/// Expert `index` of tensors that hold all, transposed.
fn stacked(
    loading: &Loading<'_>,
    config: &ExpertsConfig,
    (gate_up, down): (&str, &str),
    index: usize,
) -> Result<Dense, ModelError> {
    let (hidden, width) = (loading.config.hidden_size, config.moe_intermediate_size);
    let transposed = |name: &str, k: usize, n: usize| {
        let all = loading
            .checkpoint
            .expect(name, &[config.num_experts, k, n])?;
        let columns = all.row(index).to_f32();
        let mut rows = Vec::with_capacity(n * k);
        for row in 0..n {
            rows.extend((0..k).map(|column| columns[column * n + row]));
        }
        Ok::<_, ModelError>(Projection::of_rows(k, rows))
    };
    Ok(Dense::new(
        transposed(gate_up, hidden, 2 * width)?,
        transposed(down, width, hidden)?,
        loading.config.traits.activation,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(config: ExpertsConfig, scores: &[f32]) -> Vec<(usize, f32)> {
        let mut chosen = Vec::new();
        choose(&config, &mut scores.to_vec(), &mut Vec::new(), &mut chosen);
        chosen
    }

    fn config(chosen: usize, routing: Routing) -> ExpertsConfig {
        ExpertsConfig {
            num_experts: 6,
            num_experts_per_tok: chosen,
            moe_intermediate_size: 8,
            shared_intermediate_size: None,
            shared_gate: false,
            routing,
        }
    }

    #[test]
    fn experts_are_chosen_and_weighed_by_each_rule() {
        let scores = [0.0, 2.0, 1.0, 2.0, -1.0, 1.5];
        let exps: Vec<f32> = scores.iter().map(|s: &f32| s.exp()).collect();
        let total: f32 = exps.iter().sum();
        let rule = |norm_topk_prob, scaling_factor, groups| Routing::Softmax {
            norm_topk_prob,
            scaling_factor,
            groups,
        };
        let close = |found: &[(usize, f32)], expected: &[(usize, f32)]| {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert_eq!(a.0, b.0, "{found:?}");
                assert!((a.1 - b.1).abs() < 1e-6, "{found:?} {expected:?}");
            }
        };
        let plain = routed(config(3, rule(false, 2.0, None)), &scores);
        let weight = |i: usize| 2.0 * exps[i] / total;
        close(&plain, &[(1, weight(1)), (3, weight(3)), (5, weight(5))]);
        let normed = routed(config(2, rule(true, 1.0, None)), &scores);
        close(&normed, &[(1, 0.5), (3, 0.5)]);
        // Three groups of two: the best of the second and the third is an equal of the first's, which comes first.
        let grouped = routed(config(2, rule(false, 1.0, Some((3, 1)))), &scores);
        close(&grouped, &[(1, exps[1] / total), (0, exps[0] / total)]);
        let sigmoid = routed(config(1, Routing::SigmoidOfInput), &scores);
        close(&sigmoid, &[(1, 1.0 / (1.0 + (-2f32).exp()))]);
    }
}
