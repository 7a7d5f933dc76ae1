//! The location of a model: a local path, or a name on the Hugging Face hub.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Prefix of a path that names a model of the hub.
const HUB_PREFIX: &str = "hf:";
const DEFAULT_REVISION: &str = "main";
/// Hubs allow 96 bytes in a name; file names may be longer.
const WORD_BYTES_MAX: usize = 200;
/// More parts than any model has; a name that claims more is not believed.
const PARTS_MAX: u32 = 1_000;

/// A file or folder, or a model of a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelPath {
    Local(PathBuf),
    Hub(HubModel),
}

/// `hf:ORG/NAME[@REVISION][/FILE.gguf]`.
///
/// Every part is a plain word, so that none of them can lead out of a folder or a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `ORG/NAME`.
    pub name: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// A GGUF file of the model's; without it the whole folder.
    pub file: Option<String>,
}

impl ModelPath {
    /// `None`: empty, or begins like a hub's model and is none.
    pub fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix(HUB_PREFIX) {
            Some(name) => HubModel::parse(name).map(Self::Hub),
            None => (!text.is_empty()).then(|| Self::Local(text.into())),
        }
    }

    /// Under this name clients ask for the model unless another is set.
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

/// One part of a hub's path or URL, with nothing that would have to be escaped in either.
pub(crate) fn is_word(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=WORD_BYTES_MAX).contains(&text.len())
        && text.bytes().all(plain)
        && text.bytes().any(|byte| byte != b'.')
}

/// All files of which `file` is one: `m-00001-of-00003.gguf` stands for three, any other for itself.
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
    fn names_of_a_hub_have_an_organisation_and_perhaps_a_revision_and_a_file() {
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
    fn a_name_that_could_lead_elsewhere_is_no_name() {
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
    fn a_path_is_a_path_whatever_else_it_resembles() {
        for text in ["acme/tiny", "./hf:acme/tiny", "m.gguf"] {
            assert_eq!(ModelPath::parse(text), Some(ModelPath::Local(text.into())));
        }
    }

    #[test]
    fn a_part_stands_for_all_parts() {
        let all = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(parts_of(all[0]), all);
        assert_eq!(parts_of(all[1]), all);
        for alone in ["m.gguf", "m-00003-of-00002.gguf", "m-1-of-99999999.gguf", "m-of-.gguf"] {
            assert_eq!(parts_of(alone), [alone]);
        }
    }

    #[test]
    fn a_model_is_served_under_the_name_that_tells_it_best() {
        let name = |text| ModelPath::parse(text).unwrap().served_name().unwrap();
        assert_eq!(name("models/tiny.gguf"), "tiny");
        assert_eq!(name("models/tiny"), "tiny");
        assert_eq!(name("hf:acme/tiny@v1"), "acme/tiny");
        assert_eq!(name("hf:acme/tiny/q4/tiny-Q4.gguf"), "tiny-Q4");
    }
}
