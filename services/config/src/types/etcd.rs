//! Endpoints and key prefix of an etcd cluster.

use super::grpc_url::{authority, text_type};

text_type! {
    /// An etcd endpoint, `http://host:port` or `https://host:port`; `host:port` means `http://host:port`.
    EtcdUrl
}

impl EtcdUrl {
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (scheme, rest),
            Some(_) => return None,
            None => ("http", text),
        };
        authority(rest).map(|authority| Self(format!("{scheme}://{authority}")))
    }

    pub fn is_https(&self) -> bool {
        self.0.starts_with("https://")
    }
}

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
    fn endpoint_scheme_is_optional() {
        for (text, url) in [
            ("127.0.0.1:2379", "http://127.0.0.1:2379"),
            ("http://etcd-0.etcd:2379/", "http://etcd-0.etcd:2379"),
            ("https://[::1]:2379", "https://[::1]:2379"),
        ] {
            assert_eq!(EtcdUrl::parse(text).unwrap().as_str(), url);
        }
        for text in ["", "etcd", "ftp://etcd:1", "https://etcd", "https://http://etcd:1", "a b:1"] {
            assert_eq!(EtcdUrl::parse(text), None, "{text}");
        }
    }

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
