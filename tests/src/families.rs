//! Tiny random models of every family, written as a Hugging Face directory or a GGUF file, and candle-transformers' own
//! decoders on the same tensors. Knows no test.
//!
//! A model is its `config.json` and its tensors under transformers' names. The same seed gives the same model.

use candle_core::quantized::gguf_file::{self, Value as Gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mistral, qwen2, qwen3};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

/// A decoder with random weights.
#[derive(Clone)]
pub struct TinyModel {
    /// What its `config.json` says.
    pub config: Value,
    /// f32, by transformers' names.
    pub tensors: BTreeMap<String, Tensor>,
}

/// A `config.json` of two layers, hidden size 64, four heads of 16 and two of keys and values; `changes` replaces fields.
pub fn tiny_config(model_type: &str, changes: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    for (key, value) in changes.as_object().expect("an object of fields") {
        config[key] = value.clone();
    }
    config
}

/// Steele, Lea and Flood's SplitMix64, as numbers in −1 to 1.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

impl TinyModel {
    /// Fills the shapes that `config` asks for: activations stay near unit variance, so that no part of a layer is lost in
    /// the residual stream; norms lie in 0.5 to 1.5 and biases in −0.5 to 0.5.
    pub fn random(config: Value, seed: u64) -> Result<Self> {
        let mut noise = Noise(seed);
        let mut model = Self {
            config,
            tensors: BTreeMap::new(),
        };
        for (name, shape) in model.shapes() {
            let (middle, width) = match shape[..] {
                [_] if name.ends_with(".bias") => (0.0, 0.5),
                [_] => (1.0, 0.5),
                _ if name.contains("embed_tokens") => (0.0, 1.0),
                _ => (0.0, (3.0 / shape[1] as f32).sqrt()),
            };
            let count = shape.iter().product();
            let values = std::iter::repeat_with(|| middle + width * noise.next());
            let values: Vec<f32> = values.take(count).collect();
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
            model.tensors.insert(name, tensor);
        }
        Ok(model)
    }

    fn size(&self, field: &str) -> usize {
        let value = self.config[field].as_u64();
        value.unwrap_or_else(|| panic!("{field} is in the config")) as usize
    }

    fn flag(&self, field: &str) -> bool {
        self.config[field].as_bool().unwrap_or(false)
    }

    fn family(&self) -> &str {
        self.config["model_type"].as_str().expect("a model type")
    }

