//! A node: the participant, and the weights that it serves and prepares.

use weight_transfer::{
    ChunkDigest, Participant, Plan, Tensor, UpdateId, UpdateReport, UpdateState, WeightVersion,
};

/// The bytes of weights.
pub(crate) type Bytes = Vec<u8>;
type Weights = (WeightVersion, Bytes);

/// Returns the version of weights of one tensor.
pub(crate) fn version_of(bytes: &Bytes) -> WeightVersion {
    let tensor = Tensor {
        name: "weights".into(),
        dtype: "U8".into(),
        shape: vec![bytes.len() as u64],
        bytes: bytes.len() as u64,
    };
    let plan = Plan::new(vec![tensor], 4).unwrap();
    let digests: Vec<u128> =
        bytes.chunks(4).map(|chunk| ChunkDigest::default().update(chunk).finish()).collect();
    WeightVersion::of_content(&plan, &digests)
}

/// A node: what it serves and what it has prepared.
pub(crate) struct Node {
    pub participant: Participant,
    /// `None`: an update in place has overwritten the weights.
    pub serves: Option<Weights>,
    /// The weights to restore.
    pub last_served: Weights,
    pub prepared: Option<(UpdateId, Bytes)>,
    pub is_in_place: bool,
    /// The update in place that overwrites the weights.
    pub overwriting: Option<UpdateId>,
    /// The updates that this process has installed.
    pub installed: Vec<UpdateId>,
    /// Number of restarts. A new process loads the first weights.
    pub epoch: u32,
    pub is_reachable: bool,
}

impl Node {
    pub(crate) fn new(is_in_place: bool) -> Self {
        let loaded = (WeightVersion::LOADED, vec![0; 8]);
        Self {
            participant: Participant::default(),
            serves: Some(loaded.clone()),
            last_served: loaded,
            prepared: None,
            is_in_place,
            overwriting: None,
            installed: Vec::new(),
            epoch: 0,
            is_reachable: true,
        }
    }

    pub(crate) fn version(&self) -> WeightVersion {
        self.serves.as_ref().map_or(WeightVersion::NONE, |(version, _)| *version)
    }

    /// Restores overwritten weights unless an update brings weights.
    pub(crate) fn restore(&mut self) {
        if self.overwriting.is_none() {
            self.serves = Some(self.last_served.clone());
        }
    }

    /// Returns the bytes of an update that this node has received.
    pub(crate) fn bytes_of(&self, id: UpdateId) -> Option<Bytes> {
        let prepared = self.prepared.as_ref().filter(|(prepared, _)| *prepared == id);
        prepared.map(|(_, bytes)| bytes.clone())
    }

    pub(crate) fn check(&self) {
        match self.participant.report() {
            Some(UpdateReport { id, state: UpdateState::Receiving | UpdateState::Prepared(_) }) => {
                assert_eq!(self.overwriting, self.is_in_place.then_some(id));
            }
            _ => assert_eq!(self.overwriting, None, "nobody told the node to discard or install"),
        }
        let serves = self.serves.is_some();
        assert!(!serves || self.overwriting.is_none(), "it serves overwritten weights");
    }
}
