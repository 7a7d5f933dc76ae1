//! Finds the GGUF file of a folder.

use std::path::{Path, PathBuf};

/// Files that make a folder a Hugging Face model. Its weights are safetensors; a folder without weights is
/// enough for a router and for random weights.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];
const WITHOUT_WEIGHTS: [&str; 2] = ["config.json", "tokenizer.json"];

/// Returns the GGUF file of a folder that holds one GGUF model, in one file or split into several, and
/// no Hugging Face model. A split model's file is its first part.
pub fn file_of_folder(folder: &Path) -> Option<PathBuf> {
    let has = |name: &&str| folder.join(name).exists();
    if WEIGHTS.iter().any(has) || WITHOUT_WEIGHTS.iter().all(has) {
        return None;
    }
    let entries = std::fs::read_dir(folder).ok()?;
    let mut files = entries.flatten().map(|entry| entry.path()).filter(|path| {
        let is_gguf = path.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf"));
        is_gguf && path.is_file() && !is_later_part(path)
    });
    files.next().filter(|_| files.next().is_none())
}

/// Returns whether the name ends in `-NNNNN-of-NNNNN` with a part number above 1.
fn is_later_part(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let Some((name, count)) = stem.rsplit_once("-of-") else { return false };
    let number = name.rsplit_once('-').map_or("", |(_, number)| number);
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|it| it.is_ascii_digit());
    is_number(count) && is_number(number) && number != "00001"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("folder.gguf")).unwrap();
        let file = file_of_folder(folder.path())?;
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
}
