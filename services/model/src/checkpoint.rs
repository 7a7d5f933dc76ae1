//! Checkpoints: weights on disk in any format.

pub(crate) mod dummy;
pub(crate) mod file;
mod folder;
mod gguf_file;
pub(crate) mod int4;
mod stacked;
pub(crate) mod stored;

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use kernels::{Shard, int4::ColumnGroups};
use serde::{Deserialize, Serialize};

use self::{
    dummy::{DummyWeights, RandomInt4, RandomMxfp4},
    file::{TensorBytes, io_error},
    int4::Int4Tensors,
    stored::{StoredTensor, StoredWeights},
};
pub use self::{file::FileIdentity, int4::Int4Sizes};
use crate::{
    config::{
        ModelConfig,
        fields::JsonFile,
        hugging_face::from_hugging_face,
        quantization::{Quantization, quantization},
    },
    encoding::Format,
    error::ModelError,
    fingerprint,
    matrix::{MatrixData, MatrixSource},
    weight::{LayerWeight, Weight, WeightShape},
};

/// Maximum number of threads that compute a fingerprint.
const FINGERPRINT_THREADS_MAX: usize = 8;

/// Source of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadFormat {
    /// GGUF file or Hugging Face folder, detected from the path.
    #[default]
    Auto,
    /// Random weights; the path only needs to hold a configuration.
    Dummy { seed: u64 },
}

/// Opened model: its configuration, and its weights ready to be read.
///
/// Every weight was checked to exist with its shape, encoding and all its bytes.
pub struct Checkpoint {
    config: ModelConfig,
    weights: Weights,
    hashes_packed: bool,
    /// Hashes of the weights that were packed.
    hashes: Mutex<HashMap<Weight, u128>>,
    /// Returns whether to stop packing.
    cancelled: Box<dyn Fn() -> bool + Send + Sync>,
}

/// A weight as a file stores it.
#[derive(Clone, Debug)]
pub struct StoredWeight<'a> {
    /// Name of the tensor in the file.
    pub name: String,
    /// Name of the element type: `F32`, `BF16`, `Q8_0`, …
    pub encoding: &'static str,
    /// Dimensions, slowest first.
    pub dims: Vec<u64>,
    bytes: TensorBytes<'a>,
}

impl StoredWeight<'_> {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Fills `out` with the bytes from `begin` on. [`Checkpoint::check_unchanged`] fails if the
    /// read failed.
    ///
    /// # Panics
    /// When `out` exceeds the weight.
    pub fn read(&self, begin: u64, out: &mut [u8]) {
        self.bytes.read(begin as usize, out);
    }
}

/// Format in which files store matrices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MatrixFormat {
    /// Name of the element type, and for FP8 what has a scale.
    pub name: String,
    /// Number of matrices.
    pub matrices: usize,
}

enum Weights {
    Stored(StoredWeights),
    Dummy(DummyWeights),
}

