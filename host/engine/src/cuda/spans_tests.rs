use super::*;
use crate::{
    cuda::tensors::values_of,
    model::{
        layout::Opened,
        testing::{GgufBuilder, GgufOnDisk, random_values, tiny_model},
        weights::RawTensor,
    },
};

/// Bytes on the host, poisoned; writes of at most `room` bytes.
struct Memory {
    bytes: Vec<u8>,
    room: usize,
    writes: usize,
}

impl Sink for Memory {
    type Error = ModelError;

    fn room(&self) -> usize {
        self.room
    }

    fn write(
        &mut self,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), ModelError> {
        self.writes += 1;
        fill(&mut self.bytes[offset as usize..][..len]);
        Ok(())
    }
}

fn open(file: &GgufOnDisk) -> Opened {
    Opened::open(file.path()).expect("a valid model")
}

fn loaded(opened: &Opened, element: Element, room: usize) -> (WeightSpans, Memory) {
    let spans = WeightSpans::new(&opened.config, &opened.layout, element);
    let mut memory = Memory {
        bytes: vec![0xff; spans.bytes as usize],
        room,
        writes: 0,
    };
    spans
        .load(&opened.layout, &*opened.checkpoint, &mut memory)
        .expect("every tensor is there");
    (spans, memory)
}

fn at(memory: &Memory, span: Span, element: Element) -> Vec<f32> {
    let bytes = &memory.bytes[span.offset as usize..][..span.bytes as usize];
    values_of(bytes, element)
}

/// The named tensors of the file, one after the other, as f32.
fn named(opened: &Opened, names: &[&str]) -> Vec<f32> {
    let of = |name: &&str| opened.checkpoint.tensor(name).expect("present").to_f32();
    names.iter().flat_map(of).collect()
}

fn qwen3_with_biases() -> GgufOnDisk {
    let mut model = tiny_model("qwen3").random("output.weight", &[40, 32]);
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}");
        model = model
            .random(&name("attn_q_norm.weight"), &[8])
            .random(&name("attn_k_norm.weight"), &[8])
            .random(&name("attn_q.bias"), &[32])
            .random(&name("attn_k.bias"), &[16])
            .random(&name("attn_v.bias"), &[16]);
    }
    model.write()
}

#[test]
fn weights_are_stacked_as_the_host_stacks_them() {
    let file = qwen3_with_biases();
    let opened = open(&file);
    // Room for three rows of the widest matrix: pieces end within tensors.
    let (spans, memory) = loaded(&opened, Element::F32, 3 * 64 * 4);
    assert!(memory.writes > 100, "in pieces: {}", memory.writes);
    for (layer, weights) in spans.layers.iter().enumerate() {
        let check = |span: Span, names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| format!("blk.{layer}.{n}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            assert_eq!(at(&memory, span, Element::F32), named(&opened, &names));
        };
        let qkv = ["attn_q.weight", "attn_k.weight", "attn_v.weight"];
        check(weights.qkv.weight, &qkv);
        let bias = weights.qkv.bias.expect("the file has biases");
        check(bias, &["attn_q.bias", "attn_k.bias", "attn_v.bias"]);
        assert_eq!((weights.qkv.n, weights.qkv.k), (64, 32));
        check(weights.output.weight, &["attn_output.weight"]);
        assert!(weights.output.bias.is_none(), "the file has none");
        check(
            weights.gate_up.weight,
            &["ffn_gate.weight", "ffn_up.weight"],
        );
        assert_eq!((weights.gate_up.n, weights.gate_up.k), (128, 32));
        check(weights.down.weight, &["ffn_down.weight"]);
        assert_eq!((weights.down.n, weights.down.k), (32, 64));
        check(weights.attention_norm, &["attn_norm.weight"]);
        check(weights.feed_forward_norm, &["ffn_norm.weight"]);
        let (q, k) = weights.head_norms.expect("Qwen3");
        check(q, &["attn_q_norm.weight"]);
        check(k, &["attn_k_norm.weight"]);
    }
    let whole = |span| at(&memory, span, Element::F32);
    assert_eq!(
        whole(spans.embedding),
        named(&opened, &["token_embd.weight"])
    );
    assert_eq!(
        whole(spans.final_norm),
        named(&opened, &["output_norm.weight"])
    );
    assert_eq!(whole(spans.head.weight), named(&opened, &["output.weight"]));
}

