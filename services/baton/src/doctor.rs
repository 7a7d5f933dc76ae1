//! `baton doctor`: reports GPUs, driver and libraries of this machine, missing parts and their
//! remedies.
//!
//! [`DoctorReport::of_this_machine`] queries the driver and the libraries; the other functions only
//! format the report.

mod model;
mod pairs;

use std::{env, fmt, path::PathBuf, thread::available_parallelism};

use anyhow::{Result, bail};
use clap::Args;
use engine::defaults::{self, DerivedSetting, ModelSizes, NodeDevice, NodeTraits, SetValues};
use kernels::{
    WeightFormat,
    cuda::{
        Context, CopySubmission, CudaError, Device, Driver, KernelLibrary, Link as Way, LinkRate,
        has_cublaslt, has_nccl, pull_rate,
    },
};
use serde::Serialize;

use self::{
    model::{ModelReport, OpenedModel},
    pairs::PairReport,
};
use crate::bench::engine::{KvSetting, parse_dtype, parse_kv_dtype};

#[derive(Args, Clone)]
pub struct KernelsArg {
    /// Library of Baton's GPU kernels, built by `make kernels` [default: libbaton_kernels.so in
    /// this program's folder].
    #[arg(long, value_name = "PATH", env = "BATON_NODE_KERNELS")]
    kernels: Option<PathBuf>,
}

impl KernelsArg {
    pub fn path(&self) -> Option<PathBuf> {
        self.kernels.clone().or_else(|| KernelLibrary::in_folder_of(&env::current_exe().ok()?))
    }
}

#[derive(Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    kernels: KernelsArg,
    /// Model to check: a GGUF file or a folder with config.json. Its sizes bound the default
    /// settings of nodes on a GPU.
    #[arg(long, value_name = "PATH", env = "BATON_MODEL_PATH")]
    model: Option<PathBuf>,
    /// Number format of the model's weights: f32, bf16, q8 (CPUs) or fp8 (GPUs).
    #[arg(long, value_parser = parse_dtype, default_value = "bf16", env = "BATON_MODEL_DTYPE")]
    dtype: WeightFormat,
    /// Number format of KV for `--model`: auto (f32 with --dtype f32, else bf16), bf16 or fp8.
    #[arg(long, value_parser = parse_kv_dtype, default_value = "auto", env = "BATON_MODEL_KV_DTYPE")]
    kv_dtype: KvSetting,
    /// Addresses of the metrics of running nodes, such as 10.0.0.1:9090: reports the transport and
    /// the measured rate of KV for each pair of nodes.
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    nodes: Vec<String>,
    /// Print a JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Prints the report. A machine without a GPU is not a fault, because the CPU can serve.
