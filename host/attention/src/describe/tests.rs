use serde_json::json;
use timetable_types::Family;

use super::*;
use crate::{plain::plain_builder, resolve::Resolver, verify::verify};

/// Two decodes and a prefill of 20 tokens behind a context of 12; pages of 16.
fn good() -> Value {
    let slots: Vec<i64> = [112 + 4, 48]
        .into_iter()
        .chain((12..16).map(|p| 80 + p))
        .chain((16..32).map(|p| 96 + p - 16))
        .collect();
    json!({
        "query_start_loc": [0, 1, 2, 22],
        "seq_lens": [5, 17, 32],
        "num_reqs": 3,
        "num_actual_tokens": 22,
        "max_query_len": 20,
        "max_seq_len": 32,
        "block_table": [[7, 0], [2, 3], [5, 6]],
        "slot_mapping": slots,
        "is_prefilling": [false, false, true],
        "seq_lens_cpu_upper_bound": "=seq_lens",
        "kv_cache_spec": {"block_size": 16, "num_kv_heads": 2, "head_size": 64},
        "config": {"attention": {"num_heads": 8}, "device": {"num_workers": 4}}
    })
}

fn error(change: impl FnOnce(&mut Value)) -> String {
    let mut value = good();
    change(&mut value);
    let message = match StepDescription::from_value(value).and_then(|step| step.validate()) {
        Ok(step) => panic!("accepted: {step:?}"),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

#[test]
fn a_good_step_is_read_with_its_defaults() {
    let step = StepDescription::from_json(&good().to_string())
        .and_then(|step| step.validate())
        .expect("good");
    assert_eq!(step.step.cam.query_start_loc_cpu, [0, 1, 2, 22]);
    assert_eq!(step.step.cam.seq_lens_cpu_upper_bound, [5, 17, 32]);
    assert_eq!(step.step.cam.is_prefilling, [0, 0, 1]);
    assert_eq!(step.step.cam.causal, Causal::All(true));
    assert_eq!(step.num_blocks, 8);
    assert_eq!(step.config.attention.num_heads, 8);
    assert_eq!(step.config.attention.scale, 0.125);
    assert_eq!(step.config.device.num_workers, 4);
    assert_eq!(step.config.scheduler.max_num_blocks_per_req, 2);
}

#[test]
fn every_required_field_is_missed_by_name() {
    for field in [
        "query_start_loc",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
        "block_table",
        "slot_mapping",
        "kv_cache_spec",
    ] {
        for null in [false, true] {
            let message = error(|step| match null {
                true => step[field] = Value::Null,
                false => drop(step.as_object_mut().map(|step| step.remove(field))),
            });
            assert!(
                message.starts_with(&format!("{field} is missing: give ")),
                "{message}"
            );
        }
    }
    let message = error(|step| step["kv_cache_spec"] = json!({"block_size": 16}));
    assert_eq!(
        message,
        "kv_cache_spec.head_size is missing: give elements of a head"
    );
}

#[test]
fn negative_and_overflowing_values_are_refused_with_their_place() {
    let overflow = json!(2_147_483_648_u64);
    for (field, index) in [("query_start_loc", 3), ("seq_lens", 1)] {
        for bad in [
            json!(-1),
            overflow.clone(),
            json!(1e30),
            json!("5"),
            json!(1.5),
        ] {
            let message = error(|step| step[field][index] = bad.clone());
            assert_eq!(
                message,
                format!("{field}[{index}] is {bad}: give an integer in 0..=2147483647")
            );
        }
    }
    for field in [
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
    ] {
        let message = error(|step| step[field] = json!(-3));
        assert_eq!(
            message,
            format!("{field} is -3: give an integer in 0..=2147483647")
        );
        let message = error(|step| step[field] = json!(4_294_967_299_u64));
        assert!(
            message.starts_with(&format!("{field} is 4294967299: ")),
            "{message}"
        );
    }
    let message = error(|step| step["block_table"][2][1] = json!(-6));
    assert!(
        message.starts_with("block_table[2][1] is -6: "),
        "{message}"
    );
    let message = error(|step| step["slot_mapping"][4] = json!(-2));
    assert!(message.starts_with("slot_mapping[4] is -2: "), "{message}");
    let text = good()
        .to_string()
        .replace("\"num_reqs\":3", "\"num_reqs\":99999999999999999999");
    let message = StepDescription::from_json(&text)
        .and_then(|step| step.validate())
        .expect_err("overflows")
        .to_string();
    assert!(message.starts_with("num_reqs is "), "{message}");
}

#[test]
fn fields_that_contradict_are_refused() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 16] = [
        (
            |step| step["num_reqs"] = json!(4),
            "num_reqs is 4, but seq_lens has 3 entries",
        ),
        (
            |step| step["query_start_loc"] = json!([0, 1, 22]),
            "query_start_loc has 3 elements, must have 4",
        ),
        (
            |step| step["query_start_loc"] = json!([1, 1, 2, 22]),
            "query_start_loc[0] is 1, must be 0",
        ),
        (
            |step| step["query_start_loc"] = json!([0, 3, 2, 22]),
            "query_start_loc[2] is 2, must be at least 3",
        ),
        (
            |step| step["num_actual_tokens"] = json!(21),
            "query_start_loc[3] is 22, must be at most 21",
        ),
        (
            |step| step["max_query_len"] = json!(19),
            "max_query_len is 19, must be at least 20",
        ),
        (
            |step| step["max_seq_len"] = json!(31),
            "seq_lens[2] is 32, must be at most 31",
        ),
        (
            |step| step["seq_lens"][2] = json!(19),
            "seq_lens[2] is 19, must be at least 20",
        ),
        (
            |step| step["seq_lens_cpu_upper_bound"] = json!([5, 16, 32]),
            "seq_lens_cpu_upper_bound[1] is 16, must be at least 17",
        ),
        (
            |step| step["block_table"] = json!([[7], [2], [5]]),
            "block_table_width[1] is 1, must be at least 2",
        ),
        (
            |step| step["block_table"] = json!([[7, 0], [2], [5, 6]]),
            "block_table[1] is 1 columns, but the first row has 2",
        ),
        (
            |step| step["block_table"] = json!([[7, 0], [2, 3]]),
            "block_table is 2 rows, but seq_lens has 3 entries",
        ),
        (
            |step| step["num_blocks"] = json!(7),
            "block_table[0] is 7, must be below 7",
        ),
        (
            |step| step["slot_mapping"] = json!([1, 2]),
            "slot_mapping has 2 elements, must have 22",
        ),
        (
            |step| step["slot_mapping"][3] = json!(128),
            "slot_mapping[3] is 128, must be below 128",
        ),
        (
            |step| step["is_prefilling"] = json!([0, 0, 0, 1]),
            "is_prefilling has 4 elements, must have 3",
        ),
    ];
    for (change, start) in cases {
        let message = error(change);
        assert!(message.starts_with(start), "{message}\nexpected {start}");
    }
}

