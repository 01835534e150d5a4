//! A model of random weights, small enough that its kernels take less time than the host's work on a step. It must never know
//! what it is run for.

use std::fs::File;
use std::io::{BufWriter, Write};

use serde_json::{Map, json};
use tempfile::TempDir;

use crate::exit::{Exit, Failure};

const HIDDEN: usize = 128;
const FEED_FORWARD: usize = 256;
const HEAD: usize = 64;
const HEADS: usize = 2;
const VOCABULARY: usize = 512;

/// Writes it to a temporary directory, which goes with what is returned.
pub fn write() -> Result<TempDir, Failure> {
    let failed = |error: std::io::Error| {
        let message = format!(
            "the small model: cannot be written to a temporary directory ({error}); set TMPDIR to one with 2 MB"
        );
        Failure::new(Exit::Failure, message)
    };
    let dir = tempfile::tempdir().map_err(failed)?;
    let config = json!({
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).map_err(failed)?;
    weights(&dir).map_err(failed)?;
    Ok(dir)
}

/// Name and shape of each tensor.
fn tensors() -> Vec<(String, Vec<usize>)> {
    let layer = "model.layers.0";
    let matrices = [
        ("self_attn.q_proj", HEADS * HEAD, HIDDEN),
        ("self_attn.k_proj", HEAD, HIDDEN),
        ("self_attn.v_proj", HEAD, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
        ("mlp.gate_proj", FEED_FORWARD, HIDDEN),
        ("mlp.up_proj", FEED_FORWARD, HIDDEN),
        ("mlp.down_proj", HIDDEN, FEED_FORWARD),
    ];
    let mut all = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![VOCABULARY, HIDDEN],
        ),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        (format!("{layer}.input_layernorm.weight"), vec![HIDDEN]),
        (
            format!("{layer}.post_attention_layernorm.weight"),
            vec![HIDDEN],
        ),
    ];
    all.extend(
        matrices
            .map(|(name, rows, columns)| (format!("{layer}.{name}.weight"), vec![rows, columns])),
    );
    all
}

/// The safetensors file: the header's length, the header, the tensors one after the other.
fn weights(dir: &TempDir) -> std::io::Result<()> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors() {
        let begin = end;
        end += 4 * shape.iter().product::<usize>();
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, end] });
        header.insert(name, entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = BufWriter::new(File::create(dir.path().join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for (_, shape) in tensors() {
        for _ in 0..shape.iter().product::<usize>() {
            // Numbers in −0.1 to 0.1; norms about 1.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let noise = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.1;
            let value = if shape.len() == 1 { 1.0 + noise } else { noise };
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use timetable_engine::model::{LoadOptions, Model, Weights};

    #[test]
    fn the_small_model_is_one_that_loads() {
        let dir = super::write().unwrap();
        let options = LoadOptions {
            weights: Weights::F32,
            threads: Some(1),
        };
        let model = Model::load(dir.path(), options).unwrap();
        assert_eq!(model.config().num_hidden_layers, 1);
    }
}
