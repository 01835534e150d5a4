//! FlashInfer, measured in the same run by a Python that has it: a script of ours as a child process, its last line JSON. It
//! must never know how our own kernels fared.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cases::{DECODE, HEAD_SIZE, HEADS, PAGE, PREFILL, SCATTER_TOKENS};

const SCRIPT: &str = include_str!("flashinfer.py");

/// One case of the peer's.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PeerRow {
    /// `decode`, `prefill` or `append`.
    pub kind: String,
    /// Requests.
    pub batch: usize,
    /// Keys of a request, or tokens appended.
    pub context: usize,
    /// Which of the peer's kernels: `fa2`, `fa3`.
    pub backend: String,
    /// Median microseconds in graph replays.
    pub us: Option<f64>,
    /// Median microseconds of its plan on the host.
    pub plan_us: Option<f64>,
    /// Why there is no figure.
    pub error: Option<String>,
}

/// What the peer answered.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Peer {
    /// Its version.
    pub flashinfer: Option<String>,
    /// The version of PyTorch below it.
    pub torch: Option<String>,
    /// Why there are no figures.
    pub absent: Option<String>,
    /// Its cases.
    #[serde(default)]
    pub rows: Vec<PeerRow>,
}

impl Peer {
    /// There is none, and why.
    pub fn absent(reason: impl Into<String>) -> Self {
        Peer {
            absent: Some(reason.into()),
            ..Peer::default()
        }
    }

    /// The best figure of a case, with the kernel that made it; only of `backend` where one is named.
    pub fn best(
        &self,
        kind: &str,
        batch: usize,
        context: usize,
        backend: Option<&str>,
    ) -> Option<(f64, &str)> {
        self.rows
            .iter()
            .filter(|row| row.kind == kind && row.batch == batch && row.context == context)
            .filter(|row| backend.is_none_or(|backend| row.backend == backend))
            .filter_map(|row| Some((row.us?, row.backend.as_str())))
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }
}

/// Runs the script with `python` on CUDA device `ordinal`; its progress goes to standard error. Never fails: a peer that is
/// not there is an answer.
pub fn measure(python: &Path, ordinal: u32, only: &dyn Fn(&str) -> bool) -> Peer {
    let pick = |name: &str, cases: serde_json::Value| if only(name) { cases } else { json!([]) };
    let task = json!({
        "device": ordinal,
        "heads": HEADS.0,
        "kv_heads": HEADS.1,
        "head_size": HEAD_SIZE,
        "page": PAGE,
        "decode": pick("decode", json!(DECODE)),
        "prefill": pick("prefill", json!(PREFILL)),
        "append": pick("scatter", json!([SCATTER_TOKENS])),
    });
    let mut child = match Command::new(python)
        .arg("-")
        .arg(task.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
    {
        Ok(child) => child,
        Err(error) => {
            return Peer::absent(format!(
                "{} cannot be run ({error}); name another with --python",
                python.display()
            ));
        }
    };
    let written = child
        .stdin
        .take()
        .map(|mut stdin| stdin.write_all(SCRIPT.as_bytes()));
    if let Some(Err(error)) = written {
        // What it prints below says more.
        tracing::debug!(%error, "the script was not taken");
    }
    let output = match child.wait_with_output() {
        Ok(output) => output,
        Err(error) => return Peer::absent(format!("its answer cannot be read ({error})")),
    };
    parse(&String::from_utf8_lossy(&output.stdout)).unwrap_or_else(|| {
        Peer::absent(format!(
            "{} gave no answer ({})",
            python.display(),
            output.status
        ))
    })
}

/// The last line that is JSON.
fn parse(text: &str) -> Option<Peer> {
    text.lines()
        .rev()
        .find_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_figure_of_a_case_is_found() {
        let peer = parse(
            r#"noise
{"flashinfer": "0.1", "torch": "2", "rows": [
"#,
        );
        assert!(peer.is_none());
        let peer = parse(
            "warning\n{\"flashinfer\": \"0.1\", \"torch\": \"2\", \"rows\": [\
             {\"kind\": \"prefill\", \"batch\": 1, \"context\": 8192, \"backend\": \"fa2\", \"us\": 1700.0, \"plan_us\": 90.0},\
             {\"kind\": \"prefill\", \"batch\": 1, \"context\": 8192, \"backend\": \"fa3\", \"us\": 1000.0, \"plan_us\": 90.0},\
             {\"kind\": \"decode\", \"batch\": 1, \"context\": 8192, \"backend\": \"fa2\", \"error\": \"no\"}]}\n",
        )
        .unwrap();
        assert_eq!(peer.best("prefill", 1, 8192, None), Some((1000.0, "fa3")));
        assert_eq!(
            peer.best("prefill", 1, 8192, Some("fa2")),
            Some((1700.0, "fa2"))
        );
        assert_eq!(peer.best("decode", 1, 8192, None), None);
    }

    #[test]
    fn a_python_without_it_says_so() {
        let peer = measure(Path::new("/nonexistent/python"), 0, &|_| true);
        assert!(peer.absent.unwrap().contains("--python"));
    }
}
