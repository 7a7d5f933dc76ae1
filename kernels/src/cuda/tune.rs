//! Times cuBLASLt's algorithms per GEMM shape and keeps the fastest, once per machine.
//!
//! cuBLASLt's heuristic picks an algorithm by shape and names alternatives. All of them are timed
//! at start. The fastest is stored in a file, so that the next start times nothing. The number of
//! rows varies from step to step, so the result for one of [`row_steps`] also holds for the row
//! counts just below it.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use super::gemm::GemmShape;
use crate::layout::Dtype;

/// Settings of GEMM tuning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TuningSettings {
    /// Folder of the results' file; `None` stores nothing.
    pub folder: Option<PathBuf>,
    /// Time budget. Shapes that remain use the heuristic's algorithm until the next start.
    pub within: Duration,
}

/// Result of tuning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TuningResult {
    /// Shapes that an earlier start has timed.
    pub known: usize,
    /// Shapes left untimed because the time budget was used up.
    pub left: usize,
    pub took: Duration,
    pub times: Vec<TunedTime>,
    /// Errors of reading or writing the file.
    pub faults: Vec<String>,
}

/// Times of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TunedTime {
    pub shape: GemmShape,
    /// Time of the heuristic's algorithm.
    pub heuristic: Duration,
    pub chosen: Duration,
}

/// Opaque description of an algorithm, valid for one version of cuBLASLt.
pub(super) type Algorithm = [u64; 8];

/// Returns the number of rows that a GEMM of `rows` rows is tuned for: the batch sizes of captured
/// decode steps, and four values per power of two above them.
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

/// Returns all row counts that GEMMs of up to `rows_max` rows are tuned for.
pub fn row_steps(rows_max: usize) -> Vec<usize> {
    let (last, mut steps) = (row_step(rows_max), Vec::new());
    let mut step = 0;
    while step < last {
        step = row_step(step + 1);
        steps.push(step);
    }
    steps
}

/// Tuned algorithms of one machine.
#[derive(Debug)]
pub(super) struct TuningTable {
    /// GPU, driver and cuBLASLt version; an algorithm is valid for this combination only.
    machine: String,
    algorithms: HashMap<GemmShape, Algorithm>,
}

/// First line of every file; its number changes with the file format.
const HEADING: &str = "baton gemms 1";
/// Maximum size of a file, which has about 200 bytes per shape.
const FILE_BYTES_MAX: u64 = 16 << 20;

impl TuningTable {
    pub(super) fn new(machine: String) -> Self {
        Self { machine, algorithms: HashMap::new() }
    }

    /// Returns the algorithm that was tuned for this shape's row step.
    pub(super) fn get(&self, shape: &GemmShape) -> Option<Algorithm> {
        self.algorithms.get(&GemmShape { rows: row_step(shape.rows), ..*shape }).copied()
    }

    /// Inserts an algorithm; `shape.rows` is one of [`row_steps`].
    pub(super) fn insert(&mut self, shape: GemmShape, algorithm: Algorithm) {
        debug_assert_eq!(shape.rows, row_step(shape.rows));
        self.algorithms.insert(shape, algorithm);
    }

    /// Adds the contents of this machine's file in `folder`. A missing file is not an error.
    pub(super) fn read(&mut self, folder: &Path) -> Result<(), String> {
        let path = self.path(folder);
        let failed =
            |reason: &dyn std::fmt::Display| format!("cannot read {}: {reason}", path.display());
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(&error)),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => {
                return Err(failed(&format_args!("more than {FILE_BYTES_MAX} bytes")));
            }
            Ok(_) => {}
        }
        let text = fs::read_to_string(&path).map_err(|error| failed(&error))?;
        let found = parse(&text, &self.machine).map_err(|reason| failed(&reason))?;
        self.algorithms.extend(found);
        Ok(())
    }

    /// Merges this table into the folder's file of this machine and replaces the file atomically.
    /// If two processes write at once, the shapes of one are timed again at the next start.
    pub(super) fn write(&mut self, folder: &Path) -> Result<(), String> {
        // Another rank has other shapes and may have written since this rank read the file.
        let mut there = Self::new(self.machine.clone());
        if there.read(folder).is_ok() {
            there.algorithms.extend(self.algorithms.drain());
            self.algorithms = there.algorithms;
        }
        let path = self.path(folder);
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        // Containers that share the folder may have equal process ids.
        let moment = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let new = path.with_extension(format!("{}-{moment:x}.new", std::process::id()));
        fs::create_dir_all(folder).map_err(failed)?;
        let written = fs::write(&new, self.text()).and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&new);
            failed(error)
        })
    }

    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("gemms-{:016x}", checksum(self.machine.as_bytes())))
    }

    fn text(&self) -> String {
        let mut lines: Vec<_> = self.algorithms.iter().map(line).collect();
        lines.sort_unstable();
        let text = format!("{HEADING}\n{}\n{}", self.machine, lines.concat());
        let checksum = checksum(text.as_bytes());
        format!("{text}{checksum:016x}\n")
    }
}

