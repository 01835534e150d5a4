//! Malformed requests, made from the API's description: each is refused in OpenAI's shape, and none of them leaves anything behind.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Value, json};

use crate::http::{Client, Request};
use crate::schema::{Description, Example, Place};
use crate::server::{KEY, Served};

/// Stands for text that is no JSON value, or that a parser could not keep apart from another.
const RAW: &str = "@raw@";
/// No JSON, or beyond what a number holds.
const NO_VALUES: [&str; 10] = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "0x10",
    "01",
    "+1",
    ".5",
    "undefined",
];

/// Requests by what is wrong with them, each once.
#[derive(Default)]
pub struct Requests {
    seen: HashSet<Request>,
    pub all: Vec<(&'static str, Request)>,
}

impl Requests {
    fn add(&mut self, kind: &'static str, request: Request) {
        if self.seen.insert(request.clone()) {
            self.all.push((kind, request));
        }
    }

    /// How many there are of each kind.
    fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for (kind, _) in &self.all {
            *counts.entry(*kind).or_default() += 1;
        }
        counts
    }
}

/// All of them.
pub fn requests(description: &Description) -> Requests {
    let mut requests = Requests::default();
    for example in description.examples() {
        fields(description, &example, &mut requests);
        texts(&example, &mut requests);
        envelopes(&example, &mut requests);
    }
    conflicts(&mut requests);
    routes(description, &mut requests);
    requests
}

/// Every place of the body with values that the description does not allow there, or without one that it requires.
fn fields(description: &Description, example: &Example<'_>, requests: &mut Requests) {
    let mut add = |kind, body: Value| {
        if !description.accepts(example.schema, &body) {
            requests.add(kind, Request::post(example.path, body.to_string()));
        }
    };
    for place in description.places(example.schema, &example.body) {
        for value in values(&place) {
            add("wrong values", with(&example.body, &place.pointer, value));
        }
        if let Some(less) = without(&example.body, &place.pointer) {
            add("missing members", less);
        }
    }
    for place in description.places(example.schema, &example.body) {
        for text in NO_VALUES {
            let body = with(&example.body, &place.pointer, json!(RAW)).to_string();
            let body = body.replace(&format!("\"{RAW}\""), text);
            requests.add("no values", Request::post(example.path, body));
        }
    }
}

/// Values to try at a place: of every type, and just beyond each bound.
fn values(place: &Place<'_>) -> Vec<Value> {
    let mut deep = json!(1);
    for _ in 0..50 {
        deep = json!([deep]);
    }
    let mut values = vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(-1e300),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(""),
        json!("1"),
        json!("null"),
        json!("x".repeat(100_000)),
        json!([]),
        json!([null]),
        json!([1.5]),
        json!([-1]),
        json!([4_294_967_296_u64]),
        json!([[]]),
        json!([{}]),
        json!(["t5", 5]),
        json!([[5], "t5"]),
        json!({}),
        json!({"a": 1}),
        json!({"type": "image_url", "image_url": {"url": "data:,"}}),
        deep,
    ];
    let mut schemas = vec![place.schema];
    schemas.extend(place.schema["oneOf"].as_array().into_iter().flatten());
    for schema in schemas {
        for (bound, beyond) in [
            ("minimum", -1.0),
            ("maximum", 1.0),
            ("exclusiveMinimum", 0.0),
        ] {
            if let Some(bound) = schema[bound].as_f64() {
                values.push(json!(bound + beyond));
                values.push(json!(bound + beyond / 1000.0));
            }
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            let many = |item: Value| Value::Array(vec![item; most as usize + 1]);
            values.extend([
                many(json!("t5")),
                many(json!(5)),
                many(json!([5])),
                many(json!({})),
            ]);
        }
    }
    values
}

/// The body with `value` at the place, which need not have been there.
fn with(body: &Value, pointer: &str, value: Value) -> Value {
    let mut body = body.clone();
    let mut here = &mut body;
    for name in pointer.split('/').skip(1) {
        // An example of something else may stand here, or nothing.
        here = match name.parse::<usize>() {
            Ok(index) if here.is_array() => &mut here[index],
            Ok(_) => {
                *here = json!([null]);
                &mut here[0]
            }
            Err(_) => {
                if !here.is_object() {
                    *here = json!({});
                }
                &mut here[name]
            }
        };
    }
    *here = value;
    body
}

/// The body without the member.
fn without(body: &Value, pointer: &str) -> Option<Value> {
    let (parent, name) = pointer.rsplit_once('/')?;
    let mut body = body.clone();
    body.pointer_mut(parent)?.as_object_mut()?.remove(name)?;
    Some(body)
}

