//! TRITON_ATTN's cases.

use std::collections::HashMap;

use serde_json::{Value, json};
use timetable_attention::MetadataBuilder;
use timetable_types::{
    BuilderConfig, Causal, Metadata, Scratch, triton_attn::Metadata as TritonAttn,
};

use crate::{
    Make,
    flash_attn::compare,
    resolve::resolve,
    vectors::{Case, File, Tensors, builder_config, check_info, dtype_name},
};

/// Builders by configuration: one each, as in the recording.
pub struct Suite<'a> {
    make: Make<'a>,
    builders: HashMap<usize, (BuilderConfig, Box<dyn MetadataBuilder>)>,
}

impl<'a> Suite<'a> {
    pub fn new(make: Make<'a>) -> Self {
        Self {
            make,
            builders: HashMap::new(),
        }
    }

    pub fn check(&mut self, file: &File, case: &Case) -> Result<(), String> {
        let entry = &file.configs[case.config];
        let (config, builder) = self.builders.entry(case.config).or_insert_with(|| {
            let config = builder_config(entry);
            let builder = (self.make)(&config);
            (config, builder)
        });
        check_info(builder.info(), entry)?;
        let built = match case.method.as_str() {
            "build" => builder.build(&case.common, false),
            // The field then fills the device's lengths with ones, which notes in the file say. No builder of ours writes to
            // the host's tensors: the host captures with such a step (`capture_batch`).
            "capture" => builder.build_for_cudagraph_capture(&case.common),
            other => panic!("method {other}"),
        };
        match built {
            Ok(Metadata::TritonAttn(metadata)) => {
                check_metadata(&metadata, &case.output["metadata"], &case.tensors, config)
            }
            Ok(other) => Err(format!("metadata of family {:?}", other.family())),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn check_metadata(
    metadata: &TritonAttn,
    expected: &Value,
    step: &Tensors,
    config: &BuilderConfig,
) -> Result<(), String> {
    let tensor = |tensor| resolve(tensor, step, config, &[]);
    let scratch =
        |scratch: &Scratch| json!({ "$shape": scratch.shape, "$dtype": dtype_name(scratch.dtype) });
    let Causal::All(causal) = metadata.causal else {
        return Err("causal is per request".to_owned());
    };
    if metadata.mm_prefix_range.is_some() || metadata.rswa_prefix_lens.is_some() {
        return Err("fields that were None in the recording are present".to_owned());
    }
    let ours = json!({
        "num_actual_tokens": metadata.num_actual_tokens,
        "max_query_len": metadata.max_query_len,
        "query_start_loc": tensor(&metadata.query_start_loc),
        "max_seq_len": metadata.max_seq_len,
        "seq_lens": tensor(&metadata.seq_lens),
        "block_table": tensor(&metadata.block_table),
        "slot_mapping": tensor(&metadata.slot_mapping),
        "causal": causal,
        "seq_threshold_3D": metadata.seq_threshold_3d,
        "num_par_softmax_segments": metadata.num_par_softmax_segments,
        "softmax_segm_output": scratch(&metadata.softmax_segm_output),
        "softmax_segm_max": scratch(&metadata.softmax_segm_max),
        "softmax_segm_expsum": scratch(&metadata.softmax_segm_expsum),
    });
    compare(ours.as_object().expect("an object"), expected, step)
}
