//! One step as JSON: what `timetable build --input step.json` reads and prints.
//!
//! The input is CommonAttentionMetadata in snake case, as the field's dumps have it, with `kv_cache_spec` and `config`
//! beside it. Every fault of it is one line that names the field, the value and the remedy. The output is a builder's
//! metadata with its symbolic tensors resolved. This module must never read a file or run a builder.

mod config;
mod fields;
mod json;

use serde_json::{Map, Value};
use timetable_types::{
    BuilderConfig, Causal, DcpInputs, EncoderInputs, Extra, ExtraValue, FastPrefillInputs,
    MmDocRange,
};

use crate::{
    batch::{GroupStep, StepTensors},
    step::StepInputs,
    verify::{Grant, Refusal, VerifyContext, verify_step},
};
use fields::Fields;

pub use json::{JsonError, metadata_to_json};

/// Why a description is no step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// Not JSON.
    #[error("the step is not JSON: {0}")]
    Json(String),
    /// A field that must be there is not.
    #[error("{field} is missing: give {remedy}")]
    Missing {
        /// The field.
        field: String,
        /// What to give.
        remedy: &'static str,
    },
    /// A key that means nothing.
    #[error("{field} is not a field of a step: remove it, or use one of {known}")]
    Unknown {
        /// The key.
        field: String,
        /// What there is.
        known: String,
    },
    /// A value of the wrong kind, or out of range.
    #[error("{field} is {value}: give {remedy}")]
    Value {
        /// The field, with its index in a list.
        field: String,
        /// What it is.
        value: String,
        /// What to give.
        remedy: String,
    },
    /// Two fields that contradict one another.
    #[error("{field} is {value}, but {other}: make them agree")]
    Inconsistent {
        /// The field.
        field: String,
        /// What it is.
        value: String,
        /// What the other says.
        other: String,
    },
    /// The values do not make a step that kernels may run.
    #[error("{0}: correct the step, it does not depend on the builder")]
    Refused(Refusal),
}

/// A step that `verify_step` accepts, with the configuration of its attention group.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribedStep {
    /// The host record and the tensors.
    pub step: GroupStep,
    /// What a builder is made of.
    pub config: BuilderConfig,
    /// Kernel blocks of the cache. Default: one more than the largest block id in use.
    pub num_blocks: u32,
    /// A model state's own device fields.
    pub device_extras: Vec<(String, Vec<i32>)>,
}

/// Every key of a description.
const KEYS: &[&str] = &[
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table",
    "block_table_tensor",
    "slot_mapping",
    "causal",
    "positions",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "logits_indices_padded",
    "num_logits_indices",
    "max_logits_per_req",
    "req_idx",
    "mm_req_doc_ranges",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
    "extras",
    "kv_cache_spec",
    "config",
    "num_blocks",
];

/// A step in JSON form, not yet checked.
#[derive(Clone, Debug, PartialEq)]
pub struct StepDescription {
    object: Map<String, Value>,
}