/// Bodies that are no JSON object.
fn texts(example: &Example<'_>, requests: &mut Requests) {
    let good = example.body.to_string();
    let mut add = |kind, body: Vec<u8>| requests.add(kind, Request::post(example.path, body));
    for body in [
        "", " ", "null", "true", "[]", "1", "\"text\"", "{", "}", "[{}", "{}}", "{}{}",
    ] {
        add("no object", body.into());
    }
    for end in (1..good.len()).step_by(3) {
        add("truncated", good.as_bytes()[..end].to_vec());
    }
    let inside = |text: &str| good.replacen('{', &format!("{{{text},"), 1);
    for text in [
        "\"a\":1,,\"b\":2",
        "\"a\":'b'",
        "a:1",
        "\"a\":[1,]",
        "\"a\" 1",
        "\"a\":1 /* b */",
        "\"a\":\"\u{1}\"",
        "\"a\":\"\\q\"",
        "\"a\":\"\\ud800\"",
        "\"a\":\"\\u12\"",
        "\"a\":tru",
    ] {
        add("no JSON", inside(text).into());
    }
    add("no JSON", format!("{good};").into());
    add("no JSON", format!("{good}{good}").into());
    add("no JSON", format!("\u{feff}{good}").into());
    for text in NO_VALUES {
        add("no values", inside(&format!("\"unknown\":{text}")).into());
    }
    let utf16 = |unit: u16| unit.to_le_bytes();
    add("no UTF-8", good.encode_utf16().flat_map(utf16).collect());
    for bad in [
        &b"\xff"[..],
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\xc0\xaf",
    ] {
        let mut body = good.clone().into_bytes();
        let inside_a_text = good.find('"').expect("a text") + 1;
        body.splice(inside_a_text..inside_a_text, bad.iter().copied());
        add("no UTF-8", body);
    }
    for depth in [200, 10_000, 500_000] {
        add("too deep", "[".repeat(depth).into());
        add(
            "too deep",
            inside(&format!(
                "\"a\":{}1{}",
                "[".repeat(depth),
                "]".repeat(depth)
            ))
            .into(),
        );
        add(
            "too deep",
            inside(&format!(
                "\"a\":{}1{}",
                "{\"a\":".repeat(depth),
                "}".repeat(depth)
            ))
            .into(),
        );
    }
    for (name, value) in example.body.as_object().into_iter().flatten() {
        add("a key twice", inside(&format!("\"{name}\":{value}")).into());
    }
}

/// A good body in a wrong envelope.
fn envelopes(example: &Example<'_>, requests: &mut Requests) {
    let good = Request::post(example.path, example.body.to_string());
    let types = [
        "text/plain",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
        "application/octet-stream",
        "application",
        "json",
        "",
        "\u{fffd}",
    ];
    for content_type in types {
        requests.add(
            "content types",
            good.clone().with("Content-Type", content_type),
        );
    }
    let keys: [&[u8]; 9] = [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic a2V5LWE6",
        b"key-a",
        b"Bearer key-a key-a",
        b"Bearer key-a\xff",
        b"Token key-a",
    ];
    for key in keys {
        requests.add("wrong keys", good.clone().with("Authorization", key));
    }
    let long = format!("Bearer {}", "x".repeat(8000));
    requests.add("wrong keys", good.with("Authorization", long));
}

/// What no schema says: parameters that contradict each other, what the model does not have, what can never fit.
fn conflicts(requests: &mut Requests) {
    let completion = |extra: Value| {
        merged(
            json!({"model": "tiny-llama", "prompt": "t5 t6", "max_tokens": 2}),
            extra,
        )
    };
    let chat = |extra: Value| {
        let messages = json!([{"role": "user", "content": "t5"}]);
        merged(
            json!({"model": "tiny-llama", "messages": messages, "max_completion_tokens": 2}),
            extra,
        )
    };
    let mut add =
        |path, body: Value| requests.add("contradictions", Request::post(path, body.to_string()));
    for extra in [
        json!({"stream_options": {"include_usage": true}}),
        json!({"stream_options": {}, "stream": false}),
        json!({"n": 128, "prompt": ["t5", "t6"]}),
        json!({"prompt": vec!["t5"; 129]}),
        json!({"prompt": ""}),
        json!({"prompt": ["t5", ""]}),
        json!({"prompt": [512]}),
        json!({"prompt": [4_294_967_295_u32]}),
        json!({"prompt": [[5], [512]]}),
        json!({"prompt": "t5 ".repeat(5000)}),
        json!({"prompt": vec![5; 5000]}),
        json!({"prompt": vec![5; 400_000]}),
        json!({"max_tokens": 5000}),
        json!({"max_tokens": 1_000_000_000_000_i64}),
        json!({"max_tokens": i64::MAX}),
        json!({"n": 1, "best_of": 2}),
        json!({"echo": true, "logprobs": 1}),
        json!({"logit_bias": {"5": 101}}),
        json!({"logit_bias": {"5": "1"}}),
        json!({"logit_bias": {"t5": 1}}),
        json!({"logit_bias": {"-1": 1}}),
        json!({"logit_bias": {"512": 1}}),
    ] {
        add("/v1/completions", completion(extra));
    }
    for extra in [
        json!({"stream_options": {"include_usage": true}}),
        json!({"max_tokens": 3}),
        json!({"top_logprobs": 2}),
        json!({"top_logprobs": 2, "logprobs": false}),
        json!({"max_completion_tokens": 5000, "max_tokens": 5000}),
        json!({"messages": [{"role": "user", "content": "t5 ".repeat(5000)}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "t5 ".repeat(5000)}]}]}),
        json!({"messages": vec![json!({"role": "user", "content": "t5"}); 5000]}),
        json!({"messages": [{"role": "user"}]}),
        json!({"messages": [{"role": "system", "content": null}]}),
        // What the template of this model refuses.
        json!({"messages": [{"role": "tool", "content": "t5"}]}),
    ] {
        add("/v1/chat/completions", chat(extra));
    }
    add("/detokenize", json!({"tokens": [512]}));
    add("/detokenize", json!({"tokens": [5, 4_294_967_295_u32]}));
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    ] {
        for model in [
            "gpt-0",
            "",
            "tiny-llama ",
            "../tiny-llama",
            "t5\u{0}",
            &"x".repeat(10_000),
        ] {
            let body = match path {
                "/v1/completions" => completion(json!({"model": model})),
                "/v1/chat/completions" => chat(json!({"model": model})),
                "/tokenize" => json!({"prompt": "t5", "model": model}),
                _ => json!({"tokens": [5], "model": model}),
            };
            requests.add("unknown models", Request::post(path, body.to_string()));
        }
    }
}

