//! Stored responses of `/v1/responses`, which later requests reference by id. Bounded in bytes and
//! age. [`ResponseStore`] does no I/O and reads no clock: callers pass the time.
//!
//! An entry belongs to its owner; to any other owner its id is unknown. When the store is full, the
//! owner with the most bytes, the new response included, loses its oldest entry. So the responses
//! of one owner cannot displace those of owners that use less.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use serde_json::value::RawValue;
use tokio::task::AbortHandle;

use crate::lock::lock;

/// Estimate of the bytes that an entry takes besides its content: keys, ids and map nodes.
const ENTRY_BYTES: usize = 512;

/// A stored response.
#[derive(Clone, Debug)]
pub(crate) struct StoredResponse {
    /// The response object.
    pub object: Arc<RawValue>,
    /// Items of the whole input, earlier turns included.
    pub input: Arc<RawValue>,
    /// Items of the output.
    pub output: Arc<RawValue>,
    /// Aborts the generation; `None` once the response has ended.
    pub running: Option<AbortHandle>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let texts = [&self.object, &self.input, &self.output];
        ENTRY_BYTES + texts.iter().map(|text| text.get().len()).sum::<usize>()
    }
}

/// The stored responses of a router.
pub(crate) struct SharedResponses(Mutex<ResponseStore>);

