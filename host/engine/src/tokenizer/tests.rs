use super::*;
use crate::model::testing::{GgufBuilder, repository_file};

/// GPT-2's visible spelling of a byte.
fn spelled(byte: u8) -> String {
    let visible = matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = if visible {
        u32::from(byte)
    } else {
        256 + (0..byte)
            .filter(|b| !matches!(b, 33..=126 | 161..=172 | 174..=255))
            .count() as u32
    };
    char::from_u32(code)
        .expect("a code point below 512")
        .to_string()
}

/// A byte-level vocabulary: two control tokens, the 256 bytes, and "he", "ll", "hell".
fn byte_level(pre: &str) -> GgufBuilder {
    let mut tokens = vec!["<|start|>".to_owned(), "<|end|>".to_owned()];
    tokens.extend((0..=255).map(spelled));
    tokens.extend(["he", "ll", "hell"].map(str::to_owned));
    let mut types = vec![1; tokens.len()];
    types[..2].fill(3);
    GgufBuilder::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &tokens)
        .ints("tokenizer.ggml.token_type", &types)
        .texts(
            "tokenizer.ggml.merges",
            &["h e", "l l", "he ll"].map(str::to_owned),
        )
        .uint("tokenizer.ggml.bos_token_id", 0)
        .uint("tokenizer.ggml.eos_token_id", 1)
}

#[test]
fn byte_level_bpe_merges_and_round_trips() {
    let file = byte_level("smollm").write();
    let tokenizer = Tokenizer::load(file.path()).expect("a complete vocabulary");
    assert_eq!(tokenizer.bos_token(), Some("<|start|>"));
    let ids = tokenizer.encode("<|start|>hello", false).expect("encodes");
    assert_eq!(ids, [0, 260, 2 + u32::from(b'o')]);
    assert_eq!(tokenizer.decode(&ids, true), "hello");
    assert_eq!(tokenizer.decode(&ids, false), "<|start|>hello");
    for text in [
        "",
        "12 + 34 = 46",
        "naïve — 東京 🎉",
        "  two  spaces\n\n\ttab",
    ] {
        let ids = tokenizer.encode(text, false).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn flags_put_special_tokens_around_a_text() {
    let file = byte_level("gpt-2")
        .bool("tokenizer.ggml.add_bos_token", true)
        .bool("tokenizer.ggml.add_eos_token", true)
        .write();
    let tokenizer = Tokenizer::load(file.path()).expect("a complete vocabulary");
    assert_eq!(tokenizer.encode("he", true).expect("encodes"), [0, 258, 1]);
    assert_eq!(tokenizer.encode("he", false).expect("encodes"), [258]);
}

#[test]
fn a_stream_never_emits_half_a_character() {
    let file = byte_level("smollm").write();
    let tokenizer = Tokenizer::load(file.path()).expect("a complete vocabulary");
    let text = "a 東京 🎉 naïve — hello, hello, hello 🎉🎉 again and again";
    let mut stream = TextStream::new(true);
    let mut whole = String::new();
    for id in tokenizer.encode(text, false).expect("encodes") {
        let piece = stream.push(&tokenizer, id);
        assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
        whole += &piece;
    }
    whole += &stream.finish(&tokenizer);
    assert_eq!(whole, text);

    // An unfinished character appears at the end, as one replacement; a broken one is not held back for ever.
    let byte = |b: u8| 2 + u32::from(b);
    let mut stream = TextStream::new(true);
    assert_eq!(stream.push(&tokenizer, byte(0xe6)), "");
    assert_eq!(stream.finish(&tokenizer), "\u{fffd}");
    let mut pieces = String::new();
    for _ in 0..50 {
        pieces += &stream.push(&tokenizer, byte(0xff));
    }
    assert!(pieces.chars().count() >= 40);
}

#[test]
fn sentence_piece_prefers_the_best_score_and_falls_back_to_bytes() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["\u{2581}", "a", "b", "c", "ab", "bc", "\u{2581}a"].map(str::to_owned));
    let mut scores = vec![0.0f32; tokens.len()];
    let first = 259;
    // bc before ab before ▁a.
    scores[first + 4] = -2.0;
    scores[first + 5] = -1.0;
    scores[first + 6] = -3.0;
    let mut types = vec![6; tokens.len()];
    types[0] = 2;
    types[1..3].fill(3);
    types[first..].fill(1);
    let file = GgufBuilder::new()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .floats("tokenizer.ggml.scores", &scores)
        .ints("tokenizer.ggml.token_type", &types)
        .uint("tokenizer.ggml.bos_token_id", 1)
        .uint("tokenizer.ggml.eos_token_id", 2)
        .uint("tokenizer.ggml.unknown_token_id", 0)
        .write();
    let tokenizer = Tokenizer::load(file.path()).expect("a complete vocabulary");
    let first = first as u32;
    assert_eq!(
        tokenizer.encode("abc", true).expect("encodes"),
        [1, first + 6, first + 5]
    );
    for text in ["abc", "é", "a b  c"] {
        let ids = tokenizer.encode(text, false).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, true), text);
    }
}

#[test]
fn what_is_wrong_is_named() {
    let message = |builder: GgufBuilder| {
        let file = builder.write();
        Tokenizer::load(file.path())
            .err()
            .expect("refused")
            .to_string()
    };
    assert!(message(byte_level("deepseek-r1-qwen")).contains("'deepseek-r1-qwen'"));
    let text = message(byte_level("smollm").text("tokenizer.ggml.model", "bert"));
    assert!(text.contains("tokenizer 'bert'"), "{text}");
    let text = message(GgufBuilder::new().text("tokenizer.ggml.model", "gpt2"));
    assert!(
        text.contains("'tokenizer.ggml.tokens' is missing"),
        "{text}"
    );
    let text = message(byte_level("smollm").texts("tokenizer.ggml.merges", &["he".to_owned()]));
    assert!(text.contains("'he'"), "{text}");
    let text = message(byte_level("smollm").uint("tokenizer.ggml.bos_token_id", 9999));
    assert!(text.contains("9999"), "{text}");
    let text = message(byte_level("smollm").ints("tokenizer.ggml.token_type", &[1, 2]));
    assert!(text.contains("2 entries"), "{text}");
}

#[test]
fn a_directory_uses_its_tokenizer_json() {
    let tokenizer = Tokenizer::load(repository_file("tests/models/tiny-llama")).expect("loads");
    let ids = tokenizer.encode("t47 t500 t4", true).expect("encodes");
    assert_eq!(ids, [47, 500, 4]);
    assert_eq!(tokenizer.decode(&ids, true), "t47 t500 t4");
    assert_eq!(tokenizer.eos_token(), Some("t2"));
    let mut stream = TextStream::new(true);
    let mut whole = String::new();
    for id in (4..40).chain([2]) {
        whole += &stream.push(&tokenizer, id);
    }
    whole += &stream.finish(&tokenizer);
    let all: Vec<u32> = (4..40).collect();
    assert_eq!(whole, tokenizer.decode(&all, true));
}