    fn head_dim(&self) -> usize {
        let own = self.config["head_dim"].as_u64().map(|dim| dim as usize);
        own.unwrap_or_else(|| self.size("hidden_size") / self.size("num_attention_heads"))
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, wide) = (self.size("hidden_size"), self.size("intermediate_size"));
        let q = self.size("num_attention_heads") * self.head_dim();
        let kv = self.size("num_key_value_heads") * self.head_dim();
        let table = vec![self.size("vocab_size"), hidden];
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), table.clone()),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.flag("tie_word_embeddings") {
            shapes.push(("lm_head.weight".to_owned(), table));
        }
        let all_biases = self.flag("attention_bias");
        let qkv_bias = all_biases || self.family() == "qwen2";
        for layer in 0..self.size("num_hidden_layers") {
            let mut add = |name: &str, shape: &[usize]| {
                shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            };
            for (name, rows, columns, bias) in [
                ("self_attn.q_proj", q, hidden, qkv_bias),
                ("self_attn.k_proj", kv, hidden, qkv_bias),
                ("self_attn.v_proj", kv, hidden, qkv_bias),
                ("self_attn.o_proj", hidden, q, all_biases),
                ("mlp.gate_proj", wide, hidden, false),
                ("mlp.up_proj", wide, hidden, false),
                ("mlp.down_proj", hidden, wide, false),
            ] {
                add(&format!("{name}.weight"), &[rows, columns]);
                if bias {
                    add(&format!("{name}.bias"), &[rows]);
                }
            }
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            if self.family() == "qwen3" {
                add("self_attn.q_norm.weight", &[self.head_dim()]);
                add("self_attn.k_norm.weight", &[self.head_dim()]);
            }
        }
        shapes
    }

    /// The model whose weights are the values that `dtype` can hold, in f32 again.
    pub fn rounded(&self, dtype: DType) -> Result<Self> {
        self.mapped(|tensor| tensor.to_dtype(dtype)?.to_dtype(DType::F32))
    }

    fn mapped(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let tensors = self.tensors.iter();
        let tensors = tensors.map(|(name, tensor)| Ok((name.clone(), change(tensor)?)));
        Ok(Self {
            config: self.config.clone(),
            tensors: tensors.collect::<Result<_>>()?,
        })
    }

    /// Writes `config.json` and the weights as `dtype` into `dir`. More than one shard: neighbouring tensors lie in
    /// different files, and `model.safetensors.index.json` says in which.
    pub fn write_hf(&self, dir: &Path, dtype: DType, shards: usize) -> Result<()> {
        std::fs::write(dir.join("config.json"), self.config.to_string())?;
        let name = |shard: usize| match shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        let mut files = vec![HashMap::new(); shards];
        let mut weight_map = HashMap::new();
        for (index, (tensor, values)) in self.tensors.iter().enumerate() {
            let shard = index % shards;
            files[shard].insert(tensor.as_str(), values.to_dtype(dtype)?);
            weight_map.insert(tensor, name(shard));
        }
        for (shard, tensors) in files.iter().enumerate() {
            candle_core::safetensors::save(tensors, dir.join(name(shard)))?;
        }
        if shards > 1 {
            let index = json!({"metadata": {}, "weight_map": weight_map});
            std::fs::write(dir.join("model.safetensors.index.json"), index.to_string())?;
        }
        Ok(())
    }

    /// Writes a GGUF file in llama.cpp's layout, matrices as `dtype` says of their transformers' name and all else as f32,
    /// and returns the model of the dequantised values.
    pub fn write_gguf(&self, path: &Path, dtype: impl Fn(&str) -> GgmlDType) -> Result<Self> {
        let llama = self.family() == "llama";
        let mut tensors = Vec::new();
        let mut dequantised = self.clone();
        for (name, tensor) in &self.tensors {
            let heads = match name {
                _ if !llama => None,
                _ if name.contains("q_proj") => Some(self.size("num_attention_heads")),
                _ if name.contains("k_proj") => Some(self.size("num_key_value_heads")),
                _ => None,
            };
            let kind = match tensor.dims().len() {
                1 => GgmlDType::F32,
                _ => dtype(name),
            };
            let laid_out = heads.map_or(Ok(tensor.clone()), |n| interleaved(tensor, n))?;
            let quantised = QTensor::quantize(&laid_out, kind)?;
            let values = quantised.dequantize(&Device::Cpu)?;
            let values = heads.map_or(Ok(values.clone()), |n| halves(&values, n))?;
            dequantised.tensors.insert(name.clone(), values);
            tensors.push((gguf_name(name), quantised));
        }
        if let Some(factors) = self.llama3_factors() {
            let factors = Tensor::new(factors, &Device::Cpu)?;
            let factors = QTensor::quantize(&factors, GgmlDType::F32)?;
            tensors.push(("rope_freqs.weight".to_owned(), factors));
        }
        let metadata = self.gguf_metadata();
        let metadata: Vec<_> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(k, t)| (k.as_str(), t)).collect();
        gguf_file::write(&mut File::create(path)?, &metadata, &tensors)?;
        Ok(dequantised)
    }

    fn gguf_metadata(&self) -> Vec<(String, Gguf)> {
        let family = self.family();
        let float = |field: &str| Gguf::F32(self.config[field].as_f64().expect("a number") as f32);
        let size = |field: &str| Gguf::U32(self.size(field) as u32);
        let head_dim = || Gguf::U32(self.head_dim() as u32);
        let mut metadata = vec![(
            "general.architecture".to_owned(),
            Gguf::String(family.to_owned()),
        )];
        let mut add = |key: &str, value| metadata.push((format!("{family}.{key}"), value));
        add("block_count", size("num_hidden_layers"));
        add("context_length", size("max_position_embeddings"));
        add("embedding_length", size("hidden_size"));
        add("feed_forward_length", size("intermediate_size"));
        add("attention.head_count", size("num_attention_heads"));
        add("attention.head_count_kv", size("num_key_value_heads"));
        add("attention.layer_norm_rms_epsilon", float("rms_norm_eps"));
        add("rope.freq_base", float("rope_theta"));
        if self.config["sliding_window"].is_u64() {
            add("attention.sliding_window", size("sliding_window"));
        }
        match family {
            "llama" => add("rope.dimension_count", head_dim()),
            "qwen3" => {
                add("attention.key_length", head_dim());
                add("attention.value_length", head_dim());
            }
            _ => {}
        }
        metadata
    }

    /// What converters store as `rope_freqs.weight`: the divisors of the frequencies by Llama 3.1's rule, in f64.
    fn llama3_factors(&self) -> Option<Vec<f32>> {
        let scaling = self.config.get("rope_scaling")?;
        let number = |field: &str| scaling[field].as_f64().expect("a number");
        let context = number("original_max_position_embeddings");
        let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
        let theta = self.config["rope_theta"].as_f64().expect("a number");
        let dim = self.head_dim();
        let factor = |i: usize| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * i as f64 / dim as f64);
            let smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - smooth) / number("factor") + smooth)) as f32
        };
        Some((0..dim / 2).map(factor).collect())
    }
}

