//! Random steps of latent attention, on one rank or on several, each with its own shard of the cache: what is in none of a
//! request's slots is NaN. It must never know how metadata is made.

use std::ops::Range;

use rand::{Rng, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use timetable_attention::{
    Grant, Verifier, VerifyContext,
    batch::{ContextParallel, GroupStep, SlotRule, StepTensors, slot_mapping_into},
    verify_step,
};
use timetable_device::{
    cpu::{
        merge_states,
        mla::{
            LatentCache, LatentDtype, LatentInputs, LatentSizes, MlaAttentionImpl, MlaConfig,
            MlaImpl, MlaStepMetadata,
        },
    },
    reference::latent,
};
use timetable_types::{
    BuilderConfig, DcpInputs, KvCacheSpecKind, LaunchPromise, Metadata, SchedulerConfig,
};

#[path = "../support/builder_config.rs"]
mod builder_config;

/// How a layer and its cache are made.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub sizes: LatentSizes,
    pub dtype: LatentDtype,
    pub block_size: usize,
    pub world: usize,
    pub interleave: usize,
    /// Speculative tokens of a decode.
    pub drafts: u32,
}

/// One rank's part of a step.
pub struct Rank {
    pub config: BuilderConfig,
    pub step: GroupStep,
    pub cache: LatentCache,
}

/// One step.
pub struct Batch {
    pub layout: Layout,
    /// (query tokens, keys) of the live rows.
    pub rows: Vec<(usize, usize)>,
    /// Padding included.
    pub num_tokens: usize,
    pub ranks: Vec<Rank>,
    /// f32 [num_tokens, num_heads, qk_head_dim]; padding is NaN, as in the next two.
    pub q: Vec<f32>,
    /// f32 [num_tokens, kv_lora_rank]
    pub kv_c: Vec<f32>,
    /// f32 [num_tokens, qk_rope_head_dim]
    pub k_pe: Vec<f32>,
    pub kv_b_proj: Vec<f32>,
}

/// Output f32 [num_tokens, num_heads, v_head_dim] and log-sum-exps f32 [num_tokens, num_heads].
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    pub output: Vec<f32>,
    pub lse: Vec<f32>,
}

pub fn sizes(heads: usize, latent: usize, nope: usize, rope: usize, value: usize) -> LatentSizes {
    LatentSizes {
        num_heads: heads,
        kv_lora_rank: latent,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        v_head_dim: value,
        scale: 1.0 / ((nope + rope) as f32).sqrt(),
    }
}

pub fn layout(sizes: LatentSizes, block_size: usize) -> Layout {
    Layout {
        sizes,
        dtype: LatentDtype::F32,
        block_size,
        world: 1,
        interleave: 1,
        drafts: 0,
    }
}

