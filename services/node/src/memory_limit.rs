//! Checks the memory limit of the process before weights and KV are allocated: the kernel kills a
//! process that exceeds the limit without an error message.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use crate::settings::SettingsError;

/// Mount point of the control groups (cgroups).
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// Bytes of a memory page in `/proc/self/statm`.
const PAGE: u64 = 4096;
/// The control groups of this process.
const PROCESS_CGROUP: &str = "/proc/self/cgroup";

/// The part of a container's memory limit that one node may use. The nodes of a container have
/// equal parts.
#[derive(Debug, Clone, Copy)]
pub struct MemoryShare {
    /// The container's memory limit in bytes.
    pub limit: u64,
    pub nodes_per_container: u32,
}

impl MemoryShare {
    /// Returns this node's share of the memory limit of its control group, or `None` if the group
    /// has no limit.
    pub fn of_node(nodes_per_container: u32) -> Option<Self> {
        let own = fs::read_to_string(PROCESS_CGROUP).unwrap_or_default();
        limit(Path::new(CGROUP_MOUNT), &own).map(|limit| Self { limit, nodes_per_container })
    }

    /// Returns the bytes that the node may use.
    pub fn bytes(self) -> u64 {
        self.limit / u64::from(self.nodes_per_container)
    }

    /// Returns the memory limit of a container in which each node may use `bytes`.
    pub fn limit_for(self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.nodes_per_container.into())
    }
}

impl fmt::Display for MemoryShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nodes_per_container > 1 {
            write!(f, "1/{} (node.nodes_per_container) of ", self.nodes_per_container)?;
        }
        f.write_str("the container's memory limit")
    }
}

/// Bytes of host memory that a node's weights and KV take, also in its rank processes; zeros on a
/// GPU.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostBytes {
    pub weights: u64,
    pub kv: u64,
}

/// Rejects weights and KV that exceed the node's share of a memory limit.
pub(crate) fn check(
    share: Option<MemoryShare>,
    weights: u64,
    kv: u64,
) -> Result<(), SettingsError> {
    match share {
        Some(share) if weights.saturating_add(kv) > share.bytes() => {
            Err(SettingsError::MemoryLimit { weights, kv, share })
        }
        _ => Ok(()),
    }
}

/// Rejects new weights of `bytes` beside those in use if they exceed the node's share of a memory
/// limit, or the free memory.
pub(crate) fn check_second_copy(
    share: Option<MemoryShare>,
    HostBytes { weights, kv }: HostBytes,
    bytes: u64,
) -> Result<(), SettingsError> {
    // Ranks hold weights and KV in their own processes, so the memory that this process uses does
    // not include them.
    check(share, weights.saturating_add(bytes), kv)?;
    check_more(share, bytes)
}

/// Checks that the node's share of a memory limit and the machine have `bytes` of free memory.
pub(crate) fn check_more(share: Option<MemoryShare>, bytes: u64) -> Result<(), SettingsError> {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let used = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let used = used.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0) * PAGE;
    let left = share.map(|share| share.bytes().saturating_sub(used));
    match left.into_iter().chain(available(&memory)).min() {
        Some(left) if bytes > left => Err(SettingsError::NoMemory { bytes, left }),
        _ => Ok(()),
    }
}

