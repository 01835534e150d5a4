//! `timetable serve` as clients see it: what each endpoint answers, alone and under load, and what it refuses.

#[path = "serve/limits.rs"]
mod limits;
mod support;

use serde_json::{Value, json};

use support::serving::{Answer, Serving};
use support::{run, tiny_llama};

/// A greedy request for so many tokens.
fn greedy(prompt: &Value, max_tokens: usize) -> Value {
    json!({ "model": "tiny-llama", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true })
}

/// The same request with further members.
fn with(request: &Value, further: &Value) -> Value {
    let mut request = request.clone();
    for (name, value) in further.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    let text = |choice: &Value| {
        let text = choice["text"].as_str();
        text.or(choice["message"]["content"].as_str())
            .unwrap()
            .to_owned()
    };
    choices.iter().map(text).collect()
}

/// A stream's choices put together as one answer has them: texts, reasons, and the usage if there is one.
fn joined(answer: &Answer) -> (Vec<String>, Vec<String>, Value) {
    let (mut texts, mut reasons, mut usage) = (Vec::new(), Vec::new(), Value::Null);
    for event in answer.events() {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            if texts.len() <= index {
                texts.resize(index + 1, String::new());
                reasons.resize(index + 1, String::new());
            }
            let text = choice["text"].as_str();
            texts[index] += text.or(choice["delta"]["content"].as_str()).unwrap_or("");
            if let Some(reason) = choice["finish_reason"].as_str() {
                assert!(reasons[index].is_empty(), "two ends: {event}");
                reasons[index] = reason.to_owned();
            }
        }
        if event["usage"].is_object() {
            assert_eq!(event["choices"], json!([]));
            usage = event["usage"].clone();
        }
    }
    (texts, reasons, usage)
}

#[test]
fn a_server_says_what_it_serves_and_what_there_is_not() {
    let host = Serving::start(&[]);
    assert_eq!(host.get("/health").status, 200);
    assert_eq!(
        host.get("/version").ok()["version"],
        env!("CARGO_PKG_VERSION")
    );
    assert!(host.get("/openapi.json").ok()["paths"]["/v1/completions"].is_object());
    let models = host.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "tiny-llama");
    assert_eq!(models["data"][0]["max_model_len"], 1024);
    assert_eq!(host.get("/v1/models/tiny%2Dllama").ok(), models["data"][0]);
    host.get("/v1/models/gpt-4")
        .refused(404, "`gpt-4` does not exist here");
    let request = with(&greedy(&json!("t5"), 1), &json!({ "model": "gpt-4" }));
    let error = host
        .post("/v1/completions", &request)
        .refused(404, "`tiny-llama`");
    assert_eq!(error["code"], "model_not_found");
    host.get("/v1/nothing").refused(404, "`/v1/nothing`");
    let refused = host.get("/v1/completions");
    refused.refused(405, "use POST");
    assert_eq!(refused.header("allow"), Some("POST"));
    host.post("/health", &json!({})).refused(405, "use GET");
    let embeddings = json!({ "model": "tiny-llama", "input": "t5" });
    let error = host
        .post("/v1/embeddings", &embeddings)
        .refused(404, "no embeddings");
    assert_eq!(error["code"], "unsupported");

    let metrics = host.get("/metrics");
    assert_eq!(metrics.status, 200);
    for line in [
        "vllm:num_requests_running{model_name=\"tiny-llama\",engine=\"0\"} 0",
        "http_requests_total{handler=\"/health\",method=\"GET\",status=\"200\"} 1",
        "http_requests_total{handler=\"/v1/embeddings\",method=\"POST\",status=\"404\"} 1",
        "http_requests_total{handler=\"none\",method=\"GET\",status=\"404\"} 1",
    ] {
        assert!(
            metrics.body.lines().any(|found| found == line),
            "{line} is missing in {}",
            metrics.body
        );
    }
}

