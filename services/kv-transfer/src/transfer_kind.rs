//! The transports of KV, and how a node offers its transports to a peer.
//!
//! Each node lists its transports in `HELLO`, best first. A transport that is offered only within
//! one host is listed as `name@host`. Nodes on different hosts, and nodes that cannot tell their
//! host, therefore share only `tcp`, and `nccl` if both offer it to other hosts.

use std::fmt;

/// Transport of KV between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransferKind {
    /// Through host memory and a socket.
    Tcp,
    /// The receiver's copy engines read the sender's GPU memory. Same host only.
    Ipc,
    /// NCCL send and receive kernels.
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

    /// Returns the entry of `HELLO` that offers this transport to peers on this host only.
    fn offer_within(self, host: &str) -> String {
        format!("{}@{host}", self.name())
    }

    /// Parses an entry of `HELLO`; `None` for an unknown transport.
    pub fn from_offer(offer: &str) -> Option<Self> {
        let name = offer.split('@').next().unwrap_or(offer);
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for TransferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Transports that a node offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Best transport that both nodes of a pair support.
    #[default]
    Auto,
    /// This transport, and `tcp` with nodes that lack it.
    Only(TransferKind),
}

/// Transports within one host, best first. `ipc` precedes `nccl` because NCCL kernels take SMs from
/// the forward passes of both nodes.
const LOCAL: [TransferKind; 2] = [TransferKind::Ipc, TransferKind::Nccl];

impl TransportChoice {
    /// Returns whether a node that supports `nccl` offers it to nodes on other hosts. `auto` does so
    /// on a host with RDMA adapters, because over sockets `tcp` is faster, and without certificates,
    /// because NCCL does not encrypt.
    pub fn offers_nccl_between_hosts(self, has_rdma: bool, has_certificates: bool) -> bool {
        match self {
            Self::Auto => has_rdma && !has_certificates,
            Self::Only(only) => only == TransferKind::Nccl,
        }
    }
}

/// Returns the entries for `HELLO`, best first. `can` lists the supported transports other than
/// `tcp`.
pub(crate) fn offers(
    choice: TransportChoice,
    nccl_between_hosts: bool,
    can: &[TransferKind],
    host: Option<&str>,
) -> Vec<String> {
    let wanted = |kind: &TransferKind| match choice {
        TransportChoice::Auto => true,
        TransportChoice::Only(only) => *kind == only,
    };
    let local = |host| {
        let offered = LOCAL.into_iter().filter(|kind| can.contains(kind));
        offered.filter(wanted).map(move |kind| kind.offer_within(host))
    };
    let between_hosts =
        (nccl_between_hosts && can.contains(&TransferKind::Nccl)).then_some(TransferKind::Nccl);
    let anywhere = between_hosts.into_iter().chain([TransferKind::Tcp]);
    let anywhere = anywhere.map(|kind| kind.name().to_owned());
    host.into_iter().flat_map(local).chain(anywhere).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_follow_the_setting_and_the_supported_transports() {
        let (tcp, ipc, nccl) = (TransferKind::Tcp, TransferKind::Ipc, TransferKind::Nccl);
        let offered_with = |choice: TransportChoice, has_rdma, can: &[TransferKind], host| {
            offers(choice, choice.offers_nccl_between_hosts(has_rdma, false), can, host).join(" ")
        };
        let offered = |choice, can: &[TransferKind], host| offered_with(choice, false, can, host);
        let here = Some("here");
        assert_eq!(offered(TransportChoice::Auto, &[nccl, ipc], here), "ipc@here nccl@here tcp");
        assert_eq!(offered(TransportChoice::Auto, &[], here), "tcp");
        assert_eq!(offered(TransportChoice::Auto, &[ipc], None), "tcp", "no host to compare");
        let auto = TransportChoice::Auto;
        let with_rdma = |can: &[TransferKind], host| offered_with(auto, true, can, host);
        assert_eq!(with_rdma(&[nccl, ipc], here), "ipc@here nccl@here nccl tcp");
        assert_eq!(with_rdma(&[nccl, ipc], None), "nccl tcp");
        assert_eq!(with_rdma(&[ipc], here), "ipc@here tcp");
        assert!(!auto.offers_nccl_between_hosts(true, true), "NCCL does not encrypt");
        // Adapters change nothing where a transport is set.
        let set = TransportChoice::Only(ipc);
        assert_eq!(offered_with(set, true, &[ipc, nccl], here), "ipc@here tcp");
        assert_eq!(offered(TransportChoice::Only(tcp), &[ipc, nccl], here), "tcp");
        assert_eq!(offered(TransportChoice::Only(ipc), &[ipc, nccl], here), "ipc@here tcp");
        assert_eq!(offered(TransportChoice::Only(nccl), &[ipc, nccl], here), "nccl@here nccl tcp");
        assert_eq!(offered(TransportChoice::Only(nccl), &[ipc, nccl], None), "nccl tcp");
        assert_eq!(offered(TransportChoice::Only(nccl), &[ipc], here), "tcp");
    }

    #[test]
    fn offer_parses_with_and_without_a_host() {
        for kind in TransferKind::ALL {
            assert_eq!(TransferKind::from_offer(&kind.offer_within("here")), Some(kind));
            assert_eq!(TransferKind::from_offer(kind.name()), Some(kind));
        }
        assert_eq!(TransferKind::from_offer("pigeon@here"), None);
        assert_eq!(TransferKind::from_offer(""), None);
    }
}