fn line((shape, algorithm): (&GemmShape, &Algorithm)) -> String {
    let GemmShape { rows, inputs, outputs, from, is_fp8, to, x_stride, out_stride } = shape;
    let from = if *is_fp8 { "fp8".to_owned() } else { from.to_string() };
    let mut line = format!("{rows} {inputs} {outputs} {from} {to} {x_stride} {out_stride}");
    for word in algorithm {
        write!(line, " {word:x}").expect("writing to a string cannot fail");
    }
    line.push('\n');
    line
}

fn parse(text: &str, machine: &str) -> Result<Vec<(GemmShape, Algorithm)>, String> {
    let body = text.strip_suffix('\n').and_then(|text| text.rfind('\n'));
    let (body, last) = text.split_at(body.ok_or("malformed file; expected a list of shapes")? + 1);
    if u64::from_str_radix(last.trim_end(), 16) != Ok(checksum(body.as_bytes())) {
        return Err("wrong checksum".to_owned());
    }
    let mut lines = body.lines();
    if lines.next() != Some(HEADING) {
        return Err(format!("wrong first line; expected {HEADING:?}"));
    }
    match lines.next() {
        Some(found) if found == machine => {}
        found => {
            let found = found.unwrap_or("");
            return Err(format!("the file is for {found:?}; expected {machine:?}"));
        }
    }
    let parsed =
        lines.map(|line| parse_line(line).ok_or_else(|| format!("malformed line {line:?}")));
    parsed.collect()
}

fn parse_line(line: &str) -> Option<(GemmShape, Algorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (fields, algorithm) = words.split_first_chunk::<7>()?;
    let number = |index: usize| fields[index].parse::<usize>().ok();
    let dtype = |index: usize| match fields[index] {
        "f32" => Some(Dtype::F32),
        "bf16" => Some(Dtype::Bf16),
        _ => None,
    };
    // The activations of a model in FP8 are bf16.
    let is_fp8 = fields[3] == "fp8";
    let shape = GemmShape {
        rows: number(0)?,
        inputs: number(1)?,
        outputs: number(2)?,
        from: if is_fp8 { Dtype::Bf16 } else { dtype(3)? },
        is_fp8,
        to: dtype(4)?,
        x_stride: number(5)?,
        out_stride: number(6)?,
    };
    let algorithm = algorithm.iter().map(|word| u64::from_str_radix(word, 16).ok());
    let algorithm = algorithm.collect::<Option<Vec<_>>>()?.try_into().ok()?;
    (shape.rows == row_step(shape.rows)).then_some((shape, algorithm))
}

/// Returns the FNV-1a checksum, which detects accidental corruption only.
fn checksum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// Timing rounds, and the minimum gain over the heuristic's algorithm. Below that gain, noise would
/// decide, and each machine would choose another algorithm.
const ROUNDS: usize = 3;
const GAIN_MIN: f64 = 0.02;

