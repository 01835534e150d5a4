//! Reading vectors files and counting cases.

use std::fmt;

use serde_json::Value;

/// Passed and failed cases of one file (or of one folder of files).
pub struct Tally {
    name: String,
    expected: usize,
    passed: usize,
    failures: Vec<String>,
}

impl Tally {
    /// `expected`: how many cases there must be, so that a lost case does not pass for a green one.
    pub fn new(name: &str, expected: usize) -> Self {
        Tally {
            name: name.to_owned(),
            expected,
            passed: 0,
            failures: Vec::new(),
        }
    }

    /// Counts one case: `got` must be `wanted`.
    pub fn case<T: PartialEq + fmt::Debug>(&mut self, case: &Value, got: &T, wanted: &T) {
        if got == wanted {
            self.passed += 1;
        } else {
            self.failures.push(format!(
                "{} case {}: got {got:?}, wanted {wanted:?}, input {}",
                self.name, case["id"], case["input"]
            ));
        }
    }

    /// What failed, the first few in full; a file with too few cases fails too.
    pub fn failures(&self) -> Vec<&str> {
        self.failures.iter().take(5).map(String::as_str).collect()
    }

    /// Closes the tally.
    pub fn done(mut self) -> Self {
        let total = self.passed + self.failures.len();
        if total != self.expected {
            self.failures.push(format!(
                "{}: {total} cases, but {} were recorded",
                self.name, self.expected
            ));
        }
        self
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}/{} passed", self.name, self.passed, self.expected)
    }
}

/// The cases of `tests/vectors/{name}.json`.
pub fn cases(name: &str) -> Vec<Value> {
    let path = format!(
        "{}/../../tests/vectors/{name}.json",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut file: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}"));
    match file["cases"].take() {
        Value::Array(cases) => cases,
        other => panic!("{path}: cases is {other}"),
    }
}

/// A number that fits.
pub fn u32_of(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|v| u32::try_from(v).ok())
        .unwrap_or_else(|| panic!("{value} is not a u32"))
}

/// A string.
pub fn text(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is not a string"))
}

/// `{"$error": [type, text]}`: the text.
pub fn error_text(output: &Value) -> Option<&str> {
    output.get("$error").map(|e| text(&e[1]))
}
