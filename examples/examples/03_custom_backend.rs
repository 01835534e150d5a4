//! A backend of a third party, whole: its name, its interface, its verifier rules, its builder and its impl.
//!
//! ```text
//! cargo run --release -p timetable-examples --example 03_custom_backend
//! ```
//!
//! ACME has a kernel that reads a request's keys from both ends at once, so it divides them among at most two workers. It
//! executes FLASH_ATTN's record and adds one rule of its own: no request has more than two splits. The builder gives each
//! request a split per 64 keys, which keeps the rule for short requests and breaks it for a long one. The long one's step is
//! then built by the plain builder, which never splits: a refusal costs no step.
//!
//! The builder here is native. A component does the same job: what makes it one is `timetable-sandbox`, which implements
//! the same trait.

use std::fmt::Write;

use anyhow::{Context, bail};
use timetable_attention::{
    BuildFault, Grant, MetadataBuilder, Refusal, VerifyContext,
    backend::{
        Backend, BackendRegistry, BackendRow, BuilderTraits, Configuration, Device, HeadSizes,
        Hook, RegisteredBackend, row,
    },
    describe::DescribedStep,
    plain_builder,
    select::{Request, select},
    verify,
    verify::Rule,
};
use timetable_device::{
    cpu::{
        AttentionConfig, AttentionImpl, CacheDtype, ImplError, KvCache, RequestView, StepMetadata,
        merge_states, new_impl,
    },
    reference,
};
use timetable_examples::{noise, step};
use timetable_types::{
    BuilderInfo, CaptureShape, CommonAttentionMetadata, Dtype, Family, LaunchPromise, Metadata,
};

