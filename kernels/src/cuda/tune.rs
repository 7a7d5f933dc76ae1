//! Which algorithm of cuBLASLt is quickest for which product, measured once a machine.
//!
//! cuBLASLt guesses an algorithm from a product's shape, and names others that might do. They are timed
//! at start, and the quickest is kept: in a file too, so that the next start has nothing to time. Rows
//! vary from step to step, so what is found for one number of rows of [`row_steps`] holds for those just
//! below it.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use super::product::Product;
use crate::layout::Dtype;

/// How products are tuned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Where what was found is kept; `None`: nowhere.
    pub folder: Option<PathBuf>,
    /// After this nothing more is timed; what is left has cuBLASLt's first guess, until the next start.
    pub within: Duration,
}

/// What tuning came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuned {
    /// Shapes that an earlier start had timed.
    pub known: usize,
    /// For which the time did not suffice.
    pub left: usize,
    pub took: Duration,
    pub times: Vec<TunedTime>,
    /// What kept the file from being read or written.
    pub faults: Vec<String>,
}

/// What one product takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TunedTime {
    pub product: Product,
    /// With what cuBLASLt takes unasked.
    pub first_guess: Duration,
    pub chosen: Duration,
}

/// cuBLASLt's own description of an algorithm: opaque, and of use to the same version only.
pub(super) type Algorithm = [u64; 8];

/// The number of rows for which a product of `rows` rows is tuned: as many as recorded decoding steps
/// have, and above them four to an octave.
pub(super) fn row_step(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=4 => 4,
        5..=256 => rows.next_multiple_of(8),
        257..=512 => rows.next_multiple_of(16),
        _ => {
            let quarter = rows.next_power_of_two() / 8;
            rows.next_multiple_of(quarter)
        }
    }
}

/// All numbers of rows that products of up to `rows_max` rows are tuned for.
pub fn row_steps(rows_max: usize) -> Vec<usize> {
    let (last, mut steps) = (row_step(rows_max), Vec::new());
    let mut step = 0;
    while step < last {
        step = row_step(step + 1);
        steps.push(step);
    }
    steps
}

/// What is known of one machine.
#[derive(Debug)]
pub(super) struct Table {
    /// Of GPU, driver and cuBLASLt: an algorithm holds for them alone.
    machine: String,
    algorithms: HashMap<Product, Algorithm>,
}

/// The first line of every file; its number changes when what follows does.
const HEADING: &str = "baton products 1";
/// A file has a line of some 200 bytes for every shape of every model served here.
const FILE_BYTES_MAX: u64 = 16 << 20;

impl Table {
    pub fn new(machine: String) -> Self {
        Self { machine, algorithms: HashMap::new() }
    }

    /// What is known for products of about so many rows.
    pub fn get(&self, product: &Product) -> Option<Algorithm> {
        self.algorithms.get(&Product { rows: row_step(product.rows), ..*product }).copied()
    }

    /// `product` has rows of [`row_steps`].
    pub fn insert(&mut self, product: Product, algorithm: Algorithm) {
        debug_assert_eq!(product.rows, row_step(product.rows));
        self.algorithms.insert(product, algorithm);
    }

    /// Adds what the folder's file of this machine has. A missing file is no fault.
    pub fn read(&mut self, folder: &Path) -> Result<(), String> {
        let path = self.path(folder);
        let told =
            |reason: &dyn std::fmt::Display| format!("{} is ignored: {reason}", path.display());
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(told(&error)),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                return Err(told(&format_args!("it has more than {FILE_BYTES_MAX} bytes")));
            }
            Ok(_) => {}
        }
        let text = fs::read_to_string(&path).map_err(|error| told(&error))?;
        let found = parse(&text, &self.machine).map_err(|reason| told(&reason))?;
        self.algorithms.extend(found);
        Ok(())
    }

    /// Adds this to the folder's file of this machine, which is replaced whole or not at all. Of two
    /// that do so in the same moment one is lost, and timed again at the next start.
    pub fn write(&mut self, folder: &Path) -> Result<(), String> {
        // Another rank, whose products are others, has written since this one has read.
        let mut there = Self::new(self.machine.clone());
        if there.read(folder).is_ok() {
            there.algorithms.extend(self.algorithms.drain());
            self.algorithms = there.algorithms;
        }
        let path = self.path(folder);
        let told = |error: io::Error| format!("{} is not written: {error}", path.display());
        // Processes of several containers may share the folder, and each be number 1 in its own.
        let moment = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let new = path.with_extension(format!("{}-{moment:x}.new", std::process::id()));
        fs::create_dir_all(folder).map_err(told)?;
        let written = fs::write(&new, self.text()).and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&new);
            told(error)
        })
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("products-{:016x}", sum(self.machine.as_bytes())))
    }

    fn text(&self) -> String {
        let mut lines: Vec<_> = self.algorithms.iter().map(line).collect();
        lines.sort_unstable();
        let text = format!("{HEADING}\n{}\n{}", self.machine, lines.concat());
        let sum = sum(text.as_bytes());
        format!("{text}{sum:016x}\n")
    }
}

