//! Static list of members from the configuration.

use std::time::Duration;

use super::{MemberList, MemberWatch, Members, Membership, MembershipError, NodeAddress, Shutdown};
use crate::Role;

/// A list of members that never changes.
pub struct StaticMembership {
    list: MemberList,
}

impl StaticMembership {
    /// Creates the list from gRPC URLs by role. Each address is listed once.
    pub fn new<P, D>(
        prefill: impl IntoIterator<Item = P>,
        decode: impl IntoIterator<Item = D>,
    ) -> Result<Self, MembershipError>
    where
        P: Into<String>,
        D: Into<String>,
    {
        let prefill = prefill.into_iter().map(|url| (Role::Prefill, url.into()));
        let decode = decode.into_iter().map(|url| (Role::Decode, url.into()));
        let mut members = Members::new();
        for (role, grpc) in prefill.chain(decode) {
            let address = NodeAddress { role, grpc };
            if members.keys().any(|member| member.grpc == address.grpc) {
                return Err(MembershipError::Duplicate { address });
            }
            members.insert(address, None);
        }
        Ok(Self { list: MemberList::new(members) })
    }
}

impl Membership for StaticMembership {
    fn watch(&self) -> MemberWatch {
        self.list.watch()
    }

    fn last_known(&self) -> Vec<NodeAddress> {
        self.list.members().keys().cloned().collect()
    }

    /// Ends the watches; there is no task.
    fn shutdown(self: Box<Self>, _deadline: Duration) -> Shutdown {
        drop(self);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn shutting_down_ends_its_watches() {
        let members: Box<dyn Membership> =
            Box::new(StaticMembership::new(["http://a:1"], ["http://b:1"]).unwrap());
        let mut watch = members.watch();
        assert_eq!(members.last_known().len(), 2);
        assert!(watch.next().await.is_some() && watch.next().await.is_some());
        members.shutdown(Duration::from_secs(1)).await.unwrap();
        assert_eq!(watch.next().await, None);
    }

    #[test]
    fn an_address_with_two_roles_is_refused() {
        let twice = StaticMembership::new(["http://a:1"], ["http://a:1"]);
        assert!(matches!(twice, Err(MembershipError::Duplicate { .. })));
    }
}
