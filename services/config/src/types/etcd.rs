//! Key prefix of an etcd cluster.

use super::url::text_type;

text_type! {
    /// Key prefix of one cluster: words with `/` in front of each, and no trailing slash.
    EtcdPrefix
}

/// Maximum length of a prefix in bytes. The prefix is part of every key.
const PREFIX_BYTES_MAX: usize = 128;

impl EtcdPrefix {
    /// Parses a prefix; slashes at both ends are optional.
    pub fn parse(text: &str) -> Option<Self> {
        let path = text.trim().trim_matches('/');
        let is_word = |word: &str| {
            !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        (path.len() < PREFIX_BYTES_MAX && path.split('/').all(is_word))
            .then(|| Self(format!("/{path}")))
    }
}

impl Default for EtcdPrefix {
    fn default() -> Self {
        Self("/baton".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_around_a_prefix_are_optional() {
        for text in ["baton/a", "/baton/a", "/baton/a/"] {
            assert_eq!(EtcdPrefix::parse(text).unwrap().as_str(), "/baton/a");
        }
        for text in ["", "/", "a//b", "a b", "a/\u{e9}", &"x".repeat(128)] {
            assert_eq!(EtcdPrefix::parse(text), None, "{text}");
        }
        assert_eq!(EtcdPrefix::parse("baton"), Some(EtcdPrefix::default()));
    }
}
