//! Reads the header of a GGUF file and hands out its tensors as byte ranges.
//!
//! Everything a header claims (counts, lengths, offsets, sizes) is checked against the bytes that are really there
//! before anything is allocated, so a truncated or hostile file costs an error and no memory. Arrays stay in the mapped
//! file until they are asked for. This module knows no architecture: it does not say which keys or tensors a model needs.
//!
//! Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian.

use super::error::ModelError;
use super::files;
use super::weights::{Checkpoint, RawTensor};
use candle_core::quantized::GgmlDType;
use memmap2::Mmap;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// ggml's GGML_MAX_DIMS.
const MAX_DIMS: u32 = 4;
/// Arrays of arrays are legal; nothing uses them, and a deep chain must not overflow the stack.
const MAX_ARRAY_DEPTH: usize = 4;

/// A metadata value; text and arrays are ranges of the mapped file.
#[derive(Debug, Clone)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array {
        kind: u32,
        len: usize,
        bytes: Range<usize>,
    },
}

#[derive(Debug, Clone)]
struct TensorEntry {
    dtype: GgmlDType,
    /// Slowest dimension first.
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// An opened GGUF file: metadata and tensor directory, checked.
pub(crate) struct GgufFile {
    path: PathBuf,
    data: Mmap,
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, TensorEntry>,
}

impl GgufFile {
    /// Maps and checks the file.
    ///
    /// # Errors
    /// `Io` if it cannot be opened, `Corrupt` or `Unsupported` with the offending value otherwise.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let file = files::open(path)?;
        // SAFETY: the mapping is private to this struct and only read. A file that another process shortens meanwhile
        // would fault; models are installed atomically (a new file is renamed into place), as for every engine that
        // maps its weights.
        let data = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))?;
        let (metadata, tensors) = parse(&data, path)?;
        Ok(Self {
            path: path.to_owned(),
            data,
            metadata,
            tensors,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A non-negative integer of any width.
    pub(crate) fn uint(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key)? {
            Value::Unsigned(v) => Some(*v),
            Value::Signed(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// A floating-point number.
    pub(crate) fn float(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key)? {
            Value::Float(v) => Some(*v),
            _ => None,
        }
    }

    pub(crate) fn bool(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key)? {
            Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// A string; bytes that are not UTF-8 become U+FFFD.
    pub(crate) fn text(&self, key: &str) -> Option<String> {
        match self.metadata.get(key)? {
            Value::Text(r) => Some(String::from_utf8_lossy(&self.data[r.clone()]).into_owned()),
            _ => None,
        }
    }

    /// An array of strings.
    pub(crate) fn texts(&self, key: &str) -> Option<Vec<String>> {
        let Value::Array {
            kind: 8,
            len,
            bytes,
        } = self.metadata.get(key)?
        else {
            return None;
        };
        let mut cursor = Cursor::new(&self.data[..bytes.end], bytes.start);
        let mut out = Vec::with_capacity(*len);
        for _ in 0..*len {
            let range = cursor.text("array element").ok()?;
            out.push(String::from_utf8_lossy(&self.data[range]).into_owned());
        }
        Some(out)
    }

    /// An array of numbers, as doubles (token types and scores are small).
    pub(crate) fn numbers(&self, key: &str) -> Option<Vec<f64>> {
        let Value::Array { kind, len, bytes } = self.metadata.get(key)? else {
            return None;
        };
        let mut cursor = Cursor::new(&self.data[..bytes.end], bytes.start);
        (0..*len)
            .map(|_| match cursor.value(*kind, 0).ok()? {
                Value::Unsigned(v) => Some(v as f64),
                Value::Signed(v) => Some(v as f64),
                Value::Float(v) => Some(v),
                Value::Bool(v) => Some(f64::from(u8::from(v))),
                Value::Text(_) | Value::Array { .. } => None,
            })
            .collect()
    }
}

impl Checkpoint for GgufFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let entry = self.tensors.get(name)?;
        Some(RawTensor {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.data[entry.bytes.clone()],
        })
    }
}

type Header = (HashMap<String, Value>, HashMap<String, TensorEntry>);

fn parse(data: &[u8], path: &Path) -> Result<Header, ModelError> {
    let corrupt = |what: String| ModelError::corrupt(path, what);
    if data.get(..4) != Some(MAGIC.as_slice()) {
        return Err(ModelError::Corrupt {
            path: path.to_owned(),
            what: format!(
                "it does not start with 'GGUF' but with {:?}",
                &data[..data.len().min(4)]
            ),
            remedy: "give a GGUF file or a Hugging Face model directory",
        });
    }
    let mut cursor = Cursor::new(data, 4);
    let version = cursor.u32("version").map_err(corrupt)?;
    if !(2..=3).contains(&version) {
        return Err(ModelError::Unsupported {
            path: path.to_owned(),
            what: format!("GGUF version {version}"),
            remedy: "convert the model to little-endian GGUF version 3",
        });
    }
    let tensor_count = cursor.u64("tensor count").map_err(corrupt)?;
    let kv_count = cursor.u64("metadata count").map_err(corrupt)?;
    // The smallest entries: key length, type, one byte; name length, dimension count, type, offset.
    let needed = u128::from(kv_count) * 13 + u128::from(tensor_count) * 24;
    if needed > cursor.remaining() as u128 {
        return Err(corrupt(format!(
            "its header claims {tensor_count} tensors and {kv_count} metadata entries, at least {needed} bytes, but only {} follow",
            cursor.remaining()
        )));
    }

    let mut metadata = HashMap::new();
    for i in 0..kv_count {
        let key = cursor
            .text(&format!("key of metadata entry {i}"))
            .map_err(corrupt)?;
        let key = String::from_utf8_lossy(&data[key]).into_owned();
        let kind = cursor.u32(&format!("type of '{key}'")).map_err(corrupt)?;
        let value = cursor
            .value(kind, 0)
            .map_err(|e| corrupt(format!("metadata '{key}': {e}")))?;
        metadata.insert(key, value);
    }

    let mut claims = Vec::new();
    for i in 0..tensor_count {
        claims.push(tensor_claim(&mut cursor, i, path)?);
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(Value::Unsigned(v)) if v.is_power_of_two() && (8..=1 << 20).contains(v) => *v,
        Some(v) => {
            return Err(corrupt(format!(
                "general.alignment is {v:?}, not a power of two of at least 8"
            )));
        }
    };
    // No overflow: the position is within a file that is mapped.
    let data_start = (cursor.position as u64).next_multiple_of(alignment);
    let mut tensors = HashMap::new();
    for claim in claims {
        let end = data_start
            .checked_add(claim.offset)
            .and_then(|s| s.checked_add(claim.size));
        let end = end.filter(|end| *end <= data.len() as u64).ok_or_else(|| {
            corrupt(format!(
                "tensor '{}' needs {} bytes at offset {} of the data, which starts at byte {data_start}, but the file has {} bytes",
                claim.name, claim.size, claim.offset, data.len()
            ))
        })?;
        if !claim.offset.is_multiple_of(alignment) {
            return Err(corrupt(format!(
                "tensor '{}' lies at offset {}, which the alignment {alignment} does not divide",
                claim.name, claim.offset
            )));
        }
        let entry = TensorEntry {
            dtype: claim.dtype,
            shape: claim.shape,
            bytes: (end - claim.size) as usize..end as usize,
        };
        if tensors.insert(claim.name.clone(), entry).is_some() {
            return Err(corrupt(format!("tensor '{}' occurs twice", claim.name)));
        }
    }
    Ok((metadata, tensors))
}

/// What the directory says of one tensor, not yet compared with the file's length.
struct TensorClaim {
    name: String,
    dtype: GgmlDType,
    shape: Vec<usize>,
    offset: u64,
    size: u64,
}

fn tensor_claim(
    cursor: &mut Cursor<'_>,
    index: u64,
    path: &Path,
) -> Result<TensorClaim, ModelError> {
    let corrupt = |what: String| ModelError::corrupt(path, what);
    let name = cursor
        .text(&format!("name of tensor {index}"))
        .map_err(corrupt)?;
    let name = String::from_utf8_lossy(&cursor.data[name]).into_owned();
    let dims = cursor
        .u32(&format!("dimension count of tensor '{name}'"))
        .map_err(corrupt)?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(corrupt(format!(
            "tensor '{name}' has {dims} dimensions, not 1 to {MAX_DIMS}"
        )));
    }
    let mut shape = Vec::new();
    let mut elements: u64 = 1;
    for _ in 0..dims {
        let dim = cursor
            .u64(&format!("dimension of tensor '{name}'"))
            .map_err(corrupt)?;
        elements = elements
            .checked_mul(dim)
            .filter(|n| *n > 0 && *n < 1 << 48)
            .ok_or_else(|| corrupt(format!("tensor '{name}' has a dimension of {dim}")))?;
        shape.push(dim as usize);
    }
    let kind = cursor
        .u32(&format!("type of tensor '{name}'"))
        .map_err(corrupt)?;
    let dtype = ggml_dtype(kind).ok_or_else(|| ModelError::Unsupported {
        path: path.to_owned(),
        what: format!("tensor '{name}' of ggml type {kind}"),
        remedy: "use a model quantised as F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or Q2_K to Q6_K",
    })?;
    let block = dtype.block_size() as u64;
    if !(shape[0] as u64).is_multiple_of(block) {
        return Err(corrupt(format!(
            "tensor '{name}' has rows of {} values, which the {dtype:?} block of {block} does not divide",
            shape[0]
        )));
    }
    shape.reverse();
    let offset = cursor
        .u64(&format!("offset of tensor '{name}'"))
        .map_err(corrupt)?;
    Ok(TensorClaim {
        name,
        dtype,
        shape,
        offset,
        size: elements / block * dtype.type_size() as u64,
    })
}

