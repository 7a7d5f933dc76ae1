//! The deciding halves of the etcd client against a simulated etcd: whatever fails, and in whatever
//! order, what must hold holds. The real etcd is met in the workspace's integration tests.

mod follower;
mod registrant;
