//! CUDA libraries that are loaded at run time and that the loader may not find by itself: those in directories that the user
//! names, and those of Python's nvidia packages. It must never know what a library is used for.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Directories, separated by colons, that are looked in before Python's packages.
const VARIABLE: &str = "TIMETABLE_CUDA_LIBRARY_PATH";

/// Where Python's nvidia packages keep their libraries, from a directory of `sys.path`: one folder since CUDA 13, one for each
/// library before.
const PACKAGES: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cublas/lib"];

const RTLD_NOW: c_int = 0x2;
const RTLD_GLOBAL: c_int = 0x100;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
}

/// Makes `file` (a soname, such as "libcublasLt.so.13") known to the loader, so that loading it by that name succeeds: by its
/// name, else from [`VARIABLE`]'s directories, else from Python's packages. Whether it is known now.
pub(crate) fn preload(file: &str) -> bool {
    if open(Path::new(file)) {
        return true;
    }
    let named = std::env::var_os(VARIABLE).unwrap_or_default();
    let found = std::env::split_paths(&named)
        .chain(package_directories().iter().cloned())
        .map(|directory| directory.join(file))
        .find(|path| path.is_file() && open(path));
    if let Some(path) = &found {
        tracing::info!(path = %path.display(), "loaded a CUDA library that is not in the loader's paths");
    }
    found.is_some()
}

/// Loads a library for the life of the process.
fn open(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_encoded_bytes()) else {
        return false;
    };
    // SAFETY: a path that ends in zero; the initialisers of CUDA's libraries have no preconditions.
    let handle = unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_GLOBAL) };
    !handle.is_null()
}

/// The library folders of the nvidia packages that python3 sees; none without python3.
fn package_directories() -> &'static [PathBuf] {
    static DIRECTORIES: OnceLock<Vec<PathBuf>> = OnceLock::new();
    DIRECTORIES.get_or_init(|| {
        let output = Command::new("python3")
            .args(["-c", "import sys; print('\\n'.join(sys.path))"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        match output {
            Ok(output) => in_packages(&String::from_utf8_lossy(&output.stdout)),
            Err(_) => Vec::new(),
        }
    })
}

/// The library folders below the directories of `sys_path`, one a line.
fn in_packages(sys_path: &str) -> Vec<PathBuf> {
    sys_path
        .lines()
        .filter(|line| !line.is_empty())
        .flat_map(|line| PACKAGES.map(|package| Path::new(line).join(package)))
        .filter(|path| path.is_dir())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_that_exist_are_looked_in() {
        let root = std::env::temp_dir().join(format!("timetable-libraries-{}", std::process::id()));
        let library = root.join(PACKAGES[0]);
        std::fs::create_dir_all(&library).unwrap();
        let sys_path = format!("\n{}\n/no/such/site-packages\n", root.display());
        assert_eq!(in_packages(&sys_path), [library]);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_library_that_is_nowhere_is_not_found() {
        assert!(!preload("libtimetable-does-not-exist.so.13"));
        assert!(!preload("a name\0with a zero"));
    }

    #[test]
    fn a_library_of_the_system_is_found_by_its_name() {
        assert!(preload("libc.so.6"));
    }
}