impl Checkpoint {
    /// Opens the model at `path`: a `.gguf` file, a folder with one such file, or a folder with
    /// `config.json` and `model.safetensors` (or its shards and their index). With
    /// [`LoadFormat::Dummy`] the configuration is enough: a `config.json`, a folder that holds one,
    /// or a GGUF file.
    ///
    /// Opens files, and reads headers and scales. A backend reads the weights when it packs them.
    pub fn open(path: impl AsRef<Path>, format: LoadFormat) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let (config, weights) = match (Location::of(path)?, format) {
            (Location::Gguf { file }, LoadFormat::Auto) => {
                let (config, weights) = gguf_file::open(&file)?;
                (config, Weights::Stored(weights))
            }
            (Location::Gguf { file }, LoadFormat::Dummy { seed }) => {
                let config = gguf_file::open(&file)?.0;
                let weights = DummyWeights::new(seed, &config, None);
                (config, Weights::Dummy(weights))
            }
            (Location::Folder { config }, LoadFormat::Auto) => {
                let (mut config, quantization) = read_config(&config)?;
                let mut weights = folder::open(path)?;
                weights.int4 = quantization.and_then(Quantization::int4);
                // As in transformers, an output in the files counts more than
                // `tie_word_embeddings`.
                config.tied_output &= weights.output_is_embedding(&config);
                weights.read_quantization(&config, quantization)?;
                weights.check_stacks(&config)?;
                (config, Weights::Stored(weights))
            }
            (
                Location::Folder { config } | Location::ConfigAlone { config },
                LoadFormat::Dummy { seed },
            ) => {
                let (config, quantization) = read_config(&config)?;
                let int4 = quantization.and_then(Quantization::int4);
                let weights = DummyWeights::new(seed, &config, int4);
                (config, Weights::Dummy(weights))
            }
            (Location::ConfigAlone { .. }, LoadFormat::Auto) => {
                return Err(ModelError::NotAModel {
                    path: path.into(),
                    reason: "a configuration without weights is opened with load format dummy only"
                        .into(),
                });
            }
        };
        let checkpoint = Self {
            config,
            weights,
            hashes_packed: false,
            hashes: Mutex::default(),
            cancelled: Box::new(|| false),
        };
        checkpoint.directory()?;
        Ok(checkpoint)
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Computes the fingerprint of the model. The fingerprint covers the configuration, the tensor
    /// directory and every byte of the weights, but not the element type that a node computes in.
    /// Several threads read the weights that were not hashed while they were packed.
    ///
    /// The same weights in another file format are another model: they may round differently.
    ///
    /// # Errors
    /// When a file cannot be read, or became shorter.
    pub fn model_fingerprint(&self) -> Result<u128, ModelError> {
        let seed = match &self.weights {
            Weights::Dummy(weights) => Some(weights.fingerprint()),
            Weights::Stored(_) => None,
        };
        let directory = self.directory().expect("the directory was checked when opened");
        // As many as the affinity of the calling thread allows. More would only wait for memory.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(FINGERPRINT_THREADS_MAX);
        let known: Vec<Option<u128>> = {
            let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
            let weights = directory.iter().map(|(weight, _)| *weight);
            weights.map(|weight| hashes.get(&weight?).copied()).collect()
        };
        let directory: Vec<_> = directory.into_iter().map(|(_, tensor)| tensor).collect();
        let fingerprint = fingerprint::of(&self.config, seed, &directory, &known, threads);
        self.check_reads().map(|()| fingerprint)
    }

