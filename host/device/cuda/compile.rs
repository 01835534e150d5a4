//! Finding a CUDA compiler, and building `kernels/src` with it: what this crate's build script and `cargo xtask kernels`
//! share (each includes this file). `kernels/build.sh` says how the compiler is called.
//!
//! Knows directories and versions. Must never know what a kernel does, nor download anything.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where `cargo xtask kernels` puts a compiler, below the target directory.
pub const INSTALLED: &str = "cuda-compiler";

/// The file that says what a directory of built kernels was made of and for.
pub const MANIFEST: &str = "MANIFEST";

/// A CUDA compiler: its path and what it says its version is.
pub struct Compiler {
    nvcc: PathBuf,
    version: String,
}

impl Compiler {
    /// The compiler that the environment names (`NVCC`, `CUDA_HOME`), the one on `PATH`, or the one that
    /// `cargo xtask kernels` installed below `target`: the first that runs.
    pub fn find(target: &Path) -> Option<Self> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let candidates = [
            variable("NVCC").map(PathBuf::from),
            variable("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")),
            Some(PathBuf::from("nvcc")),
            Some(target.join(INSTALLED).join("nvidia/cu13/bin/nvcc")),
        ];
        candidates.into_iter().flatten().find_map(Self::at)
    }

    fn at(nvcc: PathBuf) -> Option<Self> {
        let output = Command::new(&nvcc).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        // The last line names the build: "Build cuda_13.0.r13.0/compiler.36424714_0".
        let version = text.lines().rfind(|line| !line.trim().is_empty())?;
        output.status.success().then(|| Self {
            nvcc,
            version: version.trim().to_owned(),
        })
    }

    /// The compiler's path.
    pub fn path(&self) -> &Path {
        &self.nvcc
    }
}

/// What a directory of built kernels was made of and for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// A digest of every source and of `build.sh`.
    pub sources: String,
    /// The compiler's version.
    pub compiler: String,
    /// What was built: `90a` is machine code for compute capability 9.0 alone, `ptx80` PTX for 8.0 and later.
    pub targets: Vec<String>,
}

impl Manifest {
    /// The manifest of a directory; `None` where a build has not come to its end.
    pub fn read(directory: &Path) -> Option<Self> {
        let text = fs::read_to_string(directory.join(MANIFEST)).ok()?;
        let lines: BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once(": "))
            .collect();
        Some(Self {
            sources: (*lines.get("sources")?).to_owned(),
            compiler: (*lines.get("compiler")?).to_owned(),
            targets: lines
                .get("targets")?
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
        })
    }

    fn write(&self, directory: &Path) -> Result<(), String> {
        let text = format!(
            "sources: {}\ncompiler: {}\ntargets: {}\n",
            self.sources,
            self.compiler,
            self.targets.join(" ")
        );
        let path = directory.join(MANIFEST);
        fs::write(&path, text)
            .map_err(|error| format!("{} could not be written: {error}", path.display()))
    }
}

/// A digest of the kernels' sources and of `build.sh`, whose flags they are built with.
pub fn sources(root: &Path) -> Result<String, String> {
    let kernels = root.join("kernels");
    let mut files = files(&kernels.join("src"))?;
    files.push(kernels.join("build.sh"));
    // FNV-1a: it only has to tell one state of the sources from another.
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut take = |bytes: &[u8]| {
        for &byte in bytes.iter().chain(&[0xff]) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for file in files {
        take(file.file_name().unwrap_or_default().as_encoded_bytes());
        take(&fs::read(&file).map_err(|error| unreadable(&file, &error))?);
    }
    Ok(format!("{digest:016x}"))
}

/// Builds the kernels for `targets` into `out`, unless what is there is the same; returns whether anything was built.
///
/// # Errors
/// What could not be read or written, or the compiler's own messages.
pub fn build(
    root: &Path,
    out: &Path,
    targets: &[&str],
    compiler: &Compiler,
) -> Result<bool, String> {
    let wanted = Manifest {
        sources: sources(root)?,
        compiler: compiler.version.clone(),
        targets: targets.iter().map(|&target| target.to_owned()).collect(),
    };
    if Manifest::read(out).as_ref() == Some(&wanted) {
        return Ok(false);
    }
    // Nothing of another build stays, and no manifest describes half of one.
    match fs::remove_dir_all(out) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(format!("{} could not be emptied: {error}", out.display()));
        }
        _ => {}
    }
    let output = Command::new("sh")
        .arg(root.join("kernels/build.sh"))
        .arg(out)
        .arg(targets.join(" "))
        .env("NVCC", compiler.path())
        .env_remove("KERNEL_FLAGS")
        .env_remove("EXTRA_SOURCES")
        .output()
        .map_err(|error| format!("sh could not be started for kernels/build.sh: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "{} could not build the kernels ({}):\n{}",
            compiler.path().display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        ));
    }
    wanted.write(out)?;
    Ok(true)
}

/// The images of a directory, sorted: one file a source.
pub fn images(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut images = files(directory)?;
    images.retain(|path| path.extension().is_some_and(|e| e == "fatbin"));
    Ok(images)
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(directory).map_err(|error| unreadable(directory, &error))?;
    let mut files = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| unreadable(directory, &error))?;
    files.sort();
    Ok(files)
}

fn unreadable(path: &Path, error: &std::io::Error) -> String {
    format!("{} could not be read: {error}", path.display())
}
