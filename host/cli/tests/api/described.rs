//! What the server takes and answers is what the API's description says.

use serde_json::{Value, json};

use crate::http::{Client, Request, Response};
use crate::schema::Description;
use crate::server::{KEY, Served};

fn ask(client: &mut Client, request: Request) -> Response {
    let request = request.with("Authorization", format!("Bearer {KEY}"));
    client
        .ask(&request)
        .unwrap_or_else(|error| panic!("{request:?}: {error}"))
}

/// The answer has a status and a body that are described.
#[track_caller]
fn is_described(description: &Description, path: &str, method: &str, response: &Response) {
    let schema = description.answer(path, method, response.status);
    let body = response.json();
    assert!(description.accepts(schema, &body), "{path}: {body}");
}

#[test]
fn the_description_is_what_is_in_the_repository() {
    let server = Served::small();
    let here = include_str!("../../../server/openapi.json");
    assert_eq!(server.description(), here);
}

#[test]
fn every_parameter_takes_its_default_its_examples_and_null() {
    let server = Served::small();
    let description = Description::new(&server.description());
    let mut client = Client::new(server.address);
    let mut tried = 0;
    for example in description.examples() {
        for (name, schema) in description.properties(example.schema) {
            let mut values = vec![schema["default"].clone()];
            values.extend(schema["examples"].as_array().into_iter().flatten().cloned());
            for bound in ["minimum", "maximum"] {
                values.extend(schema.get(bound).cloned());
            }
            for value in values {
                let mut body = example.body.clone();
                let was = body[name].clone();
                if value.is_null() && !description.accepts(schema, &value) {
                    continue;
                }
                body[name] = value;
                // What only makes sense with another.
                if name == "stream_options" {
                    body["stream"] = json!(true);
                }
                if name == "top_logprobs" {
                    body["logprobs"] = json!(true);
                }
                if name == "best_of" {
                    body["n"] = body["best_of"].clone();
                }
                if name == "max_tokens" && !was.is_number() {
                    body["max_completion_tokens"] = Value::Null;
                }
                assert!(description.accepts(example.schema, &body), "{name}: {body}");
                let response = ask(&mut client, Request::post(example.path, body.to_string()));
                assert_eq!(
                    response.status,
                    200,
                    "{} {body}: {}",
                    example.path,
                    response.text()
                );
                if response.header("content-type") == Some("application/json") {
                    is_described(&description, example.path, "post", &response);
                }
                tried += 1;
            }
        }
        // What nobody has described is ignored.
        let mut body = example.body.clone();
        body["of_the_future"] = json!({"a": [1]});
        let response = ask(&mut client, Request::post(example.path, body.to_string()));
        assert_eq!(response.status, 200, "{}", response.text());
    }
    println!("{tried} values of parameters");
    assert!(tried > 100, "{tried}");
    server.ends_well();
}

#[test]
fn every_operation_answers_as_described() {
    let server = Served::small();
    let description = Description::new(&server.description());
    let mut client = Client::new(server.address);
    let mut seen = 0;
    for (path, method, operation) in description.operations() {
        seen += 1;
        let at = path.replace("{model}", "tiny-llama");
        if method == "get" {
            let response = ask(&mut client, Request::get(&at));
            assert_eq!(response.status, 200, "{at}: {}", response.text());
            if operation["responses"]["200"]["content"]
                .get("application/json")
                .is_some()
            {
                is_described(&description, path, method, &response);
            }
            // Where no key is needed, none is.
            let open = operation["security"] == json!([]);
            let response = client.ask(&Request::get(&at)).unwrap();
            assert_eq!(response.status, if open { 200 } else { 401 }, "{at}");
        } else {
            let response = client.ask(&Request::post(&at, "{}")).unwrap();
            assert_eq!(response.status, 401, "{at}");
            is_described(&description, path, method, &response);
            let response = ask(&mut client, Request::post(&at, "[]"));
            is_described(&description, path, method, &response);
        }
        // Every answer to a good client is described.
        for status in operation["responses"]
            .as_object()
            .expect("responses")
            .keys()
        {
            assert!(status.parse::<u16>().is_ok(), "{path}: {status}");
        }
    }
    assert!(seen >= 11, "{seen}");
}

/// The events of a stream.
fn events(text: &str) -> Vec<Value> {
    let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
    let data = |event: &str| {
        let data = event
            .strip_prefix("data: ")
            .unwrap_or_else(|| panic!("{event}"));
        serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"))
    };
    events.into_iter().map(data).collect()
}

#[test]
fn pieces_of_a_stream_are_as_described() {
    let server = Served::small();
    let text = server.description();
    let description = Description::new(&text);
    let document: Value = serde_json::from_str(&text).unwrap();
    let mut client = Client::new(server.address);
    for (path, schema, parameters) in [
        (
            "/v1/completions",
            "Completion",
            json!({"model": "tiny-llama", "prompt": "t5 t6", "max_tokens": 5, "logprobs": 2}),
        ),
        (
            "/v1/chat/completions",
            "ChatCompletionChunk",
            json!({"model": "tiny-llama", "messages": [{"role": "user", "content": "t5"}], "max_tokens": 5, "logprobs": true, "top_logprobs": 2}),
        ),
    ] {
        let mut body = parameters;
        body["stream"] = json!(true);
        body["n"] = json!(2);
        body["ignore_eos"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let response = ask(&mut client, Request::post(path, body.to_string()));
        assert_eq!(response.status, 200, "{}", response.text());
        let content_type = response.header("content-type").unwrap_or_default();
        assert!(
            content_type.starts_with("text/event-stream"),
            "{content_type}"
        );
        let schema = &document["components"]["schemas"][schema];
        let events = events(&response.text());
        assert!(events.len() >= 5, "{}", events.len());
        for event in &events {
            assert!(description.accepts(schema, event), "{event}");
        }
        assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 10);
    }
    server.ends_well();
}
