//! Makes small GGUF files for tests.

use std::path::PathBuf;
use tempfile::TempDir;

/// A file of the repository.
pub(crate) fn repository_file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// Collects metadata and tensors, then writes version 3 of the format.
#[derive(Clone, Default)]
pub(crate) struct GgufBuilder {
    /// Key, type, encoded value; a later entry of a key replaces an earlier one.
    metadata: Vec<(String, u32, Vec<u8>)>,
    /// Name, shape (slowest first), type, bytes.
    tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

/// A written file; the directory goes with it.
pub(crate) struct GgufOnDisk {
    _dir: TempDir,
    path: PathBuf,
}

impl GgufOnDisk {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, bytes).expect("a small file");
        Self { _dir: dir, path }
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

fn array(kind: u32, len: usize, elements: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut out = kind.to_le_bytes().to_vec();
    out.extend((len as u64).to_le_bytes());
    out.extend(elements.flatten());
    out
}

impl GgufBuilder {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn raw(mut self, key: &str, kind: u32, value: Vec<u8>) -> Self {
        self.metadata.retain(|(k, _, _)| k != key);
        self.metadata.push((key.to_owned(), kind, value));
        self
    }

    pub(crate) fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, string(value))
    }

    pub(crate) fn uint(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    pub(crate) fn float(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, vec![u8::from(value)])
    }

    pub(crate) fn texts(self, key: &str, values: &[String]) -> Self {
        self.raw(
            key,
            9,
            array(8, values.len(), values.iter().map(|v| string(v))),
        )
    }

    pub(crate) fn ints(self, key: &str, values: &[i32]) -> Self {
        self.raw(
            key,
            9,
            array(
                5,
                values.len(),
                values.iter().map(|v| v.to_le_bytes().to_vec()),
            ),
        )
    }

    pub(crate) fn floats(self, key: &str, values: &[f32]) -> Self {
        self.raw(
            key,
            9,
            array(
                6,
                values.len(),
                values.iter().map(|v| v.to_le_bytes().to_vec()),
            ),
        )
    }

    pub(crate) fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> Self {
        self.tensors.retain(|(n, _, _, _)| n != name);
        self.tensors
            .push((name.to_owned(), shape.to_vec(), kind, bytes));
        self
    }

    /// An f32 tensor of small pseudo-random values.
    pub(crate) fn random(self, name: &str, shape: &[usize]) -> Self {
        let seed = name
            .bytes()
            .fold(17u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
        let values = random_values(shape.iter().product(), seed);
        self.tensor(
            name,
            shape,
            0,
            values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        )
    }

    pub(crate) fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|(n, _, _, _)| n != name);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, shape, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((shape.len() as u32).to_le_bytes());
            for dim in shape.iter().rev() {
                out.extend((*dim as u64).to_le_bytes());
            }
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    pub(crate) fn write(&self) -> GgufOnDisk {
        GgufOnDisk::new(&self.bytes())
    }
}

/// Values in −0.1 to 0.1.
pub(crate) fn random_values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.2
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// A whole model of the architecture, two layers, hidden size 32, vocabulary 40.
pub(crate) fn tiny_model(arch: &str) -> GgufBuilder {
    let key = |k: &str| format!("{arch}.{k}");
    let mut b = GgufBuilder::new()
        .text("general.architecture", arch)
        .uint(&key("block_count"), 2)
        .uint(&key("context_length"), 64)
        .uint(&key("embedding_length"), 32)
        .uint(&key("feed_forward_length"), 64)
        .uint(&key("attention.head_count"), 4)
        .uint(&key("attention.head_count_kv"), 2)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .random("token_embd.weight", &[40, 32])
        .random("output_norm.weight", &[32]);
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}");
        b = b
            .random(&name("attn_norm.weight"), &[32])
            .random(&name("attn_q.weight"), &[32, 32])
            .random(&name("attn_k.weight"), &[16, 32])
            .random(&name("attn_v.weight"), &[16, 32])
            .random(&name("attn_output.weight"), &[32, 32])
            .random(&name("ffn_norm.weight"), &[32])
            .random(&name("ffn_gate.weight"), &[64, 32])
            .random(&name("ffn_up.weight"), &[64, 32])
            .random(&name("ffn_down.weight"), &[32, 64]);
    }
    b
}
