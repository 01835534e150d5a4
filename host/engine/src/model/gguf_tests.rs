use super::super::testing::{GgufBuilder, GgufOnDisk, tiny_model};
use super::super::{LoadOptions, Model};
use super::*;

fn refusal(bytes: &[u8]) -> String {
    let file = GgufOnDisk::new(bytes);
    let error = Model::load(file.path(), LoadOptions::default())
        .err()
        .expect("refused");
    let text = error.to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

#[test]
fn a_whole_model_loads() {
    let file = tiny_model("llama").write();
    let model = Model::load(file.path(), LoadOptions::default()).expect("complete");
    assert_eq!(model.config().vocab_size, 40);
    assert!(model.config().tie_word_embeddings);
}

/// Every prefix of the header, and many of the data: an error each, no panic, no large allocation.
#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = tiny_model("llama").bytes();
    let data = bytes.len() - 40_000;
    let offsets = (0..data.min(6000)).chain((data..bytes.len()).step_by(997));
    for len in offsets {
        let text = refusal(&bytes[..len]);
        assert!(
            text.contains("fetch it again") || text.contains("'GGUF'"),
            "at {len}: {text}"
        );
    }
}

/// Every header byte set to extreme values: loads or is refused, and never panics.
#[test]
fn any_damaged_header_byte_is_survived() {
    let bytes = tiny_model("llama").bytes();
    let header = 2600.min(bytes.len());
    for at in 0..header {
        for value in [0x00, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            let file = GgufOnDisk::new(&damaged);
            let options = LoadOptions {
                threads: Some(1),
                ..LoadOptions::default()
            };
            if let Err(error) = Model::load(file.path(), options) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

#[test]
fn impossible_claims_are_named() {
    let base = tiny_model("llama");
    let mut bytes = base.bytes();
    bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&bytes).contains(&format!("{} tensors", u64::MAX)));
    let mut bytes = base.bytes();
    bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
    assert!(refusal(&bytes).contains("GGUF version 1"));
    let big_array = [
        5u32.to_le_bytes().to_vec(),
        (1u64 << 61).to_le_bytes().to_vec(),
    ]
    .concat();
    let text = refusal(&base.clone().raw("x", 9, big_array).bytes());
    assert!(
        text.contains("'x'") && text.contains("an array of 2305843009213693952 elements"),
        "{text}"
    );
    let text = refusal(&base.clone().raw("x", 77, vec![0]).bytes());
    assert!(text.contains("type 77"), "{text}");
    let nested: Vec<u8> = (0..9)
        .flat_map(|_| [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat())
        .chain(vec![0; 64])
        .collect();
    assert!(refusal(&base.clone().raw("x", 9, nested).bytes()).contains("nested"));
    let text = refusal(
        &base
            .clone()
            .raw("general.alignment", 4, 12u32.to_le_bytes().to_vec())
            .bytes(),
    );
    assert!(text.contains("general.alignment"), "{text}");
    let text = refusal(
        &base
            .clone()
            .tensor("token_embd.weight", &[40, 1 << 40], 0, vec![0; 64])
            .bytes(),
    );
    assert!(text.contains("token_embd.weight"), "{text}");
    let text = refusal(
        &base
            .clone()
            .tensor("token_embd.weight", &[40, 33], 2, vec![0; 64])
            .bytes(),
    );
    assert!(
        text.contains("33 values") && text.contains("Q4_0"),
        "{text}"
    );
    let text = refusal(
        &base
            .tensor("token_embd.weight", &[40, 32], 16, vec![0; 64])
            .bytes(),
    );
    assert!(text.contains("ggml type 16"), "{text}");
}

#[test]
fn missing_and_misshapen_parts_are_named() {
    let base = tiny_model("llama");
    let text = refusal(&base.clone().text("general.architecture", "mamba").bytes());
    assert!(
        text.contains("unknown architecture 'mamba'") && text.contains("qwen3"),
        "{text}"
    );
    let text = refusal(&base.clone().uint("split.count", 3).bytes());
    assert!(
        text.contains("one of 3 parts") && text.contains("merge"),
        "{text}"
    );
    let text = refusal(&base.clone().without_tensor("blk.1.ffn_up.weight").bytes());
    assert!(text.contains("'blk.1.ffn_up.weight' is missing"), "{text}");
    let text = refusal(&base.clone().without_tensor("token_embd.weight").bytes());
    assert!(text.contains("'token_embd.weight' is missing"), "{text}");
    let text = refusal(
        &base
            .clone()
            .random("blk.0.attn_k.weight", &[32, 32])
            .bytes(),
    );
    assert!(
        text.contains("[32, 32]") && text.contains("[16, 32]"),
        "{text}"
    );
    let text = refusal(&base.clone().uint("llama.block_count", 3).bytes());
    assert!(text.contains("blk.2."), "{text}");
    let text = refusal(
        &base
            .clone()
            .uint("llama.attention.head_count_kv", 3)
            .bytes(),
    );
    assert!(
        text.contains("4 query heads are not a multiple of 3"),
        "{text}"
    );
    let text = refusal(&base.clone().uint("llama.expert_count", 8).bytes());
    assert!(text.contains("8 experts"), "{text}");
    let text = refusal(&base.text("llama.rope.scaling.type", "yarn").bytes());
    assert!(text.contains("'yarn'"), "{text}");
    assert!(refusal(&tiny_model("qwen3").bytes()).contains("attn_q_norm"));
    assert!(refusal(&tiny_model("qwen2").bytes()).contains("attn_q.bias"));
    let path = Path::new("/no/such/model.gguf");
    let text = Model::load(path, LoadOptions::default())
        .err()
        .expect("refused")
        .to_string();
    assert!(
        text.contains("/no/such/model.gguf") && text.contains("give the path"),
        "{text}"
    );
}

#[test]
fn values_are_read_back() {
    let file = GgufBuilder::new()
        .text("t", "grüße")
        .uint("u", 7)
        .float("f", 0.5)
        .bool("b", true)
        .texts("ts", &["a".to_owned(), String::new(), "ccc".to_owned()])
        .ints("is", &[-3, 4])
        .raw("i64", 11, (-5i64).to_le_bytes().to_vec())
        .write();
    let gguf = GgufFile::open(file.path()).expect("valid");
    assert_eq!(gguf.text("t").as_deref(), Some("grüße"));
    assert_eq!(
        (gguf.uint("u"), gguf.float("f"), gguf.bool("b")),
        (Some(7), Some(0.5), Some(true))
    );
    assert_eq!(
        gguf.texts("ts"),
        Some(vec!["a".to_owned(), String::new(), "ccc".to_owned()])
    );
    assert_eq!(gguf.numbers("is"), Some(vec![-3.0, 4.0]));
    assert_eq!(
        (gguf.uint("i64"), gguf.uint("t"), gguf.text("none")),
        (None, None, None)
    );
}

#[test]
fn a_family_without_gguf_is_sent_to_its_directory() {
    for name in ["deepseek2", "qwen3next", "gemma3", "llama4"] {
        let text = refusal(
            &tiny_model("llama")
                .text("general.architecture", name)
                .bytes(),
        );
        let named = format!("'{name}' in a GGUF file is not supported");
        assert!(text.contains(&named), "{text}");
        assert!(text.contains("Hugging Face directory"), "{text}");
    }
}
