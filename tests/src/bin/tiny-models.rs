//! `tiny-models DIR`: writes a random-weight model of each hybrid and latent family, with a tokenizer of words `t0`, `t1` …,
//! as Hugging Face directories below DIR. `cargo xtask tiny-models` builds and runs it.

use std::path::Path;
use std::process::ExitCode;

use timetable_tests::tiny_models::Recorded;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir] = arguments.as_slice() else {
        eprintln!("Usage: tiny-models DIR");
        return ExitCode::from(2);
    };
    for case in Recorded::load().cases {
        let name: String = case
            .name
            .replace(", ", "-")
            .chars()
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let model = Path::new(dir).join(name);
        if let Err(error) = std::fs::create_dir_all(&model) {
            eprintln!("tiny-models: {}: {error}", model.display());
            return ExitCode::FAILURE;
        }
        case.write_with_tokenizer(&model);
        println!("{}", model.display());
    }
    ExitCode::SUCCESS
}
