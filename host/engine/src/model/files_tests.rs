use super::*;
use crate::model::Source;
use crate::model::config::ModelConfig;
use crate::model::safetensors::SafetensorsDir;
use crate::tokenizer::Tokenizer;
use std::path::PathBuf;

/// A directory with a pipe of that name.
fn with_pipe(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo runs").success());
    (dir, path)
}

fn refusal<T>(result: Result<T, ModelError>) -> String {
    match result {
        Ok(_) => panic!("it is accepted"),
        Err(refusal) => refusal.to_string(),
    }
}

#[test]
fn what_is_not_a_plain_file_is_refused_at_once() {
    let refused = |name: &str, read: &dyn Fn(&Path, &Path) -> String| {
        let (dir, path) = with_pipe(name);
        let text = read(dir.path(), &path);
        let expected = format!(
            "{} is not a usable model: it is not a plain file; ",
            path.display()
        );
        assert!(text.starts_with(&expected), "{text}");
    };
    refused("config.json", &|dir, _| {
        refusal(ModelConfig::from_hf_dir(dir))
    });
    refused("model.safetensors", &|dir, _| {
        refusal(SafetensorsDir::open(dir))
    });
    refused("model.safetensors.index.json", &|dir, _| {
        refusal(SafetensorsDir::open(dir))
    });
    refused("model.gguf", &|_, path| refusal(Source::open(path)));
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        refused(name, &|dir, _| {
            std::fs::write(dir.join("config.json"), "{}").expect("written");
            match name {
                "tokenizer.json" => refusal(Tokenizer::load(dir)),
                _ => refusal(crate::tokenizer::tokenizer_config(dir)),
            }
        });
    }
    let text = refusal(open(Path::new("/dev/null")));
    assert!(text.contains("it is not a plain file; "), "{text}");
}

#[test]
fn a_file_above_its_bound_is_not_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let sparse = |name: &str, size: u64| {
        let file = File::create(dir.path().join(name)).expect("created");
        file.set_len(size).expect("sized");
    };
    sparse("config.json", MAX_CONFIG + 1);
    sparse("tokenizer.json", MAX_TOKENIZER + 1);
    let text = refusal(ModelConfig::from_hf_dir(dir.path()));
    assert!(
        text.contains("it has 16777217 bytes, above 16777216; "),
        "{text}"
    );
    let text = refusal(Tokenizer::load(dir.path()));
    assert!(
        text.contains("it has 536870913 bytes, above 536870912; "),
        "{text}"
    );
    sparse("small", 3);
    assert_eq!(read(&dir.path().join("small"), 3).expect("read"), [0; 3]);
    let none = read_if_there(&dir.path().join("none"), 3).expect("no error");
    assert_eq!(none, None);
}