#[test]
fn unknown_keys_are_refused_at_every_depth() {
    let message = error(|step| step["seq_len"] = json!([1]));
    assert!(
        message.starts_with("seq_len is not a field of a step: "),
        "{message}"
    );
    let message = error(|step| step["kv_cache_spec"]["page_size"] = json!(16));
    assert!(
        message.starts_with("kv_cache_spec.page_size is not a field"),
        "{message}"
    );
    let message = error(|step| step["config"]["attention"]["heads"] = json!(16));
    assert!(
        message.starts_with("config.attention.heads is not a field"),
        "{message}"
    );
}

#[test]
fn a_bad_configuration_names_its_path() {
    let message = error(|step| step["config"]["scheduler"] = json!({"max_num_seqs": -3}));
    assert!(
        message.starts_with("config.scheduler.max_num_seqs is -3: "),
        "{message}"
    );
    let message = error(|step| step["config"]["attention"]["num_heads"] = json!(7));
    assert!(
        message.starts_with("config.attention.num_heads is 7, but "),
        "{message}"
    );
    let message = error(|step| step["kv_cache_spec"]["block_size"] = json!(0));
    assert!(
        message.starts_with("kv_cache_spec.block_size is 0: "),
        "{message}"
    );
    let message = error(|step| step["kv_cache_spec"]["dtype"] = json!("float17"));
    assert!(
        message.starts_with("kv_cache_spec.dtype is \"float17\": "),
        "{message}"
    );
    let message = error(|step| step["config"] = json!([1]));
    assert!(message.starts_with("config is [1]: "), "{message}");
}

