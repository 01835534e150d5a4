//! A C compiler for wasm32, found on this machine or in the target directory. Included by `xtask`, which installs one, and by the
//! test that compiles the builder in C. It must never know a builder.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

/// Where `xtask` installs zig, below the target directory.
pub const INSTALLED: &str = "ziglang";

/// A compiler that was seen to make a module.
#[derive(Debug)]
pub struct Compiler {
    command: Vec<OsString>,
    cache: std::path::PathBuf,
}

impl Compiler {
    /// clang with a linker for wasm, else zig: on the PATH, of the machine's Python, or installed in `target`.
    pub fn find(target: &Path) -> Option<Compiler> {
        let zig = |command: &[&std::ffi::OsStr]| {
            let flags = [
                "cc",
                "-target",
                "wasm32-freestanding",
                "-mcpu=generic+bulk_memory",
            ];
            command
                .iter()
                .map(OsString::from)
                .chain(flags.map(OsString::from))
                .collect()
        };
        let clang = [
            "clang",
            "--target=wasm32",
            "-ffreestanding",
            "-mbulk-memory",
        ];
        let installed = target.join(INSTALLED).join("ziglang/zig");
        let candidates: [Vec<OsString>; 4] = [
            clang.map(OsString::from).into(),
            zig(&["zig".as_ref()]),
            zig(&["python3".as_ref(), "-m".as_ref(), "ziglang".as_ref()]),
            zig(&[installed.as_os_str()]),
        ];
        let cache = target.join(format!("{INSTALLED}-cache"));
        std::fs::create_dir_all(&cache).ok()?;
        let probe = cache.join(format!("probe-{}", std::process::id()));
        let source = probe.with_extension("c");
        std::fs::write(&source, "int probe(void) { return 0; }\n").ok()?;
        let found = candidates
            .into_iter()
            .map(|command| Compiler {
                command,
                cache: cache.clone(),
            })
            .find(|compiler| compiler.compile(&source, &probe).is_ok());
        // Left-overs do no harm.
        let _ = std::fs::remove_file(&source);
        let _ = std::fs::remove_file(&probe);
        found
    }

    /// The command, as a person would write it.
    pub fn name(&self) -> String {
        let words = self.command.iter().map(|word| word.to_string_lossy());
        words.collect::<Vec<_>>().join(" ")
    }

    /// Compiles one file to a core module without imports of its own.
    ///
    /// # Errors
    /// What the compiler said.
    pub fn compile(&self, source: &Path, module: &Path) -> Result<(), String> {
        let output = Command::new(&self.command[0])
            .args(&self.command[1..])
            .args([
                "-std=c11",
                "-O3",
                "-s",
                "-nostdlib",
                "-Wall",
                "-Wextra",
                "-Werror",
            ])
            .args(["-Wl,--no-entry", "-o"])
            .args([module, source])
            .env("ZIG_GLOBAL_CACHE_DIR", &self.cache)
            .env("ZIG_LOCAL_CACHE_DIR", &self.cache)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{} could not be started: {error}", self.name()))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }
}
