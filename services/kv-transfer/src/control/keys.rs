//! Derives one key per purpose from the cluster secret, so that a tag for one purpose is invalid
//! for another.

use std::fmt::Write;

use proto::auth::ClusterSecret;
use ring::{
    aead::{AES_256_GCM, LessSafeKey, UnboundKey},
    hmac,
};

use crate::api::Epoch;

/// Length of a tag.
pub(super) const TAG_BYTES: usize = 32;

#[derive(Clone)]
pub struct Keys {
    control: hmac::Key,
    data: hmac::Key,
    zap: hmac::Key,
}

impl Keys {
    pub fn derive(secret: &ClusterSecret) -> Self {
        Self {
            control: secret.key("baton kv-transfer control 3"),
            data: secret.key("baton kv-transfer data 1"),
            zap: secret.key("baton kv-transfer door 1"),
        }
    }

    /// Returns the key of the control messages from one process to another.
    pub(super) fn control(&self, from: Epoch, to: Epoch) -> LessSafeKey {
        let epochs = [from.to_bytes(), to.to_bytes()].concat();
        let key = hmac::sign(&self.control, &epochs);
        let key = UnboundKey::new(&AES_256_GCM, key.as_ref());
        LessSafeKey::new(key.expect("a tag of HMAC-SHA-256 has the length of the key"))
    }

    /// Returns the tag of a data connection's handshake over `parts` in order. Each part has a
    /// fixed length.
    pub fn tag_data(&self, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
        let mut context = hmac::Context::with_key(&self.data);
        for part in parts {
            context.update(part);
        }
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(context.sign().as_ref());
        tag
    }

    /// Compares in constant time.
    pub fn check_data(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        hmac::verify(&self.data, &parts.concat(), tag).is_ok()
    }

    /// Returns the credential for connection number `sequence` of process `from` to the control
    /// listener of process `to`. The credential crosses the network in clear text. The listener
    /// accepts it once, so a recorded credential is useless.
    pub fn credential(&self, from: Epoch, to: Epoch, sequence: u64) -> Credential {
        let user = format!("{from}-{sequence}");
        let tag = self.zap_tag(to, user.as_bytes());
        let password = tag.as_ref().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        Credential { user, password }
    }

    /// Returns sender and sequence number of a valid credential for process `me`. Compares in
    /// constant time.
    pub fn check_credential(
        &self,
        me: Epoch,
        user: &[u8],
        password: &[u8],
    ) -> Option<(Epoch, u64)> {
        let (from, sequence) = std::str::from_utf8(user).ok()?.split_once('-')?;
        let (from, sequence) = (Epoch::parse(from).ok()?, sequence.parse().ok()?);
        let expected = self.credential(from, me, sequence);
        // A tag over both passwords compares them in constant time.
        let tag = hmac::sign(&self.zap, expected.password.as_bytes());
        hmac::verify(&self.zap, password, tag.as_ref()).is_ok().then_some((from, sequence))
    }

    fn zap_tag(&self, to: Epoch, user: &[u8]) -> hmac::Tag {
        hmac::sign(&self.zap, &[&to.to_bytes(), user].concat())
    }
}

/// User name and password of ZeroMQ's PLAIN mechanism.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    pub user: String,
    pub password: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Epoch = Epoch(1);
    const TO: Epoch = Epoch(2);

    fn keys(secret: &str) -> Keys {
        Keys::derive(&ClusterSecret::new(secret).unwrap())
    }

    #[test]
    fn credential_is_valid_only_for_its_processes_number_and_secret() {
        let keys_of_cluster = keys("a secret of the cluster");
        let check = |me, credential: &Credential| {
            let Credential { user, password } = credential;
            keys_of_cluster.check_credential(me, user.as_bytes(), password.as_bytes())
        };
        let credential = keys_of_cluster.credential(FROM, TO, 7);
        assert_eq!(check(TO, &credential), Some((FROM, 7)));
        assert_eq!(check(Epoch(3), &credential), None);
        let other = keys("a secret of another cluster").credential(FROM, TO, 7);
        assert_eq!(check(TO, &other), None);
        for user in [format!("{FROM}-8"), format!("{TO}-7"), "baton".into(), String::new()] {
            assert_eq!(check(TO, &Credential { user, ..credential.clone() }), None);
        }
        for password in [String::new(), credential.password[1..].into()] {
            assert_eq!(check(TO, &Credential { password, ..credential.clone() }), None);
        }
    }
}
