//! The ways in which KV can travel between two nodes, and which of them two nodes take.
//!
//! Each node lists in its greeting what it can do, best first. What works within one host only is
//! listed with the host, so that two nodes of different hosts, and nodes that do not know it, find
//! it different and have `tcp` in common.

use std::{fmt, fs};

use xxhash_rust::xxh3::xxh3_64;

/// What carries the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransferKind {
    /// Through host memory and a socket.
    Tcp,
    /// The receiver's copy engines pull out of the sender's GPU memory, on one host.
    Ipc,
    /// Kernels of both GPUs meet, on one host.
    Nccl,
}

impl TransferKind {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Ipc, Self::Nccl];

    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
        }
    }

    /// Whether it works within one host only.
    fn is_local(self) -> bool {
        match self {
            Self::Tcp => false,
            Self::Ipc | Self::Nccl => true,
        }
    }

    /// As it is listed in a greeting.
    fn offer(self, host: &str) -> String {
        if self.is_local() { format!("{}@{host}", self.name()) } else { self.name().to_owned() }
    }

    /// What was listed so.
    pub fn offered(offer: &str) -> Option<Self> {
        let name = offer.split('@').next().unwrap_or(offer);
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for TransferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which transports a node offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The fastest that both nodes of a pair can do.
    #[default]
    Auto,
    /// This one, and `tcp` with nodes that cannot.
    Only(TransferKind),
}

/// Those within one host, best first: copies go before kernels, which take multiprocessors from the
/// forwards of both nodes.
const LOCAL: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

/// What a greeting lists, best first, out of what a node can do beside `tcp`.
pub fn offers(choice: TransportChoice, can: &[TransferKind], host: Option<&str>) -> Vec<String> {
    let wanted = |kind: &TransferKind| match choice {
        TransportChoice::Auto => true,
        TransportChoice::Only(only) => *kind == only,
    };
    let local = |host| {
        let offered = LOCAL.into_iter().filter(|kind| can.contains(kind));
        offered.filter(wanted).map(move |kind| kind.offer(host))
    };
    host.into_iter().flat_map(local).chain([TransferKind::Tcp.offer("")]).collect()
}

/// A name for the running system that is the same in all its containers, and for no other; `None`
/// where the system has none.
pub fn host() -> Option<String> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{:016x}", xxh3_64(boot_id.trim().as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_follows_the_setting_and_what_can_be_done() {
        let (tcp, ipc, nccl) = (TransferKind::Tcp, TransferKind::Ipc, TransferKind::Nccl);
        let offered = |choice, can: &[TransferKind], host| offers(choice, can, host).join(" ");
        let here = Some("here");
        assert_eq!(offered(TransportChoice::Auto, &[nccl, ipc], here), "ipc@here nccl@here tcp");
        assert_eq!(offered(TransportChoice::Auto, &[], here), "tcp");
        assert_eq!(offered(TransportChoice::Auto, &[ipc], None), "tcp", "no host to compare");
        assert_eq!(offered(TransportChoice::Only(tcp), &[ipc, nccl], here), "tcp");
        assert_eq!(offered(TransportChoice::Only(ipc), &[ipc, nccl], here), "ipc@here tcp");
        assert_eq!(offered(TransportChoice::Only(nccl), &[ipc, nccl], here), "nccl@here tcp");
        assert_eq!(offered(TransportChoice::Only(nccl), &[ipc], here), "tcp");
    }

    #[test]
    fn an_offer_names_its_carrier_with_and_without_a_host() {
        for kind in TransferKind::ALL {
            assert_eq!(TransferKind::offered(&kind.offer("here")), Some(kind));
        }
        assert_eq!(TransferKind::offered("pigeon@here"), None);
        assert_eq!(TransferKind::offered(""), None);
    }

    #[test]
    fn a_host_has_one_name() {
        let name = host();
        assert_eq!(name, host());
        assert!(name.is_none_or(|name| name.len() == 16), "it fits a greeting");
    }
}