/// What the two hooks of a registered backend hold: registrant and host agree on these types.
type Rules = fn(&Metadata, &VerifyContext<'_>) -> Result<(), Refusal>;
type MakeImpl = fn(AttentionConfig) -> Result<Box<dyn AttentionImpl>, ImplError>;

/// What ACME hands to the host: FLASH_ATTN's answers on this device, but for what its kernel cannot do.
fn acme_pair() -> RegisteredBackend {
    let flash_attn = row(Backend::FlashAttn, Device::Cpu);
    let mut flags = flash_attn.flags;
    flags.supports_sliding_window = false;
    RegisteredBackend {
        row: BackendRow {
            name: "ACME_PAIR".into(),
            full_cls_name: ("acme.attention".into(), "PairBackend".into()),
            head_sizes: HeadSizes::Listed(vec![64, 128].into()),
            flags,
            builder: BuilderTraits {
                class: "PairMetadataBuilder",
                ..flash_attn.builder
            },
            ..flash_attn
        },
        interface: "acme:attention/pair@0.1.0".to_owned(),
        family: Family::FlashAttn,
        verifier: Hook::new(at_most_two_splits as Rules),
        make_impl: Hook::new(PairAttention::boxed as MakeImpl),
    }
}

/// ACME's rule. The family's rules have been checked before it: counts are within the row, lengths are right.
fn at_most_two_splits(metadata: &Metadata, _: &VerifyContext<'_>) -> Result<(), Refusal> {
    let Metadata::FlashAttn(metadata) = metadata else {
        return Ok(());
    };
    let splits = metadata.schedule.num_splits.iter();
    match splits.enumerate().find(|&(_, &splits)| splits > 2) {
        None => Ok(()),
        Some((row, &splits)) => Err(Refusal {
            part: "schedule",
            field: "num_splits",
            row: Some(row as u32),
            value: splits.into(),
            rule: Rule::AtMost,
            bound: 2,
        }),
    }
}

/// The plain builder's record, with one split for every 64 keys.
struct PairBuilder(Box<dyn MetadataBuilder>);

impl MetadataBuilder for PairBuilder {
    fn family(&self) -> Family {
        self.0.family()
    }

    fn info(&self) -> &BuilderInfo {
        self.0.info()
    }

    fn launch_promise(&mut self, shape: &CaptureShape) -> Result<LaunchPromise, BuildFault> {
        let plain = self.0.launch_promise(shape)?;
        Ok(LaunchPromise {
            max_num_splits: 2,
            max_work_items: 2 * shape.num_reqs,
            ..plain
        })
    }

    fn build(
        &mut self,
        common: &CommonAttentionMetadata,
        fast_build: bool,
    ) -> Result<Metadata, BuildFault> {
        let mut metadata = self.0.build(common, fast_build)?;
        if let Metadata::FlashAttn(metadata) = &mut metadata {
            let keys = common.seq_lens_cpu_upper_bound.iter();
            let splits: Vec<i32> = keys.map(|&keys| ((keys + 63) / 64).max(1)).collect();
            let most = splits.iter().copied().max().unwrap_or(1) as u32;
            metadata.max_num_splits = most;
            metadata.schedule.max_num_splits = most;
            metadata.schedule.num_splits = splits;
        }
        Ok(metadata)
    }

    fn update_block_table(
        &mut self,
        metadata: &Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Metadata, BuildFault> {
        self.0.update_block_table(metadata, common)
    }
}

/// ACME's kernel, slow and plain. The cache is the device's, and so are the scatter into it and the merge of partial results.
struct PairAttention {
    config: AttentionConfig,
    device: Box<dyn AttentionImpl>,
}

impl PairAttention {
    fn boxed(config: AttentionConfig) -> Result<Box<dyn AttentionImpl>, ImplError> {
        let device = new_impl(Family::FlashAttn, config)?;
        Ok(Box::new(PairAttention { config, device }))
    }

    /// One query head over one part of its request's keys: the weighted values, and the scores' log-sum-exp.
    fn partial(
        &self,
        query: &[f32],
        cache: &KvCache,
        request: &RequestView<'_>,
        keys: std::ops::Range<usize>,
        kv_head: usize,
    ) -> (Vec<f32>, f64) {
        let (mut output, mut max, mut sum) = (vec![0.0; query.len()], f64::NEG_INFINITY, 0.0f64);
        for key in keys {
            let slot = request.slot(key);
            let products = query
                .iter()
                .zip(cache.key(slot, kv_head))
                .map(|(q, k)| q * k);
            let score = f64::from(self.config.scale * products.sum::<f32>());
            // What was summed for a smaller maximum shrinks; e^(−∞) is 0.
            let (old, new) = ((max - score.max(max)).exp(), (score - score.max(max)).exp());
            for (output, value) in output.iter_mut().zip(cache.value(slot, kv_head)) {
                *output = *output * old as f32 + value * new as f32;
            }
            (sum, max) = (sum * old + new, max.max(score));
        }
        output.iter_mut().for_each(|x| *x /= sum as f32);
        (output, max + sum.ln())
    }
}

impl AttentionImpl for PairAttention {
    fn do_kv_cache_update(&self, key: &[f32], value: &[f32], cache: &mut KvCache, slots: &[i64]) {
        self.device.do_kv_cache_update(key, value, cache, slots);
    }

    fn forward(
        &self,
        query: &[f32],
        cache: &KvCache,
        metadata: Option<&StepMetadata>,
        output: &mut [f32],
        output_scale: Option<f32>,
    ) -> Result<(), ImplError> {
        if output_scale.is_some() {
            return Err(ImplError::FusedOutputQuantization("PairAttentionImpl"));
        }
        let Some(metadata) = metadata else {
            output.fill(0.0);
            return Ok(());
        };
        let mut lse = vec![0.0; metadata.num_actual_tokens() * self.config.num_heads];
        self.forward_with_lse(query, cache, metadata, output, &mut lse)
    }

    fn forward_with_lse(
        &self,
        query: &[f32],
        cache: &KvCache,
        metadata: &StepMetadata,
        output: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), ImplError> {
        let AttentionConfig {
            num_heads,
            num_kv_heads,
            head_size,
            ..
        } = self.config;
        if metadata.family() != Some(Family::FlashAttn) {
            return Err(ImplError::WrongMetadata {
                impl_name: "PairAttentionImpl",
                found: metadata.family().map_or("no family", Family::interface),
            });
        }
        let rows = metadata.num_actual_tokens() * num_heads;
        output[..rows * head_size].fill(0.0);
        lse[..rows].fill(f32::NEG_INFINITY);
        let items: Vec<_> = metadata.work_items().collect();
        for (index, request) in metadata.requests().enumerate() {
            for (token, row) in request.tokens.clone().enumerate() {
                // The last token stands at the last key, and sees no later one.
                let seen = match request.causal {
                    true => request.num_keys - request.tokens.len() + token + 1,
                    false => request.num_keys,
                };
                for head in 0..num_heads {
                    let at = (row * num_heads + head) * head_size;
                    let query = &query[at..at + head_size];
                    let of_token = items
                        .iter()
                        .filter(|item| item.request == index && item.queries.contains(&token))
                        .map(|item| item.keys.start..item.keys.end.min(seen))
                        .filter(|keys| !keys.is_empty());
                    let kv_head = head / (num_heads / num_kv_heads);
                    let partials: Vec<_> = of_token
                        .map(|keys| self.partial(query, cache, &request, keys, kv_head))
                        .collect();
                    let partials = partials.iter().map(|(part, lse)| (part.as_slice(), *lse));
                    lse[row * num_heads + head] =
                        merge_states(partials, &mut output[at..at + head_size]) as f32;
                }
            }
        }
        Ok(())
    }
}

// The host's side, from here on.

/// What came of one step.
pub struct Served {
    /// The refusal of the builder's metadata, if it was refused.
    pub refusal: Option<String>,
    /// The largest split count that ran.
    pub max_splits: usize,
    /// The output's error relative to a reference in f64.
    pub error: f64,
}

/// One step as a host serves it: build, verify by both sets of rules, fall back if refused, execute, compare.
fn serve(backend: &RegisteredBackend, described: &DescribedStep) -> anyhow::Result<Served> {
    let rules: &Rules = backend.verifier.get().context("the hook holds rules")?;
    let make_impl: &MakeImpl = backend.make_impl.get().context("the hook makes an impl")?;
    let (config, step) = (&described.config, &described.step);
    let inputs = step.tensors.inputs();
    let context = VerifyContext {
        config,
        common: &step.cam,
        inputs: &inputs,
        promise: None,
        grant: Grant::Exact,
        num_blocks: described.num_blocks,
    };
    let check =
        |metadata: &Metadata| verify(metadata, &context).and_then(|()| rules(metadata, &context));

    let plain = || plain_builder(backend.family, config).map_err(|e| anyhow::anyhow!(e.message));
    let mut metadata = PairBuilder(plain()?).build(&step.cam, false)?;
    let refusal = check(&metadata).err();
    if refusal.is_some() {
        verify(&metadata, &context).context("the family's own rules have nothing against it")?;
        metadata = plain()?.build(&step.cam, false)?;
        check(&metadata).context("the plain builder keeps every rule")?;
    }

    let layer = AttentionConfig {
        num_heads: 4,
        head_size: 64,
        scale: config.attention.scale as f32,
        num_kv_heads: 2,
        sliding_window: None,
        logits_soft_cap: None,
        kv_cache_dtype: CacheDtype::F32,
        block_size: 16,
        batch_invariant: false,
    };
    let attention = make_impl(layer)?;
    let mut prepared = StepMetadata::new();
    prepared.prepare(&metadata, &inputs, 16)?;
    let mut cache = KvCache::new(described.num_blocks as usize, 2, 16, 64, CacheDtype::F32);
    // Earlier steps filled the cache; this step's own tokens go where the host's slots say.
    for request in prepared.requests() {
        let earlier = 0..request.num_keys - request.tokens.len();
        let slots: Vec<i64> = earlier.map(|key| request.slot(key) as i64).collect();
        let (keys, values) = (noise(1, slots.len() * 128), noise(2, slots.len() * 128));
        attention.do_kv_cache_update(&keys, &values, &mut cache, &slots);
    }
    let tokens = prepared.num_actual_tokens();
    let (keys, values) = (noise(3, tokens * 128), noise(4, tokens * 128));
    attention.do_kv_cache_update(&keys, &values, &mut cache, inputs.slot_mapping);
    let query = noise(5, tokens * 256);
    let mut output = vec![f32::NAN; query.len()];
    attention.forward(&query, &cache, Some(&prepared), &mut output, None)?;

    let views: Vec<RequestView<'_>> = prepared.requests().collect();
    let requests: Vec<reference::Request> = views
        .iter()
        .map(|view| reference::Request {
            first_token: view.tokens.start,
            q_len: view.tokens.len(),
            kv_len: view.num_keys,
            causal: view.causal,
        })
        .collect();
    let layer = reference::Layer {
        num_heads: 4,
        num_kv_heads: 2,
        head_size: 64,
        scale: config.attention.scale,
        sliding_window: None,
        logits_soft_cap: None,
    };
    let expected = reference::attention(&layer, &requests, tokens, &query, |row, key, head| {
        let slot = views[row].slot(key);
        (cache.key(slot, head), cache.value(slot, head))
    });
    Ok(Served {
        refusal: refusal.map(|refusal| refusal.to_string()),
        max_splits: prepared.max_splits(),
        error: reference::max_relative_error(&output, &expected.output, 64),
    })
}

/// What the example found.
pub struct Outcome {
    /// What it printed.
    pub text: String,
    /// A step of short requests, then one with a long request.
    pub served: [Served; 2],
}

/// Registers, selects, and serves two steps.
pub fn run() -> anyhow::Result<Outcome> {
    let mut text = String::new();
    let mut registry = BackendRegistry::new();
    registry.register(acme_pair())?;

    // The operator writes --attention-backend acme_pair.
    let name = registry.parse("acme_pair")?;
    let config = Configuration::new(64, Dtype::Float32);
    let request = Request {
        config: &config,
        num_heads: 4,
        device: Device::Cpu,
        requested: name.as_deref(),
    };
    let chosen = select(&registry, &request)?;
    writeln!(text, "{}", chosen.log)?;
    // An explicit choice never falls back, a third party's neither.
    let windowed = Configuration {
        has_sliding_window: true,
        ..config.clone()
    };
    let windowed = Request {
        config: &windowed,
        ..request
    };
    match select(&registry, &windowed) {
        Ok(selection) => bail!("{} has no sliding window", selection.row.name),
        Err(error) => writeln!(text, "with a sliding window: {error}")?,
    }

    let backend = registry
        .registered(&chosen.row.name)
        .context("the chosen backend is the registered one")?;
    writeln!(text, "its components export {}", backend.interface)?;
    let short = serve(backend, &step(&[(1, 40), (1, 100), (20, 32)])?)?;
    let long = serve(backend, &step(&[(1, 40), (1, 200)])?)?;
    for (name, served) in [("short requests", &short), ("a long request", &long)] {
        match &served.refusal {
            None => writeln!(text, "{name}: accepted")?,
            Some(refusal) => writeln!(text, "{name}: refused, {refusal}; built plainly instead")?,
        }
        writeln!(
            text,
            "  splits per request: at most {}; relative error {:.1e}",
            served.max_splits, served.error
        )?;
    }
    Ok(Outcome {
        text,
        served: [short, long],
    })
}

#[allow(dead_code, reason = "the test runs `run`")]
fn main() -> anyhow::Result<()> {
    print!("{}", run()?.text);
    Ok(())
}
