//! Authentication by the cluster secret: keys by purpose, the tokens of calls to nodes, the proofs
//! of nodes, and the tags of peers.
//!
//! A token authenticates one call. Its bytes are the caller's session (16), a sequence number (8),
//! the time in milliseconds since 1970 (8), the epoch of the addressed node (16), and a tag (32):
//! HMAC-SHA-256 over these fields and the call's path. The token covers neither the message nor the
//! response.
//!
//! The responses to `Observe` and to the weights calls between nodes have a proof: the epoch of the
//! node (16) and a tag (32), HMAC-SHA-256 over the token of the call and the epoch. A router sends
//! prompts to no node without a proof, and a node takes neither weights nor the outcome of an
//! update from a peer without a proof.
//!
//! A node tags its own address ([`ClusterSecret::peer_tag`]), and its peers connect to no other
//! address.

mod peer;
mod proof;
mod replay;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ring::hmac;
use tonic::{
    GrpcMethod, Request, Status,
    metadata::{Binary, MetadataMap, MetadataValue},
    service::Interceptor,
};

use crate::ids::{Epoch, NoRandomness, random_bits};
pub use proof::{InvalidProof, PROOF_KEY, ProofCheck};
pub use replay::ReplayGuard;

/// Metadata key of the token.
pub const TOKEN_KEY: &str = "baton-token-bin";

/// Maximum difference between the caller's clock at the start of a call and the node's clock when
/// the call arrives.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(60);

/// Path of the only call without an addressed node: its caller does not know the node's epoch yet.
pub const OBSERVE: &str = "/baton.v1.Node/Observe";

/// Paths of the calls of a weight update that nodes make to each other.
pub const WEIGHTS_STATUS: &str = "/baton.v1.Weights/Status";
pub const WEIGHTS_PULL: &str = "/baton.v1.Weights/Pull";

/// Addressed epoch in a token for `Observe`.
const NO_NODE: u128 = 0;

const FIELDS_BYTES: usize = 48;
const TAG_BYTES: usize = 32;
const TOKEN_BYTES: usize = FIELDS_BYTES + TAG_BYTES;

/// Secret shared by all services of a cluster. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(Vec<u8>);

impl ClusterSecret {
    /// Minimum length in bytes. A shorter secret is open to brute force.
    pub const BYTES_MIN: usize = 16;

    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, SecretTooShort> {
        let bytes = bytes.into();
        if bytes.len() < Self::BYTES_MIN {
            return Err(SecretTooShort { bytes: bytes.len() });
        }
        Ok(Self(bytes))
    }

    /// Derives the key for one purpose, so that a tag for one purpose is invalid for another.
    pub fn key(&self, purpose: &str) -> hmac::Key {
        let root = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&root, purpose.as_bytes()).as_ref())
    }

    fn call_key(&self) -> hmac::Key {
        self.key("baton node call 1")
    }
}

impl std::fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterSecret(..)")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid cluster secret: {bytes} bytes; expected at least {}", ClusterSecret::BYTES_MIN)]
pub struct SecretTooShort {
    pub bytes: usize,
}

/// Adds a token to each call of one channel.
#[derive(Clone)]
pub struct CallSigner {
    session: Arc<AuthSession>,
    /// Epoch of the node that the calls address.
    to: u128,
}

/// State of one channel. Each channel has its own session, so that each node sees nearly
/// consecutive sequence numbers.
struct AuthSession {
    key: hmac::Key,
    proof_key: hmac::Key,
    id: u128,
    sequence: AtomicU64,
}

impl CallSigner {
    /// Returns a signer that addresses no node: only `Observe` accepts its tokens.
    pub fn new(secret: &ClusterSecret) -> Result<Self, NoRandomness> {
        let session = AuthSession {
            key: secret.call_key(),
            proof_key: secret.proof_key(),
            id: random_bits()?,
            sequence: AtomicU64::new(0),
        };
        Ok(Self { session: Arc::new(session), to: NO_NODE })
    }

    /// Returns a signer of the same session that addresses the process with this epoch.
    pub fn to(&self, node: Epoch) -> Self {
        Self { session: self.session.clone(), to: node.0 }
    }

    /// Returns a new token for a call of `path`.
    pub fn token(&self, now: SystemTime, path: &str) -> [u8; TOKEN_BYTES] {
        let AuthSession { key, id, sequence, .. } = &*self.session;
        let mut token = [0; TOKEN_BYTES];
        let (fields, tag) = token.split_at_mut(FIELDS_BYTES);
        fields[..16].copy_from_slice(&id.to_be_bytes());
        let sequence = sequence.fetch_add(1, Ordering::Relaxed) + 1;
        fields[16..24].copy_from_slice(&sequence.to_be_bytes());
        fields[24..32].copy_from_slice(&unix_ms(now).to_be_bytes());
        fields[32..].copy_from_slice(&self.to.to_be_bytes());
        tag.copy_from_slice(hmac::sign(key, &signed(fields, path)).as_ref());
        token
    }

