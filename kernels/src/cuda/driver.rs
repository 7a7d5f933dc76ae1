//! The CUDA driver and its GPUs, enumerated without creating a context.

use std::{ffi::CStr, fmt, sync::OnceLock};

use cudarc::{
    cublaslt::sys as cublaslt,
    driver::{result, sys},
};
use libloading::Library;

use super::{
    error::{CudaError, CudaVersion, Named, reason},
    packages,
};

/// CUDA version of the bindings; the driver may be newer.
pub const CUDA_NEEDED: CudaVersion = CudaVersion(13000);

/// NVIDIA's driver, loaded and initialized: a token for calling the driver.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: CudaVersion,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub(super) raw: sys::CUdevice,
    /// `GPU-` and 32 hexadecimal digits in groups, as nvidia-smi shows it.
    pub uuid: String,
    pub name: String,
    /// Compute capability; 90 is sm_90.
    pub compute: u32,
    pub memory_bytes: u64,
    pub sm_count: u32,
    /// `domain:bus:device.function`.
    pub pci: String,
}

/// Peer connection between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    NvLink,
    Pcie,
    /// No peer access: copies go through host memory.
    None,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Link::NvLink => "nvlink",
            Link::Pcie => "pcie",
            Link::None => "none",
        })
    }
}

impl Driver {
    /// Loads and initializes the driver.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] where there is none; the CPU backend then serves.
    pub fn open() -> Result<Self, CudaError> {
        // SAFETY: opens and closes a library by name; NVIDIA's initializers may run at any time.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let mut version = 0;
        // SAFETY: the library is loaded, every version of it has this function, and the function
        // writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }.named("cuDriverGetVersion")?;
        let found = CudaVersion(version);
        if found < CUDA_NEEDED {
            return Err(CudaError::DriverTooOld { found, needed: CUDA_NEEDED });
        }
        match result::init() {
            Ok(()) => Ok(Self { version: found }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
                Err(CudaError::NoDevice)
            }
            Err(error) => {
                Err(CudaError::DriverUnusable { code: error.0 as i32, reason: reason(error) })
            }
        }
    }

    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Returns all GPUs that are visible to the process.
    pub fn devices(&self) -> Result<Vec<Device>, CudaError> {
        let count = result::device::get_count().named("cuDeviceGetCount")?;
        (0..count).map(device).collect()
    }

    /// Returns the GPU of this UUID (with or without `GPU-`; a unique prefix suffices), or the
    /// first GPU for `None`.
    pub fn device(&self, uuid: Option<&str>) -> Result<Device, CudaError> {
        choose(self.devices()?, uuid)
    }

    /// Returns the visible GPU of this index or UUID.
    pub fn device_named(&self, name: &str) -> Result<Device, CudaError> {
        named(self.devices()?, name)
    }

    /// Returns the peer connection from one GPU to another.
    pub fn link(&self, from: &Device, to: &Device) -> Result<Link, CudaError> {
        use sys::CUdevice_P2PAttribute as Attribute;
        let read = |attribute| {
            let mut value = 0;
            // SAFETY: both devices were enumerated, and one number is written.
            unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, from.raw, to.raw) }
                .named("cuDeviceGetP2PAttribute")
                .map(|()| value != 0)
        };
        if !read(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
            return Ok(Link::None);
        }
        // PCIe has no native atomics between GPUs, NVLink has.
        match read(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? {
            true => Ok(Link::NvLink),
            false => Ok(Link::Pcie),
        }
    }
}

