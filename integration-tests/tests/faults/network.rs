//! A network of hosts: each host is a network namespace, linked to the namespace of a router whose
//! firewall drops packets between chosen hosts.

use std::{
    io::Write,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

/// Number of hosts: three prefill nodes, three decode nodes, Baton's router and etcd.
pub(crate) const HOSTS: usize = 8;
/// Environment variable: prefix of the namespaces' names, for the helper process.
const PREFIX: &str = "BATON_TEST_NETWORK";

/// Returns why this machine cannot have namespaces with a firewall: it needs root, `ip` and `nft`.
pub(crate) fn check_support() -> Result<()> {
    let probe = format!("baton-{}-probe", std::process::id());
    ip(&["netns", "add", &probe])?;
    let listed = ip(&["netns", "exec", &probe, "nft", "list", "ruleset"]);
    ip(&["netns", "del", &probe])?;
    listed
}

/// The namespaces. Dropping it deletes them.
pub(crate) struct Network {
    prefix: String,
}

impl Network {
    /// Creates the namespaces.
    pub(crate) fn create() -> Result<Self> {
        let network = Self { prefix: format!("baton-{}", std::process::id()) };
        let router = network.router();
        ip(&["netns", "add", &router])?;
        ip(&["-n", &router, "link", "set", "lo", "up"])?;
        let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward && nft list ruleset";
        ip(&["netns", "exec", &router, "sh", "-c", forward])?;
        for host in 0..HOSTS {
            let (name, link) = (namespace(&network.prefix, host), format!("v{host}"));
            ip(&["netns", "add", &name])?;
            let peer = ["type", "veth", "peer", "name", "eth0", "netns", &name];
            ip(&[&["-n", &router, "link", "add", &link], &peer[..]].concat())?;
            let gateway = format!("10.77.{host}.1");
            ip(&["-n", &router, "addr", "add", &format!("{gateway}/24"), "dev", &link])?;
            ip(&["-n", &router, "link", "set", &link, "up"])?;
            ip(&["-n", &name, "addr", "add", &format!("{}/24", address(host)), "dev", "eth0"])?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
            ip(&["-n", &name, "link", "set", "eth0", "up"])?;
            ip(&["-n", &name, "route", "add", "default", "via", &gateway])?;
        }
        Ok(network)
    }

    /// Runs a helper of this program in the namespace of the network's router, for at most `limit`.
    pub(crate) fn run(&self, helper: &str, limit: Duration) -> Result<()> {
        let inner = test_harness::helper(helper);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.router()]).arg(inner.get_program());
        for (name, value) in inner.get_envs() {
            command.env(name, value.expect("the helper removes no variable"));
        }
        let mut child = command.env(PREFIX, &self.prefix).spawn()?;
        let end = Instant::now() + limit;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() >= end {
                child.kill()?;
                child.wait()?;
                bail!("the helper {helper} did not end within {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        ensure!(status.success(), "the helper {helper} failed: {status}");
        Ok(())
    }

    fn router(&self) -> String {
        format!("{}-router", self.prefix)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The links end with their namespaces. A namespace that was not created is no error here.
        let hosts = (0..HOSTS).map(|host| namespace(&self.prefix, host));
        for name in hosts.chain([self.router()]) {
            let _ = ip(&["netns", "del", &name]);
        }
    }
}

fn namespace(prefix: &str, host: usize) -> String {
    format!("{prefix}-{host}")
}

/// Returns the address of a host.
pub(crate) fn address(host: usize) -> String {
    format!("10.77.{host}.2")
}

/// Returns the namespace of a host, in the helper process.
pub(crate) fn namespace_of(host: usize) -> String {
    let prefix = std::env::var(PREFIX).expect("the helper knows the network");
    namespace(&prefix, host)
}

/// Packets from one host to another are dropped with this chance in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drops {
    pub from: usize,
    pub to: usize,
    pub percent: u32,
}

/// Replaces the rules of the firewall, in the helper process.
pub(crate) fn set_drops(drops: &[Drops]) -> Result<()> {
    let mut rules = String::from("table ip faults {}\ndelete table ip faults\ntable ip faults {\n");
    rules.push_str("chain forward { type filter hook forward priority 0; policy accept;\n");
    for Drops { from, to, percent } in drops {
        let (from, to) = (address(*from), address(*to));
        let chance = match percent {
            100 => String::new(),
            percent => format!("numgen random mod 100 < {percent} "),
        };
        rules.push_str(&format!("ip saddr {from} ip daddr {to} {chance}drop\n"));
    }
    rules.push_str("}\n}\n");
    let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
    nft.stdin.take().context("nft has no stdin")?.write_all(rules.as_bytes())?;
    ensure!(nft.wait()?.success(), "nft rejected:\n{rules}");
    Ok(())
}

/// Limits the rate of packets to a host, in the helper process. Packets queue for up to 200 ms.
pub(crate) fn set_rate(host: usize, rate: Option<&str>) -> Result<()> {
    let link = format!("v{host}");
    let mut command = Command::new("tc");
    match rate {
        Some(rate) => {
            command.args(["qdisc", "replace", "dev", &link, "root", "tbf", "rate", rate]);
            command.args(["burst", "64kb", "latency", "200ms"]);
        }
        None => {
            command.args(["qdisc", "del", "dev", &link, "root"]);
        }
    }
    ensure!(command.status()?.success(), "tc cannot set the rate of {link} to {rate:?}");
    Ok(())
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("cannot run ip")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), error.trim());
    Ok(())
}