    /// Adds the token of a call of `path`, whose response has a proof. The result checks the proof.
    pub fn sign_with_proof(&self, path: &str, metadata: &mut MetadataMap) -> ProofCheck {
        let token = self.token(SystemTime::now(), path);
        metadata.insert_bin(TOKEN_KEY, sensitive(&token));
        ProofCheck { key: self.session.proof_key.clone(), token }
    }
}

/// No token is sent twice, so HTTP/2 must not add it to its header table.
fn sensitive(token: &[u8]) -> MetadataValue<Binary> {
    let mut value = MetadataValue::from_bytes(token);
    value.set_sensitive(true);
    value
}

impl Interceptor for CallSigner {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let method = request.extensions().get::<GrpcMethod<'_>>();
        let method = method.ok_or_else(|| Status::internal("a call without a method"))?;
        let path = format!("/{}/{}", method.service(), method.method());
        let token = self.token(SystemTime::now(), &path);
        request.metadata_mut().insert_bin(TOKEN_KEY, sensitive(&token));
        Ok(request)
    }
}

/// Reason why a call was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    #[error("the call has no token; expected a token that a router made with cluster.secret")]
    Missing,
    #[error("invalid token: {bytes} bytes; expected {TOKEN_BYTES}")]
    Malformed { bytes: usize },
    #[error(
        "invalid token: made with another cluster.secret or for another call; expected the same cluster.secret on \
         router and node"
    )]
    Secret,
    #[error("node_epoch = {named:032x}: this process is {own}")]
    OtherNode { named: u128, own: Epoch },
    #[error(
        "expired token: the caller's clock was {caller_s}, this node's clock is {node_s} (seconds since 1970); \
         expected clocks within {} s of each other", CLOCK_SKEW_MAX.as_secs()
    )]
    Expired { caller_s: u64, node_s: u64 },
    #[error("replayed token; expected a new token for each call")]
    Replayed,
}

/// Checks the tokens of the calls to one node. Holds the state of 1,024 channels.
pub struct CallVerifier {
    key: hmac::Key,
    proof_key: hmac::Key,
    me: Epoch,
    replay: Mutex<ReplayGuard>,
}

impl CallVerifier {
    pub fn new(secret: &ClusterSecret, me: Epoch) -> Self {
        Self { key: secret.call_key(), proof_key: secret.proof_key(), me, replay: Mutex::default() }
    }

    /// Checks the token of a call of `path` and marks it as used, so that a replay is rejected.
    pub fn verify(
        &self,
        now: SystemTime,
        path: &str,
        token: Option<&[u8]>,
    ) -> Result<(), InvalidToken> {
        let token = token.ok_or(InvalidToken::Missing)?;
        let malformed = InvalidToken::Malformed { bytes: token.len() };
        let token: &[u8; TOKEN_BYTES] = token.try_into().map_err(|_| malformed)?;
        let (fields, tag) = token.split_at(FIELDS_BYTES);
        // Compares in constant time.
        if hmac::verify(&self.key, &signed(fields, path), tag).is_err() {
            return Err(InvalidToken::Secret);
        }
        let (session, named) = (u128_at(fields, 0), u128_at(fields, 32));
        let (sequence, caller_ms) = (u64_at(fields, 16), u64_at(fields, 24));
        if named != self.me.0 && !(named == NO_NODE && path == OBSERVE) {
            return Err(InvalidToken::OtherNode { named, own: self.me });
        }
        let node_ms = unix_ms(now);
        if u128::from(caller_ms.abs_diff(node_ms)) > CLOCK_SKEW_MAX.as_millis() {
            let (caller_s, node_s) = (caller_ms / 1000, node_ms / 1000);
            return Err(InvalidToken::Expired { caller_s, node_s });
        }
        let mut replay = self.replay.lock().unwrap_or_else(|error| error.into_inner());
        if replay.admit(session, sequence) { Ok(()) } else { Err(InvalidToken::Replayed) }
    }
}

/// Returns the bytes under the tag. The fields have a fixed length.
fn signed(fields: &[u8], path: &str) -> Vec<u8> {
    [fields, path.as_bytes()].concat()
}