/// Rows (half, pair) of each head to rows (pair, half): the order of llama.cpp's llama architecture.
fn interleaved(tensor: &Tensor, heads: usize) -> Result<Tensor> {
    regrouped(tensor, heads, |half| (2, half))
}

/// The inverse of [`interleaved`].
fn halves(tensor: &Tensor, heads: usize) -> Result<Tensor> {
    regrouped(tensor, heads, |half| (half, 2))
}

fn regrouped(
    tensor: &Tensor,
    heads: usize,
    groups: impl Fn(usize) -> (usize, usize),
) -> Result<Tensor> {
    let (rows, columns) = tensor.dims2()?;
    let (a, b) = groups(rows / heads / 2);
    let tensor = tensor.reshape((heads, a, b, columns))?.transpose(1, 2)?;
    tensor.contiguous()?.reshape((rows, columns))
}

fn gguf_name(name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.");
    for (theirs, gguf) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        name = name.replace(theirs, gguf);
    }
    name
}

/// candle-transformers' decoder of a family, in f32.
pub enum CandleDecoder {
    /// `models::llama`.
    Llama(Box<llama::Llama>, Box<llama::Config>),
    /// `models::qwen2`.
    Qwen2(Box<qwen2::ModelForCausalLM>),
    /// `models::qwen3`.
    Qwen3(Box<qwen3::ModelForCausalLM>),
    /// `models::mistral`.
    Mistral(Box<mistral::Model>),
}

impl CandleDecoder {
    /// Makes the decoder of `model`'s family from its tensors.
    ///
    /// candle's windows leave a query `sliding_window` keys besides its own, transformers' that many with its own; and
    /// candle's qwen2 applies the window whatever `use_sliding_window` says. The config that candle gets differs so that
    /// both mean the same.
    pub fn load(model: &TinyModel) -> Result<Self> {
        let tensors = model.tensors.clone().into_iter().collect();
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let mut config = model.config.clone();
        let family = model.family();
        let unused = family.starts_with("qwen") && !model.flag("use_sliding_window");
        match config["sliding_window"].as_u64() {
            Some(window) if !unused => config["sliding_window"] = (window - 1).into(),
            _ if family == "qwen2" => config["sliding_window"] = (1 << 20).into(),
            _ => {}
        }
        for (field, value) in [
            ("use_sliding_window", json!(false)),
            ("max_window_layers", json!(0)),
            ("attention_bias", json!(false)),
        ] {
            if config.get(field).is_none() {
                config[field] = value;
            }
        }
        fn parsed<T: serde::de::DeserializeOwned>(config: Value) -> T {
            serde_json::from_value(config).expect("candle reads the config")
        }
        Ok(match family {
            "llama" => {
                let config = parsed::<llama::LlamaConfig>(config).into_config(false);
                Self::Llama(
                    Box::new(llama::Llama::load(weights, &config)?),
                    config.into(),
                )
            }
            "qwen2" => Self::Qwen2(qwen2::ModelForCausalLM::new(&parsed(config), weights)?.into()),
            "qwen3" => Self::Qwen3(qwen3::ModelForCausalLM::new(&parsed(config), weights)?.into()),
            "mistral" => Self::Mistral(mistral::Model::new(&parsed(config), weights)?.into()),
            other => panic!("no candle decoder of {other}"),
        })
    }

    /// Logits after each of `tokens`. Every prefix is fed at once and anew: candle masks windows only so.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        (1..=tokens.len())
            .map(|end| {
                let input = Tensor::new(&tokens[..end], &Device::Cpu)?.unsqueeze(0)?;
                let logits = match self {
                    Self::Llama(model, config) => {
                        let mut cache = llama::Cache::new(false, DType::F32, config, &Device::Cpu)?;
                        model.forward(&input, 0, &mut cache)?
                    }
                    Self::Qwen2(model) => {
                        model.clear_kv_cache();
                        model.forward(&input, 0)?
                    }
                    Self::Qwen3(model) => {
                        model.clear_kv_cache();
                        model.forward(&input, 0)?
                    }
                    Self::Mistral(model) => {
                        model.clear_kv_cache();
                        model.forward(&input, 0)?
                    }
                };
                logits.flatten_all()?.to_vec1()
            })
            .collect()
    }
}
