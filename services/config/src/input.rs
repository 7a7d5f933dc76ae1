//! The sources of settings, and the folder for Baton's own data.

use std::{collections::BTreeMap, path::PathBuf};

/// Environment variables by name. Loading reads those that begin with `BATON_` and those of
/// [`Hub`](crate::hub::Hub) and [`cache_folder`].
pub type Environment = BTreeMap<String, String>;

/// Variables that locate the folder of [`cache_folder`], highest precedence first.
pub(crate) const CACHE_VARIABLES: [&str; 2] = ["XDG_CACHE_HOME", "HOME"];

/// Returns the folder for data that programs can recreate: `baton` in `XDG_CACHE_HOME`, otherwise
/// in `.cache` of the home folder; `None` if neither is set.
pub fn cache_folder(environment: &Environment) -> Option<PathBuf> {
    let folder = |name: &str| {
        let path = environment.get(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let [cache, home] = CACHE_VARIABLES.map(folder);
    Some(cache.or_else(|| home.map(|home| home.join(".cache")))?.join("baton"))
}

/// Unparsed values of flags by key (`node.slots`).
pub type Flags = BTreeMap<String, String>;

/// The sources of settings.
#[derive(Clone, Debug, Default)]
pub struct LoadInput {
    pub file: Option<PathBuf>,
    pub environment: Environment,
    pub flags: Flags,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folder_follows_xdg_cache_home_and_home() {
        let of = |variables: &[(&str, &str)]| {
            cache_folder(&variables.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect())
        };
        let home = ("HOME", "/h");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/c"), home]), Some("/c/baton".into()));
        assert_eq!(of(&[("XDG_CACHE_HOME", ""), home]), Some("/h/.cache/baton".into()));
        // A relative path would depend on the working directory.
        assert_eq!(of(&[("XDG_CACHE_HOME", "c"), home]), Some("/h/.cache/baton".into()));
        assert_eq!(of(&[]), None);
    }
}
