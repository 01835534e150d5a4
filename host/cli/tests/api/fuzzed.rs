//! Good requests with random changes, in their JSON and in their bytes: an answer or a refusal, and nothing left behind.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};

use crate::http::{Client, Request};
use crate::schema::Description;
use crate::server::{KEY, Served};

const CASES: u32 = 10_000;

/// A change at one place of a body.
#[derive(Clone, Debug)]
enum Change {
    Replace(Value),
    Remove,
    /// The member has another name.
    Rename(String),
    /// An element is there again.
    Repeat(usize),
    /// Another place's value.
    Copy(Index),
    Wrap,
}

/// A change of the text that was sent.
#[derive(Clone, Debug)]
enum Slip {
    Flip(u8),
    Insert(Vec<u8>),
    Cut(usize),
}

fn json_value() -> impl Strategy<Value = Value> {
    let numbers = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3_i64..200).prop_map(Value::from),
        (-1.0_f64..3.0).prop_map(Value::from),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        numbers,
        ".{0,12}".prop_map(Value::from),
        "(t[0-9]{1,3} ?){0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Names that parameters and their members have.
const NAMES: &str = "\
    model prompt messages role content type text temperature top_p top_k min_p n seed stop \
    stop_token_ids ignore_eos stream stream_options include_usage max_tokens \
    max_completion_tokens logprobs top_logprobs echo best_of suffix logit_bias tools \
    frequency_penalty presence_penalty repetition_penalty response_format add_special_tokens \
    logit_bias tool_choice add_generation_prompt";

/// One of them, or any.
fn key() -> impl Strategy<Value = String> {
    let known: Vec<&str> = NAMES.split(' ').collect();
    prop_oneof![3 => prop::sample::select(known).prop_map(str::to_owned), 1 => ".{0,8}"]
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => json_value().prop_map(Change::Replace),
        1 => Just(Change::Remove),
        1 => key().prop_map(Change::Rename),
        1 => (1_usize..40).prop_map(Change::Repeat),
        1 => any::<Index>().prop_map(Change::Copy),
        1 => Just(Change::Wrap),
    ]
}

fn slip() -> impl Strategy<Value = Slip> {
    prop_oneof![
        any::<u8>().prop_map(Slip::Flip),
        prop::collection::vec(any::<u8>(), 1..8).prop_map(Slip::Insert),
        (1_usize..20).prop_map(Slip::Cut),
    ]
}

/// JSON pointers of all values.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Array(list) => {
            for (index, item) in list.iter().enumerate() {
                pointers(item, &format!("{at}/{index}"), found);
            }
        }
        Value::Object(members) => {
            for (name, member) in members {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(member, &format!("{at}/{name}"), found);
            }
        }
        _ => {}
    }
}

fn apply(body: &mut Value, place: &Index, change: Change) {
    let mut found = Vec::new();
    pointers(body, "", &mut found);
    let pointer = place.get(&found[..]).clone();
    let other = match &change {
        Change::Copy(index) => body.pointer(index.get(&found[..]).as_str()).cloned(),
        _ => None,
    };
    let (parent, name) = pointer.rsplit_once('/').unwrap_or_default();
    match change {
        Change::Remove | Change::Rename(_) => {
            if let Some(Value::Object(members)) = body.pointer_mut(parent)
                && let Some(value) = members.remove(name)
                && let Change::Rename(name) = change
            {
                members.insert(name, value);
            }
        }
        Change::Replace(value) => put(body, &pointer, |_| value),
        Change::Repeat(times) => put(body, &pointer, |value| json!(vec![value; times])),
        Change::Copy(_) => put(body, &pointer, |value| other.unwrap_or(value)),
        Change::Wrap => put(body, &pointer, |value| json!({ "text": value })),
    }
}

fn put(body: &mut Value, pointer: &str, change: impl FnOnce(Value) -> Value) {
    if let Some(here) = body.pointer_mut(pointer) {
        *here = change(here.take());
    }
}

fn slipped(mut bytes: Vec<u8>, slips: &[(Index, Slip)]) -> Vec<u8> {
    for (place, slip) in slips {
        let at = place.index(bytes.len().max(1));
        match slip {
            Slip::Flip(bits) => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= bits;
                }
            }
            Slip::Insert(more) => drop(bytes.splice(
                at.min(bytes.len())..at.min(bytes.len()),
                more.iter().copied(),
            )),
            Slip::Cut(length) => {
                drop(bytes.drain(at.min(bytes.len())..(at + length).min(bytes.len())));
            }
        }
    }
    bytes
}

#[test]
fn fuzzed_requests_are_answered_or_refused() {
    let server = Served::small();
    let description = Description::new(&server.description());
    let examples = description.examples();
    let allows = |path: &str, body: &Value| {
        let mut of_path = examples.iter().filter(|example| example.path == path);
        of_path.any(|example| description.accepts(example.schema, body))
    };
    let mut bases = Vec::new();
    for example in &examples {
        bases.push((example.path, example.body.clone()));
        if example.path.starts_with("/v1/") {
            // With all that a client may say, in a stream too.
            let full = json!({
                "temperature": 0.5, "top_p": 0.9, "top_k": 8, "n": 2, "seed": 7, "stop": ["t9"], "stop_token_ids": [9],
                "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "frequency_penalty": 0.1,
                "user": "somebody",
            });
            let mut body = example.body.clone();
            body.as_object_mut()
                .expect("an object")
                .extend(full.as_object().expect("an object").clone());
            bases.push((example.path, body));
        }
    }

    let config = Config {
        cases: CASES,
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let changes = prop::collection::vec((any::<Index>(), change()), 0..4);
    let slips = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::vec((any::<Index>(), slip()), 1..4),
    ];
    let client = RefCell::new(Client::new(server.address));
    let statuses = RefCell::new(BTreeMap::<u16, usize>::new());
    let outcome = TestRunner::new_with_rng(config, rng).run(
        &(any::<Index>(), changes, slips),
        |(base, changes, slips)| {
            let (path, body) = base.get(&bases);
            let mut body = body.clone();
            for (place, change) in changes {
                apply(&mut body, &place, change);
            }
            let sent = slipped(body.to_string().into_bytes(), &slips);
            let request =
                Request::post(path, sent.clone()).with("Authorization", format!("Bearer {KEY}"));
            let shown = || format!("{path} {}", String::from_utf8_lossy(&sent));
            let response = client.borrow_mut().ask(&request);
            let response = response
                .map_err(|error| TestCaseError::fail(format!("no answer: {error}; {}", shown())))?;
            *statuses.borrow_mut().entry(response.status).or_default() += 1;
            if response.status == 200 {
                // What is taken is what the description allows.
                let body: Value =
                    serde_json::from_slice(&sent).map_err(|_| TestCaseError::fail(shown()))?;
                prop_assert!(
                    allows(path, &body),
                    "taken, though not described: {}",
                    shown()
                );
            } else if let Err(complaint) = response.is_refusal() {
                return Err(TestCaseError::fail(format!("{complaint}; {}", shown())));
            }
            Ok(())
        },
    );
    println!(
        "fuzzed requests: {CASES}, answered with {:?}",
        statuses.borrow()
    );
    outcome.unwrap_or_else(|error| panic!("{error}"));
    // Both happened, or this tried nothing.
    assert!(statuses.borrow()[&200] > 100 && statuses.borrow()[&400] > 100);
    server.ends_well();
}
