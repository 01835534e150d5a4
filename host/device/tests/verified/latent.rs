//! As `case.rs`, for layers of latent attention: a step on one rank, once for each request with everybody else's latents and new
//! tokens poisoned too. It must never know how metadata was built or broken.

use timetable_attention::batch::{ContextParallel, GroupStep};
use timetable_device::{
    cpu::{
        ImplError,
        mla::{
            LatentCache, LatentDtype, LatentInputs, LatentSizes, MlaAttentionImpl, MlaConfig,
            MlaImpl, MlaStepMetadata,
        },
    },
    reference::latent,
};
use timetable_types::{BuilderConfig, Metadata};

use super::{Outcome, Ran, Random, UNWRITTEN, compare};

/// Of a head, beside what the configuration says.
const NOPE: usize = 12;
const VALUE: usize = 20;

/// One request: its cache and the step's new tokens, NaN but for its own.
struct Request {
    row: usize,
    cache: LatentCache,
    kv_c: Vec<f32>,
    k_pe: Vec<f32>,
}

/// Where a row's keys come from decides which of them a rank of several has.
struct Expected {
    /// All that this rank's cache holds.
    decode: Vec<f64>,
    /// Its context there and, on rank 0, the new tokens.
    prefill: Vec<f64>,
}

/// A layer, its weights, and the right answers.
pub struct LatentCase {
    layer: MlaImpl,
    rank: ContextParallel,
    num_tokens: usize,
    starts: Vec<i32>,
    q: Vec<f32>,
    kv_b_proj: Vec<f32>,
    requests: Vec<Request>,
    expected: Expected,
}

impl LatentCase {
    /// `rows`: (query tokens, keys).
    pub fn new(
        config: &BuilderConfig,
        step: &GroupStep,
        num_blocks: usize,
        rows: &[(usize, usize)],
        random: &mut Random,
    ) -> Self {
        let sizes = LatentSizes {
            num_heads: config.attention.num_heads as usize,
            kv_lora_rank: config.attention.kv_lora_rank as usize,
            qk_nope_head_dim: NOPE,
            qk_rope_head_dim: config.attention.qk_rope_head_dim as usize,
            v_head_dim: VALUE,
            scale: config.attention.scale as f32,
        };
        let parallel = &config.parallel;
        let rank = ContextParallel {
            size: parallel.dcp_world_size,
            rank: parallel.dcp_rank,
            interleave: parallel.cp_kv_cache_interleave_size,
        };
        let block_size = config.kv_cache_spec.block_size as usize;
        let layer = MlaImpl::new(MlaConfig::new(sizes, block_size)).expect("an impl");
        let num_tokens = step.cam.num_actual_tokens as usize;
        let (latent, rotated) = (sizes.kv_lora_rank, sizes.qk_rope_head_dim);
        let mut reals = |count: usize| -> Vec<f32> { (0..count).map(|_| random.real()).collect() };
        let starts = step.tensors.query_start_loc.clone();
        let live = starts[rows.len()] as usize;
        let width = sizes.num_heads * sizes.qk_head_dim();
        let mut q = reals(live * width);
        q.resize(num_tokens * width, f32::NAN);
        let kv_b_proj = reals(sizes.num_heads * (NOPE + VALUE) * latent);
        let mut requests = Vec::new();
        let (mut decodes, mut prefills) = (Vec::new(), Vec::new());
        for (row, &(query, keys)) in rows.iter().enumerate().filter(|(_, row)| row.0 > 0) {
            let latents = reals(keys * latent);
            let keys_pe = reals(keys * rotated);
            let mut cache =
                LatentCache::new(num_blocks, block_size, latent, rotated, LatentDtype::F32)
                    .expect("a cache");
            cache.fill(f32::NAN);
            let (run, size) = (rank.interleave as usize, rank.size as usize);
            let is_held = |position: usize| position / run % size == rank.rank as usize;
            let blocks = step.tensors.table().row(row);
            let slots: Vec<i64> = (0..keys)
                .map(|position| {
                    let local = position / (run * size) * run + position % run;
                    let slot =
                        blocks[local / block_size] as usize * block_size + local % block_size;
                    if is_held(position) { slot as i64 } else { -1 }
                })
                .collect();
            layer.do_kv_cache_update(&latents, &keys_pe, &mut cache, &slots);
            let (context, first) = (keys - query, starts[row] as usize);
            let own = |of: &[f32], width: usize| {
                let mut all = vec![f32::NAN; num_tokens * width];
                all[first * width..(first + query) * width].copy_from_slice(&of[context * width..]);
                all
            };
            requests.push(Request {
                row,
                cache,
                kv_c: own(&latents, latent),
                k_pe: own(&keys_pe, rotated),
            });
            let request = |has: &dyn Fn(usize) -> bool| latent::Request {
                first_token: first,
                q_len: query,
                first_position: context,
                keys: (0..keys)
                    .filter(|&key| has(key))
                    .map(|key| {
                        let latent = latents[key * latent..(key + 1) * latent].to_vec();
                        (
                            key,
                            latent,
                            keys_pe[key * rotated..(key + 1) * rotated].to_vec(),
                        )
                    })
                    .collect(),
            };
            decodes.push(request(&is_held));
            let adds_new = rank.rank == 0;
            prefills.push(request(&|key| match key < context {
                true => is_held(key),
                false => adds_new,
            }));
        }
        let attention = latent::Layer {
            num_heads: sizes.num_heads,
            kv_lora_rank: latent,
            qk_nope_head_dim: NOPE,
            qk_rope_head_dim: rotated,
            v_head_dim: VALUE,
            scale: f64::from(sizes.scale),
            kv_b_proj: &kv_b_proj,
        };
        let of = |requests: &[latent::Request]| {
            latent::attention(&attention, requests, num_tokens, &q).output
        };
        let expected = Expected {
            decode: of(&decodes),
            prefill: of(&prefills),
        };
        LatentCase {
            layer,
            rank,
            num_tokens,
            starts,
            q,
            kv_b_proj,
            requests,
            expected,
        }
    }