    /// Returns the stored weights in the order of the forward pass, each with its scales after it.
    /// Dummy weights are not stored: returns an empty list.
    pub fn stored_weights(&self) -> Result<Vec<StoredWeight<'_>>, ModelError> {
        let stored = self.directory()?.into_iter().map(|(_, tensor)| StoredWeight {
            name: tensor.name,
            encoding: tensor.encoding.name(),
            dims: tensor.dims,
            bytes: tensor.bytes,
        });
        Ok(stored.collect())
    }

    /// Returns a description for logs: `GGUF, F32 + Q4_1 + Q8_0`.
    pub fn description(&self) -> String {
        let format = match &self.weights {
            Weights::Stored(StoredWeights { format: Format::Gguf, .. }) => "GGUF",
            Weights::Stored(StoredWeights { format: Format::Safetensors, .. }) => "safetensors",
            Weights::Dummy(DummyWeights { seed, .. }) => return format!("dummy, seed {seed}"),
        };
        let mut encodings: Vec<&str> = self
            .directory()
            .map(|directory| directory.iter().map(|(_, tensor)| tensor.encoding.name()).collect())
            .unwrap_or_default();
        encodings.sort_unstable();
        encodings.dedup();
        format!("{format}, {}", encodings.join(" + "))
    }

    /// Returns the formats of the matrices, by name. Dummy weights have none.
    pub fn matrix_formats(&self) -> Vec<MatrixFormat> {
        let mut formats: BTreeMap<String, usize> = BTreeMap::new();
        let weights = match &self.weights {
            Weights::Stored(_) => Weight::all(&self.config).collect(),
            Weights::Dummy(_) => Vec::new(),
        };
        for weight in weights {
            if let WeightShape::Matrix { rows, cols } = weight.shape(&self.config) {
                const CHECKED: &str = "weights were checked when opened";
                let format = match self.int4(weight).expect(CHECKED) {
                    Some(tensors) => tensors.format(),
                    None => self.checked(weight).expect(CHECKED).format(rows, cols),
                };
                *formats.entry(format).or_default() += 1;
            }
        }
        formats.into_iter().map(|(name, matrices)| MatrixFormat { name, matrices }).collect()
    }

    /// Returns the tensors of a matrix that is stored in INT4.
    fn int4(&self, weight: Weight) -> Result<Option<Int4Tensors<'_>>, ModelError> {
        match &self.weights {
            Weights::Stored(stored) => stored.int4(weight, &self.config),
            Weights::Dummy(_) => Ok(None),
        }
    }

    /// Returns the groups of the columns of each matrix in INT4.
    fn column_groups(&self) -> &HashMap<Weight, ColumnGroups> {
        match &self.weights {
            Weights::Stored(stored) => &stored.column_groups,
            Weights::Dummy(dummy) => &dummy.column_groups,
        }
    }

    /// Returns whether matrices are stored in INT4.
    pub fn has_int4(&self) -> bool {
        !self.column_groups().is_empty()
    }

    /// Returns a hash of which matrices are in INT4, and of the groups of their columns; 0 if none
    /// is. GPUs pack weights with equal hashes alike.
    pub fn int4_layout(&self) -> u64 {
        int4::layout(self.column_groups(), &self.config)
    }

    /// Returns the sizes of a rank's part of the matrices in INT4 on CPUs or on GPUs.
    ///
    /// # Panics
    /// When the model cannot be sharded over these ranks.
    pub fn int4_sizes(&self, shard: Shard, is_gpu: bool) -> Int4Sizes {
        int4::sizes(self.column_groups(), &self.config, shard, is_gpu)
    }

    /// Returns a weight matrix, of which a backend reads the rows. Reads a matrix in INT4 to memory
    /// as a whole.
    ///
    /// # Panics
    /// When `weight` is a vector.
    pub fn matrix(&self, weight: Weight) -> Result<MatrixSource<'_>, ModelError> {
        let WeightShape::Matrix { rows, cols } = weight.shape(&self.config) else {
            panic!("{weight:?} is no matrix");
        };
        let data = match &self.weights {
            Weights::Dummy(dummy) => {
                let rows = dummy.rows(weight, &self.config);
                match weight {
                    _ if dummy.column_groups.contains_key(&weight) => {
                        let groups = dummy.column_groups[&weight].clone();
                        MatrixData::RandomInt4(RandomInt4::new(rows, groups))
                    }
                    Weight::Layer(_, LayerWeight::Expert(..))
                        if self.config.has_mxfp4_experts() =>
                    {
                        MatrixData::RandomMxfp4(RandomMxfp4::new(rows))
                    }
                    _ => MatrixData::Random(rows),
                }
            }
            Weights::Stored(stored) => match stored.int4_matrix(weight, &self.config)? {
                Some((matrix, order)) => MatrixData::Int4 { matrix: Arc::new(matrix), order },
                None => {
                    let StoredTensor { bytes, encoding, order, scales, .. } =
                        self.checked(weight)?;
                    MatrixData::Stored { bytes, encoding, order, scales }
                }
            },
        };
        Ok(MatrixSource::new(rows, cols, data))
    }

    /// Returns a weight vector in f32, with [`ModelConfig::vector_offset`] added.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix), and `NotFinite` when an element is infinite or NaN.
    ///
    /// # Panics
    /// When `weight` is a matrix.
    pub fn vector(&self, weight: Weight) -> Result<Vec<f32>, ModelError> {
        let WeightShape::Vector { len } = weight.shape(&self.config) else {
            panic!("{weight:?} is no vector");
        };
        let mut values = vec![0.0; len];
        match &self.weights {
            Weights::Dummy(dummy) => dummy.rows(weight, &self.config).read_part(0, 0, &mut values),
            _ => {
                self.checked(weight)?.read_vector(&mut values)?;
                let offset = self.config.vector_offset(weight);
                values.iter_mut().for_each(|value| *value += offset);
            }
        }
        self.check_reads()?;
        Ok(values)
    }

    /// Returns how the model was opened.
    pub fn load_format(&self) -> LoadFormat {
        match self.weights {
            Weights::Dummy(DummyWeights { seed, .. }) => LoadFormat::Dummy { seed },
            Weights::Stored(_) => LoadFormat::Auto,
        }
    }

    /// Returns the identities of the open files.
    pub fn files(&self) -> Vec<FileIdentity> {
        match &self.weights {
            Weights::Dummy(_) => Vec::new(),
            Weights::Stored(stored) => stored.files(),
        }
    }

    /// Fails if a read of the weights failed.
    pub(crate) fn check_reads(&self) -> Result<(), ModelError> {
        match &self.weights {
            Weights::Dummy(_) => Ok(()),
            Weights::Stored(stored) => stored.check_reads(),
        }
    }

    /// Fails if a read of the weights failed, or if one of the files was written since it was
    /// opened. Then two reads of the weights may have found different bytes.
    pub fn check_unchanged(&self) -> Result<(), ModelError> {
        match &self.weights {
            Weights::Dummy(_) => Ok(()),
            Weights::Stored(stored) => stored.check_unchanged(),
        }
    }

    /// Hashes whole matrices while they are packed, unless they are in INT4 or MXFP4, so that the
    /// fingerprint does not need to read them again. Rows that are in the CPU's cache are hashed
    /// three times as fast.
    #[must_use]
    pub fn hashing_packed(self) -> Self {
        Self { hashes_packed: true, ..self }
    }

    /// Packing fails with [`ModelError::Cancelled`] before the next matrix once `cancelled` returns
    /// true.
    #[must_use]
    pub fn cancelled_by(self, cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { cancelled: Box::new(cancelled), ..self }
    }

    pub(crate) fn check_cancelled(&self) -> Result<(), ModelError> {
        if (self.cancelled)() { Err(ModelError::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn hashes_packed(&self) -> bool {
        self.hashes_packed
    }

    /// Keeps the hash of a weight for the fingerprint.
    pub(crate) fn keep_hash(&self, weight: Weight, hash: u128) {
        self.hashes.lock().unwrap_or_else(PoisonError::into_inner).insert(weight, hash);
    }

    /// Returns a stored weight after checking its shape against the configuration.
    fn checked(&self, weight: Weight) -> Result<StoredTensor<'_>, ModelError> {
        let Weights::Stored(stored) = &self.weights else {
            unreachable!("dummy weights are not stored")
        };
        let tensor = stored.tensor(weight, &self.config)?;
        let expected = weight.shape(&self.config).dims();
        if tensor.dims != expected {
            return Err(tensor.wrong_shape(expected));
        }
        // Files are checked when opened: a tensor has all its bytes, in whole blocks.
        let (rows, cols) = match weight.shape(&self.config) {
            WeightShape::Vector { len } => (1, tensor.order.stored_rows(len)),
            WeightShape::Matrix { rows, cols } => (tensor.order.stored_rows(rows), cols),
        };
        assert_eq!(
            tensor.encoding.row_bytes(cols).map(|bytes| rows * bytes),
            Some(tensor.bytes.len()),
            "{}",
            tensor.name
        );
        Ok(tensor)
    }

    /// Returns the error for an element of a stored weight that is infinite or NaN.
    pub(crate) fn not_finite(&self, weight: Weight, element: usize, found: f32) -> ModelError {
        let error = match self.int4(weight) {
            Ok(Some(tensors)) => Ok(tensors.not_finite(element, found)),
            Ok(None) => self.checked(weight).map(|tensor| tensor.not_finite(element, found)),
            Err(error) => Err(error),
        };
        error.unwrap_or_else(|error| error)
    }

    /// Returns all stored weights after checking them, and after each the tensors with its scales,
    /// which belong to no other weight. Tensors with several weights, and the tensors of a matrix
    /// in INT4, have no weight beside them.
    fn directory(&self) -> Result<Vec<(Option<Weight>, StoredTensor<'_>)>, ModelError> {
        let Weights::Stored(stored) = &self.weights else { return Ok(Vec::new()) };
        let mut directory = Vec::new();
        for weight in Weight::all(&self.config) {
            let part = stored.part_of(weight, &self.config);
            let is_listed = part.is_some_and(|part| part.first > 0);
            if let Some(tensors) = stored.int4(weight, &self.config)? {
                if is_listed {
                    continue;
                }
                directory.extend(tensors.into_list().map(|tensor| (None, tensor)));
                continue;
            }
            let tensor = self.checked(weight)?;
            if let Some(tensors) = stored.tensors_of_stack(weight, &self.config) {
                directory.extend(tensors.into_iter().map(|tensor| (None, tensor)));
                continue;
            }
            if is_listed {
                continue;
            }
            let scales = stored.scale_tensors(&tensor.name)?;
            directory.push(match part {
                None => (Some(weight), tensor),
                Some(_) => (None, stored.whole_tensor(weight, &self.config)?),
            });
            directory.extend(scales.into_iter().map(|tensor| (None, tensor)));
        }
        // Last, so that a missing matrix is reported before its scales, which belong to nothing.
        stored.refuse_unknown_tensors(&self.config)?;
        Ok(directory)
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("config", &self.config)
            .field("description", &self.description())
            .finish_non_exhaustive()
    }
}

/// Kind of model at a path.
enum Location {
    Gguf { file: PathBuf },
    Folder { config: PathBuf },
    ConfigAlone { config: PathBuf },
}

impl Location {
    fn of(path: &Path) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(io_error(path, "open"))?;
        let not_a_model = |reason: &str| {
            Err(ModelError::NotAModel { path: path.into(), reason: reason.to_owned() })
        };
        if metadata.is_dir() {
            if let Some(file) = gguf::model_file_in(path).map_err(io_error(path, "read"))? {
                return Ok(Location::Gguf { file });
            }
            let config = path.join("config.json");
            if config.is_file() {
                return Ok(Location::Folder { config });
            }
            return not_a_model("the folder has neither a config.json nor exactly one GGUF file");
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some(name) if name.eq_ignore_ascii_case("gguf") => {
                Ok(Location::Gguf { file: path.into() })
            }
            Some("json") => Ok(Location::ConfigAlone { config: path.into() }),
            _ => not_a_model(
                "it is neither a .gguf file nor a folder with config.json and safetensors",
            ),
        }
    }
}

