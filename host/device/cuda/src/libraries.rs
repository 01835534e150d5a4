//! CUDA libraries that are loaded at run time and that the loader may not find by itself: those in directories that the user
//! names, and those of Python's nvidia packages. It must never know what a library is used for.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Directories, separated by colons, that are looked in before Python's packages.
const VARIABLE: &str = "TIMETABLE_CUDA_LIBRARY_PATH";

/// Where Python's nvidia packages keep their libraries, from a directory of `sys.path`: one folder since CUDA 13, one for each
/// library before.
const PACKAGES: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/nvtx/lib"];

const RTLD_NOW: c_int = 0x2;
const RTLD_GLOBAL: c_int = 0x100;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A library that stays loaded for the life of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(NonNull<c_void>);

impl Library {
    /// Loads `file` (a soname, such as "libcublasLt.so.13") by its name, else from the directories of
    /// `TIMETABLE_CUDA_LIBRARY_PATH`, else from Python's packages. Whoever loads it by its name afterwards finds it.
    pub(crate) fn load(file: &str) -> Option<Self> {
        if let Some(library) = Self::open(Path::new(file)) {
            return Some(library);
        }
        let named = std::env::var_os(VARIABLE).unwrap_or_default();
        std::env::split_paths(&named)
            .chain(package_directories().iter().cloned())
            .map(|directory| directory.join(file))
            .filter(|path| path.is_file())
            .find_map(|path| {
                let library = Self::open(&path)?;
                tracing::info!(path = %path.display(), "loaded a CUDA library that is not in the loader's paths");
                Some(library)
            })
    }

    /// The address of an exported function.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is loaded, and the name ends in zero.
        NonNull::new(unsafe { dlsym(self.0.as_ptr(), name.as_ptr()) })
    }

    fn open(path: &Path) -> Option<Self> {
        let path = CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
        // SAFETY: a path that ends in zero; the initialisers of CUDA's libraries have no preconditions.
        NonNull::new(unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_GLOBAL) }).map(Self)
    }
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
        assert!(Library::load("libtimetable-does-not-exist.so.13").is_none());
        assert!(Library::load("a name\0with a zero").is_none());
    }

    #[test]
    fn a_library_of_the_system_is_found_by_its_name() {
        let library = Library::load("libc.so.6").unwrap();
        assert!(library.symbol(c"getpid").is_some());
        assert!(library.symbol(c"timetable_does_not_exist").is_none());
    }
}
