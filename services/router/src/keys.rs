//! API keys of clients and operators. A file holds SHA-256 hashes of the keys, with the models and
//! limits of each.
//!
//! A key is looked up by the hash of the presented text. The lookup time depends on the hash alone,
//! and a client cannot choose texts whose hashes approach a stored hash, so the time reveals
//! nothing about a key. A hash without salt suffices, because `baton keys new` makes keys of 256
//! random bits.

mod file;
mod limits;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, Once},
    time::Instant,
};

use cluster::is_adapter_name;
use credentials::{Reload, Reloaded, SettingFile};
use http::{HeaderMap, HeaderName, Request, header};
use ring::digest::{SHA256, digest};
use router_core::{Flow, FlowName};
use telemetry::metrics::{
    ApiKeyMetrics, FinishedRequest, KEY_LABEL, KeyMetrics, KeyRejection, KeyWaiting, MODEL_LABEL,
};

use crate::{
    lock::lock,
    net::ConnectionState,
    request::{
        error::{FieldError, RequestError},
        options::{TENANT_HEADER, Tenant, salt_for_nodes},
    },
};
pub(crate) use limits::LimitExceeded;
use limits::{KeyLimits, KeyUsage};

/// Header of a key in Anthropic's API.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The port whose clients present the keys.
pub(crate) enum Purpose {
    /// The APIs of clients; with the served models by name and alias.
    Clients(BTreeMap<Arc<str>, Arc<str>>),
    /// `router.admin`, which has no limits.
    Operators,
}

impl Purpose {
    fn setting(&self) -> &'static str {
        match self {
            Self::Clients(_) => "router.keys",
            Self::Operators => "router.admin_keys",
        }
    }
}

/// The keys of one file, by hash.
type KeysByHash = HashMap<[u8; 32], Arc<Key>>;

/// The keys that a port accepts.
pub(crate) struct ApiKeys {
    current: Arc<Reloaded<KeysByHash>>,
    metrics: ApiKeyMetrics,
}

impl ApiKeys {
    /// Reads the file. The error names the file and its setting.
    pub(crate) fn read(
        path: &Path,
        purpose: Purpose,
        metrics: ApiKeyMetrics,
    ) -> Result<Self, String> {
        let files = vec![SettingFile::new(purpose.setting(), path)];
        let of_keys = metrics.clone();
        let parse = move |files: &[SettingFile],
                          contents: &[Vec<u8>],
                          before: Option<&KeysByHash>| {
            keys(&contents[0], &purpose, &of_keys, before).map_err(|error| files[0].error(error))
        };
        Ok(Self { current: Arc::new(Reloaded::read(files, parse)?), metrics })
    }

    pub(crate) fn reload(&self) -> Arc<dyn Reload> {
        self.current.clone()
    }

    /// Admits a request with a valid key: counts the request, and replaces the key by its
    /// [`Caller`].
    pub(crate) fn authenticate<B>(&self, request: &mut Request<B>) -> Result<(), RequestError> {
        let admitted = self.admit(request.headers(), Instant::now());
        let is_unknown =
            matches!(admitted, Err(RequestError::MissingKey | RequestError::UnknownKey));
        if let Some(connection) = request.extensions().get::<ConnectionState>()
            && !is_unknown
        {
            connection.authenticate();
        }
        for name in [header::AUTHORIZATION, X_API_KEY] {
            request.headers_mut().remove(name);
        }
        request.extensions_mut().insert(admitted?);
        Ok(())
    }

    fn find(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let hash = digest(&SHA256, presented);
        self.current.current().get::<[u8]>(hash.as_ref()).cloned()
    }

    /// Returns the caller of a probe, which needs no key and counts against no limit.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        Some(Caller(Some(self.find(presented(headers)?)?)))
    }

    /// Returns the caller of a request, and counts the request.
    fn admit(&self, headers: &HeaderMap, now: Instant) -> Result<Caller, RequestError> {
        let Some(presented) = presented(headers) else {
            self.metrics.rejected(KeyRejection::Missing);
            return Err(RequestError::MissingKey);
        };
        let Some(key) = self.find(presented) else {
            self.metrics.rejected(KeyRejection::Unknown);
            return Err(RequestError::UnknownKey);
        };
        let admitted = key.usage().request(&key.limits, now);
        key.counted(admitted)?;
        key.shared.metrics.request();
        Ok(Caller(Some(key)))
    }
}