impl SharedResponses {
    pub(crate) fn new(settings: &config::Router) -> Self {
        let bytes_max = settings.responses_bytes_max.bytes() as usize;
        Self(Mutex::new(ResponseStore::new(bytes_max, settings.responses_age_max)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ResponseStore> {
        lock(&self.0)
    }
}

#[derive(Debug)]
pub(crate) struct ResponseStore {
    bytes_max: usize,
    age_max: Duration,
    bytes: usize,
    /// Number of the next entry.
    next: u64,
    by_id: HashMap<String, StoreEntry>,
    /// Ids of all entries by number, the oldest first.
    ids: BTreeMap<u64, String>,
    owners: HashMap<Arc<str>, OwnerEntries>,
}

#[derive(Debug)]
struct StoreEntry {
    owner: Arc<str>,
    number: u64,
    stored_at: Instant,
    response: StoredResponse,
}

#[derive(Debug, Default)]
struct OwnerEntries {
    bytes: usize,
    /// Ids by number, the oldest first.
    ids: BTreeMap<u64, String>,
}

impl ResponseStore {
    fn new(bytes_max: usize, age_max: Duration) -> Self {
        let (by_id, ids, owners) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        Self { bytes_max, age_max, bytes: 0, next: 0, by_id, ids, owners }
    }

    /// Returns whether responses are stored at all.
    pub(crate) fn is_enabled(&self) -> bool {
        self.bytes_max > 0
    }

    /// Stores a response, or replaces the one with this id. Drops entries that are too old, then as
    /// many as the new one needs. A response that alone exceeds the bound is not stored.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        owner: &Arc<str>,
        id: String,
        response: StoredResponse,
    ) {
        self.expire(now);
        self.remove(&id);
        let bytes = response.bytes();
        if bytes > self.bytes_max {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            self.evict(owner, bytes);
        }
        let number = self.next;
        self.next += 1;
        self.bytes += bytes;
        let entries = self.owners.entry(owner.clone()).or_default();
        entries.bytes += bytes;
        entries.ids.insert(number, id.clone());
        self.ids.insert(number, id.clone());
        let entry = StoreEntry { owner: owner.clone(), number, stored_at: now, response };
        self.by_id.insert(id, entry);
    }

    /// Replaces a response in progress by its end. Returns false if it has ended or is not stored
    /// any more.
    pub(crate) fn end(&mut self, now: Instant, id: &str, response: StoredResponse) -> bool {
        let is_running = |entry: &StoreEntry| entry.response.running.is_some();
        self.by_id.get(id).is_some_and(is_running) && self.update(now, id, response)
    }

    /// Replaces a response. Returns false if it is not stored any more.
    pub(crate) fn update(&mut self, now: Instant, id: &str, response: StoredResponse) -> bool {
        let Some(owner) = self.by_id.get(id).map(|entry| entry.owner.clone()) else { return false };
        self.insert(now, &owner, id.to_owned(), response);
        true
    }

    /// Returns the response of this owner.
    pub(crate) fn get(&self, now: Instant, owner: &str, id: &str) -> Option<&StoredResponse> {
        let entry = self.by_id.get(id).filter(|entry| *entry.owner == *owner)?;
        (now.duration_since(entry.stored_at) <= self.age_max).then_some(&entry.response)
    }

    /// Removes the response with this id, whoever owns it.
    pub(crate) fn remove(&mut self, id: &str) {
        let Some(entry) = self.by_id.remove(id) else { return };
        let bytes = entry.response.bytes();
        self.bytes -= bytes;
        self.ids.remove(&entry.number);
        let entries = self.owners.get_mut(&entry.owner).expect("each entry has an owner");
        entries.bytes -= bytes;
        entries.ids.remove(&entry.number);
        if entries.ids.is_empty() {
            self.owners.remove(&entry.owner);
        }
    }

    /// Drops the entries that are too old.
    fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.ids.first_key_value()
            && now.duration_since(self.by_id[id].stored_at) > self.age_max
        {
            let id = id.clone();
            self.remove(&id);
        }
    }

    /// Makes room for a response of `incoming` bytes: drops the oldest entry of the owner with the
    /// most bytes, these included. If the new response alone makes its owner the largest, the
    /// oldest of all entries is dropped.
    fn evict(&mut self, owner: &Arc<str>, incoming: usize) {
        let own = self.owners.get(owner).map_or(0, |entries| entries.bytes) + incoming;
        let others = self.owners.iter().filter(|(other, _)| *other != owner);
        let largest = others.max_by_key(|(_, entries)| entries.bytes);
        let victim = match largest {
            Some((other, entries)) if entries.bytes > own => other,
            _ => owner,
        };
        let ids = self.owners.get(victim).map_or(&self.ids, |entries| &entries.ids);
        let oldest = ids.values().next().cloned();
        self.remove(&oldest.expect("a store without room has an entry"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::to_raw_value;

    use super::*;

    const AGE_MAX: Duration = Duration::from_secs(60);
    /// Bytes of an entry whose input is a text of 1000 bytes.
    const BYTES: usize = ENTRY_BYTES + 1000 + 2 + 2 * "null".len();

    fn response(input_bytes: usize) -> StoredResponse {
        let raw = |value: Option<String>| Arc::from(to_raw_value(&value).unwrap());
        let input = raw(Some("x".repeat(input_bytes)));
        StoredResponse { object: raw(None), input, output: raw(None), running: None }
    }

    struct Fixture {
        store: ResponseStore,
        now: Instant,
    }

    impl Fixture {
        fn of_entries(count: usize) -> Self {
            Self { store: ResponseStore::new(count * BYTES, AGE_MAX), now: Instant::now() }
        }

        fn insert(&mut self, owner: &str, id: &str) {
            self.store.insert(self.now, &owner.into(), id.to_owned(), response(1000));
            self.check();
        }

        fn has(&self, owner: &str, id: &str) -> bool {
            self.store.get(self.now, owner, id).is_some()
        }

        fn check(&self) {
            let store = &self.store;
            let entries = store.by_id.values().map(|entry| entry.response.bytes());
            assert_eq!(entries.sum::<usize>(), store.bytes);
            assert_eq!(store.owners.values().map(|it| it.bytes).sum::<usize>(), store.bytes);
            let ids: usize = store.owners.values().map(|it| it.ids.len()).sum();
            assert_eq!(ids, store.by_id.len());
            assert!(store.bytes <= store.bytes_max);
        }
    }

    #[test]
    fn a_response_is_known_to_its_owner_only() {
        let mut fixture = Fixture::of_entries(2);
        fixture.insert("a", "resp_1");
        assert!(fixture.has("a", "resp_1") && !fixture.has("b", "resp_1"));
        fixture.store.remove("resp_1");
        assert!(!fixture.has("a", "resp_1"));
        fixture.check();
        assert_eq!(fixture.store.bytes, 0);
    }

    #[test]
    fn a_full_store_drops_the_oldest_response_of_its_largest_owner() {
        let mut fixture = Fixture::of_entries(4);
        fixture.insert("b", "first");
        for id in ["1", "2", "3", "4", "5"] {
            fixture.insert("a", id);
        }
        assert!(fixture.has("b", "first"), "another owner is not displaced");
        let kept = ["1", "2", "3", "4", "5"].map(|id| fixture.has("a", id));
        assert_eq!(kept, [false, false, true, true, true]);
    }

    #[test]
    fn no_owner_displaces_responses_of_owners_that_use_less() {
        let mut fixture = Fixture::of_entries(4);
        for owner in ["b", "c", "d"] {
            fixture.insert(owner, owner);
        }
        for id in ["1", "2", "3"] {
            fixture.insert("a", id);
        }
        assert!(["b", "c", "d"].into_iter().all(|owner| fixture.has(owner, owner)));
        assert_eq!(["1", "2", "3"].map(|id| fixture.has("a", id)), [false, false, true]);
        fixture.insert("e", "e");
        assert!(
            fixture.has("e", "e") && !fixture.has("b", "b"),
            "of equal owners the oldest entry"
        );
    }

    #[test]
    fn only_a_response_in_progress_ends() {
        let mut fixture = Fixture::of_entries(2);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let task = runtime.spawn(std::future::ready(()));
        let running = StoredResponse { running: Some(task.abort_handle()), ..response(1000) };
        fixture.store.insert(fixture.now, &"a".into(), "1".to_owned(), running);
        assert!(fixture.store.end(fixture.now, "1", response(1000)));
        assert!(!fixture.store.end(fixture.now, "1", response(1000)), "it has ended");
        assert!(fixture.store.update(fixture.now, "1", response(1000)));
        fixture.store.remove("1");
        assert!(!fixture.store.update(fixture.now, "1", response(1000)), "it was deleted");
        assert!(!fixture.has("a", "1"));
        fixture.check();
    }

    #[test]
    fn an_old_response_is_unknown_and_makes_room() {
        let mut fixture = Fixture::of_entries(4);
        fixture.insert("a", "1");
        fixture.now += AGE_MAX;
        assert!(fixture.has("a", "1"));
        fixture.now += Duration::from_secs(1);
        assert!(!fixture.has("a", "1"));
        fixture.insert("b", "2");
        assert_eq!(fixture.store.by_id.len(), 1);
    }

    #[test]
    fn a_response_beyond_the_bound_is_not_stored_and_displaces_nothing() {
        let mut fixture = Fixture::of_entries(2);
        fixture.insert("a", "1");
        let large = response(2 * BYTES);
        fixture.store.insert(fixture.now, &"a".into(), "2".to_owned(), large);
        assert!(fixture.has("a", "1") && !fixture.has("a", "2"));
        assert!(!ResponseStore::new(0, AGE_MAX).is_enabled());
    }

    #[test]
    fn a_replaced_response_counts_once() {
        let mut fixture = Fixture::of_entries(2);
        for _ in 0..5 {
            fixture.insert("a", "1");
        }
        assert_eq!((fixture.store.by_id.len(), fixture.store.bytes), (1, BYTES));
    }
}