fn merged(mut base: Value, extra: Value) -> Value {
    if let (Some(base), Value::Object(extra)) = (base.as_object_mut(), extra) {
        base.extend(extra);
    }
    base
}

/// Paths and methods that nobody has.
fn routes(description: &Description, requests: &mut Requests) {
    let known: Vec<(&str, &str)> = description
        .operations()
        .map(|(path, method, _)| (path, method))
        .collect();
    for (path, method) in known {
        let path = path.replace("{model}", "tiny-llama");
        for other in [
            "GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW",
        ] {
            if other.to_lowercase() != method {
                let mut request = Request::post(&path, "{}");
                request.method = other.to_owned();
                requests.add("methods", request);
            }
        }
        for wrong in [
            format!("{path}/"),
            format!("{path}/x"),
            format!("/v2{path}"),
            format!("/{path}"),
            path.to_uppercase(),
        ] {
            // The second is a model's name.
            if !path.starts_with("/v1/models") {
                let mut request = Request::post(&wrong, "{}");
                request.method = method.to_uppercase();
                requests.add("paths", request);
            }
        }
    }
    let paths = [
        "/",
        "/v1",
        "/v1/",
        "/v1/responses",
        "/v1/models/gpt-0",
        "/v1/models/%ff",
        "/v1/models/%2e%2e%2f",
        "/..",
        "/%00",
        "/admin",
        "/?a=b",
        "/v1/engines",
        "/favicon.ico",
    ];
    for path in paths {
        requests.add("paths", Request::get(path));
    }
    let body = json!({"model": "tiny-llama", "input": "t5"}).to_string();
    requests.add("unsupported", Request::post("/v1/embeddings", body));
    requests.add("unsupported", Request::post("/v1/embeddings", "{"));
}

#[test]
fn malformed_requests_are_refused_in_the_shape_of_openai() {
    let server = Served::small();
    let description = Description::new(&server.description());
    let requests = requests(&description);
    assert!(requests.all.len() >= 200, "{}", requests.all.len());
    let mut client = Client::new(server.address);
    let mut wrong = Vec::new();
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for (kind, request) in &requests.all {
        let keyed = request
            .headers
            .iter()
            .any(|(name, _)| name == "Authorization");
        let sent = match keyed {
            true => request.clone(),
            false => request
                .clone()
                .with("Authorization", format!("Bearer {KEY}")),
        };
        let outcome = match client.ask(&sent) {
            Ok(response) => {
                *statuses.entry(response.status).or_default() += 1;
                let expected = expected(kind).is_none_or(|status| status == response.status);
                response.is_refusal().and_then(|()| match expected {
                    true => Ok(()),
                    false => Err(format!(
                        "not that status: {} {}",
                        response.status,
                        response.text()
                    )),
                })
            }
            Err(error) => Err(format!("no answer: {error}")),
        };
        if let Err(complaint) = outcome {
            let body: String = String::from_utf8_lossy(&request.body)
                .chars()
                .take(300)
                .collect();
            wrong.push(format!(
                "{kind}: {} {} {body}\n    {complaint}",
                request.method, request.path
            ));
        }
    }
    println!(
        "malformed requests: {} of the kinds {:?}",
        requests.all.len(),
        requests.counts()
    );
    println!("answered with {statuses:?}");
    assert!(
        wrong.is_empty(),
        "{} wrong answers:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    server.ends_well();
}

/// The status that a kind of request has, where it has one.
fn expected(kind: &str) -> Option<u16> {
    match kind {
        "content types" => Some(415),
        "wrong keys" => Some(401),
        "methods" => Some(405),
        "paths" | "unsupported" | "unknown models" => Some(404),
        _ => Some(400),
    }
}