#[test]
fn an_answer_is_what_generate_says_in_every_shape_of_prompt() {
    let model = tiny_llama();
    let said = run(&[
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--weights",
        "f32",
        "--admin",
        "none",
        "--json",
        "--prompt",
        "t40 t41 t42",
        "--max-tokens",
        "24",
        "--ignore-eos",
    ]);
    let said = said.succeeds().json();
    let host = Serving::start(&[]);
    let answer = host
        .post("/v1/completions", &greedy(&json!("t40 t41 t42"), 24))
        .ok();
    assert_eq!(
        texts(&answer)[0],
        said["outputs"][0]["text"].as_str().unwrap()
    );
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        answer["usage"],
        json!({ "prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27 })
    );
    for prompt in [
        json!([40, 41, 42]),
        json!([[40, 41, 42]]),
        json!(["t40 t41 t42"]),
    ] {
        let other = host.post("/v1/completions", &greedy(&prompt, 24)).ok();
        assert_eq!(texts(&other), texts(&answer), "{prompt}");
    }
    let several = host
        .post(
            "/v1/completions",
            &greedy(&json!(["t50", "t40 t41 t42"]), 24),
        )
        .ok();
    assert_eq!(texts(&several)[1], texts(&answer)[0]);
    let echo = with(&greedy(&json!([40, 41, 42]), 24), &json!({ "echo": true }));
    let echo = host.post("/v1/completions", &echo).ok();
    assert_eq!(texts(&echo)[0], format!("t40 t41 t42{}", texts(&answer)[0]));
}

#[test]
fn a_stream_put_together_is_the_answer_in_one_piece() {
    let host = Serving::start(&[]);
    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let completions = [
        greedy(&json!("t40 t41"), 20),
        with(
            &greedy(&json!(["t40 t41", "t60"]), 20),
            &json!({ "n": 3, "echo": true, "temperature": 1, "seed": 5 }),
        ),
        with(
            &greedy(&json!("t70"), 200),
            &json!({ "stop": ["t2", " t33"], "temperature": 1, "seed": 1 }),
        ),
    ];
    let message = |role: &str, content: Value| json!({ "role": role, "content": content });
    let parts = json!([{ "type": "text", "text": "t41" }, { "type": "text", "text": "t42" }]);
    let messages = json!([message("system", json!("t40")), message("user", parts)]);
    let chat = json!({ "model": "tiny-llama", "messages": messages, "temperature": 0, "max_completion_tokens": 30 });
    let chats = [
        chat.clone(),
        with(&chat, &json!({ "n": 2, "temperature": 1, "seed": 9 })),
    ];
    let all = completions
        .iter()
        .map(|request| ("/v1/completions", request));
    for (path, request) in all.chain(
        chats
            .iter()
            .map(|request| ("/v1/chat/completions", request)),
    ) {
        let whole = host.post(path, request).ok();
        let stream = host.post(path, &with(request, &options));
        let (pieces, reasons, usage) = joined(&stream);
        assert_eq!(pieces, texts(&whole), "{request}");
        let expected: Vec<&str> = whole["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["finish_reason"].as_str().unwrap())
            .collect();
        assert_eq!(reasons, expected);
        assert_eq!(usage, whole["usage"]);
        let plain = host.post(path, &with(request, &json!({ "stream": true })));
        let (pieces, _, usage) = joined(&plain);
        assert_eq!((pieces, usage), (texts(&whole), Value::Null));
        assert!(
            plain
                .events()
                .iter()
                .all(|event| event.get("usage").is_none())
        );
    }
    let first = &host
        .post(
            "/v1/chat/completions",
            &with(&chat, &json!({ "stream": true })),
        )
        .events()[0];
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(
        first["choices"][0]["delta"],
        json!({ "role": "assistant", "content": "" })
    );
}

#[test]
fn answers_under_load_are_those_of_the_same_requests_alone() {
    let host = Serving::start(&["--max-num-seqs", "16"]);
    let requests: Vec<Value> = (0..32)
        .map(|i| {
            let prompt: Vec<String> = (0..1 + i % 7)
                .map(|k| format!("t{}", 40 + 11 * i + k))
                .collect();
            with(
                &greedy(&json!(prompt.join(" ")), 20 + i),
                &json!({ "temperature": if i % 3 == 0 { 0.8 } else { 0.0 }, "seed": i }),
            )
        })
        .collect();
    let alone: Vec<Vec<String>> = requests
        .iter()
        .map(|request| texts(&host.post("/v1/completions", request).ok()))
        .collect();
    std::thread::scope(|scope| {
        for (i, (request, expected)) in requests.iter().zip(&alone).enumerate() {
            let host = &host;
            scope.spawn(move || {
                for round in 0..3 {
                    let got = match (i + round) % 2 {
                        0 => texts(&host.post("/v1/completions", request).ok()),
                        _ => {
                            joined(&host.post(
                                "/v1/completions",
                                &with(request, &json!({ "stream": true })),
                            ))
                            .0
                        }
                    };
                    assert_eq!(&got, expected, "{request}");
                }
            });
        }
    });
    let table = host.wait_until("idle", |table| table["http"]["running"] == 0);
    assert_eq!(table["engine"]["kv_cache_usage"], 0.0);
    assert_eq!(table["engine"]["running"], 0);
    assert_eq!(table["http"]["first_token_ns"]["count"], 128);
}

#[test]
fn stops_seeds_choices_and_lengths_are_the_requests_own() {
    let host = Serving::start(&[]);
    let ask = |further: Value| {
        let request = with(&greedy(&json!("t40 t41"), 40), &further);
        host.post("/v1/completions", &request).ok()
    };
    let whole = texts(&ask(json!({})))[0].clone();
    let words: Vec<&str> = whole.split(' ').collect();
    let stop = words[5];
    let end = whole.find(stop).unwrap();
    for stop in [json!(stop), json!(["never", stop])] {
        let stopped = ask(json!({ "stop": stop }));
        assert_eq!(texts(&stopped)[0], whole[..end]);
        assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    }
    let token: u32 = stop[1..].parse().unwrap();
    let stopped = ask(json!({ "stop_token_ids": [token] }));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(whole.starts_with(&texts(&stopped)[0]) && texts(&stopped)[0].len() < whole.len());

    let drawn = |further: Value| texts(&ask(with(&json!({ "temperature": 1.0 }), &further)));
    let three = drawn(json!({ "seed": 3, "n": 3 }));
    assert_eq!(three, drawn(json!({ "seed": 3, "n": 3 })));
    assert_eq!(
        three[1..],
        drawn(json!({ "seed": 4, "n": 2 })),
        "each answer has the seed plus its number"
    );
    assert_ne!(three[0], three[1]);
    assert_ne!(
        drawn(json!({})),
        drawn(json!({})),
        "without a seed it is another each time"
    );
    assert_eq!(drawn(json!({ "top_k": 1 }))[0], whole);
    assert_eq!(drawn(json!({ "top_p": 1e-6 }))[0], whole);
    let default = host
        .post(
            "/v1/completions",
            &json!({ "model": "tiny-llama", "prompt": "t40", "ignore_eos": true }),
        )
        .ok();
    assert_eq!(default["usage"]["completion_tokens"], 16);
}

#[test]
fn log_probabilities_have_both_shapes() {
    let host = Serving::start(&[]);
    let request = with(&greedy(&json!("t40 t41"), 6), &json!({ "logprobs": 3 }));
    let whole = host.post("/v1/completions", &request).ok();
    let logprobs = &whole["choices"][0]["logprobs"];
    let tokens: Vec<&str> = logprobs["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_str().unwrap())
        .collect();
    // The tiny model's first four are special tokens, which texts leave out.
    let shown = tokens.iter().filter(|token| token.len() > 2);
    assert_eq!(
        shown.copied().collect::<Vec<_>>().join(" "),
        texts(&whole)[0]
    );
    for (at, token) in tokens.iter().enumerate() {
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        let own = logprobs["token_logprobs"][at].as_f64().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: what came is the likeliest.
        assert!(
            top.values()
                .all(|value| value.as_f64().unwrap() <= own && own <= 0.0)
        );
        assert_eq!(top[*token], own);
        let before: usize = tokens[..at].iter().map(|token| token.len()).sum();
        assert_eq!(logprobs["text_offset"][at], before);
    }
    let stream = host.post(
        "/v1/completions",
        &with(&request, &json!({ "stream": true })),
    );
    let pieces = |name: &str| -> Value {
        let events = stream.events();
        let pieces = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"][name].as_array());
        pieces.flatten().cloned().collect()
    };
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(pieces(name), logprobs[name], "{name}");
    }

    let chat = json!({ "model": "tiny-llama", "messages": [{ "role": "user", "content": "t40" }], "temperature": 0,
        "max_tokens": 5, "logprobs": true, "top_logprobs": 2, "ignore_eos": true });
    let whole = host.post("/v1/chat/completions", &chat).ok();
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(content.len(), 5);
    for token in content {
        assert_eq!(
            token["bytes"],
            json!(token["token"].as_str().unwrap().as_bytes())
        );
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"]);
    }
    let stream = host.post(
        "/v1/chat/completions",
        &with(&chat, &json!({ "stream": true })),
    );
    let events = stream.events();
    let streamed = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(
        streamed.flatten().collect::<Vec<_>>(),
        content.iter().collect::<Vec<_>>()
    );
    host.post(
        "/v1/chat/completions",
        &with(&chat, &json!({ "logprobs": false })),
    )
    .refused(400, "`top_logprobs`");

    let ask = |further: Value| {
        texts(
            &host
                .post(
                    "/v1/completions",
                    &with(&greedy(&json!("t40"), 4), &further),
                )
                .ok(),
        )[0]
        .clone()
    };
    assert_eq!(
        ask(json!({ "logit_bias": { "77": 100 } })),
        "t77 t77 t77 t77"
    );
    // Each time that one comes costs it more, until the other does.
    let two = json!({ "logit_bias": { "77": 60, "78": 60 }, "max_tokens": 40 });
    let penalised = ask(with(&two, &json!({ "frequency_penalty": 2 })));
    assert_ne!(penalised, ask(two));
    for token in ["t77", "t78"] {
        assert!(penalised.contains(token), "{penalised}");
    }
    let drawn = ask(json!({ "temperature": 1, "min_p": 1 }));
    assert_eq!(drawn, ask(json!({})), "only the likeliest is left");
}

#[test]
fn what_cannot_be_answered_is_refused_at_once_with_its_field() {
    let host = Serving::start(&["--max-model-len", "256", "--num-gpu-blocks-override", "8"]);
    let request = greedy(&json!("t40"), 4);
    for (further, param) in [
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "top_p": 0 }), "top_p"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 1.5 }), "n"),
        (json!({ "best_of": 2 }), "best_of"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "stop": [""] }), "stop"),
        (json!({ "seed": "x" }), "seed"),
        (json!({ "stream": 1 }), "stream"),
        (json!({ "stream_options": {} }), "stream_options"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [[40], []] }), "prompt"),
        (json!({ "prompt": [40, "t40"] }), "prompt"),
        (json!({ "prompt": [-1] }), "prompt"),
        (json!({ "prompt": null }), "prompt"),
        (json!({ "model": null }), "model"),
        (json!({ "suffix": "t5" }), "suffix"),
        (
            json!({ "response_format": { "type": "json_object" } }),
            "response_format",
        ),
    ] {
        let error = host
            .post("/v1/completions", &with(&request, &further))
            .refused(400, param);
        assert_eq!(error["param"], param, "{further}");
    }
    host.post("/v1/completions", &greedy(&json!([512]), 4))
        .refused(400, "vocabulary of 512");
    host.post("/v1/completions", &greedy(&json!("t40"), 256))
        .refused(400, "maximum context length is 256");
    // 7 blocks of 16 tokens, and the last token needs none.
    let error = host
        .post("/v1/completions", &greedy(&json!("t40"), 113))
        .refused(400, "KV cache holds 112");
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(
        host.post("/v1/completions", &greedy(&json!("t40"), 112))
            .ok()["usage"]["completion_tokens"],
        112
    );
    for (body, part) in [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "a list of 1"),
        ("{\"model\": 1}", "`model` is 1"),
    ] {
        let body = if body.is_empty() { " " } else { body };
        host.ask("POST", "/v1/completions", &[], body)
            .refused(400, part);
    }
    let deep = "[".repeat(100_000);
    host.ask("POST", "/v1/completions", &[], &deep)
        .refused(400, "not JSON");
    host.ask(
        "POST",
        "/v1/completions",
        &[("Content-Type", "text/plain")],
        "{}",
    )
    .refused(415, "Content-Type");
    let image = json!({ "model": "tiny-llama", "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] });
    let error = host
        .post("/v1/chat/completions", &image)
        .refused(400, "`image_url`");
    assert_eq!(error["param"], "messages[0].content");
    assert_eq!(host.get("/health").status, 200);
}

#[test]
fn tokens_come_and_go_in_vllms_shapes() {
    let host = Serving::start(&[]);
    let tokens = host
        .post(
            "/tokenize",
            &json!({ "prompt": "t40 t41 t42", "return_token_strs": true }),
        )
        .ok();
    assert_eq!(
        tokens,
        json!({ "count": 3, "max_model_len": 1024, "tokens": [40, 41, 42], "token_strs": ["t40", "t41", "t42"] })
    );
    let back = host
        .post("/detokenize", &json!({ "tokens": tokens["tokens"] }))
        .ok();
    assert_eq!(back, json!({ "prompt": "t40 t41 t42" }));
    let chat = json!({ "messages": [{ "role": "user", "content": "t40" }] });
    let tokens = host.post("/tokenize", &chat).ok();
    assert_eq!(tokens["tokens"], json!([412, 40, 414]));
    assert_eq!(tokens["token_strs"], Value::Null);
    host.post("/tokenize", &json!({}))
        .refused(400, "`prompt` is missing");
    host.post("/detokenize", &json!({ "tokens": ["t40"] }))
        .refused(400, "token ids");
}
