//! Address of a trainer that broadcasts weights by NCCL.

/// Longest address, in bytes.
const ADDRESS_BYTES_MAX: usize = 300;

/// Splits `host:port/token` into `host:port` and the token. Returns `None` for another text.
pub fn trainer_address(text: &str) -> Option<(&str, &str)> {
    let (host, token) = text.split_once('/')?;
    let (name, port) = host.rsplit_once(':')?;
    let is_valid = !name.is_empty()
        && port.parse::<u16>().is_ok()
        && !token.is_empty()
        && text.len() <= ADDRESS_BYTES_MAX
        && text.bytes().all(|byte| byte.is_ascii_graphic());
    is_valid.then_some((host, token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_a_host_a_port_and_a_token() {
        assert_eq!(trainer_address("10.0.0.7:5000/a/b"), Some(("10.0.0.7:5000", "a/b")));
        assert_eq!(trainer_address("[::1]:5000/a"), Some(("[::1]:5000", "a")));
        let long = format!("host:1/{}", "t".repeat(ADDRESS_BYTES_MAX));
        for text in ["", "host", "host:1", "host:1/", ":1/t", "host:70000/t", "host:1/a b", &long] {
            assert_eq!(trainer_address(text), None, "{text:?}");
        }
    }
}
