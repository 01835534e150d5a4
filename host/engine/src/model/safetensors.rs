//! Opens a Hugging Face model directory: one `model.safetensors`, or shards listed by `model.safetensors.index.json`.
//!
//! Knows the file format only; names and shapes are the loader's business.

use super::error::ModelError;
use super::files;
use super::weights::{Checkpoint, RawTensor};
use candle_core::quantized::GgmlDType;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

struct Entry {
    shard: usize,
    dtype: GgmlDType,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// All shards of a directory, mapped, with one directory of tensors.
pub(crate) struct SafetensorsDir {
    path: PathBuf,
    shards: Vec<Mmap>,
    tensors: HashMap<String, Entry>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: HashMap<String, String>,
}

impl SafetensorsDir {
    /// Maps and checks every shard.
    ///
    /// # Errors
    /// `Io`, `Corrupt`, or `Unsupported` for a dtype other than F32, F16 and BF16.
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut this = Self {
            path: dir.to_owned(),
            shards: Vec::new(),
            tensors: HashMap::new(),
        };
        let index_path = dir.join("model.safetensors.index.json");
        if index_path.exists() {
            let text = files::read(&index_path, files::MAX_TOKENIZER)?;
            let index: ShardIndex = serde_json::from_slice(&text).map_err(|e| {
                ModelError::corrupt(&index_path, format!("it is not a shard index: {e}"))
            })?;
            for file in index.weight_map.values().collect::<BTreeSet<_>>() {
                // A shard is a plain file name; anything else could point out of the directory.
                if Path::new(file)
                    .file_name()
                    .is_none_or(|name| name != file.as_str())
                {
                    let what = format!("shard '{file}' is not a file name");
                    return Err(ModelError::corrupt(&index_path, what));
                }
                this.add_shard(&dir.join(file))?;
            }
        } else {
            this.add_shard(&dir.join("model.safetensors"))?;
        }
        Ok(this)
    }

    fn add_shard(&mut self, path: &Path) -> Result<(), ModelError> {
        let file = files::open(path)?;
        // SAFETY: as for GGUF files: read only, and models are installed by renaming complete files into place.
        let data = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))?;
        // `deserialize` checks the header against the length: offsets contiguous, sizes equal to shape times dtype.
        let parsed = SafeTensors::deserialize(&data)
            .map_err(|e| ModelError::corrupt(path, format!("safetensors header: {e}")))?;
        let base = data.as_ptr() as usize;
        for (name, view) in parsed.iter() {
            let dtype = match view.dtype() {
                Dtype::F32 => GgmlDType::F32,
                Dtype::F16 => GgmlDType::F16,
                Dtype::BF16 => GgmlDType::BF16,
                other => {
                    return Err(ModelError::Unsupported {
                        path: path.to_owned(),
                        what: format!("tensor '{name}' of dtype {other:?}"),
                        remedy: "save the weights as float32, float16 or bfloat16",
                    });
                }
            };
            let start = view.data().as_ptr() as usize - base;
            let entry = Entry {
                shard: self.shards.len(),
                dtype,
                shape: view.shape().to_vec(),
                bytes: start..start + view.data().len(),
            };
            if self.tensors.insert(name.to_owned(), entry).is_some() {
                return Err(ModelError::corrupt(
                    path,
                    format!("tensor '{name}' occurs in two shards"),
                ));
            }
        }
        self.shards.push(data);
        Ok(())
    }
}

impl Checkpoint for SafetensorsDir {
    fn path(&self) -> &Path {
        &self.path
    }

    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let entry = self.tensors.get(name)?;
        Some(RawTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.shards[entry.shard][entry.bytes.clone()],
        })
    }
}