/// ggml's type numbers, as far as weights use them.
fn ggml_dtype(kind: u32) -> Option<GgmlDType> {
    Some(match kind {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// A bounds-checked reader; an error says what was being read.
struct Cursor<'a> {
    data: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    fn new(data: &'a [u8], position: usize) -> Self {
        Self { data, position }
    }

    fn remaining(&self) -> usize {
        self.data.len() - self.position
    }

    fn take(&mut self, len: u64, what: &str) -> Result<Range<usize>, String> {
        if len > self.remaining() as u64 {
            return Err(format!(
                "{what} needs {len} bytes at byte {}, but the file has only {} more",
                self.position,
                self.remaining()
            ));
        }
        let start = self.position;
        self.position += len as usize;
        Ok(start..self.position)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let range = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(&self.data[range]);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<Range<usize>, String> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// One value of the given type; arrays are walked over, not copied.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        let what = "value";
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(what)?[0])),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array(what)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(what)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array(what)?))),
            4 => Value::Unsigned(u64::from(self.u32(what)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array(what)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(what)?))),
            7 => match self.array::<1>(what)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                b => return Err(format!("boolean is {b}, not 0 or 1")),
            },
            8 => Value::Text(self.text("string")?),
            9 => self.array_value(depth)?,
            10 => Value::Unsigned(self.u64(what)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            other => return Err(format!("type {other} is not one of GGUF's 0 to 12")),
        })
    }

    fn array_value(&mut self, depth: usize) -> Result<Value, String> {
        if depth == MAX_ARRAY_DEPTH {
            return Err(format!(
                "arrays are nested more than {MAX_ARRAY_DEPTH} deep"
            ));
        }
        let kind = self.u32("array type")?;
        let len = self.u64("array length")?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            other => return Err(format!("array type {other} is not one of GGUF's 0 to 12")),
        };
        if u128::from(len) * width > self.remaining() as u128 {
            return Err(format!(
                "an array of {len} elements needs at least {} bytes, but the file has only {} more",
                u128::from(len) * width,
                self.remaining()
            ));
        }
        let start = self.position;
        match kind {
            8 | 9 => {
                for _ in 0..len {
                    self.value(kind, depth + 1)?;
                }
            }
            _ => {
                self.take(len * width as u64, "array")?;
            }
        }
        Ok(Value::Array {
            kind,
            len: len as usize,
            bytes: start..self.position,
        })
    }
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