/// Returns the key of the header `authorization: Bearer KEY`, otherwise of `x-api-key: KEY`.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let plain = || headers.get(X_API_KEY).map(|value| value.as_bytes().trim_ascii());
    bearer(headers).or_else(plain).filter(|key| !key.is_empty())
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes().trim_ascii();
    let (scheme, key) = value.split_at_checked("bearer ".len())?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

/// Makes the keys of a file. Keys that `before` had under the same name keep their use of limits.
fn keys(
    content: &[u8],
    purpose: &Purpose,
    metrics: &ApiKeyMetrics,
    before: Option<&KeysByHash>,
) -> Result<KeysByHash, String> {
    let before: HashMap<&str, &Arc<Key>> =
        before.into_iter().flat_map(HashMap::values).map(|key| (&*key.name, key)).collect();
    let key = |entry: file::KeyEntry| {
        let models = match purpose {
            Purpose::Clients(served) => allowed_models(&entry, served)?,
            Purpose::Operators => {
                let plain = file::KeyEntry {
                    name: entry.name.clone(),
                    sha256: entry.sha256,
                    ..file::KeyEntry::default()
                };
                if entry != plain {
                    return Err(format!(
                        "key {}: keys of operators have no models, shares, limits and caches; expected name and \
                         sha256",
                        entry.name
                    ));
                }
                None
            }
        };
        let earlier = before.get(&*entry.name);
        let new = || KeyState {
            usage: Mutex::default(),
            metrics: metrics.of_key(&entry.name),
            tenant_ignored: Once::new(),
        };
        let shared = earlier.map_or_else(|| Arc::new(new()), |key| key.shared.clone());
        let cache_scope = cache_scope(&entry);
        let name: Arc<str> = entry.name.into();
        let flow = Flow {
            name: FlowName::Key(name.clone()),
            weight: entry.weight.unwrap_or(1),
            priority: entry.priority.unwrap_or(0),
        };
        let (limits, gateway) = (entry.limits, entry.gateway);
        let key = Key { name, models, flow, limits, cache_scope, gateway, shared };
        Ok((entry.sha256, Arc::new(key)))
    };
    file::parse(content)?.into_iter().map(key).collect()
}

fn allowed_models(
    entry: &file::KeyEntry,
    served: &BTreeMap<Arc<str>, Arc<str>>,
) -> Result<Option<BTreeSet<Arc<str>>>, String> {
    let Some(models) = &entry.models else { return Ok(None) };
    let model = |name: &String| {
        let adapted = || {
            let (model, adapter) = name.rsplit_once(':')?;
            let model = served.get(model).filter(|_| is_adapter_name(adapter))?;
            Some(format!("{model}:{adapter}").into())
        };
        served.get(name.as_str()).cloned().or_else(adapted).ok_or_else(|| {
            let names: Vec<&str> = served.keys().map(|name| &**name).collect();
            format!(
                "key {}: models has an unknown model; expected {}",
                entry.name,
                names.join(", ")
            )
        })
    };
    models.iter().map(model).collect::<Result<_, _>>().map(Some)
}

/// Returns the start of the salts of a key: a hash of its group, or of its own name without a
/// group. The hash keeps salts within the nodes' limit.
fn cache_scope(entry: &file::KeyEntry) -> String {
    let scope = match &entry.cache_group {
        Some(group) => format!("group {group}"),
        None => format!("key {}", entry.name),
    };
    let hash = digest(&SHA256, scope.as_bytes());
    hash.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Key {
    name: Arc<str>,
    /// Names of the allowed models, without aliases, and of adapters as MODEL:ADAPTER; `None` is all
    /// models and adapters.
    models: Option<BTreeSet<Arc<str>>>,
    flow: Flow,
    limits: KeyLimits,
    /// Keys of equal scopes share cached KV.
    cache_scope: String,
    /// Whether the tenant header of the key's requests counts.
    gateway: bool,
    shared: Arc<KeyState>,
}

/// State of a key that outlives changes of the file.
struct KeyState {
    usage: Mutex<KeyUsage>,
    metrics: KeyMetrics,
    /// Whether the log says that requests of the key name a tenant although the key is no gateway.
    tenant_ignored: Once,
}

impl Key {
    fn usage(&self) -> MutexGuard<'_, KeyUsage> {
        lock(&self.shared.usage)
    }

    /// Counts the rejection, if there is one.
    fn counted(&self, outcome: Result<(), LimitExceeded>) -> Result<(), LimitExceeded> {
        outcome.inspect_err(|exceeded| self.shared.metrics.limited(exceeded.limit))
    }
}

