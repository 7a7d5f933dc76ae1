//! What is derived from the cluster secret: one key per use, so that a tag made for one purpose
//! means nothing for another.

use std::fmt::Write;

use ring::hmac;

use crate::{api::Epoch, config::ClusterSecret};

/// Bytes of every tag.
pub const TAG_BYTES: usize = 32;

#[derive(Clone)]
pub struct Keys {
    message: hmac::Key,
    data: hmac::Key,
    door: hmac::Key,
}

impl Keys {
    pub fn derive(secret: &ClusterSecret) -> Self {
        let root = hmac::Key::new(hmac::HMAC_SHA256, secret.bytes());
        let key = |purpose: &str| {
            hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&root, purpose.as_bytes()).as_ref())
        };
        Self {
            message: key("baton kv-transfer notice 1"),
            data: key("baton kv-transfer data 1"),
            door: key("baton kv-transfer door 1"),
        }
    }

    pub(super) fn tag_control(&self, frame: &[u8]) -> hmac::Tag {
        hmac::sign(&self.message, frame)
    }

    pub(super) fn check_control(&self, frame: &[u8], tag: &[u8]) -> bool {
        hmac::verify(&self.message, frame, tag).is_ok()
    }

    /// Tag of a data connection's hello, over `parts` in order. Each part has a fixed length.
    pub fn tag_data(&self, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
        let mut context = hmac::Context::with_key(&self.data);
        for part in parts {
            context.update(part);
        }
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(context.sign().as_ref());
        tag
    }

    /// In constant time.
    pub fn check_data(&self, parts: &[&[u8]], tag: &[u8; TAG_BYTES]) -> bool {
        hmac::verify(&self.data, &parts.concat(), tag).is_ok()
    }

    /// What a connection to the control message listener of process `to` must show before libzmq takes a
    /// single frame from it. It crosses in clear: it keeps strangers out, the tags prove who speaks.
    pub fn zap_password(&self, to: Epoch) -> String {
        let tag = hmac::sign(&self.door, &to.to_bytes());
        tag.as_ref().iter().fold(String::with_capacity(2 * TAG_BYTES), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// In time that does not depend on where the two differ.
    pub fn check_zap_password(&self, me: Epoch, password: &[u8]) -> bool {
        let mut tag = [0; TAG_BYTES];
        if password.len() != 2 * TAG_BYTES {
            return false;
        }
        for (byte, digits) in tag.iter_mut().zip(password.chunks_exact(2)) {
            let parsed =
                str::from_utf8(digits).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok());
            let Some(parsed) = parsed else { return false };
            *byte = parsed;
        }
        hmac::verify(&self.door, &me.to_bytes(), &tag).is_ok()
    }
}