/// Returns the fastest of `count` candidates, its time and the time of the heuristic's algorithm,
/// candidate 0. Returns candidate 0 if no candidate gains [`GAIN_MIN`]. `time` returns `None` for a
/// candidate that does not support the shape. A candidate that is much slower in one round is not
/// timed again.
pub(super) fn choose<E>(
    count: usize,
    mut time: impl FnMut(usize) -> Result<Option<Duration>, E>,
) -> Result<Option<(usize, Duration, Duration)>, E> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); count];
    let mut is_out = vec![false; count];
    for _ in 0..ROUNDS {
        for candidate in 0..times.len() {
            if is_out[candidate] {
                continue;
            }
            match time(candidate)? {
                Some(time) => times[candidate].push(time),
                None => is_out[candidate] = true,
            }
        }
        let best = best_of(&times, &is_out).map(|(_, time)| time);
        for (candidate, times) in times.iter().enumerate() {
            let is_slow = median(times) > best.map(|best| best.mul_f64(1.1));
            // The first candidate is the baseline of the comparison.
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

/// Tunes the shapes that have no algorithm yet, in this order, within the time budget.
pub(super) fn tune<E>(
    table: &mut TuningTable,
    shapes: impl Iterator<Item = GemmShape>,
    tuning: &TuningSettings,
    mut time: impl FnMut(GemmShape) -> Result<Option<(Algorithm, Duration, Duration)>, E>,
) -> Result<TuningResult, E> {
    let (started, mut tuned) = (Instant::now(), TuningResult::default());
    if let Some(folder) = &tuning.folder {
        tuned.faults.extend(table.read(folder).err());
    }
    for shape in shapes {
        if table.get(&shape).is_some() {
            tuned.known += 1;
        } else if started.elapsed() >= tuning.within {
            tuned.left += 1;
        } else if let Some((algorithm, chosen, heuristic)) = time(shape)? {
            table.insert(shape, algorithm);
            tuned.times.push(TunedTime { shape, heuristic, chosen });
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

    fn shape(rows: usize) -> GemmShape {
        GemmShape::packed(rows, 4096, 6144, Dtype::Bf16, Dtype::F32)
    }

    fn tuning(folder: &Path) -> TuningSettings {
        TuningSettings { folder: Some(folder.to_owned()), within: Duration::from_secs(3600) }
    }

    fn milliseconds(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    proptest! {
        #[test]
        fn row_step_is_at_most_a_quarter_above_the_rows(rows in 1_usize..100_000) {
            let step = row_step(rows);
            prop_assert!(step >= rows && row_step(step) == step);
            if rows > 28 {
                prop_assert!(step - rows <= rows / 4, "{rows} {step}");
            }
            prop_assert_eq!(row_steps(rows).last().copied(), Some(step));
        }

        #[test]
        fn arbitrary_text_is_rejected(text in "\\PC{0,60}(\n\\PC{0,20}){0,4}\n?") {
            prop_assert!(parse(&text, MACHINE).is_err());
        }
    }

    #[test]
    fn row_steps_are_few_and_include_every_decode_graph_size() {
        let steps = row_steps(8192);
        assert_eq!(steps[..6], [1, 2, 4, 8, 16, 24]);
        let mut graphs = (8..=256).step_by(8).chain((256..=512).step_by(16));
        assert!(graphs.all(|size| steps.contains(&size)));
        assert!(steps.ends_with(&[4096, 5120, 6144, 7168, 8192]) && steps.len() < 70, "{steps:?}");
        assert!(steps.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn tuned_shapes_are_read_at_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let not_there_yet = folder.path().join("not/there/yet");
        let folder = not_there_yet.as_path();
        let shapes = || [1, 8, 512].map(shape).into_iter();
        let time = |shape: GemmShape| {
            Ok::<_, Infallible>(Some(([shape.rows as u64; 8], milliseconds(2), milliseconds(3))))
        };
        let mut table = TuningTable::new(MACHINE.into());
        let tuned = tune(&mut table, shapes(), &tuning(folder), time).unwrap();
        assert_eq!(
            (tuned.known, tuned.times.len(), tuned.left, &tuned.faults[..]),
            (0, 3, 0, &[][..])
        );
        let [_, found, _] = tuned.times[..] else { panic!("{tuned:?}") };
        let (heuristic, chosen) = (milliseconds(3), milliseconds(2));
        assert_eq!(found, TunedTime { shape: shape(8), heuristic, chosen });

        let mut table = TuningTable::new(MACHINE.into());
        let never = |shape| -> Result<_, Infallible> { panic!("{shape:?} is known") };
        let tuned = tune(&mut table, shapes(), &tuning(folder), never).unwrap();
        assert_eq!((tuned.known, tuned.times.len(), tuned.faults.len()), (3, 0, 0));
        // The row counts just below share the algorithm; other shapes do not.
        assert_eq!(table.get(&shape(497)), Some([512; 8]));
        assert_eq!(table.get(&shape(496)), None);
        assert_eq!(table.get(&GemmShape { to: Dtype::Bf16, ..shape(8) }), None);

        // With another driver nothing is tuned, and the file of the first driver stays.
        let mut table = TuningTable::new("a GPU, driver 13.1".into());
        assert_eq!(tune(&mut table, shapes(), &tuning(folder), time).unwrap().times.len(), 3);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 2, "no half-written file is left");
    }

    #[test]
    fn shapes_beyond_the_time_budget_are_left_untimed() {
        let tuning = TuningSettings { folder: None, within: Duration::ZERO };
        let mut table = TuningTable::new(MACHINE.into());
        table.insert(shape(8), [1; 8]);
        let never = |shape| -> Result<_, Infallible> { panic!("{shape:?} is timed") };
        let tuned = tune(&mut table, [1, 8].map(shape).into_iter(), &tuning, never).unwrap();
        assert_eq!((tuned.known, tuned.times.len(), tuned.left), (1, 0, 1));
    }

    #[test]
    fn concurrent_ranks_merge_their_shapes() {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = [TuningTable::new(MACHINE.into()), TuningTable::new(MACHINE.into())];
        for table in &mut ranks {
            table.read(folder.path()).unwrap();
        }
        ranks[0].insert(shape(8), [1; 8]);
        ranks[0].insert(shape(1), [2; 8]);
        ranks[1].insert(shape(8), [3; 8]);
        for table in &mut ranks {
            table.write(folder.path()).unwrap();
        }
        let mut next = TuningTable::new(MACHINE.into());
        next.read(folder.path()).unwrap();
        let found = [8, 1].map(|rows| next.get(&shape(rows)));
        assert_eq!(found, [Some([3; 8]), Some([2; 8])]);
    }

    #[test]
    fn truncated_corrupt_or_foreign_file_is_ignored_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let mut table = TuningTable::new(MACHINE.into());
        table.insert(shape(8), [7; 8]);
        table.write(folder).unwrap();
        let path = table.path(folder);
        let good = fs::read(&path).unwrap();
        let foreign =
            TuningTable { machine: "another".into(), algorithms: table.algorithms.clone() };
        let foreign = foreign.text();
        let changed = String::from_utf8(good.clone()).unwrap().replace("4096", "4097");
        let bad: [(&[u8], &str); 6] = [
            (&good[..good.len() - 1], "expected a list"),
            (&good[..good.len() / 2], "expected a list"),
            (b"", "expected a list"),
            (b"\xff\xfe\n\n", "UTF-8"),
            (changed.as_bytes(), "checksum"),
            (foreign.as_bytes(), "another"),
        ];
        for (bytes, word) in bad {
            fs::write(&path, bytes).unwrap();
            let mut table = TuningTable::new(MACHINE.into());
            let error = table.read(folder).unwrap_err();
            assert!(error.contains(word) && error.contains("gemms-"), "{error:?}: {word}");
            assert!(table.algorithms.is_empty());
            let time = |_| Ok::<_, Infallible>(Some(([1; 8], milliseconds(1), milliseconds(1))));
            let tuned = tune(&mut table, [shape(8)].into_iter(), &tuning(folder), time).unwrap();
            assert_eq!((tuned.times.len(), tuned.faults.len()), (1, 1));
            TuningTable::new(MACHINE.into()).read(folder).unwrap();
        }
        let nowhere = Path::new("/proc/nowhere");
        assert!(table.write(nowhere).unwrap_err().contains("/proc/nowhere/gemms-"));
    }

    #[test]
    fn fastest_algorithm_is_chosen_if_clearly_faster_than_the_heuristic() {
        let time = |times: &[Option<u64>], candidate: usize| {
            Ok::<_, Infallible>(times[candidate].map(milliseconds))
        };
        let chosen = |times: &[Option<u64>]| {
            choose(times.len(), |candidate| time(times, candidate)).unwrap()
        };
        let ms = milliseconds;
        assert_eq!(chosen(&[Some(100), Some(90), Some(80)]), Some((2, ms(80), ms(100))));
        assert_eq!(chosen(&[Some(100), Some(99)]), Some((0, ms(100), ms(100))));
        assert_eq!(chosen(&[Some(300), Some(90)]), Some((1, ms(90), ms(300))));
        assert_eq!(chosen(&[None, Some(90), None]), Some((1, ms(90), ms(90))));
        assert_eq!((chosen(&[None, None]), chosen(&[])), (None, None));
        // A candidate that is far behind is timed once.
        let (times, mut count) = ([Some(100), Some(500), Some(101), None], 0);
        let counted = |candidate| {
            count += 1;
            time(&times, candidate)
        };
        choose(times.len(), counted).unwrap();
        assert_eq!(count, 3 + 1 + 3 + 1);
    }
}