#[test]
fn spans_are_aligned_apart_and_within_the_allocation() {
    let file = qwen3_with_biases();
    for element in [Element::Bf16, Element::F32] {
        let opened = open(&file);
        let spans = WeightSpans::new(&opened.config, &opened.layout, element);
        let mut all = vec![spans.embedding, spans.final_norm, spans.head.weight];
        for layer in &spans.layers {
            all.extend([layer.attention_norm, layer.feed_forward_norm]);
            for projection in [&layer.qkv, &layer.output, &layer.gate_up, &layer.down] {
                all.push(projection.weight);
                all.extend(projection.bias);
            }
            all.extend(layer.head_norms.iter().flat_map(|(q, k)| [*q, *k]));
        }
        all.sort_by_key(|span| span.offset);
        for pair in all.windows(2) {
            assert!(pair[0].offset + pair[0].bytes <= pair[1].offset, "{pair:?}");
        }
        assert!(all.iter().all(|span| span.offset.is_multiple_of(256)));
        let last = all.last().expect("many");
        assert!(last.offset + last.bytes <= spans.bytes);
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let file = tiny_model("llama").write();
    let opened = open(&file);
    let (spans, _) = loaded(&opened, Element::Bf16, 1 << 20);
    assert_eq!(spans.head.weight, spans.embedding);
    assert_eq!((spans.head.n, spans.head.k), (40, 32));
}

#[test]
fn a_bias_that_only_some_parts_have_is_zero_elsewhere() {
    let file = GgufBuilder::new()
        .random("a.weight", &[4, 32])
        .random("b.weight", &[6, 32])
        .random("b.bias", &[6])
        .write();
    let gguf = crate::model::gguf::GgufFile::open(file.path()).expect("valid");
    let part = |name: &str, n: usize, bias: bool| Part {
        weight: format!("{name}.weight"),
        bias: bias.then(|| format!("{name}.bias")),
        n,
    };
    let parts = [part("a", 4, false), part("b", 6, true)];
    let mut cursor = Cursor {
        element: Element::F32,
        next: 0,
    };
    let spans = cursor.projection(32, &parts);
    let mut memory = Memory {
        bytes: vec![0xff; cursor.next as usize],
        room: 1 << 20,
        writes: 0,
    };
    let mut loader = Loader {
        element: Element::F32,
        checkpoint: &gguf,
        sink: &mut memory,
    };
    loader.projection(&spans, &parts).expect("loads");
    let bias = at(&memory, spans.bias.expect("one part has one"), Element::F32);
    let expected = gguf.tensor("b.bias").expect("present").to_f32();
    assert_eq!(bias[..4], [0.0; 4]);
    assert_eq!(bias[4..], expected);
}

#[test]
fn every_format_is_rounded_once() {
    let values = random_values(64, 5);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let f32_tensor = RawTensor {
        dtype: candle_core::quantized::GgmlDType::F32,
        shape: &[2, 32],
        bytes: &bytes,
    };
    for element in [Element::Bf16, Element::F16, Element::F32] {
        let mut out = vec![0xff; 64 * element.bytes()];
        convert_rows(f32_tensor, element, (0, 2), &mut out);
        let rounded: Vec<f32> = match element {
            Element::Bf16 => values
                .iter()
                .map(|v| half::bf16::from_f32(*v).to_f32())
                .collect(),
            Element::F16 => values
                .iter()
                .map(|v| half::f16::from_f32(*v).to_f32())
                .collect(),
            Element::F32 => values.clone(),
        };
        assert_eq!(values_of(&out, element), rounded);
        // Its own format is copied bit for bit, also from the middle.
        let own = RawTensor {
            dtype: crate::cuda::tensors::stored(element),
            shape: &[2, 32],
            bytes: &out,
        };
        let mut copy = vec![0; 32 * element.bytes()];
        convert_rows(own, element, (1, 1), &mut copy);
        assert_eq!(copy, out[32 * element.bytes()..]);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let file = tiny_model("llama")
        .without_tensor("blk.1.ffn_up.weight")
        .write();
    let opened = open(&file);
    let spans = WeightSpans::new(&opened.config, &opened.layout, Element::Bf16);
    let mut memory = Memory {
        bytes: vec![0; spans.bytes as usize],
        room: 1 << 20,
        writes: 0,
    };
    let error = spans
        .load(&opened.layout, &*opened.checkpoint, &mut memory)
        .expect_err("a tensor is missing");
    assert!(error.to_string().contains("blk.1.ffn_up.weight"), "{error}");
}