impl StepDescription {
    /// From JSON text: an object with known keys only.
    pub fn from_json(text: &str) -> Result<Self, DescriptionError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| DescriptionError::Json(error.to_string()))?;
        Self::from_value(value)
    }

    /// From a JSON value: an object with known keys only.
    pub fn from_value(value: Value) -> Result<Self, DescriptionError> {
        let Value::Object(object) = value else {
            return Err(fields::wrong(
                "the step",
                &value,
                "an object of CommonAttentionMetadata's fields",
            ));
        };
        match object.keys().find(|key| !KEYS.contains(&key.as_str())) {
            Some(key) => Err(DescriptionError::Unknown {
                field: key.clone(),
                known: KEYS.join(", "),
            }),
            None => Ok(StepDescription { object }),
        }
    }

    /// The step, if every field is present, in range and consistent with the others.
    ///
    /// Required: query_start_loc, seq_lens, num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table (or
    /// block_table_tensor), slot_mapping, and kv_cache_spec with block_size, num_kv_heads and head_size. Defaults:
    /// query_start_loc_cpu and seq_lens_cpu_upper_bound are their device forms (also written "=seq_lens"), causal is true,
    /// nothing prefills, everything else is absent.
    ///
    /// `kv_cache_spec` and `config` are the contract's records in snake case; what they leave out is: full attention in
    /// bfloat16, head_size_v as head_size; as many query heads as KV heads, scale 1/√head_size, no window, no soft cap, cache
    /// dtype "auto" as LBNHC; the scheduler's limits 256 requests, 8,192 tokens and 32,768 positions, or the step's own where
    /// those are larger; no graphs, one rank, a CPU with one worker; at most 32 KV splits; model runner V2.
    pub fn validate(&self) -> Result<DescribedStep, DescriptionError> {
        let fields = Fields::new(&self.object);
        let query_start_loc =
            fields.required_i32s("query_start_loc", "a list of R + 1 token offsets")?;
        let seq_lens = fields.required_i32s("seq_lens", "a list of R lengths")?;
        let rows = seq_lens.len();
        let num_reqs = fields.required_u32("num_reqs", "the number of rows")?;
        agree("num_reqs", num_reqs, "seq_lens", rows)?;
        let num_actual_tokens = fields.required_u32("num_actual_tokens", "the number of tokens")?;
        let max_query_len = fields.required_u32("max_query_len", "the longest query, in tokens")?;
        let max_seq_len = fields.required_u32("max_seq_len", "the longest sequence, in tokens")?;
        let (block_table, width) = fields.block_table(rows)?;
        let slot_mapping =
            fields.required_i64s("slot_mapping", "a list of slots, one a token", -1)?;
        let positions = fields.optional_i64s("positions", 0)?.unwrap_or_default();

        let config = config::config(
            &self.object,
            &config::StepShape {
                num_reqs,
                num_actual_tokens,
                max_seq_len,
                width: width as u32,
            },
        )?;
        let (causal, causal_rows) = fields.causal()?;
        let tensors = StepTensors {
            query_start_loc,
            seq_lens,
            block_table,
            block_table_width: width,
            slot_mapping,
            positions,
            causal: causal_rows,
            dcp_local_seq_lens: fields.optional_i32s("dcp_local_seq_lens")?,
            encoder_seq_lens: fields.optional_i32s("encoder_seq_lens")?,
            logits_indices_padded: fields.optional_i32s("logits_indices_padded")?,
            rswa_prefix_lens: fields.optional_i32s("rswa_prefix_lens")?,
        };
        let bound = fields
            .same_or_i32s("seq_lens_cpu_upper_bound", "=seq_lens")?
            .unwrap_or_else(|| tensors.seq_lens.clone());
        let mut step = GroupStep::new(
            tensors,
            bound,
            num_actual_tokens,
            max_query_len,
            max_seq_len,
        );
        let cam = &mut step.cam;
        cam.causal = causal;
        if let Some(starts) = fields.same_or_i32s("query_start_loc_cpu", "=query_start_loc")? {
            cam.query_start_loc_cpu = starts;
        }
        cam.is_prefilling = fields.flags("is_prefilling")?.unwrap_or_default();
        cam.dcp = dcp(&fields, &step.tensors)?;
        cam.encoder = encoder(&fields, &step.tensors)?;
        cam.fast_prefill = fast_prefill(&fields, &step.tensors)?;
        cam.req_idx = fields
            .optional_i32s("req_idx")?
            .map(|rows| rows.into_iter().map(|row| row as u32).collect())
            .unwrap_or_default();
        cam.mm_req_doc_ranges = doc_ranges(&fields)?;
        cam.replayssm_decode_base_cpu = fields
            .optional_i32s("replayssm_decode_base_cpu")?
            .unwrap_or_default();
        let (extras, device_extras) = extras(&fields)?;
        cam.extras = extras;

        let largest = step
            .tensors
            .block_table
            .iter()
            .fold(0, |max, &id| max.max(id)) as u32;
        let num_blocks = fields.optional_u32("num_blocks")?.unwrap_or(largest + 1);
        let described = DescribedStep {
            step,
            config,
            num_blocks,
            device_extras,
        };
        let borrowed = described.borrowed_extras();
        let inputs = described.inputs(&borrowed);
        verify_step(&described.context(&inputs)).map_err(DescriptionError::Refused)?;
        Ok(described)
    }
}

impl DescribedStep {
    /// The device extras, borrowed: what `inputs` takes.
    pub fn borrowed_extras(&self) -> Vec<(&str, &[i32])> {
        self.device_extras
            .iter()
            .map(|(name, data)| (name.as_str(), data.as_slice()))
            .collect()
    }

    /// The step's tensors.
    pub fn inputs<'a>(&'a self, extras: &'a [(&'a str, &'a [i32])]) -> StepInputs<'a> {
        StepInputs {
            extras,
            ..self.step.tensors.inputs()
        }
    }

    /// What a builder's metadata for this step is verified against: outside graphs, without grants.
    pub fn context<'a>(&'a self, inputs: &'a StepInputs<'a>) -> VerifyContext<'a> {
        VerifyContext {
            config: &self.config,
            common: &self.step.cam,
            inputs,
            promise: None,
            grant: Grant::Exact,
            num_blocks: self.num_blocks,
        }
    }
}

fn agree(field: &str, value: u32, other: &str, count: usize) -> Result<(), DescriptionError> {
    if value as usize == count {
        Ok(())
    } else {
        Err(DescriptionError::Inconsistent {
            field: field.to_owned(),
            value: value.to_string(),
            other: format!("{other} has {count} entries"),
        })
    }
}

