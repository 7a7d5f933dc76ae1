//! Finds the GGUF file of a folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Names of the weights of a Hugging Face model. A folder with one of these files is a Hugging Face
/// model.
const SAFETENSORS_FILES: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
/// Files of a Hugging Face model without weights. A folder with all of these files is a Hugging
/// Face model: a router and random weights need no more.
const CONFIG_FILES: [&str; 2] = ["config.json", "tokenizer.json"];

/// Finds the GGUF file of a folder that holds one GGUF model, in one file or split into parts, and
/// no Hugging Face model. Returns the first part of a split model. Returns `None` if the folder
/// holds no or several GGUF models, or a Hugging Face model.
///
/// # Errors
/// The folder or an entry cannot be read.
pub fn model_file_in(folder: &Path) -> io::Result<Option<PathBuf>> {
    let has_file = |name: &str| folder.join(name).try_exists();
    for name in SAFETENSORS_FILES {
        if has_file(name)? {
            return Ok(None);
        }
    }
    let [config, tokenizer] = CONFIG_FILES;
    if has_file(config)? && has_file(tokenizer)? {
        return Ok(None);
    }
    let mut found = None;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_gguf = path.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf"));
        if is_gguf && !is_later_part(&path) && is_file(&path)? && found.replace(path).is_some() {
            return Ok(None);
        }
    }
    Ok(found)
}

/// Returns whether the path, or the target of a link, is a file. A dangling link is none.
fn is_file(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        metadata => Ok(metadata?.is_file()),
    }
}

/// Returns whether the name ends in `-NNNNN-of-NNNNN` with a part number above 1.
fn is_later_part(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let Some((name, count)) = stem.rsplit_once("-of-") else { return false };
    let number = name.rsplit_once('-').map_or("", |(_, number)| number);
    let is_part_number =
        |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    is_part_number(count) && is_part_number(number) && number != "00001"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::create_dir(folder.path().join("folder.gguf")).unwrap();
        let file = model_file_in(folder.path()).unwrap()?;
        Some(file.file_name().unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn the_only_gguf_model_of_a_folder_is_found() {
        for (names, file) in [
            (&["a.gguf", "README.md", "config.json"][..], "a.gguf"),
            (&["a.GGUF", "tokenizer.json"], "a.GGUF"),
            (&["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        ] {
            assert_eq!(found(names).as_deref(), Some(file), "{names:?}");
        }
    }

    #[test]
    fn no_or_several_gguf_models_and_hugging_face_folders_have_no_gguf_file() {
        for names in [
            &[][..],
            &["a.bin"],
            &["a.gguf", "b.gguf"],
            &["a-00001-of-00002.gguf", "b.gguf"],
            &["a.gguf", "config.json", "tokenizer.json"],
            &["a.gguf", "model.safetensors"],
            &["a.gguf", "model.safetensors.index.json"],
        ] {
            assert_eq!(found(names), None, "{names:?}");
        }
    }

    #[test]
    fn unreadable_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let missing = model_file_in(&folder.path().join("missing")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let file = folder.path().join("a.txt");
        fs::write(&file, "").unwrap();
        assert_eq!(model_file_in(&file).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        // Nobody can look up names in a folder whose own name is too long.
        let unreadable = model_file_in(&folder.path().join("x".repeat(300))).unwrap_err();
        assert_eq!(unreadable.kind(), io::ErrorKind::InvalidFilename);
    }

    #[test]
    fn dangling_link_is_no_gguf_file() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("missing", folder.path().join("a.gguf")).unwrap();
        assert_eq!(model_file_in(folder.path()).unwrap(), None);
    }
}
