//! Origins of web pages.

use super::url::text_type;

text_type! {
    /// Origin of web pages as browsers send it, `scheme://host` or `scheme://host:port`; `*` is any.
    Origin
}

impl Origin {
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_lowercase();
        let text = text.strip_suffix('/').unwrap_or(&text);
        let is_origin = text.split_once("://").is_some_and(|(scheme, host)| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
            let is_scheme = |c: char| c.is_ascii_alphanumeric() || c == '-';
            !scheme.is_empty()
                && scheme.chars().all(is_scheme)
                && !host.is_empty()
                && host.chars().all(is_plain)
        });
        (text == "*" || is_origin).then(|| Self(text.to_owned()))
    }

    /// Returns whether this is `*`.
    pub fn is_any(&self) -> bool {
        self.0 == "*"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_a_host_and_no_path() {
        for (text, origin) in [
            ("https://chat.example.com", "https://chat.example.com"),
            (" HTTP://Localhost:3000/ ", "http://localhost:3000"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("tauri://localhost", "tauri://localhost"),
            ("*", "*"),
        ] {
            assert_eq!(Origin::parse(text).unwrap().as_str(), origin);
        }
        for text in
            ["", "localhost", "https://", "https://a/b", "https://*.example.com", "null", "**"]
        {
            assert_eq!(Origin::parse(text), None, "{text}");
        }
    }
}