fn dcp(fields: &Fields<'_>, tensors: &StepTensors) -> Result<Option<DcpInputs>, DescriptionError> {
    let bound = fields.optional_i32s("dcp_local_seq_lens_cpu_upper_bound")?;
    Ok(match (&tensors.dcp_local_seq_lens, bound) {
        (None, None) => None,
        (_, bound) => Some(DcpInputs {
            dcp_local_seq_lens_cpu_upper_bound: bound.unwrap_or_default(),
        }),
    })
}

fn encoder(
    fields: &Fields<'_>,
    tensors: &StepTensors,
) -> Result<Option<EncoderInputs>, DescriptionError> {
    let lens = fields.optional_i32s("encoder_seq_lens_cpu")?;
    Ok(match (&tensors.encoder_seq_lens, lens) {
        (None, None) => None,
        (device, lens) => Some(EncoderInputs {
            encoder_seq_lens_cpu: lens.or_else(|| device.clone()).unwrap_or_default(),
        }),
    })
}

fn fast_prefill(
    fields: &Fields<'_>,
    tensors: &StepTensors,
) -> Result<Option<FastPrefillInputs>, DescriptionError> {
    let Some(indices) = &tensors.logits_indices_padded else {
        return Ok(None);
    };
    let len = indices.len() as u32;
    let given = fields.optional_u32("num_logits_indices")?.unwrap_or(len);
    Ok(Some(FastPrefillInputs {
        num_logits_indices: given,
        max_logits_per_req: fields.optional_u32("max_logits_per_req")?.unwrap_or(given),
        num_logits_indices_padded: len,
    }))
}

/// `{"row": [[start, end], …]}`, as the field has it.
fn doc_ranges(fields: &Fields<'_>) -> Result<Vec<MmDocRange>, DescriptionError> {
    const FIELD: &str = "mm_req_doc_ranges";
    const REMEDY: &str = "an object of rows, each with a list of [start, end] pairs";
    let Some(value) = fields.get(FIELD) else {
        return Ok(Vec::new());
    };
    let Value::Object(rows) = value else {
        return Err(fields::wrong(FIELD, value, REMEDY));
    };
    let mut ranges = Vec::new();
    for (key, spans) in rows {
        let field = format!("{FIELD}.{key}");
        let row = key.parse::<u32>().map_err(|_| {
            fields::wrong(&field, &Value::from(key.as_str()), "a row's number as key")
        })?;
        for (index, span) in fields::list(&field, spans)?.iter().enumerate() {
            let field = format!("{field}[{index}]");
            match fields::i32s(&field, span, 0)?.as_slice() {
                &[start, end] => ranges.push(MmDocRange {
                    row,
                    start: start as u32,
                    end: end as u32,
                }),
                _ => return Err(fields::wrong(&field, span, "a pair [start, end]")),
            }
        }
    }
    Ok(ranges)
}

type Extras = (Vec<Extra>, Vec<(String, Vec<i32>)>);

/// `{"name": 5}`, `{"name": {"host": […]}}` or `{"name": {"device": […]}}`.
fn extras(fields: &Fields<'_>) -> Result<Extras, DescriptionError> {
    const REMEDY: &str = "an integer, {\"host\": […]} or {\"device\": […]}";
    let Some(value) = fields.get("extras") else {
        return Ok((Vec::new(), Vec::new()));
    };
    let Value::Object(entries) = value else {
        return Err(fields::wrong("extras", value, "an object of named extras"));
    };
    let (mut extras, mut device) = (Vec::new(), Vec::new());
    for (name, value) in entries {
        let field = format!("extras.{name}");
        let vector = |kind: &str| {
            value
                .as_object()
                .filter(|map| map.len() == 1)
                .and_then(|map| map.get(kind))
        };
        let made = if let Some(integer) = value.as_i64() {
            ExtraValue::Integer(integer)
        } else if let Some(list) = vector("host") {
            ExtraValue::Host(fields::i32s(&field, list, i32::MIN.into())?)
        } else if let Some(list) = vector("device") {
            let data = fields::i32s(&field, list, i32::MIN.into())?;
            let rows = data.len() as u32;
            device.push((name.clone(), data));
            ExtraValue::Device(rows)
        } else {
            return Err(fields::wrong(&field, value, REMEDY));
        };
        extras.push(Extra {
            name: name.clone(),
            value: made,
        });
    }
    Ok((extras, device))
}

/// One flag, or one for each row.
fn causal_of(value: Option<&Value>) -> Result<(Causal, Option<Vec<i32>>), DescriptionError> {
    match value {
        None | Some(Value::Null) => Ok((Causal::All(true), None)),
        Some(Value::Bool(flag)) => Ok((Causal::All(*flag), None)),
        Some(list @ Value::Array(_)) => {
            let flags = fields::flag_list("causal", list)?;
            Ok((
                Causal::PerRequest,
                Some(flags.into_iter().map(i32::from).collect()),
            ))
        }
        Some(other) => Err(fields::wrong(
            "causal",
            other,
            "true, false, or a list of flags, one a row",
        )),
    }
}

#[cfg(test)]
mod tests;