#[test]
fn what_is_no_json_object_is_refused() {
    for text in ["", "{", "[1]", "3", "{\"seq_lens\": [1,}"] {
        let found = StepDescription::from_json(text);
        let message = found.expect_err(text).to_string();
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn metadata_is_printed_with_its_tensors_resolved() {
    let described = StepDescription::from_value(good())
        .and_then(|step| step.validate())
        .expect("good");
    let extras = described.borrowed_extras();
    let inputs = described.inputs(&extras);
    let resolver = Resolver::new(&described.config, &described.step.cam, inputs);
    let mut printed = Vec::new();
    for family in [Family::FlashAttn, Family::Flashinfer] {
        let mut builder = plain_builder(family, &described.config).expect("plain");
        let metadata = builder.build(&described.step.cam, false).expect("built");
        verify(&metadata, &described.context(&inputs)).expect("verified");
        printed.push(metadata_to_json(&metadata, &resolver).expect("resolved"));
    }
    let [flash_attn, flashinfer] = &printed[..] else {
        panic!("two families");
    };
    assert_eq!(flash_attn["family"], "flash-attn");
    assert_eq!(flash_attn["seq_lens"], json!([5, 17, 32]));
    assert_eq!(flash_attn["block_table"], json!([[7, 0], [2, 3], [5, 6]]));
    assert_eq!(flash_attn["slot_mapping"][0], json!(116));
    assert_eq!(flash_attn["schedule"]["max_num_splits"], json!(1));
    let decode = &flashinfer["decode"]["wrapper"];
    assert_eq!(decode["paged_kv_indptr"], json!([0, 1, 3]));
    assert_eq!(decode["paged_kv_indices"], json!([7, 2, 3]));
    assert_eq!(decode["paged_kv_last_page_len"], json!([5, 1]));
    let prefill = &flashinfer["prefill"]["wrapper"];
    assert_eq!(prefill["qo_indptr"], json!([0, 20]));
    assert_eq!(prefill["paged_kv_indices"], json!([5, 6]));
    assert_eq!(prefill["paged_kv_last_page_len"], json!([16]));
}

#[test]
fn the_fields_optional_parts_are_read() {
    let mut value = good();
    value["causal"] = json!([true, true, false]);
    value["mm_req_doc_ranges"] = json!({"2": [[14, 20]]});
    value["extras"] =
        json!({"count": 5, "host": {"host": [1, -2]}, "device": {"device": [3, 4, 5]}});
    value["positions"] = json!((0..22).collect::<Vec<i64>>());
    value["block_table_tensor"] = value["block_table"].take();
    let step = StepDescription::from_value(value)
        .and_then(|step| step.validate())
        .expect("good");
    assert_eq!(step.step.cam.causal, Causal::PerRequest);
    assert_eq!(step.step.tensors.causal, Some(vec![1, 1, 0]));
    let range = MmDocRange {
        row: 2,
        start: 14,
        end: 20,
    };
    assert_eq!(step.step.cam.mm_req_doc_ranges, [range]);
    assert_eq!(step.device_extras, [("device".to_owned(), vec![3, 4, 5])]);
    assert_eq!(step.step.cam.extras.len(), 3);
}
