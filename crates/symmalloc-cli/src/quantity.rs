//! Formatting of quantities.

use symmalloc_core::units::{Amount, KIB};
use symmalloc_text::visible_line;

/// Formats a count with commas between thousands.
pub(crate) fn count(number: impl TryInto<u64>) -> String {
    let digits = number.try_into().unwrap_or(u64::MAX).to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats an amount of memory in the largest unit that does not exceed it.
pub(crate) fn memory(size_bytes: u64) -> String {
    Amount(size_bytes).to_string()
}

/// Formats an amount of memory with the exact number of bytes.
pub(crate) fn exact_memory(size_bytes: u64) -> String {
    let bytes = counted(size_bytes, "byte");
    if size_bytes < KIB { bytes } else { format!("{} ({bytes})", memory(size_bytes)) }
}

/// Describes an op and its allocation, both counted from 0, with the name that the program gave it.
pub(crate) fn op_of_allocation(op: usize, allocation: usize, name: Option<&str>) -> String {
    let name = name.map_or_else(String::new, |name| format!(", {}", visible_line(name)));
    format!("op {} (allocation {}{name})", count(op), count(allocation))
}

/// Rounds to six decimal places.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// Formats a count with its noun: `1 stream`, `2 streams`, `2 passes`.
pub(crate) fn counted(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    let ending = match number {
        1 => "",
        _ if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{} {noun}{ending}", count(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        assert_eq!([0_u64, 999, 1000, 24_464, 1_234_567].map(count), ["0", "999", "1,000", "24,464", "1,234,567"]);
    }

    #[test]
    fn memory_is_printed_in_the_largest_unit_that_fits() {
        assert_eq!(
            [0, 1023, 1 << 10, 3 << 19, 5 << 30].map(memory),
            ["0 B", "1023 B", "1.00 KiB", "1.50 MiB", "5.00 GiB"]
        );
        assert_eq!([1, 1023, 1025].map(exact_memory), ["1 byte", "1,023 bytes", "1.00 KiB (1,025 bytes)"]);
    }

    #[test]
    fn one_has_no_plural() {
        assert_eq!([1_u64, 2].map(|n| counted(n, "stream")), ["1 stream", "2 streams"]);
        assert_eq!([1_u64, 2].map(|n| counted(n, "pass")), ["1 pass", "2 passes"]);
    }
}