pub fn run(args: DoctorArgs) -> Result<()> {
    let model = args
        .model
        .map(|path| {
            OpenedModel::open(&path, (args.dtype, args.kv_dtype.unwrap_or(args.dtype.kv_format())))
        })
        .transpose()?;
    let mut report = DoctorReport::of_this_machine(args.kernels.path(), model);
    for node in &args.nodes {
        match pairs::of_node(node) {
            Ok(pairs) if pairs.is_empty() => {
                report.notes.push(format!("{node} has not measured the rate of KV from any node"));
            }
            Ok(pairs) => report.pairs.extend(pairs),
            Err(error) => report.notes.push(format!("{error:#}")),
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    match report.faults.len() {
        0 => Ok(()),
        1 => bail!("this machine cannot serve because of 1 fault"),
        count => bail!("this machine cannot serve because of {count} faults"),
    }
}

#[derive(Debug, Default, Serialize)]
struct DoctorReport {
    /// `cuda` if a GPU can serve, otherwise `cpu`.
    serves_on: &'static str,
    cpus: usize,
    driver: InstalledLibrary,
    libraries: Vec<Library>,
    gpus: Vec<Gpu>,
    links: Vec<GpuLink>,
    /// Pairs of the nodes in `--nodes`.
    pairs: Vec<PairReport>,
    model: Option<ModelReport>,
    /// Settings that a node derives at start, for each role.
    defaults: Vec<RoleDefaults>,
    /// Reasons why a present GPU or the model cannot serve, each with its remedy.
    faults: Vec<String>,
    /// Missing parts that this machine does not need for serving.
    notes: Vec<String>,
}

/// Presence and version of a driver or library.
#[derive(Debug, Default, Serialize)]
struct InstalledLibrary {
    found: bool,
    version: Option<String>,
    reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct Library {
    name: &'static str,
    needed_for: &'static str,
    #[serde(flatten)]
    part: InstalledLibrary,
}

#[derive(Debug, Serialize)]
struct Gpu {
    uuid: String,
    name: String,
    /// Compute capability; 90 is sm_90.
    compute: u32,
    sms: u32,
    memory_bytes: u64,
    /// Free memory; `None` if no context could be created.
    free_bytes: Option<u64>,
    pci: String,
}

#[derive(Debug, Serialize)]
struct RoleDefaults {
    role: &'static str,
    settings: Vec<DerivedSetting>,
}

#[derive(Debug, Serialize)]
struct GpuLink {
    from: String,
    to: String,
    way: String,
    /// Rate of copies from the first GPU's memory by the second GPU; `None` without peer access.
    rate: Option<LinkSpeed>,
    /// Transport of KV between nodes on the two GPUs with `transfer.transport = "auto"`.
    transport: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct LinkSpeed {
    gb_per_s: f64,
    /// Latency of a copy of a few KiB, until the host observes its completion.
    latency_us: f64,
}

/// Bytes of the measured copy.
const COPY_BYTES: usize = 64 << 20;

fn rate(driver: Driver, from: &Device, to: &Device) -> Result<LinkSpeed, CudaError> {
    let from = Context::new(driver, from.clone())?;
    let to = Context::new(driver, to.clone())?;
    let LinkRate { gb_per_s, latency } =
        pull_rate(&from, &to, COPY_BYTES, COPY_BYTES, CopySubmission::Single)?;
    Ok(LinkSpeed { gb_per_s, latency_us: latency.as_secs_f64() * 1e6 })
}

impl InstalledLibrary {
    fn of<T>(found: &Result<T, CudaError>, version: impl FnOnce(&T) -> Option<String>) -> Self {
        match found {
            Ok(part) => Self { found: true, version: version(part), reason: None },
            Err(error) => Self { found: false, version: None, reason: Some(error.to_string()) },
        }
    }
}

impl DoctorReport {
    fn of_this_machine(kernels: Option<PathBuf>, model: Option<OpenedModel>) -> Self {
        let driver = Driver::open();
        let kernels = KernelLibrary::open(kernels.as_deref());
        let is_there = |found, name| match found {
            true => Ok(()),
            false => Err(CudaError::LibraryMissing { name }),
        };
        let cublas = is_there(has_cublaslt(), "libcublasLt.so.13");
        let nccl = is_there(has_nccl(), "libnccl.so.2");
        let library = |name, needed_for, part| Library { name, needed_for, part };
        let mut report = Self {
            cpus: available_parallelism().map_or(1, usize::from),
            driver: InstalledLibrary::of(&driver, |driver| {
                Some(format!("CUDA {}", driver.version()))
            }),
            libraries: vec![
                library("cublasLt", "GEMMs", InstalledLibrary::of(&cublas, |()| None)),
                library(
                    "kernels",
                    "all other kernels",
                    InstalledLibrary::of(&kernels, |kernels| Some(kernels.build().to_owned())),
                ),
                library(
                    "nccl",
                    "KV transfer between GPUs of two nodes",
                    InstalledLibrary::of(&nccl, |()| None),
                ),
            ],
            ..Self::default()
        };
        match driver {
            Ok(driver) => {
                report.add_gpus(driver, kernels.as_ref().ok());
                let needed = [cublas.err(), kernels.err()];
                report.faults.extend(needed.iter().flatten().map(CudaError::to_string));
            }
            // The machine has no GPU.
            Err(error @ (CudaError::NoDriver | CudaError::NoDevice)) => {
                report.notes.push(error.to_string());
            }
            Err(error) => report.faults.push(error.to_string()),
        }
        if let (Err(error), false) = (nccl, report.gpus.is_empty()) {
            report.notes.push(format!(
                "{error}; without it KV goes by ipc within a host and by tcp between hosts"
            ));
        }
        let is_gpu = !report.gpus.is_empty() && report.faults.is_empty();
        report.serves_on = if is_gpu { "cuda" } else { "cpu" };
        let gpu = report.gpus.first().filter(|_| is_gpu);
        let (memory, compute) = (gpu.map(node_memory), gpu.map(|gpu| gpu.compute));
        report.add_defaults(memory, model.as_ref().map(|model| model.sizes(is_gpu)));
        if let Some(model) = model.map(|model| model.report(compute)) {
            let refused = model.refused().map(|why| format!("the model is refused: {why}"));
            report.faults.extend(refused);
            report.model = Some(model);
        }
        report
    }

    /// Derives the defaults of a node of one rank, on a GPU with this memory or on the CPU.
    fn add_defaults(&mut self, gpu_memory: Option<u64>, model: Option<ModelSizes>) {
        let (device, model) = match (gpu_memory, model) {
            (Some(memory_bytes), Some(model)) => (NodeDevice::Gpu { memory_bytes }, model),
            (Some(_), None) => {
                return self.notes.push(
                    "the default sizes of a GPU node depend on the model; name it with --model"
                        .to_owned(),
                );
            }
            // The defaults of a CPU do not depend on the model.
            (None, _) => (NodeDevice::Cpu, ModelSizes { weights: 0, activations: 0, kv: 0 }),
        };
        for (role, prefers_decode) in [("prefill", false), ("decode", true)] {
            let node = NodeTraits { device, prefers_decode, model, set: SetValues::default() };
            match defaults::derive(&node, None) {
                Ok(defaults) => {
                    self.defaults.push(RoleDefaults { role, settings: defaults.reasons });
                }
                Err(error) => return self.faults.push(error.to_string()),
            }
        }
    }

    fn add_gpus(&mut self, driver: Driver, kernels: Option<&KernelLibrary>) {
        let devices = match driver.devices() {
            Ok(devices) => devices,
            Err(error) => return self.faults.push(error.to_string()),
        };
        for device in &devices {
            let free_bytes = self.try_gpu(driver, device, kernels);
            self.gpus.push(Gpu {
                uuid: device.uuid.clone(),
                name: device.name.clone(),
                compute: device.compute,
                sms: device.sm_count,
                memory_bytes: device.memory_bytes,
                free_bytes,
                pci: device.pci.clone(),
            });
        }
        for (index, from) in devices.iter().enumerate() {
            for to in &devices[index + 1..] {
                let link = self.link(driver, from, to);
                self.links.push(link);
            }
        }
    }

    fn link(&mut self, driver: Driver, from: &Device, to: &Device) -> GpuLink {
        let way = driver.link(from, to);
        let reaches = way.as_ref().is_ok_and(|way| *way != Way::None);
        let rate = if reaches { rate(driver, from, to).map(Some) } else { Ok(None) };
        let rate = rate.unwrap_or_else(|error| {
            let (from, to) = (&from.uuid, &to.uuid);
            self.notes.push(format!("GPU {to} cannot copy from GPU {from}: {error}"));
            None
        });
        GpuLink {
            from: from.uuid.clone(),
            to: to.uuid.clone(),
            way: way.map_or_else(|error| error.to_string(), |way| way.to_string()),
            transport: if rate.is_some() { "ipc" } else { "tcp" },
            rate,
        }
    }

    /// Creates a context, which fails on a GPU in exclusive use, and loads the kernels. Returns the
    /// free memory.
    fn try_gpu(
        &mut self,
        driver: Driver,
        device: &Device,
        kernels: Option<&KernelLibrary>,
    ) -> Option<u64> {
        let tried = Context::new(driver, device.clone()).and_then(|context| {
            let free_bytes = context.free_bytes()?;
            kernels.map_or(Ok(()), |kernels| kernels.initialise(&context))?;
            Ok(free_bytes)
        });
        tried.map_err(|error| self.faults.push(error.to_string())).ok()
    }
}

/// Returns the memory that a node with default settings uses on this GPU.
fn node_memory(gpu: &Gpu) -> u64 {
    let node = config::Node::default();
    let share = gpu.memory_bytes / 100 * u64::from(node.gpu_memory_percent);
    let memory = share.min(gpu.free_bytes.unwrap_or(share));
    memory.saturating_sub(node.gpu_reserve.bytes())
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "serves on  {} ({} CPUs)", self.serves_on, self.cpus)?;
        writeln!(f, "driver     {}", self.driver)?;
        for Library { name, needed_for, part } in &self.libraries {
            writeln!(f, "{name:<10} {part} (for {needed_for})")?;
        }
        for gpu in &self.gpus {
            let free = match gpu.free_bytes {
                Some(bytes) => format!("{} free", gibibytes(bytes)),
                None => "cannot be used".to_owned(),
            };
            writeln!(
                f,
                "GPU        {} {} sm_{}, {} SMs, {} memory, {free}, PCI {}",
                gpu.uuid,
                gpu.name,
                gpu.compute,
                gpu.sms,
                gibibytes(gpu.memory_bytes),
                gpu.pci
            )?;
        }
        for GpuLink { from, to, way, rate, transport } in &self.links {
            write!(f, "link       {from} {to} {way}")?;
            if let Some(LinkSpeed { gb_per_s, latency_us }) = rate {
                write!(f, ", {gb_per_s:.0} GB/s, {latency_us:.0} us")?;
            }
            writeln!(f, ", KV by {transport}")?;
        }
        for pair in &self.pairs {
            writeln!(f, "pair       {pair}")?;
        }
        if let Some(model) = &self.model {
            write!(f, "{model}")?;
        }
        for RoleDefaults { role, settings } in &self.defaults {
            for setting in settings {
                writeln!(f, "{role:<10} {setting}")?;
            }
        }
        for note in &self.notes {
            writeln!(f, "note       {note}")?;
        }
        for fault in &self.faults {
            writeln!(f, "fault      {fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for InstalledLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.found, &self.version) {
            (true, Some(version)) => f.write_str(version),
            (true, None) => f.write_str("found"),
            (false, _) => f.write_str("missing"),
        }
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_of_a_gpu_need_the_model_and_fail_where_it_does_not_fit() {
        let added = |gpu_memory, model| {
            let mut report = DoctorReport::default();
            report.add_defaults(gpu_memory, model);
            report
        };
        let model = ModelSizes { weights: 15 << 30, activations: 139_264, kv: 131_072 };
        let report = added(Some(125 << 30), None);
        assert!(report.defaults.is_empty() && report.notes[0].contains("--model"));
        let report = added(Some(125 << 30), Some(model));
        let value = |role: usize, key| {
            let settings = &report.defaults[role].settings;
            settings.iter().find(|setting| setting.key == key).map(|setting| &setting.value[..])
        };
        assert_eq!(value(0, "node.step_tokens"), Some("4096"));
        assert_eq!(
            (value(0, "node.itl_max"), value(1, "node.itl_max")),
            (Some("at least 20ms"), Some("at least 20ms"))
        );
        let report = added(Some(15 << 30), Some(model));
        assert!(report.defaults.is_empty() && report.faults[0].contains("node.step_tokens"));
    }

    #[test]
    fn report_lists_parts_links_and_faults() {
        let part = |found| InstalledLibrary { found, version: None, reason: None };
        let report = DoctorReport {
            serves_on: "cpu",
            cpus: 4,
            driver: InstalledLibrary {
                found: true,
                version: Some("CUDA 13.0".into()),
                reason: None,
            },
            libraries: vec![
                Library { name: "cublasLt", needed_for: "GEMMs", part: part(true) },
                Library { name: "nccl", needed_for: "KV", part: part(false) },
            ],
            gpus: vec![Gpu {
                uuid: "GPU-1".into(),
                name: "a GPU".into(),
                compute: 90,
                sms: 132,
                memory_bytes: 3 << 29,
                free_bytes: None,
                pci: "0000:01:00.0".into(),
            }],
            links: vec![
                GpuLink {
                    from: "GPU-1".into(),
                    to: "GPU-2".into(),
                    way: "nvlink".into(),
                    rate: Some(LinkSpeed { gb_per_s: 390.6, latency_us: 8.2 }),
                    transport: "ipc",
                },
                GpuLink {
                    from: "GPU-1".into(),
                    to: "GPU-3".into(),
                    way: "none".into(),
                    rate: None,
                    transport: "tcp",
                },
            ],
            pairs: vec![],
            model: None,
            defaults: vec![RoleDefaults {
                role: "decode",
                settings: vec![DerivedSetting {
                    key: "node.slots",
                    value: "64".into(),
                    why: "as many as fit".into(),
                }],
            }],
            faults: vec!["it is busy".into()],
            notes: vec![],
        };
        assert_eq!(
            report.to_string(),
            "serves on  cpu (4 CPUs)\n\
             driver     CUDA 13.0\n\
             cublasLt   found (for GEMMs)\n\
             nccl       missing (for KV)\n\
             GPU        GPU-1 a GPU sm_90, 132 SMs, 1.5 GiB memory, cannot be used, PCI \
             0000:01:00.0\n\
             link       GPU-1 GPU-2 nvlink, 391 GB/s, 8 us, KV by ipc\n\
             link       GPU-1 GPU-3 none, KV by tcp\n\
             decode     node.slots = 64 (as many as fit)\n\
             fault      it is busy\n"
        );
    }
}