/// The client of a request: the owner of a key, or anybody where the port needs no key.
#[derive(Clone, Default)]
pub(crate) struct Caller(Option<Arc<Key>>);

impl Caller {
    /// Returns the name of the key.
    pub(crate) fn name(&self) -> Option<&str> {
        self.0.as_deref().map(|key| &*key.name)
    }

    /// Returns whether the caller may use the model of this name, which must not be an alias, or the
    /// adapter MODEL:ADAPTER.
    pub(crate) fn may_use(&self, model: &str) -> bool {
        let models = self.0.as_deref().and_then(|key| key.models.as_ref());
        models.is_none_or(|models| models.contains(model))
    }

    /// Returns whether the caller may read series of metrics with this label. A key of some models
    /// sees no series of other models and of other keys.
    pub(crate) fn may_read(&self, label: &str, value: &str) -> bool {
        let Some(key) = self.0.as_deref().filter(|key| key.models.is_some()) else { return true };
        match label {
            MODEL_LABEL => self.may_use(value),
            KEY_LABEL => value == &*key.name,
            _ => true,
        }
    }

    /// Returns the tenant that a gateway names in the header [`TENANT_HEADER`]. The header of a key
    /// that is no gateway is ignored: the client could name any tenant. Without keys every client
    /// counts as a gateway.
    pub(crate) fn tenant(&self, header: Option<&[u8]>) -> Result<Option<Tenant>, FieldError> {
        let Some(header) = header else { return Ok(None) };
        if let Some(key) = self.0.as_deref().filter(|key| !key.gateway) {
            key.shared.tenant_ignored.call_once(|| {
                tracing::warn!(
                    key = &*key.name,
                    "ignoring the header {TENANT_HEADER}: the API key lacks gateway = true"
                );
            });
            return Ok(None);
        }
        Tenant::parse(header).map(Some)
    }

    /// Returns the salt for nodes, which separates the prefix caches of keys, their tenants and
    /// their salts.
    pub(crate) fn salt_for_nodes(&self, tenant: Option<&Tenant>, salt: &str) -> String {
        let scope = self.0.as_deref().map(|key| &*key.cache_scope);
        salt_for_nodes(scope, tenant, salt)
    }

    /// Returns the owner of what a router stores for later requests: the key with its tenant. Keys
    /// that share cached KV are separate owners.
    pub(crate) fn owner(&self, tenant: Option<&Tenant>) -> Arc<str> {
        salt_for_nodes(self.name(), tenant, "").into()
    }

    /// Returns the flow of the key; without a key of the tenant, or the flow of all other callers.
    pub(crate) fn flow(&self, tenant: Option<&Tenant>) -> Flow {
        match (&self.0, tenant) {
            (Some(key), _) => key.flow.clone(),
            (None, Some(tenant)) => Flow::new(FlowName::Tenant(tenant.as_str().into())),
            (None, None) => Flow::new(FlowName::Shared),
        }
    }

    /// Counts a request of the key as waiting for a node until the guard is dropped.
    pub(crate) fn waiting(&self) -> Option<KeyWaiting> {
        Some(self.0.as_deref()?.shared.metrics.waiting())
    }

    /// Returns the maximum number of answers in flight.
    pub(crate) fn streams_max(&self) -> Option<u32> {
        self.0.as_deref()?.limits.streams_max
    }

    /// Counts answers as in flight until the guard is dropped.
    pub(crate) fn open_streams(&self, count: u32) -> Result<OpenStreams, LimitExceeded> {
        if let Some(key) = &self.0 {
            let opened = key.usage().open_streams(&key.limits, count);
            key.counted(opened)?;
        }
        Ok(OpenStreams { caller: self.clone(), count })
    }

    /// Counts prompt or completion tokens against the limit.
    pub(crate) fn used_tokens(&self, count: u32) {
        if let Some(key) = self.0.as_deref().filter(|key| key.limits.tokens_per_minute.is_some()) {
            key.usage().tokens(&key.limits, count, Instant::now());
        }
    }

