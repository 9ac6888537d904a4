//! Escapes foreign text, so that it cannot control a terminal or forge a line.
//!
//! Names, file names, flight records and messages of other ranks come from outside this program. A control character in them can move the
//! cursor, recolor the screen or set a title; a bidirectional override or a zero-width character can disguise one text as another; a line
//! break can forge a line of this program. Therefore all hidden characters are shown by number, for example `\u{1b}`.
//!
//! ```text
//!  a peer's message ──► decoding ──► visible_start_of_line      a library escapes what it receives, because any part of the program
//!                                                               may print an error
//!  a file ──► the command line ──► output ──► visible, visible_line
//! ```
//!
//! Escaping is idempotent, so text may pass through it at several places.
//!
//! # Examples
//! ```
//! use symmalloc_text::{visible, visible_line, visible_start_of_line};
//!
//! let name = "red\u{1b}[31m\nsymmalloc: all ranks are done";
//! assert_eq!(visible(name), "red\\u{1b}[31m\nsymmalloc: all ranks are done");
//! assert_eq!(visible_line(name), r"red\u{1b}[31m\nsymmalloc: all ranks are done");
//! assert_eq!(visible_start_of_line(name, 14), r"red\u{1b}[31m\");
//! ```

#![forbid(unsafe_code)]

use std::borrow::Cow;

/// Returns `true` for control and formatting characters, which are invisible and can change how other characters are shown, and for
/// noncharacters. Returns `false` for the line break `\n`, and for blank letters such as the Hangul filler.
pub fn is_hidden(character: char) -> bool {
    match character {
        '\n' => false,
        // Soft hyphen, Arabic letter mark, Mongolian vowel separator, byte order mark.
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' => true,
        // Zero-width characters and direction marks; line separators, embeddings and overrides; joiners and isolates.
        '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' => true,
        // Interlinear annotations, tags.
        '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}' => true,
        // Noncharacters, which XML cannot represent.
        '\u{fdd0}'..='\u{fdef}' => true,
        _ => character.is_control() || u32::from(character) & 0xfffe == 0xfffe,
    }
}

/// Returns the text with hidden characters shown by number. Line breaks remain.
pub fn visible(text: &str) -> Cow<'_, str> {
    replaced(text, is_hidden, |out, character| out.extend(character.escape_unicode()))
}

/// Returns the text as one line, with hidden characters and line breaks escaped.
pub fn visible_line(text: &str) -> Cow<'_, str> {
    let is_replaced = |character| character == '\n' || is_hidden(character);
    replaced(text, is_replaced, |out, character| match character {
        '\n' => out.push_str("\\n"),
        other => out.extend(other.escape_unicode()),
    })
}

/// Returns the start of the text as [one line](visible_line) of at most `bytes_max` bytes. Takes time and memory in proportion to
/// `bytes_max`, however long the text is.
pub fn visible_start_of_line(text: &str, bytes_max: usize) -> Cow<'_, str> {
    match visible_line(start(text, bytes_max)) {
        Cow::Borrowed(line) => Cow::Borrowed(line),
        Cow::Owned(mut line) => {
            line.truncate(start(&line, bytes_max).len());
            Cow::Owned(line)
        }
    }
}

/// Returns the longest prefix of the text that has at most `bytes_max` bytes.
fn start(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// Returns the text with the matching characters replaced. Borrows the text if none matches.
pub fn replaced(text: &str, is_replaced: impl Fn(char) -> bool, replace: impl Fn(&mut String, char)) -> Cow<'_, str> {
    if !text.contains(&is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_replaced(character) {
            replace(&mut out, character);
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every character, each with a text in which it stands between two letters.
    fn texts() -> impl Iterator<Item = (char, String)> {
        ('\0'..=char::MAX).map(|character| (character, format!("a{character}b")))
    }

    #[test]
    fn every_hidden_character_is_shown_by_number_and_every_other_one_stays() {
        for (character, text) in texts() {
            let (shown, line) = (visible(&text), visible_line(&text));
            if is_hidden(character) {
                assert_eq!(shown, format!("a{}b", character.escape_unicode()));
                assert_eq!(line, shown);
            } else {
                assert_eq!(shown, text);
                assert_eq!(line, text.replace('\n', "\\n"));
            }
            assert!(!line.contains(|other| other == '\n' || is_hidden(other)), "{text:?}");
            assert_eq!(visible_line(&line), line);
        }
        assert!(matches!(visible("Gewichte, 重み, \u{1f980}, e\u{301}"), Cow::Borrowed(_)));
    }

    /// The characters that a terminal acts on, or that disguise a text, by class.
    #[test]
    fn the_known_hostile_characters_are_hidden() {
        let classes = [
            '\0'..='\u{9}',
            '\u{b}'..='\u{1f}',
            '\u{7f}'..='\u{9f}',
            '\u{200b}'..='\u{200f}',
            '\u{2028}'..='\u{202e}',
            '\u{2066}'..='\u{2069}',
            '\u{feff}'..='\u{feff}',
            '\u{e0020}'..='\u{e007f}',
        ];
        for character in classes.into_iter().flatten() {
            assert!(is_hidden(character), "{character:?}");
        }
    }

    #[test]
    fn a_long_text_is_truncated_at_a_character_and_within_its_limit() {
        for (character, _) in texts().step_by(97) {
            let text = String::from_iter([character; 40]);
            for bytes_max in [0, 1, 5, 39, 40, 1000] {
                let line = visible_start_of_line(&text, bytes_max);
                assert!(line.len() <= bytes_max, "{character:?}, {bytes_max}: {line}");
                assert!(visible_line(&text).starts_with(&*line));
            }
        }
        assert_eq!(visible_start_of_line("aäää", 4), "aä");
    }
}