/// Returns the machine's available memory in bytes. `memory` is the text of `/proc/meminfo`.
fn available(memory: &str) -> Option<u64> {
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Returns the smallest limit of the process's control groups and of the groups above them, in
/// version 1 or 2. `own` is the text of `/proc/self/cgroup`.
fn limit(mount: &Path, own: &str) -> Option<u64> {
    let files = own.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let (folder, file) = match controllers {
            "" => (mount.to_owned(), "memory.max"),
            list if list.split(',').any(|controller| controller == "memory") => {
                (mount.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        // A container may see its own group at the mount instead of at `path`, so every folder on
        // the way is read.
        let group = PathBuf::from(path.trim_start_matches('/'));
        let groups: Vec<PathBuf> =
            group.ancestors().map(|group| folder.join(group).join(file)).collect();
        Some(groups)
    });
    // Without a limit, version 2 has the word `max`, and version 1 has a number larger than any
    // memory.
    let value = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    files.flatten().filter_map(value).filter(|limit| *limit < 1 << 60).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(files: &[(&str, &str)]) -> tempfile::TempDir {
        let mount = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let file = mount.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        mount
    }

    #[test]
    fn smallest_limit_of_the_groups_above_the_process_applies() {
        let two = mount(&[
            ("pods/memory.max", "3000\n"),
            ("pods/one/memory.max", "max\n"),
            ("pods/two/memory.max", "2000\n"),
        ]);
        assert_eq!(limit(two.path(), "0::/pods/one\n"), Some(3000));
        assert_eq!(limit(two.path(), "0::/pods/two\n"), Some(2000));
        assert_eq!(limit(two.path(), "0::/other\n"), None);
        let one = mount(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/pods/memory.limit_in_bytes", "5000\n"),
            ("cpu/pods/memory.limit_in_bytes", "1\n"),
        ]);
        assert_eq!(limit(one.path(), "5:cpu,cpuacct:/pods\n4:memory:/pods\n0::/\n"), Some(5000));
        assert_eq!(limit(one.path(), "4:memory:/\n"), None);
        // A container that sees its own group at the mount, and the path of the host.
        let own = mount(&[("memory/memory.limit_in_bytes", "7000\n")]);
        assert_eq!(limit(own.path(), "4:memory:/kubepods/pod1/c1\n"), Some(7000));
        assert_eq!(limit(own.path(), ""), None);
    }

    #[test]
    fn available_memory_is_read_in_kib() {
        assert_eq!(
            available("MemFree: 1 kB\nMemAvailable:   2048 kB\nBuffers: 3 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(available(""), None);
        assert!(check_more(None, 1 << 20).is_ok());
        let error = check_more(None, 1 << 60).unwrap_err().to_string();
        assert!(error.contains("expected at most"), "{error}");
    }

    #[test]
    fn further_memory_is_limited_to_the_share_of_the_node() {
        let share = |nodes_per_container| Some(MemoryShare { limit: 1 << 40, nodes_per_container });
        assert!(check_more(share(1), 1 << 20).is_ok());
        // A share of 1 MiB, which this process uses already.
        let error = check_more(share(1 << 20), 1 << 20).unwrap_err().to_string();
        assert!(error.contains("expected at most 0 MiB"), "{error}");
    }

    #[test]
    fn second_copy_of_weights_that_ranks_hold_is_limited_to_the_share_of_the_node() {
        const GIB: u64 = 1 << 30;
        // This process uses almost nothing of the share.
        let share = |gib: u64| Some(MemoryShare { limit: gib * GIB, nodes_per_container: 1 });
        let bytes = HostBytes { weights: 1 << 20, kv: 1000 * GIB };
        assert!(check_second_copy(share(1001), bytes, 1 << 20).is_ok());
        assert!(check_second_copy(share(1001), bytes, 2 * GIB).is_err(), "the copy is larger");
        let error = check_second_copy(share(1000), bytes, 1 << 20).unwrap_err().to_string();
        assert!(error.starts_with("weights of 2 MiB and KV of 1024000 MiB exceed"), "{error}");
        assert!(check_second_copy(None, bytes, 1 << 20).is_ok(), "no limit");
        let on_gpu = HostBytes::default();
        assert!(check_second_copy(share(1), on_gpu, 0).is_ok());
        assert!(check_second_copy(None, on_gpu, 1 << 60).is_err(), "the machine has less");
    }

    #[test]
    fn equal_shares_add_up_to_the_limit() {
        const LIMIT: u64 = 64 << 30;
        for nodes_per_container in 1..=1_024 {
            let share = MemoryShare { limit: LIMIT, nodes_per_container };
            let total = share.bytes() * u64::from(nodes_per_container);
            assert!((LIMIT - 1_024..=LIMIT).contains(&total), "{share:?}");
        }
    }

    #[test]
    fn weights_and_kv_beyond_the_limit_are_rejected_with_all_three() {
        const GIB: u64 = 1 << 30;
        let share = |limit, nodes| Some(MemoryShare { limit, nodes_per_container: nodes });
        assert!(check(None, 100 * GIB, GIB).is_ok());
        assert!(check(share(3 * GIB, 1), 2 * GIB, GIB).is_ok());
        let error = check(share(3 * GIB - 1, 1), 2 * GIB, GIB).unwrap_err().to_string();
        for word in ["weights of 2048 MiB", "KV of 1024 MiB", "limit of 3071 MiB", "node.kv_memory"]
        {
            assert!(error.contains(word), "{error:?} lacks {word:?}");
        }
        // Each of four nodes of one container.
        assert!(check(share(12 * GIB, 4), 2 * GIB, GIB).is_ok());
        let error = check(share(11 * GIB, 4), 2 * GIB, GIB).unwrap_err().to_string();
        let words =
            "exceed 1/4 (node.nodes_per_container) of the container's memory limit of 11264 MiB";
        assert!(error.contains(words) && error.ends_with("a limit above 12288 MiB"), "{error}");
    }
}