    pub(crate) fn request_ended(&self, request: &FinishedRequest) {
        if let Some(key) = &self.0 {
            key.shared.metrics.request_ended(request);
        }
    }
}

/// Guard of a caller's answers in flight.
pub(crate) struct OpenStreams {
    caller: Caller,
    count: u32,
}

impl Drop for OpenStreams {
    fn drop(&mut self) {
        if let Some(key) = &self.caller.0 {
            key.usage().close_streams(self.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use credentials::ReloadOutcome;
    use telemetry::{Resource, Telemetry, TelemetryConfig, metrics::KEYS_MAX};

    use super::*;

    fn metrics() -> ApiKeyMetrics {
        let resource = Resource { service: "baton-router".into(), instance: "test".into() };
        let telemetry = Telemetry::start(&TelemetryConfig::default(), resource).unwrap();
        ApiKeyMetrics::new(&telemetry.metrics())
    }

    fn entry(name: &str, key: &str, fields: &str) -> String {
        let hash = digest(&SHA256, key.as_bytes());
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\n{fields}\n")
    }

    fn served() -> Purpose {
        let name = |name: &'static str, model: &'static str| (name.into(), model.into());
        Purpose::Clients([name("one", "one"), name("uno", "one"), name("two", "two")].into())
    }

    fn headers(authorization: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, authorization.parse().unwrap())])
    }

    fn admit(keys: &ApiKeys, authorization: &str) -> Result<Caller, RequestError> {
        keys.admit(&headers(authorization), Instant::now())
    }