/// Reads `config.json` and, if it exists, `generation_config.json` in the same folder. Returns how
/// matrices are quantized, too.
fn read_config(path: &Path) -> Result<(ModelConfig, Option<Quantization>), ModelError> {
    let config = read_json(path)?;
    let generation_path = path.with_file_name("generation_config.json");
    let generation =
        if generation_path.is_file() { Some(read_json(&generation_path)?) } else { None };
    let model = from_hugging_face(&config, generation.as_ref())?;
    let quantization = quantization(&config, model.family)?;
    Ok((model, quantization))
}

pub(crate) fn read_json(path: &Path) -> Result<JsonFile, ModelError> {
    // A shard index of a very large model has about 10 MB; configurations have a few kB.
    const BYTES_MAX: u64 = 64 << 20;
    let metadata = std::fs::metadata(path).map_err(io_error(path, "open"))?;
    // Opening a FIFO blocks.
    if !metadata.is_file() {
        let cause = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(io_error(path, "read")(cause));
    }
    if metadata.len() > BYTES_MAX {
        return Err(ModelError::FileTooLarge { path: path.into(), limit: BYTES_MAX });
    }
    let text = std::fs::read(path).map_err(io_error(path, "read"))?;
    let value = serde_json::from_slice(&text)
        .map_err(|cause| ModelError::Json { path: path.into(), cause })?;
    Ok(JsonFile { path: path.into(), value })
}
