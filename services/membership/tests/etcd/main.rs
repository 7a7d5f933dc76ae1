//! The pure cores of the etcd client against a simulated etcd with faults in any order. The
//! integration tests use a real etcd.

mod follower;
mod registrant;
