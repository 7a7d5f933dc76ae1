//! Assignment of GPUs to nodes.

use anyhow::{Context as _, Result, bail, ensure};
use kernels::cuda::Driver;

/// Exclusive upper bound of GPU indices.
const GPUS_MAX: usize = 64;

/// Parses the list of `--gpus`: indices, ranges such as 0-3, and UUIDs.
pub(super) fn parse(list: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for part in list.split(',').map(str::trim) {
        let range = part.split_once('-').and_then(|(first, last)| {
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        match range {
            Some((first, last)) => {
                ensure!(
                    first <= last && last < GPUS_MAX,
                    "invalid --gpus {list}: {part} is not a range; expected for example 0-3"
                );
                names.extend((first..=last).map(|index| index.to_string()));
            }
            None if part.is_empty() => {
                bail!("invalid --gpus {list}; expected indices, ranges such as 0-3, or UUIDs")
            }
            None => names.push(part.to_owned()),
        }
    }
    Ok(names)
}

/// Returns the UUIDs of each node's GPUs, one per rank, prefill nodes first. All nodes share the
/// GPUs if the list has as many GPUs as one node has ranks.
pub(super) fn of_nodes(list: &str, nodes: u32, ranks: u32) -> Result<Vec<Vec<String>>> {
    let names = parse(list)?;
    let (given, ranks) = (names.len(), ranks as usize);
    let wanted = nodes as usize * ranks;
    let each = match ranks {
        1 => "one for each node".to_owned(),
        _ => format!("{ranks} for each node"),
    };
    ensure!(
        given == ranks || given == wanted,
        "invalid --gpus {list}: it names {given} GPUs for {nodes} nodes; expected {wanted} ({each}, prefill \
         nodes first) or {ranks} shared by all nodes"
    );
    let driver = Driver::open().with_context(|| format!("--gpus {list}"))?;
    let uuid = |name: &String| -> Result<String> {
        Ok(driver.device_named(name).with_context(|| format!("--gpus {list}"))?.uuid)
    };
    let uuids = names.iter().map(uuid).collect::<Result<Vec<_>>>()?;
    let nodes = uuids.chunks(ranks).cycle().take(nodes as usize);
    Ok(nodes.map(<[String]>::to_vec).collect())
}

/// Returns the largest number of nodes that share one GPU.
pub(super) fn most_shared(gpus: &[Vec<String>]) -> u32 {
    let count = |gpu: &String| gpus.iter().filter(|others| others.contains(gpu)).count() as u32;
    gpus.iter().flatten().map(count).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_list_has_indices_ranges_and_uuids() {
        let parsed = |list| parse(list).map(|names| names.join(" "));
        assert_eq!(parsed("0").unwrap(), "0");
        assert_eq!(parsed("0,1").unwrap(), "0 1");
        assert_eq!(parsed("0-2, 5").unwrap(), "0 1 2 5");
        let uuid = "GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0fff";
        assert_eq!(parsed(uuid).unwrap(), uuid);
        for list in ["", "0,", "3-1", "0-64"] {
            let error = parsed(list).unwrap_err().to_string();
            assert!(error.contains(&format!("--gpus {list}")) && error.contains("0-3"), "{error}");
        }
    }

    #[test]
    fn number_of_gpus_must_match_nodes_and_ranks() {
        let error = of_nodes("0-2", 2, 1).unwrap_err().to_string();
        assert!(error.contains("names 3 GPUs for 2 nodes"), "{error}");
        assert!(error.contains("expected 2 (one for each node"), "{error}");
        let error = of_nodes("0", 2, 2).unwrap_err().to_string();
        assert!(error.contains("names 1 GPUs for 2 nodes"), "{error}");
        assert!(error.contains("4 (2 for each node, prefill nodes first) or 2 shared"), "{error}");
    }

    #[test]
    fn nodes_that_share_a_gpu_are_counted() {
        let counted = |nodes: &[&str]| {
            let gpus = |node: &&str| node.split(' ').map(str::to_owned).collect();
            most_shared(&nodes.iter().map(gpus).collect::<Vec<_>>())
        };
        assert_eq!((counted(&[]), counted(&["a", "b"]), counted(&["a", "b", "a"])), (1, 1, 2));
        assert_eq!((counted(&["a b", "c d"]), counted(&["a b", "a b"])), (1, 2));
    }
}