fn line((product, algorithm): (&Product, &Algorithm)) -> String {
    let Product { rows, inputs, outputs, from, to, x_stride, out_stride } = product;
    let mut line = format!("{rows} {inputs} {outputs} {from} {to} {x_stride} {out_stride}");
    for word in algorithm {
        write!(line, " {word:x}").expect("a string takes all");
    }
    line.push('\n');
    line
}

fn parse(text: &str, machine: &str) -> Result<Vec<(Product, Algorithm)>, String> {
    let body = text.strip_suffix('\n').and_then(|text| text.rfind('\n'));
    let (body, last) = text.split_at(body.ok_or("it is no list of products")? + 1);
    if u64::from_str_radix(last.trim_end(), 16) != Ok(sum(body.as_bytes())) {
        return Err("its check sum is another".to_owned());
    }
    let mut lines = body.lines();
    if lines.next() != Some(HEADING) {
        return Err(format!("it does not begin with {HEADING:?}"));
    }
    match lines.next() {
        Some(found) if found == machine => {}
        found => return Err(format!("it is of {:?}, not of {machine:?}", found.unwrap_or(""))),
    }
    let parsed = lines.map(|line| parse_line(line).ok_or_else(|| format!("line {line:?}")));
    parsed.collect()
}

fn parse_line(line: &str) -> Option<(Product, Algorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (shape, algorithm) = words.split_first_chunk::<7>()?;
    let number = |index: usize| shape[index].parse::<usize>().ok();
    let dtype = |index: usize| match shape[index] {
        "f32" => Some(Dtype::F32),
        "bf16" => Some(Dtype::Bf16),
        _ => None,
    };
    let product = Product {
        rows: number(0)?,
        inputs: number(1)?,
        outputs: number(2)?,
        from: dtype(3)?,
        to: dtype(4)?,
        x_stride: number(5)?,
        out_stride: number(6)?,
    };
    let algorithm = algorithm.iter().map(|word| u64::from_str_radix(word, 16).ok());
    let algorithm = algorithm.collect::<Option<Vec<_>>>()?.try_into().ok()?;
    (product.rows == row_step(product.rows)).then_some((product, algorithm))
}

/// FNV-1a: finds accidents, and that is all it is for.
fn sum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// One of several algorithms, timed.
pub(super) trait Candidates {
    type Error;
    fn count(&self) -> usize;
    /// What one product takes; `None` where this one cannot.
    fn time(&mut self, candidate: usize) -> Result<Option<Duration>, Self::Error>;
}

/// Rounds of timing, and by how much one must be quicker than the first guess. Below that, noise would
/// choose, and each machine another.
const ROUNDS: usize = 3;
const GAIN_MIN: f64 = 0.02;

/// The quickest, what it takes and what the first guess takes. Those that are far behind in one round
/// are not timed again.
pub(super) fn choose<C: Candidates>(
    candidates: &mut C,
) -> Result<Option<(usize, Duration, Duration)>, C::Error> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); candidates.count()];
    let mut is_out = vec![false; candidates.count()];
    for _ in 0..ROUNDS {
        for candidate in 0..times.len() {
            if is_out[candidate] {
                continue;
            }
            match candidates.time(candidate)? {
                Some(time) => times[candidate].push(time),
                None => is_out[candidate] = true,
            }
        }
        let best = best_of(&times, &is_out).map(|(_, time)| time);
        for (candidate, times) in times.iter().enumerate() {
            let is_slow = median(times) > best.map(|best| best.mul_f64(1.1));
            // The first is what others are compared with.
            is_out[candidate] |= is_slow && candidate > 0;
        }
    }
    let Some((best, time)) = best_of(&times, &is_out) else { return Ok(None) };
    let first = (!is_out[0]).then(|| median(&times[0])).flatten();
    Ok(Some(match first {
        Some(first) if time > first.mul_f64(1.0 - GAIN_MIN) => (0, first, first),
        first => (best, time, first.unwrap_or(time)),
    }))
}

