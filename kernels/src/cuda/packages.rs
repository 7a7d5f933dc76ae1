//! NVIDIA's libraries that pip installed beside this program.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Returns the path of `file`, such as `nccl/lib/libnccl.so.2`, in NVIDIA's packages of the Python
/// environment in whose folder `bin` this program lies; `None` if it is not there.
pub(super) fn of_this_environment(file: &str) -> Option<PathBuf> {
    in_environment(env::current_exe().ok()?.parent()?.parent()?, file)
}

fn in_environment(environment: &Path, file: &str) -> Option<PathBuf> {
    let pythons = fs::read_dir(environment.join("lib")).ok()?.filter_map(Result::ok);
    pythons
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|entry| {
            ["site-packages", "dist-packages"].map(|folder| entry.path().join(folder))
        })
        .map(|packages| packages.join("nvidia").join(file))
        .find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_packages_are_found() {
        let environment = tempfile::tempdir().unwrap();
        let folder = environment.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
        fs::create_dir_all(&folder).unwrap();
        let file = "nccl/lib/libnccl.so.2";
        assert_eq!(in_environment(environment.path(), file), None);
        fs::write(folder.join("libnccl.so.2"), "").unwrap();
        assert_eq!(in_environment(environment.path(), file), Some(folder.join("libnccl.so.2")));
    }
}
