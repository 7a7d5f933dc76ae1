//! Folder for data that programs can recreate.

use std::path::PathBuf;

use crate::Environment;

/// Variables that locate the folder, in falling precedence.
pub(crate) const VARIABLES: [&str; 2] = ["XDG_CACHE_HOME", "HOME"];

/// Returns `baton` in `XDG_CACHE_HOME`, otherwise in `.cache` of the home folder; `None` if neither is set.
pub fn cache_folder(environment: &Environment) -> Option<PathBuf> {
    let folder = |name: &str| {
        let path = environment.get(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let [cache, home] = VARIABLES.map(folder);
    Some(cache.or_else(|| home.map(|home| home.join(".cache")))?.join("baton"))
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