fn unix_ms(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn u64_at(fields: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(fields[at..at + 8].try_into().expect("the range has 8 bytes"))
}

fn u128_at(fields: &[u8], at: usize) -> u128 {
    u128::from_be_bytes(fields[at..at + 16].try_into().expect("the range has 16 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: Epoch = Epoch(7);
    const DECODE: &str = "/baton.v1.Node/Decode";

    fn secret(text: &str) -> ClusterSecret {
        ClusterSecret::new(text).unwrap()
    }

    fn verifier() -> CallVerifier {
        CallVerifier::new(&secret("a secret of the cluster"), ME)
    }

    fn signer() -> CallSigner {
        CallSigner::new(&secret("a secret of the cluster")).unwrap()
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn each_token_is_valid_once_and_tokens_may_overtake_each_other() {
        let (verifier, signer) = (verifier(), signer().to(ME));
        let [first, second] = [0; 2].map(|_| signer.token(at(1000), DECODE));
        for token in [&second, &first] {
            assert_eq!(verifier.verify(at(1000), DECODE, Some(token)), Ok(()));
        }
        for token in [&second, &first] {
            let replayed = verifier.verify(at(1000), DECODE, Some(token));
            assert_eq!(replayed, Err(InvalidToken::Replayed));
        }
    }

    #[test]
    fn sessions_have_separate_sequence_numbers() {
        let verifier = verifier();
        for _ in 0..3 {
            let token = signer().to(ME).token(at(1000), DECODE);
            assert_eq!(verifier.verify(at(1000), DECODE, Some(&token)), Ok(()));
        }
    }

    #[test]
    fn missing_malformed_and_forged_tokens_are_rejected() {
        let verifier = verifier();
        let verify = |path: &str, token: Option<&[u8]>| verifier.verify(at(1000), path, token);
        assert_eq!(verify(DECODE, None), Err(InvalidToken::Missing));
        let malformed = Err(InvalidToken::Malformed { bytes: 3 });
        assert_eq!(verify(DECODE, Some(b"abc")), malformed);
        let stranger = CallSigner::new(&secret("a secret of another cluster")).unwrap().to(ME);
        let token = stranger.token(at(1000), DECODE);
        assert_eq!(verify(DECODE, Some(&token)), Err(InvalidToken::Secret));
        let token = signer().to(ME).token(at(1000), DECODE);
        for bit in 0..8 * TOKEN_BYTES {
            let mut changed = token;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(verify(DECODE, Some(&changed)), Err(InvalidToken::Secret), "bit {bit}");
        }
        let other_path = verify("/baton.v1.Node/SetDraining", Some(&token));
        assert_eq!(other_path, Err(InvalidToken::Secret));
        assert_eq!(verify(DECODE, Some(&token)), Ok(()), "rejections do not use the token up");
    }

    #[test]
    fn token_expires_when_the_clocks_differ_by_more_than_a_minute() {
        let verifier = verifier();
        let verify = |caller, node| {
            let token = signer().to(ME).token(at(caller), DECODE);
            verifier.verify(at(node), DECODE, Some(&token))
        };
        assert_eq!(verify(1000, 1060), Ok(()));
        assert_eq!(verify(1060, 1000), Ok(()));
        for (caller_s, node_s) in [(1000, 1061), (1061, 1000)] {
            let error = verify(caller_s, node_s).unwrap_err();
            assert_eq!(error, InvalidToken::Expired { caller_s, node_s });
            let text = error.to_string();
            assert!(text.contains(&caller_s.to_string()) && text.contains(&node_s.to_string()));
        }
    }

    #[test]
    fn token_for_another_node_is_rejected_and_only_observe_needs_no_node() {
        let verifier = verifier();
        let verify = |signer: &CallSigner, path| {
            let token = signer.token(at(1000), path);
            verifier.verify(at(1000), path, Some(&token))
        };
        let other = |named| Err(InvalidToken::OtherNode { named, own: ME });
        let signer = signer();
        assert_eq!(verify(&signer.to(Epoch(8)), DECODE), other(8));
        assert_eq!(verify(&signer.to(Epoch(8)), OBSERVE), other(8));
        assert_eq!(verify(&signer, DECODE), other(NO_NODE));
        assert_eq!(verify(&signer, OBSERVE), Ok(()));
        assert_eq!(verify(&signer.to(ME), OBSERVE), Ok(()));
    }

    #[test]
    fn secret_is_not_in_debug_output() {
        assert_eq!(format!("{:?}", secret("a secret of the cluster")), "ClusterSecret(..)");
        assert_eq!(ClusterSecret::new("short"), Err(SecretTooShort { bytes: 5 }));
    }
}
