//! Which node gets which GPU.

use anyhow::{Context as _, Result, bail, ensure};
use kernels::cuda::Driver;

/// More than a host has.
const GPUS_MAX: usize = 64;

/// Parses the list of `--gpus`: indices, ranges of them such as 0-3, and UUIDs.
pub fn parse(list: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for part in list.split(',').map(str::trim) {
        let range = part.split_once('-').and_then(|(first, last)| {
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        match range {
            Some((first, last)) => {
                ensure!(
                    first <= last && last < GPUS_MAX,
                    "--gpus {list}: {part} is no range; allowed are such as 0-3"
                );
                names.extend((first..=last).map(|index| index.to_string()));
            }
            None if part.is_empty() => {
                bail!("--gpus {list}: allowed are indices, ranges such as 0-3, and UUIDs")
            }
            None => names.push(part.to_owned()),
        }
    }
    Ok(names)
}

/// The GPUs of each node, one for each of its ranks: prefill nodes first, then decode nodes. GPUs for
/// one node are shared by all.
pub fn of_nodes(list: &str, nodes: u32, ranks: u32) -> Result<Vec<Vec<String>>> {
    let names = parse(list)?;
    let (given, ranks) = (names.len(), ranks as usize);
    let wanted = nodes as usize * ranks;
    let each = match ranks {
        1 => "one for each".to_owned(),
        _ => format!("{ranks} for the ranks of each"),
    };
    ensure!(
        given == ranks || given == wanted,
        "--gpus {list} names {given} GPUs for {nodes} nodes; allowed are {wanted}, {each}, prefill \
         nodes first, or {ranks} that all share"
    );
    let driver = Driver::open().with_context(|| format!("--gpus {list}"))?;
    let uuid = |name: &String| -> Result<String> {
        Ok(driver.device_named(name).with_context(|| format!("--gpus {list}"))?.uuid)
    };
    let uuids = names.iter().map(uuid).collect::<Result<Vec<_>>>()?;
    let nodes = uuids.chunks(ranks).cycle().take(nodes as usize);
    Ok(nodes.map(<[String]>::to_vec).collect())
}

/// How many nodes share the GPU that the most of them have.
pub fn most_shared(gpus: &[Vec<String>]) -> u32 {
    let count = |gpu: &String| gpus.iter().filter(|others| others.contains(gpu)).count() as u32;
    gpus.iter().flatten().map(count).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_indices_ranges_and_uuids() {
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
    fn as_many_gpus_as_nodes_or_one() {
        let error = of_nodes("0-2", 2, 1).unwrap_err().to_string();
        assert!(error.contains("names 3 GPUs for 2 nodes"), "{error}");
        assert!(error.contains("allowed are 2, one for each"), "{error}");
        let error = of_nodes("0", 2, 2).unwrap_err().to_string();
        assert!(error.contains("names 1 GPUs for 2 nodes"), "{error}");
        assert!(
            error.contains("4, 2 for the ranks of each, prefill nodes first, or 2 that"),
            "{error}"
        );
    }

    #[test]
    fn those_that_share_a_gpu_are_counted() {
        let counted = |nodes: &[&str]| {
            let gpus = |node: &&str| node.split(' ').map(str::to_owned).collect();
            most_shared(&nodes.iter().map(gpus).collect::<Vec<_>>())
        };
        assert_eq!((counted(&[]), counted(&["a", "b"]), counted(&["a", "b", "a"])), (1, 1, 2));
        assert_eq!((counted(&["a b", "c d"]), counted(&["a b", "a b"])), (1, 2));
    }
}
