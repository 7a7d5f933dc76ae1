//! URLs of servers and names of nodes.

use std::net::IpAddr;

/// Declares a text that was validated when it was parsed.
macro_rules! text_type {
    ($(#[doc = $about:literal])+ $Name:ident) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $Name(String);

        impl $Name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

pub(super) use text_type;

text_type! {
    /// Address of a gRPC server, `http://host:port`; `host:port` means the same. The host is a name
    /// or an IP address.
    GrpcUrl
}

impl GrpcUrl {
    /// Parses a host and a port from 1 to 65535; `None` for anything else, including a path.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        authority(text.strip_prefix("http://").unwrap_or(text))
            .map(|authority| Self(format!("http://{authority}")))
    }
}

text_type! {
    /// Address of a server, `http://host:port` or `https://host:port`; `host:port` means
    /// `http://host:port`.
    ServerUrl
}

impl ServerUrl {
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

    /// Returns whether the host is `localhost` or a loopback address.
    pub fn is_loopback(&self) -> bool {
        let authority = self.0.rsplit_once('/').map_or(&*self.0, |(_, authority)| authority);
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    }
}

/// Prefix of a name in [`NodeUrl`].
const DNS_PREFIX: &str = "dns:";

/// A node's gRPC address, or a DNS name with the addresses of several nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeUrl {
    Grpc(GrpcUrl),
    /// `host:port`, written `dns:host:port`: each address of the host is a node.
    Dns(String),
}

impl NodeUrl {
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim().strip_prefix(DNS_PREFIX) {
            Some(name) => authority(name).map(Self::Dns),
            None => GrpcUrl::parse(text).map(Self::Grpc),
        }
    }
}

impl std::fmt::Display for NodeUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Grpc(url) => url.fmt(f),
            Self::Dns(name) => write!(f, "{DNS_PREFIX}{name}"),
        }
    }
}

/// Parses the part of a URL after the scheme as `host:port`; `None` for anything else.
pub(super) fn authority(text: &str) -> Option<String> {
    let (host, port) = text.strip_suffix('/').unwrap_or(text).rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
    let host_is_plain = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host.len() <= 253
                && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
        }
    };
    host_is_plain.then(|| format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_addresses_and_urls_are_valid() {
        for (text, url) in [
            ("http://127.0.0.1:50061", "http://127.0.0.1:50061"),
            ("decode-0.decode:50061", "http://decode-0.decode:50061"),
            ("http://[::1]:9/", "http://[::1]:9"),
        ] {
            assert_eq!(GrpcUrl::parse(text).unwrap().as_str(), url);
        }
    }

    #[test]
    fn node_url_is_an_address_or_a_dns_name() {
        let dns = NodeUrl::parse("dns:decode.serving.svc:50061").unwrap();
        assert_eq!(dns, NodeUrl::Dns("decode.serving.svc:50061".into()));
        assert_eq!(NodeUrl::parse(&dns.to_string()), Some(dns));
        let address = GrpcUrl::parse("a:1").map(NodeUrl::Grpc);
        assert_eq!(NodeUrl::parse("a:1"), address);
        for text in ["dns:", "dns:host", "dns:http://host:1", "dns:host:0", "dns://host:1"] {
            assert_eq!(NodeUrl::parse(text), None, "{text}");
        }
    }

    #[test]
    fn invalid_address_is_rejected() {
        for text in [
            "",
            "host",
            "host:0",
            "host:70000",
            "https://host:1",
            "http://:5",
            "http://a b:5",
            "http://host:5/path",
            "::1:5",
            "[::1:5",
            "user@host:5",
            "host:+5x",
        ] {
            assert_eq!(GrpcUrl::parse(text), None, "{text}");
        }
    }

    #[test]
    fn endpoint_scheme_is_optional() {
        for (text, url) in [
            ("127.0.0.1:2379", "http://127.0.0.1:2379"),
            ("http://etcd-0.etcd:2379/", "http://etcd-0.etcd:2379"),
            ("https://[::1]:2379", "https://[::1]:2379"),
        ] {
            assert_eq!(ServerUrl::parse(text).unwrap().as_str(), url);
        }
        for text in ["", "etcd", "ftp://etcd:1", "https://etcd", "https://http://etcd:1", "a b:1"] {
            assert_eq!(ServerUrl::parse(text), None, "{text}");
        }
    }
}
