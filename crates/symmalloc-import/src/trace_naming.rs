//! Names for the traces of a job: every device of every rank writes a separate file.
//!
//! | pattern | replaced by |
//! |---|---|
//! | `%r` | the rank |
//! | `%d` | the device's index |
//! | `%p` | the process id |
//! | `%%` | a percent sign |

/// Properties that distinguish the trace files of a job. If the pattern omits a property that is needed, a part is inserted before the
/// file's suffix: `.rankN` in a job of several ranks, `.deviceN` from the second device on, `.processN` from the second process on. No two
/// traces share a file.
///
/// # Examples
/// ```
/// use symmalloc_import::TraceNaming;
///
/// let naming = TraceNaming { rank: 3, ranks: 8, device: 0, is_first_device: true, process: 77, is_first_process: true };
/// assert_eq!(naming.path_of("job.trace.zst"), "job.rank3.trace.zst");
/// assert_eq!(naming.path_of("job-%r-of-this-%p.gz"), "job-3-of-this-77.gz");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceNaming {
    /// The rank of the process within the job.
    pub rank: u64,
    /// Number of ranks in the job.
    pub ranks: u64,
    /// Index of the device.
    pub device: usize,
    /// `true` for the first device of the process that writes a trace.
    pub is_first_device: bool,
    /// The id of the process.
    pub process: u32,
    /// `true` for the first process of its rank that writes a trace.
    pub is_first_process: bool,
}

impl TraceNaming {
    /// Returns the file name for a pattern, with the placeholders replaced and the missing parts inserted.
    pub fn path_of(&self, pattern: &str) -> String {
        let mut path = String::new();
        let (mut has_rank, mut has_device, mut has_process) =
            (self.ranks <= 1, self.is_first_device, self.is_first_process);
        let mut rest = pattern.chars().peekable();
        while let Some(letter) = rest.next() {
            let next = if letter == '%' { rest.peek().copied() } else { None };
            match next {
                Some('r') => path.push_str(&self.rank.to_string()),
                Some('d') => path.push_str(&self.device.to_string()),
                Some('p') => path.push_str(&self.process.to_string()),
                Some('%') => path.push('%'),
                _ => {
                    path.push(letter);
                    continue;
                }
            }
            rest.next();
            has_rank |= matches!(next, Some('r' | 'p'));
            has_device |= next == Some('d');
            has_process |= next == Some('p');
        }
        let part = |is_told: bool, word: &str, number: u64| {
            if is_told { String::new() } else { format!(".{word}{number}") }
        };
        let parts = part(has_rank, "rank", self.rank)
            + &part(has_process, "process", self.process.into())
            + &part(has_device, "device", self.device as u64);
        let name_at = path.rfind('/').map_or(0, |slash| slash + 1);
        // The suffix of `job.trace.zst` starts at its first dot, which must not be the first character.
        let dot = path[name_at..].char_indices().skip(1).find(|(_, letter)| *letter == '.');
        let suffix_at = dot.map_or(path.len(), |(at, _)| name_at + at);
        path.insert_str(suffix_at, &parts);
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMING: TraceNaming =
        TraceNaming { rank: 3, ranks: 8, device: 1, is_first_device: true, process: 77, is_first_process: true };

    fn path_of(pattern: &str, ranks: u64, is_first_device: bool) -> String {
        TraceNaming { ranks, is_first_device, ..NAMING }.path_of(pattern)
    }

    #[test]
    fn each_rank_and_device_writes_its_own_file() {
        assert_eq!(path_of("/tmp/job.trace.zst", 1, true), "/tmp/job.trace.zst");
        assert_eq!(path_of("/tmp/job.trace.zst", 8, true), "/tmp/job.rank3.trace.zst");
        assert_eq!(path_of("/tmp/job.trace.zst", 8, false), "/tmp/job.rank3.device1.trace.zst");
        assert_eq!(path_of("/tmp.d/job", 8, true), "/tmp.d/job.rank3");
        assert_eq!(path_of(".hidden", 8, true), ".hidden.rank3");
        assert_eq!(path_of("job-%r-%d.gz", 8, false), "job-3-1.gz");
        assert_eq!(path_of("job-%p.gz", 8, true), "job-77.gz");
        assert_eq!(path_of("100%%%x%", 1, true), "100%%x%");
    }

    #[test]
    fn each_process_of_a_rank_writes_its_own_file() {
        let second = TraceNaming { ranks: 1, is_first_process: false, ..NAMING };
        assert_eq!(second.path_of("job.trace.zst"), "job.process77.trace.zst");
        assert_eq!(TraceNaming { ranks: 8, ..second }.path_of("job.trace"), "job.rank3.process77.trace");
        assert_eq!(second.path_of("job-%p.trace"), "job-77.trace");
    }
}