    #[tokio::test]
    async fn only_a_listed_key_is_admitted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, entry("a", "secret-a", "")).unwrap();
        let keys = ApiKeys::read(&path, served(), metrics()).unwrap();
        for accepted in ["Bearer secret-a", "bearer  secret-a ", "BEARER secret-a"] {
            assert_eq!(admit(&keys, accepted).unwrap().name(), Some("a"), "{accepted}");
        }
        for unknown in ["Bearer secret-b", "Bearer secret-", "Bearer secret-a secret-a"] {
            assert_eq!(admit(&keys, unknown).err(), Some(RequestError::UnknownKey), "{unknown}");
        }
        for missing in ["", "Bearer", "Bearer ", "Basic secret-a", "secret-a"] {
            assert_eq!(admit(&keys, missing).err(), Some(RequestError::MissingKey), "{missing}");
        }
        let plain = |key: &str| HeaderMap::from_iter([(X_API_KEY, key.parse().unwrap())]);
        let admitted = keys.admit(&plain("secret-a "), Instant::now());
        assert_eq!(admitted.unwrap().name(), Some("a"));
        let mut both = plain("secret-a");
        both.extend(headers("Bearer secret-b"));
        for (headers, error) in [
            (plain("secret-b"), RequestError::UnknownKey),
            (plain(" "), RequestError::MissingKey),
            (both, RequestError::UnknownKey),
        ] {
            assert_eq!(keys.admit(&headers, Instant::now()).err(), Some(error));
        }
        let none = keys.admit(&HeaderMap::new(), Instant::now());
        assert_eq!(none.err(), Some(RequestError::MissingKey));
    }

    #[tokio::test]
    async fn file_of_the_maximum_number_of_keys_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let fields = "models = [\"one\", \"two\"]\npriority = 3\nweight = 10\n\
                      requests_per_minute = 6000\ntokens_per_minute = 1000000\nstreams_max = 32";
        let entries = (0..KEYS_MAX).map(|index| {
            entry(&format!("team-of-this-name-{index:05}"), &index.to_string(), fields)
        });
        std::fs::write(&path, entries.collect::<String>()).unwrap();
        let keys = ApiKeys::read(&path, served(), metrics()).unwrap();
        let last = format!("Bearer {}", KEYS_MAX - 1);
        assert_eq!(admit(&keys, &last).unwrap().streams_max(), Some(32));
    }

    #[tokio::test]
    async fn replaced_file_revokes_keys_and_keeps_the_use_of_limits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let limit = "requests_per_minute = 1";
        std::fs::write(&path, entry("a", "old", limit) + &entry("b", "b", "")).unwrap();
        let keys = ApiKeys::read(&path, served(), metrics()).unwrap();
        admit(&keys, "Bearer old").unwrap();
        admit(&keys, "Bearer b").unwrap();
        std::fs::write(&path, entry("a", "new", limit)).unwrap();
        assert_eq!(keys.reload().reload(), ReloadOutcome::Replaced);
        for revoked in ["Bearer old", "Bearer b"] {
            assert_eq!(admit(&keys, revoked).err(), Some(RequestError::UnknownKey));
        }
        assert!(matches!(admit(&keys, "Bearer new").err(), Some(RequestError::KeyLimit(_))));
        std::fs::write(&path, "[[key]]").unwrap();
        let ReloadOutcome::Invalid(error) = keys.reload().reload() else {
            panic!("the file is invalid")
        };
        let expected = format!("invalid router.keys {}: key number 1: name", path.display());
        assert!(error.starts_with(&expected), "{error}");
        assert!(matches!(admit(&keys, "Bearer new").err(), Some(RequestError::KeyLimit(_))));
    }

    #[tokio::test]
    async fn models_of_a_key_are_checked_against_the_served_ones() {
        let metrics = metrics();
        let read = |fields| keys(entry("a", "x", fields).as_bytes(), &served(), &metrics, None);
        let error = read("models = [\"three\"]").err().unwrap();
        assert_eq!(error, "key a: models has an unknown model; expected one, two, uno");
        let keys = read("models = [\"uno\"]").unwrap();
        let caller = Caller(keys.into_values().next());
        assert!(caller.may_use("one") && !caller.may_use("two"));
        assert!(Caller::default().may_use("two"));

        assert!(!caller.may_use("one:sql"), "an adapter is listed by its own name");
        let keys = read("models = [\"uno:sql\"]").unwrap();
        let caller = Caller(keys.into_values().next());
        assert!(caller.may_use("one:sql") && !caller.may_use("one") && !caller.may_use("one:law"));
        assert!(read("models = [\"three:sql\"]").is_err() && read("models = [\"one:\"]").is_err());
    }

    #[tokio::test]
    async fn flow_of_a_key_has_its_priority_and_weight() {
        let flow = |fields| {
            let keys = keys(entry("a", "x", fields).as_bytes(), &served(), &metrics(), None);
            Caller(keys.unwrap().into_values().next()).flow(None)
        };
        let name = FlowName::Key("a".into());
        assert_eq!(
            flow("priority = 3\nweight = 5"),
            Flow { name: name.clone(), weight: 5, priority: 3 }
        );
        assert_eq!(flow(""), Flow { name, weight: 1, priority: 0 });
    }

    #[tokio::test]
    async fn keys_share_salts_by_group_and_only_gateways_name_tenants() {
        let metrics = metrics();
        let caller = |name, fields| {
            let keys = keys(entry(name, name, fields).as_bytes(), &served(), &metrics, None);
            Caller(keys.unwrap().into_values().next())
        };
        let salt = |caller: &Caller, tenant: Option<&[u8]>| {
            caller.salt_for_nodes(caller.tenant(tenant).unwrap().as_ref(), "")
        };
        let (group, gateway) = ("cache_group = \"a\"", "gateway = true");
        let [a, b] = ["a", "b"].map(|name| caller(name, ""));
        let [c, d] = ["c", "d"].map(|name| caller(name, group));
        let gateway = caller("e", gateway);
        assert_eq!(salt(&c, None), salt(&d, None));
        let apart = [
            salt(&Caller::default(), None),
            salt(&Caller::default(), Some(b"t")),
            salt(&a, None),
            salt(&b, None),
            salt(&c, None),
            salt(&gateway, None),
            salt(&gateway, Some(b"t")),
        ];
        assert_eq!(BTreeSet::from_iter(&apart).len(), apart.len(), "{apart:?}");
        for ignored in [&b"t"[..], b"not valid"] {
            assert_eq!(salt(&a, Some(ignored)), salt(&a, None));
        }
        assert!(gateway.tenant(Some(b"not valid")).is_err());
    }

    #[tokio::test]
    async fn keys_of_operators_have_no_limits() {
        let metrics = metrics();
        let read = |fields| {
            keys(entry("a", "x", fields).as_bytes(), &Purpose::Operators, &metrics, None).err()
        };
        assert_eq!(read(""), None);
        for fields in [
            "models = [\"one\"]",
            "streams_max = 1",
            "weight = 1",
            "gateway = true",
            "cache_group = \"a\"",
        ] {
            assert!(read(fields).unwrap().contains("expected name and sha256"), "{fields}");
        }
    }
}
