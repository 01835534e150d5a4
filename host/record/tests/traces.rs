//! Public request traces: small files of the published formats, written here.

use std::{path::PathBuf, time::Duration};

use timetable_record::trace::{HASH_BLOCK_TOKENS, Trace, TraceFormat, answer, prompt};

fn file(scratch: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = scratch.path().join("trace");
    std::fs::write(&path, text).unwrap();
    path
}

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
    2024-01-01 00:00:01.5,374,44\n\
    2024-01-01 00:00:01.0000000,396,109\n\
    2024-01-01 00:00:02,879,1\n";

const MOONCAKE: &str = "\
    {\"timestamp\": 100, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [0, 1]}\n\
    \n\
    {\"timestamp\": 2500, \"input_length\": 1100, \"output_length\": 7, \"hash_ids\": [0, 2, 3], \"more\": true}\n";

#[test]
fn both_formats_are_told_by_their_first_line() {
    let scratch = tempfile::tempdir().unwrap();
    let azure = Trace::read(&file(&scratch, AZURE), None, None).unwrap();
    assert_eq!(azure.format, TraceFormat::Azure);
    let seen: Vec<_> = azure
        .requests
        .iter()
        .map(|request| (request.arrival, request.input_length, request.output_length))
        .collect();
    let at = Duration::from_millis;
    // By arrival, whatever the order in the file.
    assert_eq!(
        seen,
        [(at(0), 396, 109), (at(500), 374, 44), (at(1000), 879, 1)]
    );
    let moved = "a,GeneratedTokens, ContextTokens ,TIMESTAMP\r\nx,3,4,2024-01-01 00:00:00Z\r\n";
    let path = file(&scratch, moved);
    let azure = Trace::read(&path, Some(TraceFormat::Azure), None).unwrap();
    assert_eq!(azure.requests[0].input_length, 4);

    let mooncake = Trace::read(&file(&scratch, MOONCAKE), None, None).unwrap();
    assert_eq!(mooncake.format, TraceFormat::Mooncake);
    assert_eq!(mooncake.requests.len(), 2);
    assert_eq!(mooncake.requests[1].arrival, at(2400));
    assert_eq!(mooncake.requests[1].hash_ids, [0, 2, 3]);
    let first = Trace::read(&file(&scratch, MOONCAKE), None, Some(1)).unwrap();
    assert_eq!(first.requests.len(), 1);
}

#[test]
fn equal_blocks_are_equal_tokens_and_nothing_else_is() {
    let scratch = tempfile::tempdir().unwrap();
    let trace = Trace::read(&file(&scratch, MOONCAKE), None, None).unwrap();
    let vocab_size = 128_256;
    let prompts: Vec<Vec<u32>> = trace
        .requests
        .iter()
        .enumerate()
        .map(|(index, request)| prompt(index, request, vocab_size))
        .collect();
    assert_eq!((prompts[0].len(), prompts[1].len()), (600, 1100));
    assert_eq!(
        prompts[0][..HASH_BLOCK_TOKENS],
        prompts[1][..HASH_BLOCK_TOKENS]
    );
    assert_ne!(
        prompts[0][HASH_BLOCK_TOKENS..528],
        prompts[1][HASH_BLOCK_TOKENS..528]
    );
    assert!(prompts.iter().flatten().all(|token| *token < vocab_size));
    assert_eq!(prompt(0, &trace.requests[0], vocab_size), prompts[0]);
    let answers = [0, 1].map(|index| answer(index, &trace.requests[index], vocab_size));
    assert_eq!((answers[0].len(), answers[1].len()), (5, 7));
    assert_ne!(answers[0], answers[1][..5]);

    // Requests of a trace without names share nothing.
    let trace = Trace::read(&file(&scratch, AZURE), None, None).unwrap();
    let [a, b] = [0, 1].map(|index| prompt(index, &trace.requests[index], vocab_size));
    assert_ne!(a[..16], b[..16]);
}

#[test]
fn a_bad_line_is_told_with_its_number_and_the_remedy() {
    let scratch = tempfile::tempdir().unwrap();
    let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,1,1\n";
    let json = |line: &str| {
        format!(
            "{{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[9]}}\n{line}\n"
        )
    };
    let cases = [
        (
            format!("{head}2024-01-01 00:00:00,many,1\n"),
            "line 3: ContextTokens is `many`",
        ),
        (
            format!("{head}2024-01-01 00:00:00,1,0\n"),
            "line 3: GeneratedTokens is 0",
        ),
        (
            format!("{head}yesterday,1,1\n"),
            "line 3: TIMESTAMP is `yesterday`",
        ),
        (
            format!("{head}2024-01-01 00:00:00,1\n"),
            "line 3: it has 2 fields and no GeneratedTokens",
        ),
        (
            "TIMESTAMP,Tokens\n".to_owned(),
            "line 1: the column ContextTokens is missing",
        ),
        (json("{"), "line 2: EOF while parsing an object at column "),
        (json("[]"), "expected an object at column "),
        (json("7"), "expected an object at column "),
        (
            format!("{head}2024-01-01 00:00:00,\u{1b}[31m\u{7},1\n"),
            "line 3: ContextTokens is `\\u{1b}[31m\\u{7}`",
        ),
        (
            json("{\"timestamp\":-1e300,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}"),
            "line 2: timestamp is -1e300",
        ),
        (
            json("{\"timestamp\":0,\"input_length\":1e300,\"output_length\":1,\"hash_ids\":[1]}"),
            "line 2: invalid type: floating point",
        ),
        (
            json(&format!(
                "{{\"timestamp\":\"\\u001b{}\"}}",
                "9".repeat(5000)
            )),
            "… at column",
        ),
        (
            json("{\"timestamp\":-5,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}"),
            "line 2: timestamp is -5",
        ),
        (
            json("{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}"),
            "line 2: it has 1 hash_ids, and 513 tokens are 2 blocks of 512",
        ),
        (
            json("{\"timestamp\":0,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}"),
            "line 2: input_length is 0",
        ),
        (
            json(&"x".repeat(1 << 21)),
            "line 2: it has more than 1048576 bytes",
        ),
        ("hello\n".to_owned(), "begins with \"hello"),
        (String::new(), "has no requests; give an Azure CSV file"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned(),
            "has no requests",
        ),
    ];
    for (text, says) in cases {
        let error = Trace::read(&file(&scratch, &text), None, None).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(says), "`{says}` is missing in: {error}");
        assert!(!error.contains(char::is_control), "{error:?}");
        assert!(error.len() < 400, "{error}");
        assert!(!error.contains("struct Line"), "{error}");
    }
    let missing = Trace::read(&scratch.path().join("missing"), None, None).unwrap_err();
    assert!(
        missing.to_string().contains("give an Azure CSV"),
        "{missing}"
    );
    let directory = Trace::read(scratch.path(), None, None).unwrap_err();
    assert!(
        directory.to_string().contains("not a regular file"),
        "{directory}"
    );
}