fn device(ordinal: i32) -> Result<Device, CudaError> {
    use sys::CUdevice_attribute as Attribute;
    let raw = result::device::get(ordinal).named("cuDeviceGet")?;
    let uuid = result::device::get_uuid(raw).named("cuDeviceGetUuid")?;
    let attribute = |attribute| {
        // SAFETY: the driver has just enumerated `raw`.
        unsafe { result::device::get_attribute(raw, attribute) }
            .named("cuDeviceGetAttribute")
            .map(|value| u32::try_from(value).unwrap_or(0))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: the driver has just enumerated `raw`; one number is written.
    let memory = unsafe { result::device::total_mem(raw) }.named("cuDeviceTotalMem")?;
    Ok(Device {
        raw,
        uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
        name: result::device::get_name(raw).named("cuDeviceGetName")?,
        compute: major * 10 + minor,
        memory_bytes: memory as u64,
        sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        pci: pci(raw)?,
    })
}

fn pci(raw: sys::CUdevice) -> Result<String, CudaError> {
    let mut text = [0u8; 32];
    // SAFETY: the buffer has the length that is passed, and `raw` is a device.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, raw) }
        .named("cuDeviceGetPCIBusId")?;
    let text = CStr::from_bytes_until_nul(&text);
    Ok(text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (index, byte) in bytes.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn choose(devices: Vec<Device>, uuid: Option<&str>) -> Result<Device, CudaError> {
    let Some(wanted) = uuid else {
        return devices.into_iter().next().ok_or(CudaError::NoDevice);
    };
    let bare = |uuid: &str| uuid.trim_start_matches("GPU-").to_lowercase();
    let prefix = bare(wanted);
    let is_match = |device: &&Device| !prefix.is_empty() && bare(&device.uuid).starts_with(&prefix);
    let mut matching = devices.iter().filter(is_match);
    match (matching.next(), matching.next()) {
        (Some(device), None) => Ok(device.clone()),
        _ if devices.is_empty() => Err(CudaError::NoDevice),
        _ => {
            let found: Vec<_> = devices.iter().map(|device| device.uuid.as_str()).collect();
            Err(CudaError::NoSuchDevice { wanted: wanted.to_owned(), found: found.join(", ") })
        }
    }
}

/// Finds a GPU by name: a short number is an index, a longer text is a UUID prefix.
fn named(devices: Vec<Device>, name: &str) -> Result<Device, CudaError> {
    const INDEX_DIGITS_MAX: usize = 2;
    if name.len() <= INDEX_DIGITS_MAX
        && let Ok(index) = name.parse::<usize>()
    {
        let count = devices.len();
        return devices.into_iter().nth(index).ok_or_else(|| CudaError::NoSuchDevice {
            wanted: name.to_owned(),
            found: format!("0 to {}", count.saturating_sub(1)),
        });
    }
    choose(devices, Some(name))
}

/// Returns whether cuBLASLt can be loaded.
pub fn has_cublaslt() -> bool {
    /// cuBLASLt of a Python package, which stays loaded: the loader then finds it by its name.
    static OF_PACKAGE: OnceLock<Option<Library>> = OnceLock::new();

    // SAFETY: opens and closes a library by name.
    let is_present = || unsafe { cublaslt::is_culib_present() };
    let load = || {
        let path = packages::of_this_environment("cu13/lib/libcublasLt.so.13")?;
        // SAFETY: cuBLASLt's initializers are those of the C++ runtime.
        unsafe { Library::new(path) }.ok()
    };
    is_present() || OF_PACKAGE.get_or_init(load).is_some() && is_present()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<Device> {
        [0x11, 0x12, 0x22]
            .map(|byte| Device {
                raw: 0,
                uuid: uuid_text([byte; 16]),
                name: "a GPU".into(),
                compute: 90,
                memory_bytes: 1,
                sm_count: 1,
                pci: String::new(),
            })
            .into()
    }

    #[test]
    fn uuid_is_formatted_as_by_nvidia_smi() {
        let bytes = [0x1f, 0x2e, 0x3d, 0x4c, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff];
        assert_eq!(uuid_text(bytes), "GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0fff");
    }

    #[test]
    fn device_is_chosen_by_unique_uuid_prefix() {
        let chosen = |uuid| choose(devices(), uuid).map(|device| device.uuid[4..6].to_owned());
        assert_eq!(chosen(None).unwrap(), "11");
        assert_eq!(chosen(Some("GPU-22222222-2222-2222-2222-222222222222")).unwrap(), "22");
        assert_eq!(chosen(Some("12")).unwrap(), "12");
        assert_eq!(chosen(Some("GPU-2")).unwrap(), "22");
        for wanted in ["1", "", "GPU-", "33", "0"] {
            let error = chosen(Some(wanted)).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{wanted:?}")) && error.contains("GPU-1111"),
                "{error}"
            );
        }
        assert_eq!(choose(vec![], None), Err(CudaError::NoDevice));
        assert_eq!(choose(vec![], Some("1")), Err(CudaError::NoDevice));
    }

    #[test]
    fn device_is_named_by_index_or_uuid() {
        let chosen = |name| named(devices(), name).map(|device| device.uuid[4..6].to_owned());
        assert_eq!((chosen("0").unwrap(), chosen("2").unwrap()), ("11".into(), "22".into()));
        assert_eq!(chosen("GPU-12").unwrap(), "12");
        let error = chosen("3").unwrap_err().to_string();
        assert!(error.contains("\"3\"") && error.contains("0 to 2"), "{error}");
        assert!(chosen("x").is_err());
    }

    /// Opening the driver never panics, and a missing driver is an error.
    #[test]
    fn opening_the_driver_is_safe_on_every_machine() {
        match Driver::open() {
            Ok(driver) => assert!(driver.version() >= CUDA_NEEDED),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        let _ = (has_cublaslt(), crate::cuda::has_nccl());
    }
}
