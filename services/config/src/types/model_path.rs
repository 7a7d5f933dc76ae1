//! Location of a model: a local path, or a name on the Hugging Face hub.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Prefix of hub models.
const HUB_PREFIX: &str = "hf:";
const DEFAULT_REVISION: &str = "main";
/// Maximum length of a word in bytes. The hub allows 96 bytes in a model name; file names may be
/// longer.
const WORD_BYTES_MAX: usize = 200;
/// Maximum number of parts of a split model file.
const PARTS_MAX: u32 = 1_000;

/// A local file or folder, or a model of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelPath {
    Local(PathBuf),
    Hub(HubModel),
}

/// A model of the hub, `hf:ORG/NAME[@REVISION][/FILE.gguf]`.
///
/// Each part is a plain word, so no part can escape a folder or a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `ORG/NAME`.
    pub name: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// GGUF file of the model; `None` means the whole folder.
    pub file: Option<String>,
}

impl ModelPath {
    /// Parses a path; `None` if the text is empty or an invalid hub model.
    pub fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix(HUB_PREFIX) {
            Some(name) => HubModel::parse(name).map(Self::Hub),
            None => (!text.is_empty()).then(|| Self::Local(text.into())),
        }
    }

    /// Returns the model's default name in client requests.
    pub(crate) fn served_name(&self) -> Option<String> {
        let last = |path: &Path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some(name.strip_suffix(".gguf").unwrap_or(&name).to_owned())
        };
        match self {
            Self::Local(path) => last(path),
            Self::Hub(HubModel { file: Some(file), .. }) => last(Path::new(file)),
            Self::Hub(HubModel { name, .. }) => Some(name.clone()),
        }
    }
}

impl HubModel {
    /// Parses the part after `hf:`.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '/');
        let (organisation, name) = (parts.next()?, parts.next()?);
        let file = parts.next();
        let (name, revision) = name.split_once('@').unwrap_or((name, DEFAULT_REVISION));
        let file_fits = file.is_none_or(|f| f.ends_with(".gguf") && f.split('/').all(is_word));
        ([organisation, name, revision].into_iter().all(is_word) && file_fits).then(|| Self {
            name: format!("{organisation}/{name}"),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HUB_PREFIX}{}", self.name)?;
        if self.revision != DEFAULT_REVISION {
            write!(f, "@{}", self.revision)?;
        }
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

impl fmt::Display for ModelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => path.display().fmt(f),
            Self::Hub(model) => model.fmt(f),
        }
    }
}

/// Returns whether `text` is a valid part of a hub path or URL and needs no escaping there.
pub(crate) fn is_word(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=WORD_BYTES_MAX).contains(&text.len())
        && text.bytes().all(plain)
        && text.bytes().any(|byte| byte != b'.')
}

/// Returns all parts of the split model to which `file` belongs: three for `m-00001-of-00003.gguf`,
/// otherwise `file`.
pub fn parts_of(file: &str) -> Vec<String> {
    let parts = || -> Option<Vec<String>> {
        let (stem, extension) = file.rsplit_once('.')?;
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, _) = stem.rsplit_once('-')?;
        let parts: u32 = count.parse().ok().filter(|parts| (1..=PARTS_MAX).contains(parts))?;
        let width = count.len();
        Some((1..=parts).map(|at| format!("{stem}-{at:0width$}-of-{count}.{extension}")).collect())
    };
    match parts() {
        Some(all) if all.iter().any(|part| part == file) => all,
        _ => vec![file.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> HubModel {
        match ModelPath::parse(text) {
            Some(ModelPath::Hub(model)) => model,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn hub_model_has_organisation_name_and_optional_revision_and_file() {
        let model = hub("hf:acme/tiny-1.5B");
        assert_eq!((model.name.as_str(), model.revision.as_str()), ("acme/tiny-1.5B", "main"));
        assert_eq!(model.file, None);
        let model = hub("hf:acme/tiny@v1.0/q4/tiny-Q4_K_M.gguf");
        assert_eq!(model.revision, "v1.0");
        assert_eq!(model.file.as_deref(), Some("q4/tiny-Q4_K_M.gguf"));
        for text in ["hf:acme/tiny", "hf:acme/tiny@0a1b", "hf:acme/tiny@v1/x/m.gguf"] {
            assert_eq!(hub(text).to_string(), text);
        }
    }

    #[test]
    fn hub_model_that_escapes_its_folder_is_invalid() {
        for text in [
            "hf:",
            "hf:tiny",
            "hf:/tiny",
            "hf:acme/",
            "hf:acme/..",
            "hf:../tiny",
            "hf:acme/tiny@",
            "hf:acme/tiny@../../etc",
            "hf:acme/tiny/../m.gguf",
            "hf:acme/tiny//m.gguf",
            "hf:acme/tiny/model.bin",
            "hf:acme/tiny?x=y",
            "hf:acme/ti ny",
            "hf:acme/tiny%2e",
            "",
        ] {
            assert_eq!(ModelPath::parse(text), None, "{text}");
        }
    }

    #[test]
    fn path_without_hub_prefix_is_local() {
        for text in ["acme/tiny", "./hf:acme/tiny", "m.gguf"] {
            assert_eq!(ModelPath::parse(text), Some(ModelPath::Local(text.into())));
        }
    }

    #[test]
    fn one_part_yields_all_parts() {
        let all = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(parts_of(all[0]), all);
        assert_eq!(parts_of(all[1]), all);
        for alone in ["m.gguf", "m-00003-of-00002.gguf", "m-1-of-99999999.gguf", "m-of-.gguf"] {
            assert_eq!(parts_of(alone), [alone]);
        }
    }

    #[test]
    fn served_name_is_file_folder_or_hub_name() {
        let name = |text| ModelPath::parse(text).unwrap().served_name().unwrap();
        assert_eq!(name("models/tiny.gguf"), "tiny");
        assert_eq!(name("models/tiny"), "tiny");
        assert_eq!(name("hf:acme/tiny@v1"), "acme/tiny");
        assert_eq!(name("hf:acme/tiny/q4/tiny-Q4.gguf"), "tiny-Q4");
    }
}
