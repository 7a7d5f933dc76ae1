//! Isolation of cached prefixes: requests share cached KV only with the same tenant and the same salt.
//!
//! The latency of a response shows whether its prompt was cached, and so reveals prompts of other clients. A client
//! isolates itself with a salt of its own. A gateway isolates its clients by naming each request's tenant in a
//! header.

use super::error::{FieldError, shown};

/// Header and gRPC metadata key of a request's tenant.
pub const TENANT_HEADER: &str = "x-baton-tenant";
const TENANT_CHARS_MAX: usize = 64;
/// Maximum length of a salt in bytes. Salt and tenant together stay below the limit of the nodes.
pub const CACHE_SALT_BYTES_MAX: usize = 128;

/// A validated tenant name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant(String);

impl Tenant {
    pub fn parse(header: &[u8]) -> Result<Self, FieldError> {
        let text = String::from_utf8_lossy(header);
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.is_empty() || text.len() > TENANT_CHARS_MAX || !text.chars().all(allowed) {
            let problem = format!(
                "is {:?}; allowed: 1 to {TENANT_CHARS_MAX} letters, digits, '.', '_' and '-'",
                shown(&text)
            );
            return Err(FieldError::new(TENANT_HEADER, problem));
        }
        Ok(Self(text.into_owned()))
    }
}

/// Checks the length of a client's salt.
pub fn check_salt(field: &str, salt: String) -> Result<String, FieldError> {
    if salt.len() > CACHE_SALT_BYTES_MAX {
        let bytes = salt.len();
        let problem = format!("has {bytes} bytes; allowed: at most {CACHE_SALT_BYTES_MAX}");
        return Err(FieldError::new(field, problem));
    }
    Ok(salt)
}

/// Returns the salt for nodes. A tenant name has no slash, so different pairs yield different salts.
pub fn salt_for_nodes(tenant: Option<&Tenant>, salt: String) -> String {
    match tenant {
        Some(Tenant(tenant)) => format!("{tenant}/{salt}"),
        None => salt,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tenants_are_plain_and_bounded() {
        let long = "x".repeat(65);
        assert!(Tenant::parse(b"team-7.eu_west").is_ok());
        for wrong in [&b""[..], b"a/b", b"a b", b"\xff", "é".as_bytes(), long.as_bytes()] {
            let error = Tenant::parse(wrong).unwrap_err();
            assert_eq!(error.field, TENANT_HEADER);
            assert!(error.problem.contains("1 to 64"), "{error}");
        }
    }

    #[test]
    fn tenants_and_salts_never_meet() {
        let tenant = |name: &str| Some(Tenant::parse(name.as_bytes()).unwrap());
        let salts = [
            (tenant("a"), "b"),
            (tenant("ab"), ""),
            (tenant("a"), ""),
            (tenant("a"), "b/c"),
            (tenant("b"), "b"),
            (None, "b"),
            (None, ""),
        ]
        .map(|(tenant, salt)| salt_for_nodes(tenant.as_ref(), salt.to_owned()));
        for (index, salt) in salts.iter().enumerate() {
            assert!(!salts[..index].contains(salt), "{salt}");
        }
    }
}
