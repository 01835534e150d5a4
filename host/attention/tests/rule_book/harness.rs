//! Runs one vectors file through a function and counts. It knows JSON and the vectors' conventions, nothing of the rules.

use serde_json::{Value, json};

/// What a case gave.
pub type Outcome = Result<Value, FieldError>;

/// The error that the field raised: its type and its text.
#[derive(Debug)]
pub struct FieldError {
    /// Python's class.
    pub class: &'static str,
    /// Our text. It may say more than the field's, never something else first.
    pub text: String,
}

impl FieldError {
    /// An error of that class with that text.
    pub fn new(class: &'static str, error: &impl std::fmt::Display) -> Self {
        Self {
            class,
            text: error.to_string(),
        }
    }
}

/// Cases of one file, or of one folder of files.
pub struct Tally {
    pub file: &'static str,
    pub passed: usize,
    pub total: usize,
    pub failures: Vec<String>,
}

impl Tally {
    /// No case yet.
    pub fn new(file: &'static str) -> Self {
        Self {
            file,
            passed: 0,
            total: 0,
            failures: Vec::new(),
        }
    }

    /// Counts one case: `got` must be `want`.
    pub fn case<T: PartialEq + std::fmt::Debug>(&mut self, case: &Value, got: &T, want: &T) {
        self.total += 1;
        if got == want {
            self.passed += 1;
        } else {
            self.failures.push(format!(
                "case {}:\n  input {}\n  got   {got:?}\n  want  {want:?}",
                case["id"], case["input"]
            ));
        }
    }

    /// Prints passed/total, and panics with the first differences if a case failed.
    pub fn check(&self) {
        println!("{}: {}/{}", self.file, self.passed, self.total);
        assert!(self.total > 0, "{}: no cases", self.file);
        assert!(
            self.failures.is_empty(),
            "{}: {} of {} cases differ; the first:\n{}",
            self.file,
            self.failures.len(),
            self.total,
            self.failures
                .iter()
                .take(3)
                .cloned()
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
}

/// The folder of vectors.
pub const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors");

/// A vectors file, as JSON.
pub fn read(file: &str) -> Value {
    let path = format!("{VECTORS}/{file}.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The cases of a vectors file.
pub fn cases(file: &str) -> Vec<Value> {
    match read(file)["cases"].take() {
        Value::Array(cases) => cases,
        other => panic!("{file}: cases is {other}"),
    }
}

/// Runs every case of `file` through `function`, which sees the case's input.
pub fn run(file: &'static str, function: impl Fn(&Value) -> Outcome) -> Tally {
    run_compared(file, function, |got, want| got == want)
}

/// As [`run`], with a comparison of its own for outputs that are not errors.
pub fn run_compared(
    file: &'static str,
    function: impl Fn(&Value) -> Outcome,
    equal: impl Fn(&Value, &Value) -> bool,
) -> Tally {
    let vectors = read(file);
    let cases = vectors["cases"].as_array().expect("a list of cases");
    let mut tally = Tally::new(file);
    tally.total = cases.len();
    for case in cases {
        let (got, want) = (function(&case["input"]), &case["output"]);
        let same = match (&got, want.get("$error")) {
            (Ok(got), None) => equal(got, want),
            (Err(error), Some(want)) => {
                error.class == want[0]
                    && error
                        .text
                        .starts_with(want[1].as_str().expect("an error text"))
            }
            _ => false,
        };
        if same {
            tally.passed += 1;
        } else {
            let got = got.unwrap_or_else(|error| json!({"$error": [error.class, error.text]}));
            tally.failures.push(format!(
                "case {}:\n  input {}\n  got   {got}\n  want  {want}",
                case["id"], case["input"]
            ));
        }
    }
    tally
}

/// A list of s32.
pub fn ints(value: &Value) -> Vec<i32> {
    list(value, |v| int(v) as i32)
}

/// A list of anything.
pub fn list<T>(value: &Value, item: impl Fn(&Value) -> T) -> Vec<T> {
    value
        .as_array()
        .unwrap_or_else(|| panic!("{value} is not a list"))
        .iter()
        .map(item)
        .collect()
}

/// An integer.
pub fn int(value: &Value) -> i64 {
    value
        .as_i64()
        .unwrap_or_else(|| panic!("{value} is not an integer"))
}

/// An integer that is not negative.
pub fn uint(value: &Value) -> u32 {
    u32::try_from(int(value)).unwrap_or_else(|_| panic!("{value} is negative or too large"))
}

/// A string.
pub fn text(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is not a string"))
}

/// `{"$error": [type, text]}`: the text.
pub fn error_text(output: &Value) -> Option<&str> {
    output.get("$error").map(|error| text(&error[1]))
}

/// A truth value.
pub fn flag(value: &Value) -> bool {
    value
        .as_bool()
        .unwrap_or_else(|| panic!("{value} is not a bool"))
}