/// Standard normal (Box and Muller).
fn normals(rng: &mut Pcg64Mcg, count: usize) -> Vec<f32> {
    let normal = |rng: &mut Pcg64Mcg| {
        let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
        ((-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()) as f32
    };
    (0..count).map(|_| normal(rng)).collect()
}

impl Layout {
    fn config(&self, rank: usize) -> BuilderConfig {
        let mut config = builder_config::config();
        let (spec, attention) = (&mut config.kv_cache_spec, &mut config.attention);
        spec.kind = KvCacheSpecKind::MlaAttention;
        spec.block_size = self.block_size as u32;
        spec.num_kv_heads = 1;
        spec.head_size = self.sizes.head_size() as u32;
        spec.head_size_v = spec.head_size;
        spec.dcp_sharded = self.world > 1;
        attention.num_heads = self.sizes.num_heads as u32;
        attention.scale = f64::from(self.sizes.scale);
        attention.kv_lora_rank = self.sizes.kv_lora_rank as u32;
        attention.qk_rope_head_dim = self.sizes.qk_rope_head_dim as u32;
        if self.dtype == LatentDtype::Fp8DsMla {
            attention.kv_cache_dtype = "fp8_ds_mla".to_owned();
        }
        config.scheduler = SchedulerConfig {
            max_num_seqs: 64,
            max_num_batched_tokens: 4_096,
            max_model_len: 8_192,
            max_num_blocks_per_req: 8_192,
            num_speculative_tokens: self.drafts,
            parallel_drafting: false,
        };
        config.parallel.dcp_world_size = self.world as u32;
        config.parallel.dcp_rank = rank as u32;
        config.parallel.cp_kv_cache_interleave_size = self.interleave as u32;
        config.device.num_workers = 7;
        config.max_num_splits = 8;
        config
    }

    pub fn parallel(&self, rank: usize) -> ContextParallel {
        ContextParallel {
            size: self.world as u32,
            rank: rank as u32,
            interleave: self.interleave as u32,
        }
    }

    /// Which rank holds a position.
    pub fn owner(&self, position: usize) -> usize {
        position / self.interleave % self.world
    }

    /// Keys of the first `len` that `rank` holds, counted one by one.
    pub fn held(&self, len: usize, rank: usize) -> usize {
        (0..len).filter(|&at| self.owner(at) == rank).count()
    }
}

impl Batch {
    /// Rows of (query tokens, keys), then `padding` rows and tokens of no request.
    pub fn new(
        rng: &mut Pcg64Mcg,
        layout: Layout,
        rows: &[(usize, usize)],
        padding: (usize, usize),
    ) -> Self {
        let Layout {
            sizes,
            block_size,
            world,
            ..
        } = layout;
        let pages = |keys: usize| keys.div_ceil(block_size * world);
        let used: usize = rows.iter().map(|row| pages(row.1)).sum();
        let width = rows.iter().map(|row| pages(row.1)).max().unwrap_or(0) + 2;
        let num_blocks = used + 3;
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        free.shuffle(rng);
        let (mut starts, mut lens, mut table, mut positions) =
            (vec![0i32], Vec::new(), Vec::new(), Vec::new());
        for &(query, keys) in rows {
            starts.push(starts[starts.len() - 1] + query as i32);
            lens.push(keys as i32);
            positions.extend((keys - query) as i64..keys as i64);
            table.extend(free.split_off(free.len() - pages(keys)));
            let row = lens.len() * width;
            // Columns behind a request's own name blocks that are others'.
            table.resize_with(row, || rng.random_range(0..num_blocks as i32));
        }
        let tokens = positions.len();
        for _ in 0..padding.0 {
            starts.push(tokens as i32);
            lens.push(0);
            table.resize_with(table.len() + width, || 0);
        }
        let num_tokens = tokens + padding.1;
        positions.resize(num_tokens, 0);

        let scale = 1.0 / (sizes.kv_lora_rank as f32).sqrt();
        let per_head = sizes.qk_nope_head_dim + sizes.v_head_dim;
        let weights = sizes.num_heads * per_head * sizes.kv_lora_rank;
        let kv_b_proj = normals(rng, weights).iter().map(|x| scale * x).collect();
        let contents: Vec<(Vec<f32>, Vec<f32>)> = rows
            .iter()
            .map(|&(_, keys)| {
                let latents = normals(rng, keys * sizes.kv_lora_rank);
                (latents, normals(rng, keys * sizes.qk_rope_head_dim))
            })
            .collect();
        let (mut kv_c, mut k_pe) = (Vec::new(), Vec::new());
        for (&(query, keys), (latents, rotated)) in rows.iter().zip(&contents) {
            kv_c.extend_from_slice(&latents[(keys - query) * sizes.kv_lora_rank..]);
            k_pe.extend_from_slice(&rotated[(keys - query) * sizes.qk_rope_head_dim..]);
        }
        let mut q = normals(rng, tokens * sizes.num_heads * sizes.qk_head_dim());
        for (of, width) in [
            (&mut q, sizes.num_heads * sizes.qk_head_dim()),
            (&mut kv_c, sizes.kv_lora_rank),
            (&mut k_pe, sizes.qk_rope_head_dim),
        ] {
            of.resize(num_tokens * width, f32::NAN);
        }

        let ranks = (0..world)
            .map(|rank| {
                let rule = SlotRule {
                    block_size: block_size as u32,
                    context_parallel: (world > 1).then(|| layout.parallel(rank)),
                };
                let row_of = |row: usize| table.get(row * width..(row + 1) * width);
                let slots_of = |starts: &[i32], positions: &[i64], count: usize| {
                    let mut slots = vec![-1; count];
                    let beyond = slot_mapping_into(rule, row_of, starts, positions, &mut slots);
                    assert_eq!(beyond, 0);
                    slots
                };
                let slots = slots_of(&starts, &positions[..tokens], num_tokens);
                let mut cache = LatentCache::new(
                    num_blocks,
                    block_size,
                    sizes.kv_lora_rank,
                    sizes.qk_rope_head_dim,
                    layout.dtype,
                )
                .expect("a cache");
                cache.fill(f32::NAN);
                let writer = layout.attention();
                for (row, (&(query, keys), (latents, rotated))) in
                    rows.iter().zip(&contents).enumerate()
                {
                    // The context was written by earlier steps.
                    let context: Vec<i64> = (0..(keys - query) as i64).collect();
                    let mut starts = vec![0; row + 1];
                    starts.push(context.len() as i32);
                    let slots = slots_of(&starts, &context, context.len());
                    writer.do_kv_cache_update(latents, rotated, &mut cache, &slots);
                }
                writer.do_kv_cache_update(&kv_c, &k_pe, &mut cache, &slots);
                let local: Option<Vec<i32>> = (world > 1).then(|| {
                    let lens = lens.iter();
                    lens.map(|&len| layout.held(len as usize, rank) as i32)
                        .collect()
                });
                let mut step = GroupStep::new(
                    StepTensors {
                        query_start_loc: starts.clone(),
                        seq_lens: lens.clone(),
                        block_table: table.clone(),
                        block_table_width: width,
                        slot_mapping: slots,
                        positions: positions.clone(),
                        dcp_local_seq_lens: local.clone(),
                        ..StepTensors::default()
                    },
                    lens.clone(),
                    num_tokens as u32,
                    rows.iter().map(|row| row.0).max().unwrap_or(0) as u32,
                    rows.iter().map(|row| row.1).max().unwrap_or(0) as u32,
                );
                step.cam.is_prefilling = rows.iter().map(|row| u8::from(row.0 > 1)).collect();
                step.cam.dcp = local.map(|lens| DcpInputs {
                    dcp_local_seq_lens_cpu_upper_bound: lens,
                });
                Rank {
                    config: layout.config(rank),
                    step,
                    cache,
                }
            })
            .collect();
        Batch {
            layout,
            rows: rows.to_vec(),
            num_tokens,
            ranks,
            q,
            kv_c,
            k_pe,
            kv_b_proj,
        }
    }

    /// Some query tokens of one row, as a step of their own on one rank; its keys end with the last of them.
    pub fn part(&self, row: usize, tokens: Range<usize>) -> Batch {
        let (query, keys) = self.rows[row];
        let keys = keys - (query - tokens.end);
        let first = self.first_token(row);
        let own = first + tokens.start..first + tokens.end;
        let step = &self.ranks[0].step;
        let step = GroupStep::new(
            StepTensors {
                query_start_loc: vec![0, own.len() as i32],
                seq_lens: vec![keys as i32],
                block_table: step.tensors.table().row(row).to_vec(),
                block_table_width: step.tensors.block_table_width,
                slot_mapping: step.tensors.slot_mapping[own.clone()].to_vec(),
                positions: step.tensors.positions[own.clone()].to_vec(),
                ..StepTensors::default()
            },
            vec![keys as i32],
            own.len() as u32,
            own.len() as u32,
            keys as u32,
        );
        self.cut(step, own)
    }

    /// `step`, whose tokens are `own` of this one's, over the same cache on one rank.
    pub fn cut(&self, step: GroupStep, own: Range<usize>) -> Batch {
        assert_eq!(self.layout.world, 1);
        let sizes = &self.layout.sizes;
        let of = |of: &[f32], width: usize| of[own.start * width..own.end * width].to_vec();
        let Rank { config, cache, .. } = &self.ranks[0];
        let queries = step.tensors.query_start_loc.windows(2);
        let rows = queries.zip(&step.tensors.seq_lens);
        Batch {
            layout: self.layout,
            rows: rows
                .map(|(pair, &keys)| ((pair[1] - pair[0]) as usize, keys as usize))
                .collect(),
            num_tokens: own.len(),
            q: of(&self.q, sizes.num_heads * sizes.qk_head_dim()),
            kv_c: of(&self.kv_c, sizes.kv_lora_rank),
            k_pe: of(&self.k_pe, sizes.qk_rope_head_dim),
            kv_b_proj: self.kv_b_proj.clone(),
            ranks: vec![Rank {
                config: config.clone(),
                step,
                cache: cache.clone(),
            }],
        }
    }

    pub fn inputs(&self) -> LatentInputs<'_> {
        self.inputs_from(0)
    }

    /// The inputs of tokens from `first` on.
    pub fn inputs_from(&self, first: usize) -> LatentInputs<'_> {
        let sizes = &self.layout.sizes;
        LatentInputs {
            q: &self.q[first * sizes.num_heads * sizes.qk_head_dim()..],
            kv_c_normed: &self.kv_c[first * sizes.kv_lora_rank..],
            k_pe: &self.k_pe[first * sizes.qk_rope_head_dim..],
            kv_b_proj: &self.kv_b_proj,
        }
    }

    pub fn first_token(&self, row: usize) -> usize {
        self.rows[..row].iter().map(|row| row.0).sum()
    }

    /// Is the metadata what the verifier lets through?
    pub fn verify(&self, rank: usize, metadata: &Metadata) {
        self.verify_within(rank, metadata, None);
    }

    /// As `verify`, in a graph that was captured with `promise`.
    pub fn verify_within(&self, rank: usize, metadata: &Metadata, promise: Option<&LaunchPromise>) {
        let Rank {
            config,
            step,
            cache,
        } = &self.ranks[rank];
        let inputs = step.tensors.inputs();
        let ctx = VerifyContext {
            config,
            common: &step.cam,
            inputs: &inputs,
            promise,
            grant: Grant::Exact,
            num_blocks: cache.num_blocks() as u32,
        };
        verify_step(&ctx).expect("a good step");
        Verifier::new()
            .verify(metadata, &ctx)
            .unwrap_or_else(|error| panic!("{error}: {metadata:?}"));
    }

    pub fn prepare(&self, rank: usize, metadata: &Metadata) -> MlaStepMetadata {
        let mut step = MlaStepMetadata::of_rank(self.layout.parallel(rank));
        let inputs = self.ranks[rank].step.tensors.inputs();
        step.prepare(metadata, &inputs, self.layout.block_size as u32)
            .expect("metadata for this step");
        step
    }

    /// The right result, where the first `decodes` rows read all their keys from the cache, the others only their context.
    pub fn expected(&self, decodes: usize) -> latent::Attention {
        let Layout {
            sizes,
            block_size,
            world,
            interleave,
            ..
        } = self.layout;
        let layer = latent::Layer {
            num_heads: sizes.num_heads,
            kv_lora_rank: sizes.kv_lora_rank,
            qk_nope_head_dim: sizes.qk_nope_head_dim,
            qk_rope_head_dim: sizes.qk_rope_head_dim,
            v_head_dim: sizes.v_head_dim,
            scale: f64::from(sizes.scale),
            kv_b_proj: &self.kv_b_proj,
        };
        let cached = |row: usize, position: usize| {
            let Rank { step, cache, .. } = &self.ranks[self.layout.owner(position)];
            let round = interleave * world;
            let local = position / round * interleave + position % interleave;
            let block = step.tensors.table().row(row)[local / block_size] as usize;
            let mut entry = cache.entry(block * block_size + local % block_size);
            let rotated = entry.split_off(sizes.kv_lora_rank);
            (position, entry, rotated)
        };
        let requests: Vec<latent::Request> = self
            .rows
            .iter()
            .enumerate()
            .map(|(row, &(q_len, keys))| {
                let (context, first) = (keys - q_len, self.first_token(row));
                let from_cache = if row < decodes { keys } else { context };
                let mut of: Vec<_> = (0..from_cache).map(|key| cached(row, key)).collect();
                for position in from_cache..keys {
                    let token = first + position - context;
                    let part =
                        |of: &[f32], width: usize| of[token * width..(token + 1) * width].to_vec();
                    let latent = part(&self.kv_c, sizes.kv_lora_rank);
                    of.push((position, latent, part(&self.k_pe, sizes.qk_rope_head_dim)));
                }
                latent::Request {
                    first_token: first,
                    q_len,
                    first_position: context,
                    keys: of,
                }
            })
            .collect();
        latent::attention(&layer, &requests, self.num_tokens, &self.q)
    }

    /// Runs each rank's metadata by the field's two calls and merges the ranks' results. Everything that is written was NaN.
    pub fn run(&self, metadata: &[Metadata]) -> Ran {
        let sizes = &self.layout.sizes;
        let (heads, latent, value) = (sizes.num_heads, sizes.kv_lora_rank, sizes.v_head_dim);
        let attention = self.layout.attention();
        let (mut decoded, mut prefilled) = (Vec::new(), Vec::new());
        let mut decodes = 0;
        for (rank, metadata) in metadata.iter().enumerate() {
            let step = self.prepare(rank, metadata);
            decodes = step.num_decode_tokens();
            let cache = &self.ranks[rank].cache;
            let mut query = vec![f32::NAN; decodes * heads * sizes.head_size()];
            attention.absorb(&self.inputs(), &mut query);
            let mut output = vec![f32::NAN; decodes * heads * latent];
            let mut lse = vec![f32::NAN; decodes * heads];
            attention
                .forward_mqa(&query, cache, &step, &mut output, Some(&mut lse))
                .expect("forward_mqa");
            decoded.push((output, lse));
            let rest = self.num_tokens - decodes;
            let mut output = vec![f32::NAN; rest * heads * value];
            let mut lse = vec![f32::NAN; rest * heads];
            let inputs = self.inputs_from(decodes);
            attention
                .forward_mha(&inputs, cache, &step, &mut output, Some(&mut lse))
                .expect("forward_mha");
            prefilled.push((output, lse));
        }
        let (latents, mut lse) = merged(&decoded, latent);
        let mut output = vec![f32::NAN; decodes * heads * value];
        attention.project_values(&latents, &self.kv_b_proj, &mut output);
        let (rest, rest_lse) = merged(&prefilled, value);
        output.extend(rest);
        lse.extend(rest_lse);
        Ran { output, lse }
    }
}

/// Rows of `size` elements merged over ranks.
fn merged(ranks: &[(Vec<f32>, Vec<f32>)], size: usize) -> (Vec<f32>, Vec<f32>) {
    let rows = ranks[0].1.len();
    let mut output = vec![f32::NAN; rows * size];
    let lse = output.chunks_mut(size).enumerate().map(|(row, output)| {
        let partials = ranks
            .iter()
            .map(|(of, lse)| (&of[row * size..(row + 1) * size], f64::from(lse[row])));
        merge_states(partials, output) as f32
    });
    let lse = lse.collect();
    (output, lse)
}

impl Layout {
    pub fn attention(&self) -> MlaImpl {
        MlaImpl::new(MlaConfig {
            kv_cache_dtype: self.dtype,
            ..MlaConfig::new(self.sizes, self.block_size)
        })
        .expect("an impl")
    }
}