fn best_of(times: &[Vec<Duration>], is_out: &[bool]) -> Option<(usize, Duration)> {
    let all = times.iter().enumerate().filter(|(candidate, _)| !is_out[*candidate]);
    all.filter_map(|(candidate, times)| Some((candidate, median(times)?)))
        .min_by_key(|(_, time)| *time)
}

fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len().checked_sub(1)? / 2).copied()
}

/// Tunes what is not known yet, in this order, until the time is over.
pub(super) fn tune<E>(
    table: &mut Table,
    products: impl Iterator<Item = Product>,
    tuning: &Tuning,
    mut time: impl FnMut(Product) -> Result<Option<(Algorithm, Duration, Duration)>, E>,
) -> Result<Tuned, E> {
    let (started, mut tuned) = (Instant::now(), Tuned::default());
    if let Some(folder) = &tuning.folder {
        tuned.faults.extend(table.read(folder).err());
    }
    for product in products {
        if table.get(&product).is_some() {
            tuned.known += 1;
        } else if started.elapsed() >= tuning.within {
            tuned.left += 1;
        } else if let Some((algorithm, chosen, first_guess)) = time(product)? {
            table.insert(product, algorithm);
            tuned.times.push(TunedTime { product, first_guess, chosen });
        }
    }
    if let (Some(folder), 1..) = (&tuning.folder, tuned.times.len()) {
        tuned.faults.extend(table.write(folder).err());
    }
    tuned.took = started.elapsed();
    Ok(tuned)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    const MACHINE: &str = "a GPU, driver 13.0, cuBLASLt 130200";

    fn product(rows: usize) -> Product {
        Product::packed(rows, 4096, 6144, Dtype::Bf16, Dtype::F32)
    }

    fn tuning(folder: &Path) -> Tuning {
        Tuning { folder: Some(folder.to_owned()), within: Duration::from_secs(3600) }
    }

    fn milliseconds(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    proptest! {
        #[test]
        fn rows_have_a_step_at_most_a_quarter_above_them(rows in 1_usize..100_000) {
            let step = row_step(rows);
            prop_assert!(step >= rows && row_step(step) == step);
            if rows > 28 {
                prop_assert!(step - rows <= rows / 4, "{rows} {step}");
            }
            prop_assert_eq!(row_steps(rows).last().copied(), Some(step));
        }

        #[test]
        fn no_text_is_read_as_what_it_is_not(text in "\\PC{0,60}(\n\\PC{0,20}){0,4}\n?") {
            prop_assert!(parse(&text, MACHINE).is_err());
        }
    }

    #[test]
    fn steps_are_few_and_every_size_of_a_decode_graph_is_one() {
        let steps = row_steps(8192);
        assert_eq!(steps[..6], [1, 2, 4, 8, 16, 24]);
        let mut graphs = (8..=256).step_by(8).chain((256..=512).step_by(16));
        assert!(graphs.all(|size| steps.contains(&size)));
        assert!(steps.ends_with(&[4096, 5120, 6144, 7168, 8192]) && steps.len() < 70, "{steps:?}");
        assert!(steps.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn what_was_timed_once_is_known_to_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let not_there_yet = folder.path().join("not/there/yet");
        let folder = not_there_yet.as_path();
        let products = || [1, 8, 512].map(product).into_iter();
        let time = |product: Product| {
            Ok::<_, Infallible>(Some(([product.rows as u64; 8], milliseconds(2), milliseconds(3))))
        };
        let mut table = Table::new(MACHINE.into());
        let tuned = tune(&mut table, products(), &tuning(folder), time).unwrap();
        assert_eq!(
            (tuned.known, tuned.times.len(), tuned.left, &tuned.faults[..]),
            (0, 3, 0, &[][..])
        );
        let [_, found, _] = tuned.times[..] else { panic!("{tuned:?}") };
        let (first_guess, chosen) = (milliseconds(3), milliseconds(2));
        assert_eq!(found, TunedTime { product: product(8), first_guess, chosen });

        let mut table = Table::new(MACHINE.into());
        let never = |product| -> Result<_, Infallible> { panic!("{product:?} is known") };
        let tuned = tune(&mut table, products(), &tuning(folder), never).unwrap();
        assert_eq!((tuned.known, tuned.times.len(), tuned.faults.len()), (3, 0, 0));
        // Rows just below have it too, other shapes have not.
        assert_eq!(table.get(&product(497)), Some([512; 8]));
        assert_eq!(table.get(&product(496)), None);
        assert_eq!(table.get(&Product { to: Dtype::Bf16, ..product(8) }), None);

        // Another driver knows nothing, and leaves the file alone.
        let mut table = Table::new("a GPU, driver 13.1".into());
        assert_eq!(tune(&mut table, products(), &tuning(folder), time).unwrap().times.len(), 3);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 2, "no half-written file is left");
    }

    #[test]
    fn when_the_time_is_over_the_rest_is_left_to_the_next_start() {
        let tuning = Tuning { folder: None, within: Duration::ZERO };
        let mut table = Table::new(MACHINE.into());
        table.insert(product(8), [1; 8]);
        let never = |product| -> Result<_, Infallible> { panic!("{product:?} is timed") };
        let tuned = tune(&mut table, [1, 8].map(product).into_iter(), &tuning, never).unwrap();
        assert_eq!((tuned.known, tuned.times.len(), tuned.left), (1, 0, 1));
    }

    #[test]
    fn ranks_that_find_different_products_keep_each_others() {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = [Table::new(MACHINE.into()), Table::new(MACHINE.into())];
        for table in &mut ranks {
            table.read(folder.path()).unwrap();
        }
        ranks[0].insert(product(8), [1; 8]);
        ranks[0].insert(product(1), [2; 8]);
        ranks[1].insert(product(8), [3; 8]);
        for table in &mut ranks {
            table.write(folder.path()).unwrap();
        }
        let mut next = Table::new(MACHINE.into());
        next.read(folder.path()).unwrap();
        let found = [8, 1].map(|rows| next.get(&product(rows)));
        assert_eq!(found, [Some([3; 8]), Some([2; 8])]);
    }

    #[test]
    fn a_file_that_is_cut_changed_or_foreign_is_ignored_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let mut table = Table::new(MACHINE.into());
        table.insert(product(8), [7; 8]);
        table.write(folder).unwrap();
        let path = table.path(folder);
        let good = fs::read(&path).unwrap();
        let foreign = Table { machine: "another".into(), algorithms: table.algorithms.clone() };
        let foreign = foreign.text();
        let changed = String::from_utf8(good.clone()).unwrap().replace("4096", "4097");
        let bad: [(&[u8], &str); 6] = [
            (&good[..good.len() - 1], "no list"),
            (&good[..good.len() / 2], "no list"),
            (b"", "no list"),
            (b"\xff\xfe\n\n", "UTF-8"),
            (changed.as_bytes(), "check sum"),
            (foreign.as_bytes(), "another"),
        ];
        for (bytes, word) in bad {
            fs::write(&path, bytes).unwrap();
            let mut table = Table::new(MACHINE.into());
            let error = table.read(folder).unwrap_err();
            assert!(error.contains(word) && error.contains("products-"), "{error:?}: {word}");
            assert!(table.algorithms.is_empty());
            let time = |_| Ok::<_, Infallible>(Some(([1; 8], milliseconds(1), milliseconds(1))));
            let tuned = tune(&mut table, [product(8)].into_iter(), &tuning(folder), time).unwrap();
            assert_eq!((tuned.times.len(), tuned.faults.len()), (1, 1));
            Table::new(MACHINE.into()).read(folder).unwrap();
        }
        let nowhere = Path::new("/proc/nowhere");
        assert!(table.write(nowhere).unwrap_err().contains("/proc/nowhere/products-"));
    }

    /// Candidates that take what is said, one after the other.
    struct Told(Vec<Option<u64>>, usize);

    impl Candidates for Told {
        type Error = Infallible;

        fn count(&self) -> usize {
            self.0.len()
        }

        fn time(&mut self, candidate: usize) -> Result<Option<Duration>, Infallible> {
            self.1 += 1;
            Ok(self.0[candidate].map(milliseconds))
        }
    }

    #[test]
    fn the_quickest_is_chosen_if_it_is_clearly_quicker_than_the_first_guess() {
        let chosen = |times: &[Option<u64>]| choose(&mut Told(times.to_vec(), 0)).unwrap();
        let ms = milliseconds;
        assert_eq!(chosen(&[Some(100), Some(90), Some(80)]), Some((2, ms(80), ms(100))));
        assert_eq!(chosen(&[Some(100), Some(99)]), Some((0, ms(100), ms(100))));
        assert_eq!(chosen(&[Some(300), Some(90)]), Some((1, ms(90), ms(300))));
        assert_eq!(chosen(&[None, Some(90), None]), Some((1, ms(90), ms(90))));
        assert_eq!((chosen(&[None, None]), chosen(&[])), (None, None));
        // What is far behind is timed once.
        let mut told = Told(vec![Some(100), Some(500), Some(101), None], 0);
        choose(&mut told).unwrap();
        assert_eq!(told.1, 3 + 1 + 3 + 1);
    }
}