    /// Prepares metadata that the verifier refused, and runs it if the device takes it.
    pub fn survives(&self, metadata: &Metadata, step: &GroupStep) -> bool {
        let Ok(prepared) = self.prepare(metadata, step) else {
            return false;
        };
        let request = self.requests.first();
        request.is_some_and(|request| self.forward(request, &prepared).is_ok())
    }

    pub fn run(&self, metadata: &Metadata, step: &GroupStep) -> Ran {
        let prepared = match self.prepare(metadata, step) {
            Ok(prepared) => prepared,
            Err(error) => return Ran::NotHere(error),
        };
        let Metadata::FlashMla(record) = metadata else {
            return Ran::NotHere("another family".to_owned());
        };
        let heads = self.layer.config().sizes.num_heads;
        let covered = self.starts[self.starts.len() - 1] as usize * heads * VALUE;
        for request in &self.requests {
            let row = request.row;
            let output = match self.forward(request, &prepared) {
                Ok(output) => output,
                Err(error) => return Ran::Wrong(format!("row {row}: {error}")),
            };
            let wanted = match row < record.num_decodes as usize {
                true => &self.expected.decode,
                false => &self.expected.prefill,
            };
            let tokens = self.starts[row] as usize..self.starts[row + 1] as usize;
            let own = tokens.start * heads * VALUE..tokens.end * heads * VALUE;
            if let Outcome::Differs(at, found, right) =
                compare(&output[own.clone()], &wanted[own], VALUE)
            {
                let (token, head) = (at / heads, at % heads);
                return Ran::Wrong(format!(
                    "row {row}, token {token}, head {head}: {found} where {right} was right"
                ));
            }
            if output[covered..].iter().any(|&x| x != 0.0) {
                return Ran::Wrong("a token of no request is not zeros".to_owned());
            }
        }
        Ran::Right
    }

    fn prepare(&self, metadata: &Metadata, step: &GroupStep) -> Result<MlaStepMetadata, String> {
        let mut prepared = MlaStepMetadata::of_rank(self.rank);
        let block_size = self.layer.config().block_size as u32;
        let done = prepared.prepare(metadata, &step.tensors.inputs(), block_size);
        done.map(|()| prepared).map_err(|error| error.to_string())
    }

    /// The whole layer; on a rank of several, its part of it.
    fn forward(&self, request: &Request, step: &MlaStepMetadata) -> Result<Vec<f32>, ImplError> {
        let sizes = self.layer.config().sizes;
        let heads = sizes.num_heads;
        let inputs = LatentInputs {
            q: &self.q,
            kv_c_normed: &request.kv_c,
            k_pe: &request.k_pe,
            kv_b_proj: &self.kv_b_proj,
        };
        let mut output = vec![UNWRITTEN; self.num_tokens * heads * VALUE];
        if self.rank.size == 1 {
            self.layer
                .forward(&inputs, &request.cache, Some(step), &mut output)?;
            return Ok(output);
        }
        let decodes = step.num_decode_tokens();
        // A record that nobody verified may count more than there are.
        let decodes = decodes.min(self.num_tokens);
        let mut query = vec![0.0; decodes * heads * sizes.head_size()];
        self.layer.absorb(&inputs, &mut query);
        let mut latents = vec![0.0; decodes * heads * sizes.kv_lora_rank];
        self.layer
            .forward_mqa(&query, &request.cache, step, &mut latents, None)?;
        let (decoded, rest) = output.split_at_mut(decodes * heads * VALUE);
        self.layer
            .project_values(&latents, &self.kv_b_proj, decoded);
        let rest_of = LatentInputs {
            q: &inputs.q[decodes * heads * sizes.qk_head_dim()..],
            kv_c_normed: &inputs.kv_c_normed[decodes * sizes.kv_lora_rank..],
            k_pe: &inputs.k_pe[decodes * sizes.qk_rope_head_dim..],
            kv_b_proj: &self.kv_b_proj,
        };
        self.layer
            .forward_mha(&rest_of, &request.cache, step, rest, None)?;
        Ok(output)
    }
}
