//! Writer for names in double quotes. It escapes every character that would break a line.

use std::fmt;

/// Writes a space and the name.
pub(crate) fn write_name(line: &mut impl fmt::Write, name: &str) -> fmt::Result {
    line.write_str(" \"")?;
    for character in name.chars() {
        match character {
            '"' => line.write_str("\\\"")?,
            '\\' => line.write_str("\\\\")?,
            '\n' => line.write_str("\\n")?,
            '\r' => line.write_str("\\r")?,
            '\t' => line.write_str("\\t")?,
            _ if character.is_control() => write!(line, "\\u{{{:x}}}", u32::from(character))?,
            _ => line.write_char(character)?,
        }
    }
    line.write_char('"')
}
