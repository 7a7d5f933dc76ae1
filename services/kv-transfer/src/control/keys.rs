//! Derives one key per purpose from the cluster secret, so that a tag for one purpose is invalid
//! for another.

use std::fmt::Write;

use ring::hmac;

use crate::{api::Epoch, config::ClusterSecret};

/// Length of a tag.
pub const TAG_BYTES: usize = 32;

#[derive(Clone)]
pub struct Keys {
    control: hmac::Key,
    data: hmac::Key,
    zap: hmac::Key,
}

impl Keys {
    pub fn derive(secret: &ClusterSecret) -> Self {
        Self {
            control: secret.key("baton kv-transfer notice 1"),
            data: secret.key("baton kv-transfer data 1"),
            zap: secret.key("baton kv-transfer door 1"),
        }
    }

    pub(super) fn tag_control(&self, frame: &[u8]) -> hmac::Tag {
        hmac::sign(&self.control, frame)
    }

    pub(super) fn check_control(&self, frame: &[u8], tag: &[u8]) -> bool {
        hmac::verify(&self.control, frame, tag).is_ok()
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

    /// Returns the password that a connection must present to the control listener of process `to`
    /// before libzmq accepts a frame from it. The password crosses the network in clear text. It
    /// only keeps strangers out; the tags authenticate each message.
    pub fn zap_password(&self, to: Epoch) -> String {
        let tag = hmac::sign(&self.zap, &to.to_bytes());
        tag.as_ref().iter().fold(String::with_capacity(2 * TAG_BYTES), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// Compares in constant time.
    pub fn check_zap_password(&self, me: Epoch, password: &[u8]) -> bool {
        let expected = hmac::sign(&self.zap, self.zap_password(me).as_bytes());
        hmac::verify(&self.zap, password, expected.as_ref()).is_ok()
    }
}
